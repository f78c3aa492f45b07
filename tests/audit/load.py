"""Many producers and workers at once, with an account of every job.

Clients note what they did in the transaction in which they did it: a job is in aud.put exactly if its producer committed, an
attempt in aud.got exactly if its claim committed, its end in aud.ended exactly if that committed. So in the end every job can
be followed, whatever was rolled back, cut off or prepared in between.

The load is made by pgbench, since what matters is the interleaving in the server; the few sessions that need more than a script
(they are cut off in mid-transaction, prepare, or keep their caches to the end) are threads.
"""

import random
import threading
import time

import psycopg

SETUP = """
CREATE SCHEMA aud;
CREATE TABLE aud.put (queue int, xid xid8, jobs bigint[]);
CREATE TABLE aud.got (receipt bigint, queue int, job bigint, at timestamptz, call bigint);
CREATE TABLE aud.saw (call bigint, queue int, before pg_snapshot, after pg_snapshot);
CREATE TABLE aud.ended (receipt bigint, job bigint, verb text, state text, changed boolean);
CREATE TABLE aud.seg (lane_id bigint, first_seq bigint, first_entry_id bigint, n smallint, slot smallint);
CREATE SEQUENCE aud.calls CACHE 100;

CREATE FUNCTION aud.put(q int, n int, p int DEFAULT NULL) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF n = 1 THEN
        INSERT INTO aud.put SELECT q, pg_current_xact_id(), ARRAY[awa.enqueue('q' || q, '{"n": 1}', priority => p)];
    ELSE
        INSERT INTO aud.put SELECT q, pg_current_xact_id(),
            awa.enqueue_batch('q' || q, array_fill('{"n": 1}'::jsonb, ARRAY[n]), priority => p);
    END IF;
END $$;

-- Snapshots are taken before and after the claim: each statement of a volatile function has a new one.
-- claimed_at is read under the lane's claim lock, so it tells which of two claims came first.
CREATE FUNCTION aud.note(q int, call bigint, before pg_snapshot, rows bigint[], jobs bigint[], times timestamptz[])
RETURNS bigint[] LANGUAGE plpgsql AS $$
BEGIN
    IF rows <> '{}' THEN
        INSERT INTO aud.got SELECT r, q, j, t, call FROM unnest(rows, jobs, times) AS u (r, j, t);
        INSERT INTO aud.saw VALUES (call, q, before, pg_current_snapshot());
    END IF;
    RETURN rows;
END $$;

CREATE FUNCTION aud.get(q int, m int) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    before pg_snapshot := pg_current_snapshot();
    rows bigint[];
    jobs bigint[];
    times timestamptz[];
BEGIN
    SELECT coalesce(array_agg(receipt), '{}'), array_agg(job_id), array_agg(claimed_at) INTO rows, jobs, times
    FROM awa.claim('q' || q, m, 'audit');
    RETURN aud.note(q, nextval('aud.calls'), before, rows, jobs, times);
END $$;

CREATE FUNCTION aud.finish(verb text, receipts bigint[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF verb = 'complete' THEN
        INSERT INTO aud.ended SELECT receipt, job_id, verb, state, changed FROM awa.complete(receipts);
    ELSIF verb = 'release' THEN
        INSERT INTO aud.ended SELECT receipt, job_id, verb, state, changed FROM awa.release(receipts);
    ELSE
        INSERT INTO aud.ended SELECT receipt, job_id, verb, state, changed FROM awa.cancel_claimed(receipts);
    END IF;
END $$;

CREATE FUNCTION aud.next(receipts bigint[], q int, m int) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    before pg_snapshot := pg_current_snapshot();
    rows bigint[];
    jobs bigint[];
    times timestamptz[];
BEGIN
    SELECT coalesce(array_agg(receipt), '{}'), array_agg(job_id), array_agg(claimed_at) INTO rows, jobs, times
    FROM awa.complete_and_claim(receipts, ARRAY['q' || q], m, 'audit', strict => true);
    INSERT INTO aud.ended SELECT r, g.job, 'complete', 'completed', true FROM unnest(receipts) r JOIN aud.got g ON g.receipt = r;
    RETURN aud.note(q, nextval('aud.calls'), before, rows, jobs, times);
END $$;
CREATE INDEX ON aud.got (receipt);
"""

# Queue :q is one of those that a run names; each script says what it does to them.
PRODUCERS = {
    # Savepoints that are rolled back, and whole transactions.
    "savepoints": """
\\set r random(1, 10)
\\set us random(0, 6000)
BEGIN;
SELECT aud.put(:q, 5);
SAVEPOINT s1;
SELECT aud.put(:q, 1);
\\sleep :us us
\\if :r <= 3
ROLLBACK TO s1;
\\endif
\\if :r = 5
SAVEPOINT s2;
SELECT aud.put(:q, 20);
ROLLBACK TO s1;
\\endif
SELECT aud.put(:q, 5);
\\if :r = 1 or :r = 9
ROLLBACK;
\\else
COMMIT;
\\endif
""",
    # No savepoints: a snapshot does not tell of subtransactions, so the checks of order need whole ones.
    "plain": """
\\set r random(1, 8)
\\set us random(0, 6000)
BEGIN;
SELECT aud.put(:q, 5);
\\sleep :us us
SELECT aud.put(:q, 1);
\\if :r = 1
ROLLBACK;
\\else
COMMIT;
\\endif
""",
    # Enqueue and claim in one transaction, half of them rolled back.
    "own": """
\\set r random(1, 4)
BEGIN;
SELECT aud.put(:q, 5);
SELECT aud.get(:q, 8) AS rs \\gset
\\if :r <= 2
ROLLBACK;
\\else
COMMIT;
SELECT aud.finish('complete', :rs);
\\endif
""",
    "singles": """
\\set us random(0, 2000)
SELECT aud.put(:q, 1);
\\sleep :us us
""",
    "aborting": """
\\set r random(1, 10)
\\set n random(1, 6)
\\set us random(0, 3000)
BEGIN;
SELECT aud.put(:q, :n);
\\sleep :us us
\\if :r <= 7
ROLLBACK;
\\else
COMMIT;
\\endif
""",
    "priorities": """
\\set p random(1, 4)
\\set n random(1, 12)
SELECT aud.put(:q, :n, :p);
""",
}

WORKERS = {
    # Savepoints and whole transactions that give back what they took, and claims that follow in the same one.
    "rollbacks": """
\\set r random(1, 8)
\\set m random(1, 40)
\\set us random(0, 4000)
\\set v random(1, 10)
BEGIN;
SAVEPOINT a;
SELECT aud.get(:q, :m) AS rs, '{}' AS rs2 \\gset
\\if :r = 2
ROLLBACK TO a;
SELECT aud.get(:q, :m) AS rs \\gset
\\elif :r <= 4
SELECT aud.get(:q, :m) AS rs2 \\gset
\\endif
\\sleep :us us
\\if :r = 1
ROLLBACK;
\\else
COMMIT;
BEGIN;
\\if :v = 1
SELECT aud.finish('release', :rs);
\\else
SELECT aud.finish('complete', :rs);
\\endif
SELECT aud.finish('complete', :rs2);
\\if :v = 2
ROLLBACK;
\\else
COMMIT;
\\endif
\\endif
""",
    "commits": """
\\set m random(1, 40)
SELECT aud.get(:q, :m) AS rs \\gset
SELECT aud.finish('complete', :rs);
""",
    "next": """
\\set m random(1, 20)
\\set r random(1, 8)
SELECT aud.get(:q, :m) AS rs \\gset
BEGIN;
SELECT aud.next(:rs, :q, :m) AS rs2 \\gset
\\if :r = 1
ROLLBACK;
SELECT aud.finish('complete', :rs);
\\else
COMMIT;
SELECT aud.finish('complete', :rs2);
\\endif
""",
    "all": """
SELECT aud.get(:q, 1000) AS rs \\gset
SELECT aud.finish('complete', :rs);
""",
}


class Load:
    """One run. queues: the settings of queue q1, q2 ... as JSON."""

    def __init__(self, db, queues, settings=None):
        self.db = db
        self.settings = {"statement_timeout": "60s", **(settings or {})}
        self.count = len(queues)
        self.complaints = []
        self.done = threading.Event()
        self.steps = {}
        db.sql(SETUP)
        for i, settings in enumerate(queues, 1):
            db.sql("SELECT awa.create_queue(%s, %s)", [f"q{i}", settings])

    # -- the clients -----------------------------------------------------------------------------------------------

    def complain(self, text):
        self.complaints.append(text)

    def pgbench(self, clients, seconds, scripts):
        """scripts: (text, numbers of the queues that it is for, weight)."""
        cluster = self.db.cluster
        arguments = []
        for k, (text, queues, weight) in enumerate(scripts):
            # A script cannot pick from a list, so its queues follow one another.
            low, high = min(queues), max(queues)
            assert sorted(queues) == list(range(low, high + 1))
            path = cluster.dir / f"{self.db.name}_{threading.get_ident()}_{k}.sql"
            path.write_text(f"\\set q random({low}, {high})\n{text}")
            path.chmod(0o644)
            arguments += ["-f", f"{path}@{weight}"]
        options = " ".join(f"-c {k}={v}" for k, v in self.settings.items())
        said = cluster.program(
            "pgbench", "-n", "-M", "prepared", "-c", clients, "-j", 2, "-T", seconds, *arguments,
            f"{cluster.conninfo(self.db.name)} options='{options}'", check=False, timeout=seconds + 100,
        )  # fmt: skip
        bad = [line for line in said.splitlines() if "ERROR" in line or "FATAL" in line or "aborted" in line]
        if bad or "number of transactions actually processed" not in said:
            self.complain(f"pgbench: {bad[:5] or said[-600:]}")

    def cut_off(self, seed, queues):
        """Sessions that end in mid-transaction in every way, or whose transaction outlives them."""
        r, cut = random.Random(seed), self.db.connect()
        prepared = 0
        while not self.done.is_set():
            queue = r.choice(queues)
            client = self.db.connect(settings=self.settings)
            client.execute("BEGIN")
            client.execute("SELECT aud.put(%s, %s)", [queue, r.choice((1, 5, 20))])
            client.execute("SELECT aud.get(%s, %s)", [queue, r.choice((1, 5, 30))])
            way = r.randrange(4)
            if way == 0:
                client.pgconn.finish()
            elif way == 1:
                cut.execute("SELECT pg_terminate_backend(%s)", [client.info.backend_pid])
            elif way == 2:
                prepared += 1
                name = f"{self.db.name}_{seed}_{prepared}"
                client.execute(f"PREPARE TRANSACTION '{name}'")
                client.close()
                time.sleep(r.random() * 0.03)
                cut.execute(f"{r.choice(('COMMIT', 'ROLLBACK'))} PREPARED '{name}'")
            else:
                try:
                    client.execute("SELECT 1 / 0")
                except psycopg.errors.DivisionByZero:
                    pass
            try:
                client.close()
            except psycopg.Error:
                pass
            time.sleep(r.random() * 0.02)

    def watch(self, seed, queues, session):
        """A session that works all along and keeps what it remembers to the end."""
        r = random.Random(seed)
        while not self.done.is_set():
            queue = r.choice(queues)
            session.execute("BEGIN")
            receipts = session.execute("SELECT aud.get(%s, %s)", [queue, r.choice((1, 5, 30))]).fetchone()[0]
            if r.random() < 0.4:
                session.execute("ROLLBACK")
            else:
                session.execute("SELECT aud.finish('complete', %s)", [receipts])
                session.execute("COMMIT")
            time.sleep(r.random() * 0.01)

    def rotate(self, every, empty=True):
        keeper = self.db.connect(settings=self.settings)
        while not self.done.is_set():
            self.rotate_once(keeper, empty)
            self.done.wait(every)
        keeper.close()

    def step(self, keeper, statement, slot=None):
        said = keeper.execute(statement, None if slot is None else [slot]).fetchone()[0]
        word = said.split(":")[0]
        self.steps[word] = self.steps.get(word, 0) + 1
        return word

    def rotate_once(self, keeper, empty=True):
        self.step(keeper, "SELECT awa_internal.seal()")
        for slot in range(16):
            if self.step(keeper, "SELECT awa_internal.close(%s)", slot) == "closed":
                # Its segments never change from here on: kept for the checks of order.
                keeper.execute(
                    f"INSERT INTO aud.seg SELECT lane_id, first_seq, first_entry_id, n, slot FROM awa_internal.segments_{slot}"
                )
            if empty:
                self.step(keeper, 'SELECT awa_internal."empty"(%s, true)', slot)

    # -- a run -----------------------------------------------------------------------------------------------------

    def run(self, seconds, producers, workers, queues=None, rotate=0.5, empty=True, clients=16, worker_clients=16,
            cut_off=(), watch=()):  # fmt: skip
        """producers and workers: (script's name, queues, weight)."""
        self.watchers = [self.db.connect(settings=self.settings) for _ in range(2 if watch else 0)]
        jobs = [
            lambda: self.pgbench(clients, seconds, [(PRODUCERS[n], q, w) for n, q, w in producers]),
            lambda: self.pgbench(worker_clients, seconds, [(WORKERS[n], q, w) for n, q, w in workers]),
        ]
        others = [lambda: self.rotate(rotate, empty)] if rotate else []
        others += [lambda s=s: self.cut_off(s, list(cut_off)) for s in range(2 if cut_off else 0)]
        others += [lambda i=i, w=w: self.watch(i, list(watch), w) for i, w in enumerate(self.watchers)]

        def guarded(job):
            try:
                job()
            except Exception as error:
                self.complain(f"{type(error).__name__}: {error}")

        running = [threading.Thread(target=guarded, args=[job]) for job in jobs]
        beside = [threading.Thread(target=guarded, args=[job]) for job in others]
        for thread in running + beside:
            thread.start()
        for thread in running:
            thread.join()
        self.done.set()
        for thread in beside:
            thread.join()
        return self

    def settle(self):
        """Old sessions say what they still see, then everything is taken and finished and the slots are emptied."""
        sql = self.db.sql
        left = {
            job
            for (job,) in sql(
                "SELECT unnest(jobs) FROM aud.put"
                " EXCEPT SELECT job FROM aud.got g WHERE NOT EXISTS (SELECT FROM aud.ended e WHERE e.receipt = g.receipt"
                " AND e.verb = 'release' AND e.changed)"
            )
        }
        # What is rolled back is left alone for 50 ms where there is something else to take, so it is asked for twice.
        for i, session in enumerate(self.watchers):
            seen = set()
            for queue in range(1, self.count + 1):
                session.execute("BEGIN")
                for _ in range(2):
                    rows = session.execute("SELECT job_id FROM awa.claim(%s, 100000)", [f"q{queue}"]).fetchall()
                    seen |= {job for (job,) in rows}
                    session.execute("SELECT pg_sleep(0.06)")
                session.execute("ROLLBACK")
            if seen != left:
                self.complain(
                    f"old session {i} sees {len(seen & left)} of {len(left)} waiting jobs and {len(seen - left)} others"
                )
            session.close()
        for queue in range(1, self.count + 1):
            while sql("SELECT cardinality(aud.get(%s, 100000))", [queue])[0][0]:
                pass
        sql(
            "SELECT aud.finish('complete', array_agg(receipt)) FROM aud.got g"
            " WHERE NOT EXISTS (SELECT FROM aud.ended e WHERE e.receipt = g.receipt AND e.changed)"
        )
        keeper = self.db.connect()
        # Where no slot was empty the first round empties those that are closed, and the second one the one that was current.
        for _ in range(2):
            self.rotate_once(keeper)
        stuck = keeper.execute("SELECT slot, count(*) FROM awa_internal.segments GROUP BY slot").fetchall()
        if stuck:
            self.complain(f"slots that can not be emptied although every job has ended: {stuck}, {self.steps}")
        keeper.close()
        return self

    # -- the account -----------------------------------------------------------------------------------------------

    def faults(self):
        value, found = self.db.value, list(self.complaints)
        self.db.sql("CREATE TEMP TABLE job AS SELECT queue, xid, unnest(jobs) AS job FROM aud.put")
        self.db.sql("CREATE INDEX ON job (job)")
        self.db.sql("ANALYZE job, aud.got, aud.ended, aud.seg")
        checks = {
            "jobs enqueued under an id that was given out before": "SELECT count(*) - count(DISTINCT job) FROM job",
            "receipts given out twice": "SELECT count(*) - count(DISTINCT receipt) FROM aud.got",
            "jobs claimed that were never committed":
                "SELECT count(*) FROM aud.got g WHERE NOT EXISTS (SELECT FROM job j WHERE j.job = g.job AND j.queue = g.queue)",
            "jobs never claimed": "SELECT count(*) FROM job j WHERE NOT EXISTS (SELECT FROM aud.got g WHERE g.job = j.job)",
            "jobs claimed more often than they were released, and once":
                "SELECT count(*) FROM (SELECT g.job FROM aud.got g LEFT JOIN aud.ended e"
                " ON e.receipt = g.receipt AND e.verb = 'release' AND e.changed"
                " GROUP BY g.job HAVING count(*) <> 1 + count(e.receipt)) x",
            "jobs not completed exactly once":
                "SELECT count(*) FROM (SELECT j.job FROM job j LEFT JOIN aud.ended e"
                " ON e.job = j.job AND e.verb = 'complete' AND e.state = 'completed' AND e.changed"
                " GROUP BY j.job HAVING count(e.receipt) <> 1) x",
            "finishes that were refused":
                "SELECT count(*) FROM aud.ended WHERE NOT changed OR state NOT IN ('completed', 'ready')",
            "finishes that ended another job":
                "SELECT count(*) FROM aud.ended e JOIN aud.got g USING (receipt) WHERE e.job <> g.job",
            "seqs given out twice":
                "SELECT count(*) FROM (SELECT lane_id, first_seq + i FROM aud.seg, generate_series(0, n - 1) i"
                " GROUP BY 1, 2 HAVING count(*) > 1) x",
        }  # fmt: skip
        for name, query in checks.items():
            n = value(query)
            if n:
                found.append(f"{n} {name}")
        total = value("SELECT coalesce(sum(n), 0) FROM awa_internal.queue_totals WHERE outcome = 'c'")
        jobs = value("SELECT count(*) FROM job")
        if total != jobs:
            found.append(f"{total} completed by the queues' totals, of {jobs} jobs")
        log = [x for x in self.db.cluster.log().splitlines() if "PANIC" in x or "panicked" in x or "XX000" in x or "signal" in x]
        if log:
            found.append(f"in the server's log: {log[:3]}")
        return found

    def jobs(self):
        return self.db.value("SELECT count(*) FROM aud.put, unnest(jobs)")

    def positions(self, queue):
        """A table of each job's seq in a queue of one lane, with its producer's transaction and its last claim."""
        self.db.sql("DROP TABLE IF EXISTS pos")
        self.db.sql(
            "CREATE TEMP TABLE pos AS SELECT s.first_seq + i AS seq, j.xid, g.at, g.call"
            " FROM aud.seg s CROSS JOIN LATERAL generate_series(0, s.n - 1) i"
            " JOIN job j ON j.job = s.first_entry_id + i JOIN aud.got g ON g.job = j.job"
            " WHERE j.queue = %s",
            [queue],
        )
        self.db.sql("CREATE INDEX ON pos (seq)")
        self.db.sql("ANALYZE pos")

    def out_of_order_strict(self, queue):
        """(violations, pairs looked at) in a strict lane: jobs claimed although an earlier one was not committed yet."""
        self.positions(queue)
        return self.db.row(
            "SELECT count(*) FILTER (WHERE NOT pg_visible_in_snapshot(p.xid, c.after)), count(*) FROM"
            " (SELECT s.after, m.top FROM aud.saw s JOIN (SELECT call, max(seq) AS top FROM pos GROUP BY call) m USING (call)) c"
            " JOIN pos p ON p.seq < c.top AND p.seq > c.top - 400",
        )

    def out_of_order_relaxed(self, queue):
        """(violations, legal overtakes): jobs that were committed before a claim began, lay below what it took, and were claimed
        later."""
        self.positions(queue)
        return self.db.row(
            "SELECT count(*) FILTER (WHERE pg_visible_in_snapshot(p.xid, c.before)), count(*) FROM"
            " (SELECT s.before, m.at, m.low FROM aud.saw s"
            " JOIN (SELECT call, at, min(seq) AS low FROM pos GROUP BY call, at) m USING (call)) c"
            " JOIN pos p ON p.seq < c.low AND p.seq > c.low - 400 AND p.at > c.at",
        )
