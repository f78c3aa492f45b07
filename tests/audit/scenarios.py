"""Each known way to lose or double a job, step by step.

A scenario takes a database and a mutant (or None) and returns the faults that it saw: an empty list when the queue held.
test_faults plays them as they are, test_mutants with the safety test taken out that each of them is about.
"""

import psycopg

from .play import Gates, Play


def got(who, claimed, expected):
    """A fault when a session did not get exactly the jobs that it had to get."""
    lost = sorted(set(expected) - set(claimed))
    extra = sorted(set(claimed) - set(expected))
    faults = []
    if lost:
        faults.append(f"{who}: lost {len(lost)} of {len(expected)} jobs")
    if extra:
        faults.append(f"{who}: {len(extra)} jobs that nobody may have: twice, or never committed")
    return faults


def rotate(part, *slots):
    """Seals, then closes and empties slots; returns what the steps said."""
    said = [part.value("SELECT awa_internal.seal()")]
    for slot in slots:
        said.append(part.value("SELECT awa_internal.close(%s)", [slot]))
        said.append(part.value('SELECT awa_internal."empty"(%s, true)', [slot]))
    return said


def rest(part):
    """Ranges taken by open claims are left alone for 50 ms, where there is something else to take."""
    part.sql("SELECT pg_sleep(0.06)")


# ------------------------------------------------------------------------------------------------ own rows


def many_claims(part, n):
    """Takes n jobs by as many savepoints. The claims have a transaction id each, and their list becomes so long that they share
    a range which hangs on no single one: it is walked while they are open."""
    for i in range(n):
        part.savepoint(f"s{i}")
        assert len(part.claim(1)) == 1


def own_claims_rolled_back(db, mutant=None):
    """A session walks over its own open claims and then rolls back: they must not have been passed as taken."""
    play = Play(db, mutant)
    worker = play.part()
    jobs = worker.enqueue(30)
    worker.begin()
    many_claims(worker, 30)
    rest(worker)
    assert worker.claim(1) == {}
    worker.rollback()
    return got("the worker that rolled back", worker.claim(), jobs)


def own_segments_rolled_back(db, mutant=None):
    """A session claims what it has enqueued itself and rolls back; the numbers are given out again to others."""
    play = Play(db, mutant)
    worker, producer = play.parts(2)
    worker.begin()
    assert len(worker.enqueue(5)) == 5
    assert len(worker.claim()) == 5
    worker.rollback()
    assert worker.claim() == {}
    jobs = producer.enqueue(8)
    return got("the worker that rolled back", worker.claim(), jobs)


def own_jobs_of_a_savepoint(db, mutant=None):
    """Enqueue and claim in one transaction, part of it rolled back to a savepoint, then all of it."""
    play = Play(db, mutant)
    worker, producer, other = play.parts(3)
    worker.begin()
    first = worker.enqueue(6)
    a = worker.claim(4)
    worker.savepoint()
    worker.enqueue(6)
    b = worker.claim()
    worker.rollback_to()
    c = worker.claim()
    faults = got("before the savepoint", a, first[:4])
    faults += [] if len(b) == 8 else [f"{len(b)} of 8 own jobs inside of the savepoint"]
    faults += got("after the savepoint", c, first[4:])
    worker.rollback()
    jobs = producer.enqueue(8)
    taken = {**worker.claim(3), **other.claim(3), **worker.claim()}
    return faults + got("all", taken, jobs)


def own_jobs_in_one_statement(db, mutant=None):
    """One statement claims what it has enqueued, also of a queue that it has created."""
    play = Play(db, mutant)
    worker = play.part()
    faults = []
    for queue in (play.queue, "made_here"):
        rows = worker.sql(
            "WITH e AS MATERIALIZED (SELECT awa.enqueue_batch(%s, ARRAY['1', '2', '3']::jsonb[]) AS ids)"
            " SELECT c.job_id, c.receipt, c.args FROM e, LATERAL awa.claim(CASE WHEN e.ids IS NULL THEN '' ELSE %s END, 10) c",
            [queue, queue],
        )
        if [r[2] for r in rows] != [1, 2, 3]:
            faults.append(f"{queue}: {rows}")
        worker.complete({job: receipt for job, receipt, _ in rows})
    return faults + got("afterwards", worker.claim(), [])


# ------------------------------------------------------------------------------------------------ what is in progress


def segment_in_progress(db, mutant=None):
    """A segment that commits after a later one was claimed."""
    play = Play(db, mutant)
    slow, quick, worker = play.parts(3)
    slow.begin()
    late = slow.enqueue(5)
    soon = quick.enqueue(5)
    faults = got("the worker, first", worker.claim(), soon)
    slow.commit()
    return faults + got("the worker, after the late commit", worker.claim(), late)


def claim_in_progress(db, mutant=None):
    """Claims of another session that roll back after somebody walked over them."""
    play = Play(db, mutant)
    holder, worker = play.parts(2)
    jobs = holder.enqueue(40)
    holder.begin()
    many_claims(holder, 30)
    faults = got("the worker, first", worker.claim(), jobs[30:])
    rest(worker)
    faults += got("the worker, once more", worker.claim(), [])
    holder.rollback()
    return faults + got("the worker, after the rollback", worker.claim(), jobs[:30])


def numbers_of_an_aborted_tail(db, mutant=None):
    """Seqs at the tail whose transaction aborts are given out again; old lists must find the new jobs."""
    play = Play(db, mutant)
    producer, other, worker = play.parts(3)
    producer.begin()
    producer.enqueue(5)
    assert worker.claim() == {}
    producer.rollback()
    assert worker.claim() == {}
    jobs = other.enqueue(5)
    return got("the worker", worker.claim(), jobs)


def numbers_given_out_again(db, mutant=None):
    """Many old lists, tails that abort in all orders, segments of other sizes in their place."""
    play = Play(db, mutant)
    a, b, d = play.parts(3)
    workers = play.parts(4)
    faults = []
    for worker in workers:  # every worker has a list
        b.enqueue(5)
        worker.complete(worker.claim(5))
    a.begin()
    a.enqueue(20)
    for worker in workers:
        faults += got("while the tail is open", worker.claim(), [])
    a.rollback()
    faults += got("after its abort", workers[0].claim(), [])
    jobs = b.enqueue(5) + b.enqueue(7)
    taken = {**workers[1].claim(3), **workers[2].claim(2), **workers[3].claim(), **workers[0].claim()}
    faults += got("the jobs in its place", taken, jobs)
    # A commit above an open tail: its numbers are not given out again. Then two tails that abort one after the other.
    a.begin()
    a.enqueue(20)
    jobs = d.enqueue(3)
    taken = {}
    for worker in workers:
        taken |= worker.claim(1)
    a.rollback()
    jobs += b.enqueue(4)
    a.begin()
    a.enqueue(9)
    d.begin()
    d.enqueue(9)
    for worker in workers:
        taken |= worker.claim(1)
    a.rollback()
    taken |= workers[0].claim(10)
    d.rollback()
    jobs += b.enqueue(2)
    d.begin()
    jobs += d.enqueue(2)
    jobs += b.enqueue(1)
    for worker in workers:
        taken |= worker.claim()
    d.commit()
    for worker in reversed(workers):
        taken |= worker.claim()
    return faults + got("all in the end", taken, jobs)


def full_list_beside_a_tail(db, mutant=None):
    """A list of ranges that is full when a tail follows: the tail's numbers come back when it aborts."""
    play = Play(db, mutant)
    a, b, producer, worker = play.parts(4)
    jobs = producer.enqueue(200)
    a.begin()
    b.begin()
    gone, back = [], []
    for _ in range(65):
        gone += a.claim(1)
        back += b.claim(1)
    taken = worker.claim()
    faults = got("the worker, behind the others", taken, jobs[130:])
    producer.begin()
    producer.enqueue(10)
    faults += got("the worker, with a tail open", worker.claim(5), [])
    a.commit()
    b.rollback()
    faults += got("the worker, in many holes", worker.claim(), back)
    producer.rollback()
    faults += got("the worker, after the tail's abort", worker.claim(), [])
    jobs = b.enqueue(5)
    return faults + got("the worker, in the tail's place", worker.claim(), jobs)


# ------------------------------------------------------------------------------------------------ borders between ranges


def claim_across_a_border(db, mutant=None):
    """A claim by one session that straddles a border between two ranges in another session's list."""
    play = Play(db, mutant)
    slow, quick, y, z = play.parts(4)
    slow.begin()
    late = slow.enqueue(10)
    soon = quick.enqueue(10)
    y.begin()
    faults = got("y, first", y.claim(), soon)
    y.rollback()
    slow.commit()
    faults += got("z, all in one claim", z.claim(), late + soon)
    faults += got("y, at once", y.claim(), [])
    rest(y)
    return faults + got("y, later", y.claim(), [])


def claim_across_the_end_of_a_first_walk(db, mutant=None):
    """A session's first walk, which is done without the claim lock, has read the segments when one more comes and another
    session's claim takes it together with what lies before: the walk sees that claim, and ends inside it."""
    play = Play(db, mutant)
    first, producer, other = play.parts(3)
    before = producer.enqueue(10)
    with Gates(db) as gates:
        first.at_gate("claim.segments_read")
        walking = gates.hold(first, *play.claim_call(100))
        after = producer.enqueue(10)
        faults = got("the other, all in one claim", other.claim(), before + after)
        first_got = finish(gates, first, walking)
    first.at_gate()
    return faults + got("who walked first", first_got | first.claim(), [])


def hole_before_a_long_claim(db, mutant=None):
    """A hole of exactly the wanted size, then a committed claim that spans the end of the hole's segment."""
    play = Play(db, mutant)
    holder, committer, worker = play.parts(3)
    jobs = holder.enqueue(10) + holder.enqueue(10)
    holder.begin()
    held = holder.claim(5)
    faults = got("the holder", held, jobs[:5])
    faults += got("the committer, across the segments' border", committer.claim(10), jobs[5:15])
    holder.rollback()
    rest(worker)
    faults += got("the worker, the hole", worker.claim(5), jobs[:5])
    faults += got("the worker, the rest", worker.claim(), jobs[15:])
    for part in (worker, committer, holder):
        faults += got("nothing more", part.claim(), [])
    return faults


# ------------------------------------------------------------------------------------------------ slots


def second_look(db, mutant=None):
    """A scan has passed a slot when two segments are added, the first of them behind it."""
    play = Play(db, mutant)
    slow, behind, ahead, worker, keeper = play.parts(5)
    keeper.enqueue(10)
    worker.complete(worker.claim())
    slow.begin()
    slow.enqueue(1)  # or shared memory would tell that the lane is empty
    assert worker.claim() == {}
    with Gates(db, 1) as writing, Gates(db, 2) as reading:
        behind.sql("SET awa_queue.pause_key = 1")
        behind.at_gate("enqueue.rows_written")
        enqueued = writing.hold(behind, *play.enqueue_call(1))  # into slot 0, without a number yet
        keeper.value("SELECT awa_internal.seal()")
        assert worker.claim() == {}  # knows of both slots
        worker.sql("SET awa_queue.pause_key = 2")
        worker.at_gate("claim.between_slots")
        claimed = reading.hold(worker, *play.claim_call(100))  # slot 0 of the segments has been read, slot 1 not
        writing.open()
        first = enqueued.result()[0][0]
        second = ahead.enqueue(1)  # into slot 1
        worker_got = finish(reading, worker, claimed)
    worker.at_gate()
    worker_got |= worker.claim()
    slow.rollback()
    return got("the worker", worker_got, first + second)


def finish(gates, part, pending):
    """Lets a held claim run to its end and returns what it took."""
    gates.open()
    return {job: receipt for receipt, job in pending.result()}


def seal_before_the_reservation(db, mutant=None):
    """A producer waits before its reservation while another slot is opened and written into."""
    play = Play(db, mutant)
    late, early, worker, keeper = play.parts(4)
    with Gates(db) as gates:
        late.at_gate("enqueue.rows_written")
        pending = gates.hold(late, *play.enqueue_call(5))
        keeper.value("SELECT awa_internal.seal()")
        jobs = early.enqueue(5)
        gates.open()
        jobs += pending.result()[0][0]
    numbers = [first + k for first, n, _ in play.segments() for k in range(n)]
    faults = [] if sorted(numbers) == list(range(1, 11)) else [f"seqs given out: {sorted(numbers)}"]
    taken = {}
    for _ in range(3):
        taken |= worker.claim()
    return faults + got("the worker", taken, jobs)


def seal_before_the_claim(db, mutant=None):
    """A worker waits before the claim lock while a slot is opened that holds the lower of two new segments."""
    play = Play(db, mutant)
    upper, lower, worker, keeper = play.parts(4)
    keeper.enqueue(3)
    worker.complete(worker.claim())
    with Gates(db, 1) as writing, Gates(db, 2) as claiming:
        upper.sql("SET awa_queue.pause_key = 1")
        upper.at_gate("enqueue.rows_written")
        enqueued = writing.hold(upper, *play.enqueue_call(1))  # into slot 0
        worker.sql("SET awa_queue.pause_key = 2")
        worker.at_gate("claim.before_lock")
        claimed = claiming.hold(worker, *play.claim_call(100))  # knows of slot 0 alone
        keeper.value("SELECT awa_internal.seal()")
        jobs = lower.enqueue(1)  # into slot 1
        writing.open()
        jobs += enqueued.result()[0][0]
        worker_got = finish(claiming, worker, claimed)
    worker.at_gate()
    worker_got |= worker.claim()
    return got("the worker", worker_got, jobs)


def slot_gone_before_its_tables_are_locked(db, mutant=None):
    """A producer has chosen its slot, which is then sealed, closed and emptied."""
    play = Play(db, mutant)
    producer, worker, keeper = play.parts(3)
    keeper.enqueue(3)
    worker.complete(worker.claim())
    with Gates(db) as gates:
        producer.at_gate("enqueue.slot_chosen")
        pending = gates.hold(producer, *play.enqueue_call(7))
        said = rotate(keeper, 0)
        assert said[1:] == ["closed", "emptied"], said
        gates.open()
        jobs = pending.result()[0][0]
    taken = worker.claim()
    return got("the worker", taken, jobs) + got("a new session", play.part().claim(), [])


def caches_from_before_the_emptying(db, mutant=None):
    """What a session remembers of a lane from before an emptying: where it begins, and where to write."""
    play = Play(db, mutant)
    keeper, worker, watcher, producer = play.parts(4)
    keeper.enqueue(10)
    done = worker.claim()
    keeper.value("SELECT awa_internal.seal()")
    assert keeper.value("SELECT awa_internal.close(0)") == "closed"
    assert producer.claim(1) == {}  # its caches are filled between closing and emptying
    # A lane that this session has not walked: it says where it would begin.
    lane = play.lane()
    cold = watcher.value("SELECT awa_internal.lane_state(%s)", [lane])
    worker.complete(done)
    assert keeper.value('SELECT awa_internal."empty"(0, true)') == "emptied"
    faults = []
    told = watcher.value("SELECT awa_internal.lane_state(%s)", [lane])
    fresh = play.part().value("SELECT awa_internal.lane_state(%s)", [lane])
    if told != fresh:
        faults.append(f"a session that looked before the emptying begins at {told} ({cold} before it), a new one at {fresh}")
    jobs = producer.enqueue(7)
    firsts = [first for first, _, _ in play.segments()]
    if firsts != [11]:
        faults.append(f"first seqs after the emptying: {firsts}")
    taken = {**watcher.claim(3), **worker.claim(2), **producer.claim()}
    return faults + got("all", taken, jobs)


def older_segment_open_at_the_emptying(db, mutant=None):
    """A slot is emptied while an older segment of its lane is still in progress in another slot; then a cold worker comes."""
    play = Play(db, mutant)
    slow, quick, worker, keeper = play.parts(4)
    slow.begin()
    late = slow.enqueue(4)  # slot 0
    keeper.value("SELECT awa_internal.seal()")
    soon = quick.enqueue(3)  # slot 1
    keeper.value("SELECT awa_internal.seal()")
    assert keeper.value("SELECT awa_internal.close(1)") == "closed"
    taken = worker.claim()
    faults = got("the worker", taken, soon)
    worker.complete(taken)
    said = keeper.value('SELECT awa_internal."empty"(1, true)')
    assert said == "emptied", said
    slow.commit()
    return faults + got("a cold worker", play.part().claim(), late)


def steps_rolled_back(db, mutant=None):
    """Maintenance steps whose transaction rolls back, with verbs of the same and of other sessions in between."""
    play = Play(db, mutant)
    keeper, worker, producer = play.parts(3)
    jobs = producer.enqueue(5)
    for end in ("ROLLBACK", "COMMIT"):
        keeper.begin()
        keeper.value("SELECT awa_internal.seal()")
        keeper.value("SELECT awa_internal.lane_state(%s)", [play.lane()])  # reads the ring as it would be
        keeper.sql(end)
        jobs += keeper.enqueue(2) + producer.enqueue(3)
    taken = worker.claim()
    for end in ("ROLLBACK", "COMMIT"):
        keeper.begin()
        assert keeper.value("SELECT awa_internal.close(0)") == "closed"
        keeper.sql(end)
        jobs += keeper.enqueue(2) + producer.enqueue(3)
        taken |= worker.claim()
    worker.complete(taken)
    for end in ("ROLLBACK", "COMMIT"):
        keeper.begin()
        assert keeper.value('SELECT awa_internal."empty"(0, true)') == "emptied"
        keeper.sql(end)
        more = keeper.enqueue(2) + producer.enqueue(3)
        jobs += more
        taken |= keeper.claim(1) | worker.claim()
    return got("all", taken, jobs)


def all_steps_in_one_transaction(db, mutant=None):
    """Seal, close and empty in one transaction, while producers and workers know the ring from before."""
    play = Play(db, mutant)
    keeper, worker, producer = play.parts(3)
    jobs = producer.enqueue(5)
    taken = worker.claim()
    worker.complete(taken)
    for slot in (0, 1, 0):
        keeper.begin()
        keeper.value("SELECT awa_internal.seal()")
        said = [keeper.value("SELECT awa_internal.close(%s)", [slot])]
        said += [keeper.value('SELECT awa_internal."empty"(%s, true)', [slot])]
        assert said == ["closed", "emptied"], said
        waiting = producer.session.start_waiting(*play.enqueue_call(4), event="relation") if slot == 0 else None
        keeper.commit()
        jobs += waiting.result()[0][0] if waiting else producer.enqueue(4)
        mine = worker.claim()
        worker.complete(mine)
        taken |= mine
    return got("all", taken, jobs)


def producer_open_through_rotations(db, mutant=None):
    """A producer that stays open while the ring goes round and is full: its slot alone stays."""
    play = Play(db, mutant)
    slow, quick, worker, keeper = play.parts(4)
    slow.begin()
    late = slow.enqueue(3)
    jobs, taken = [], {}
    for i in range(40):
        jobs += quick.enqueue(2)
        if i % 7 == 0:
            late += slow.enqueue(1)  # into the slots of later times as well
        mine = worker.claim()
        worker.complete(mine)
        taken |= mine
        rotate(keeper, *range(16))
    slow.commit()
    faults = got("all the others", taken, jobs)
    mine = worker.claim()
    faults += got("the late ones, by an old session", mine, late)
    worker.complete(mine)
    rotate(keeper, *range(16))
    rotate(keeper, *range(16))
    left = db.sql("SELECT DISTINCT slot FROM awa_internal.segments")
    return faults + ([f"slots {left} can not be emptied"] if left else [])


def errors_in_exception_blocks(db, mutant=None):
    """Loops of PL/pgSQL blocks whose enqueues, claims and finishes are undone by an exception, or not."""
    play = Play(db, mutant)
    worker, other = play.parts(2)
    worker.sql("CREATE TEMP TABLE kept (receipt bigint, job bigint)")
    worker.sql("CREATE TEMP TABLE made (job bigint)")
    worker.sql(
        """
        DO $$
        BEGIN
            FOR i IN 1..200 LOOP
                BEGIN
                    INSERT INTO made SELECT unnest(awa.enqueue_batch('q', array_fill('1'::jsonb, ARRAY[3])));
                    INSERT INTO kept SELECT receipt, job_id FROM awa.claim('q', 2);
                    BEGIN
                        PERFORM awa.complete(array_agg(receipt)) FROM kept;
                        INSERT INTO kept SELECT receipt, job_id FROM awa.claim('q', 1);
                        IF i % 2 = 0 THEN RAISE EXCEPTION 'inner'; END IF;
                    EXCEPTION WHEN raise_exception THEN NULL;
                    END;
                    IF i % 3 = 0 THEN RAISE EXCEPTION 'outer'; END IF;
                EXCEPTION WHEN raise_exception THEN NULL;
                END;
            END LOOP;
        END $$
        """
    )
    jobs = [job for (job,) in worker.sql("SELECT job FROM made")]
    kept = {job: receipt for receipt, job in worker.sql("SELECT receipt, job FROM kept")}
    twice = worker.value("SELECT count(*) - count(DISTINCT job) FROM kept")
    faults = [f"{twice} claimed twice"] if twice else []
    rest_of_them = other.claim(100_000) | worker.claim(100_000)
    return faults + got("both", kept | rest_of_them, jobs) + got("the rest", rest_of_them, set(jobs) - set(kept))


def queue_made_and_rolled_back(db, mutant=None):
    """A queue that enqueue makes in a transaction or savepoint that rolls back is made again, by the same session too."""
    play = Play(db, mutant)
    maker, worker = play.parts(2)
    play.queue = "n"
    maker.begin()
    maker.enqueue(3)
    assert len(maker.claim()) == 3
    maker.rollback()
    maker.begin()
    maker.savepoint()
    maker.enqueue(3)
    maker.rollback_to()
    jobs = maker.enqueue(2)
    maker.commit()
    jobs += maker.enqueue(1)
    return got("the worker", worker.claim() | maker.claim(), jobs)


def released_in_rolled_back_transactions(db, mutant=None):
    """Release, undone and done, by a transaction that also claims what it has released."""
    play = Play(db, mutant)
    worker, other = play.parts(2)
    jobs = worker.enqueue(6)
    held = worker.claim(4)
    faults = []
    for end in ("ROLLBACK", "COMMIT"):
        worker.begin()
        worker.sql("SELECT awa.release(%s)", [list(held.values())])
        again = worker.claim(5)
        faults += [] if len(again) == 5 else [f"{len(again)} of 5 jobs after a release"]
        worker.sql(end)
    stale = worker.sql("SELECT state FROM awa.complete(%s)", [list(held.values())])
    faults += [] if stale == [("stale",)] * 4 else [f"receipts that were given back end as {stale}"]
    taken = again | other.claim()
    faults += got("both", taken, jobs)
    other.complete(taken)
    return faults + got("nothing more", worker.claim(), [])


def hundreds_of_savepoints(db, mutant=None):
    """More subtransactions than a backend's entry in the proc array holds, part of them rolled back, while others look."""
    play = Play(db, mutant)
    producer, holder, worker, other = play.parts(4)
    producer.begin()
    late, soon, taken = [], [], {}
    for i in range(200):
        producer.savepoint("s")
        made = producer.enqueue(1)
        if i % 3:
            producer.sql("RELEASE s")
            late += made
        else:
            producer.rollback_to()
            producer.sql("RELEASE s")
        if i % 10 == 0:
            soon += other.enqueue(1)
            taken |= worker.claim(1)
    faults = got("the worker, while the producer is open", taken | worker.claim(), soon)
    producer.commit()
    holder.begin()
    kept = {}
    for i in range(len(late)):
        holder.savepoint("s")
        mine = holder.claim(1)
        if i % 2:
            holder.rollback_to()
        else:
            kept |= mine
        holder.sql("RELEASE s")
        if i % 10 == 0:
            taken |= worker.claim(1)
    rest(worker)
    taken |= worker.claim()
    faults += got("both", taken | kept, soon + late)
    faults += [f"{len(set(taken) & set(kept))} twice"] if set(taken) & set(kept) else []
    holder.rollback()
    return faults + got("the others, after the rollback", other.claim(30) | worker.claim(), kept)


def ring_seen_by_a_failed_statement(db, mutant=None):
    """One statement seals, reads the ring as it would be, and fails, in a session that had not read it before."""
    play = Play(db, mutant)
    jobs, taken = [], {}
    for end in (None, "COMMIT", "ROLLBACK"):
        keeper = play.part()
        if end:
            keeper.begin()
            keeper.savepoint()
        try:
            keeper.sql("SELECT awa_internal.seal(), (SELECT count(*) FROM awa.jobs), 1 / 0")
        except psycopg.errors.DivisionByZero:
            pass
        if end:
            keeper.rollback_to()
            keeper.sql("SELECT count(*) FROM awa.jobs")
            keeper.sql(end)
        jobs += keeper.enqueue(3)
        taken |= play.part().claim(2)
        taken |= keeper.claim()
    return got("all", taken, jobs)


def seal_during_a_first_look(db, mutant=None):
    """A session without a list looks at the lane without the claim lock; meanwhile a slot is opened that holds the lower of two new
    segments."""
    play = Play(db, mutant)
    upper, lower, keeper = play.parts(3)
    keeper.enqueue(150)
    keeper.enqueue(150)
    keeper.complete(keeper.claim())
    cold = play.part()
    with Gates(db, 1) as writing, Gates(db, 2) as looking:
        upper.sql("SET awa_queue.pause_key = 1")
        upper.at_gate("enqueue.rows_written")
        enqueued = writing.hold(upper, *play.enqueue_call(1))  # into slot 0
        cold.sql("SET awa_queue.pause_key = 2")
        cold.at_gate("claim.between_entries", "claim.before_lock")
        claimed = looking.hold(cold, *play.claim_call(100))
        keeper.value("SELECT awa_internal.seal()")
        jobs = lower.enqueue(1)  # into slot 1
        writing.open()
        jobs += enqueued.result()[0][0]
        taken = finish(looking, cold, claimed)
    cold.at_gate()
    return got("the new session", taken | cold.claim(), jobs)
