"""Soak: a steady stream of jobs with retries and schedules, a ring that turns every few seconds, and a reader that holds its
first snapshot all the time. Watches what must not grow, and compares all counts at the end."""

import argparse
import json
import os
import statistics
import threading
import time
from collections import Counter, namedtuple

import results
from harness import Cluster
from server import dead_tuples, lsn, percentile

QUEUE = "soak"
RETENTION, SLOT_AGE, GRACE = 6, 3, 5
SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "shared_buffers": "512MB",
    "max_wal_size": "4GB",
    "awa_queue.worker": "on",
    "awa_queue.slot_age": f"{SLOT_AGE}s",
    "awa_queue.snapshot_grace": f"{GRACE}s",
}
POLICY = {
    "retention": f"{RETENTION} s",
    "lease": "30 s",
    "max_attempts": 5,
    "backoff": {"base": "1 s", "factor": 2, "max": "10 s"},
}
# Of so many jobs one fails once, one fails for good, one is scheduled for so many seconds later.
FAILS_EVERY, REFUSED_EVERY, LATER_EVERY, LATER = 20, 1000, 20, 3
BATCH, PRODUCERS = 20, 2
WINDOW = 10.0

ENQUEUE = "SELECT awa.enqueue_batch(%s, ARRAY(SELECT jsonb_array_elements(%s::jsonb)), run_in => make_interval(secs => %s))"
# How long after it was ready: a fresh job since its enqueue, one that was put off since its time.
COLUMNS = (
    "receipt, job_id, attempt, args->'fails', attempt > 1 OR run_at > enqueued_at AS deferred,"
    " extract(epoch FROM claimed_at - run_at)::float8"
)
NEXT = f"SELECT {COLUMNS} FROM awa.complete_and_claim(%s, ARRAY['{QUEUE}'], {BATCH}, worker => %s, strict => true)"
FAIL = "SELECT state FROM awa.fail(%s, 'soak', permanent => %s, strict => true)"

Line = namedtuple("Line", "seconds enqueued ended ready deferred p50 p99 late99 dead dead_deferred wal ring states reasons")


class Tally:
    """What the clients know, to be compared with what the queue says."""

    def __init__(self):
        self.lock = threading.Lock()
        self.enqueued = set()
        self.completed = Counter()  # by job id
        self.failed = Counter()
        self.retried = 0
        self.pick_up, self.late = [], []
        self.errors = []
        self.emptied = set()  # numbers of events
        self.stop_producing, self.stop_working = threading.Event(), threading.Event()

    def window(self):
        with self.lock:
            found = self.pick_up, self.late
            self.pick_up, self.late = [], []
        return found


def job(number):
    fails = 99 if number % REFUSED_EVERY == 7 else 1 if number % FAILS_EVERY == 3 else 0
    return {"n": number, "fails": fails, "note": "x" * 50}


def guarded(body):
    """A thread's error ends the run instead of a thread."""

    def run(tally, *arguments):
        try:
            body(tally, *arguments)
        except Exception as error:  # whatever it is: it is said, and the exit code is 1
            tally.errors.append(f"{body.__name__}: {type(error).__name__}: {error}")
            tally.stop_producing.set()

    return run


@guarded
def produce(tally, database, rate, part):
    connection = database.connect()
    number, begun = part * BATCH, time.monotonic()
    while not tally.stop_producing.is_set():
        pause = begun + number / rate - time.monotonic()
        if pause > 0:
            time.sleep(pause)
        jobs = [job(number + i) for i in range(BATCH)]
        later = [j for j in jobs if j["n"] % LATER_EVERY == 0]
        now = [j for j in jobs if j["n"] % LATER_EVERY]
        with connection.transaction():
            ids = connection.execute(ENQUEUE, [QUEUE, json.dumps(now), None]).fetchone()[0]
            if later:
                ids += connection.execute(ENQUEUE, [QUEUE, json.dumps(later), LATER]).fetchone()[0]
        with tally.lock:
            tally.enqueued.update(ids)
        number += PRODUCERS * BATCH
    connection.close()


@guarded
def work(tally, database, name, can_wait):
    connection = database.connect()
    done, done_ids = [], []
    while True:
        rows = connection.execute(NEXT, [done, name]).fetchall()
        with tally.lock:
            tally.completed.update(done_ids)
            tally.pick_up += [wait for *_, deferred, wait in rows if not deferred]
            tally.late += [wait for *_, deferred, wait in rows if deferred]
        done, done_ids = [], []
        for fails, permanent in ((1, False), (99, True)):
            bad = [row for row in rows if row[3] == fails and row[2] <= fails]
            if bad:
                states = [s for s, in connection.execute(FAIL, [[row[0] for row in bad], permanent])]
                with tally.lock:
                    tally.retried += states.count("retryable")
                    tally.failed.update(row[1] for row, state in zip(bad, states) if state == "failed")
        for receipt, job_id, attempt, fails, *_ in rows:
            if attempt > fails:
                done.append(receipt)
                done_ids.append(job_id)
        if not rows:
            if tally.stop_working.is_set():
                break
            if can_wait:
                connection.execute(f"CALL awa.wait(ARRAY['{QUEUE}'], '1 s')")
            else:
                time.sleep(0.005)
    connection.close()


def stats(database):
    names = ("ready", "scheduled", "retryable", "running", "enqueued_total", "completed_total", "failed_total", "failed",
             "retried_total", "rescued_total", "stale_total")
    return dict(zip(names, database.row(f"SELECT {', '.join(names)} FROM awa.queue_stats WHERE queue = %s", [QUEUE])))


def ring(database):
    """(bytes, {state: slots}, reasons of slots that are not empty)"""
    rows = database.sql("SELECT slot, state, bytes, blocked_reason FROM awa.ring_status ORDER BY slot")
    reasons = [f"slot {slot}: {reason}" for slot, state, _, reason in rows if reason and state != "empty"]
    return int(sum(r[2] for r in rows)), Counter(state for _, state, *_ in rows), reasons


def note_emptied(database, tally):
    """A slot's event stays until it is emptied the next time, which takes longer than from one look to the next."""
    tally.emptied.update(no for no, in database.sql("SELECT event_no FROM awa_internal.ring WHERE event = 'e'"))


def look(database, tally, begun, before):
    note_emptied(database, tally)
    counts, (size, states, reasons) = stats(database), ring(database)
    pick_up, late = tally.window()
    now, ended = lsn(database), counts["completed_total"] + counts["failed_total"]
    line = Line(
        time.monotonic() - begun, counts["enqueued_total"], ended, counts["ready"], counts["scheduled"] + counts["retryable"],
        1000 * percentile(pick_up, 0.5), 1000 * percentile(pick_up, 0.99), 1000 * percentile(late, 0.99), dead_tuples(database),
        database.value("SELECT pg_stat_get_dead_tuples('awa_internal.deferred'::regclass)"),
        float(now - before[0]) / max(1, ended - before[1]), size, states, reasons,
    )
    return line, (now, ended)


def say(line):
    states = ", ".join(f"{n} {state}" for state, n in sorted(line.states.items()))
    print(f"{line.seconds:5.0f} s  ready {line.ready:>4,}  deferred {line.deferred:>4,}  pick-up p50 {line.p50:.1f} p99 {line.p99:.1f} ms"
          f"  due p99 {line.late99:.0f} ms  dead {line.dead} (deferred {line.dead_deferred:,})  WAL {line.wal:.0f} B/job"
          f"  ring {line.ring / 2**20:.0f} MB: {states}", flush=True)
    kinds = Counter(reason.split(": ", 1)[1] for reason in line.reasons)
    for reason, n in kinds.most_common(2):
        print(f"         {n} x {reason}")


def quarters(lines):
    size = max(1, len(lines) // 4)
    # The first window has the start of everything in it.
    body = lines[1:] if len(lines) > 4 else lines
    return body[:size], body[-size:]


def verdict(lines, tally, counts, last, rate):
    """[(word, sentence)]; FAIL ends the run with exit code 1, WARN is for somebody to look at."""
    first, end = quarters(lines)
    out = []

    def rule(good, text, hard=False):
        out.append(("ok" if good else "FAIL" if hard else "WARN", text))

    spent = lines[-1].seconds
    rule(lines[-1].enqueued >= 0.97 * rate * spent, f"rate: {lines[-1].enqueued / spent:,.0f} jobs/s over {spent:,.0f} s ({rate:,} wanted)")
    deepest = max(line.ready for line in end)
    rule(deepest <= max(rate, 2 * max(line.ready for line in first)),
         f"depth: at most {max(line.ready for line in lines):,} ready jobs seen, {deepest:,} in the last quarter;"
         f" {max(line.deferred for line in lines):,} deferred")
    early, late = (statistics.median(line.p99 for line in part) for part in (first, end))
    rule(late <= 2 * early + 5, f"pick-up p99: {early:.1f} ms in the first quarter, {late:.1f} ms in the last (medians of 10 s windows)")
    early, late = (statistics.median(line.late99 for line in part) for part in (first, end))
    rule(late <= 2 * early + 100, f"time to claim of a deferred job that is due, p99: {early:.0f} ms, {late:.0f} ms")
    early, late = (statistics.median(line.wal for line in part) for part in (first, end))
    rule(late <= 1.2 * early, f"WAL per job: {early:.0f} bytes, {late:.0f} bytes")
    biggest = [max(line.ring for line in part) / 2**20 for part in (first, end)]
    rule(biggest[1] <= 1.5 * biggest[0] + 8, f"ring: {biggest[0]:.0f} MB, {biggest[1]:.0f} MB")
    dead = max(line.dead for line in lines)
    rule(dead == 0, f"dead tuples of the logs: {dead}; of the table of deferred jobs (the old snapshot keeps them): {end[-1].dead_deferred:,}")
    kept = sum(n for state, n in last[1].items() if state != "empty") - 1
    emptied = len(tally.emptied)
    wanted = spent / SLOT_AGE / 2  # half of what a slot every SLOT_AGE would make
    reason = Counter(r.split(": ", 1)[1] for r in last[2]).most_common(1)
    rule(emptied >= wanted and (kept == 0 or reason),
         f"slots: {emptied + kept} sealed, {emptied} of them emptied again; at the end {kept} not empty beside the current one"
         + (f" ({reason[0][0]})" if reason else ""))
    own = {
        "enqueued_total": len(tally.enqueued), "completed_total": tally.completed.total(), "failed_total": tally.failed.total(),
        "failed": tally.failed.total(), "retried_total": tally.retried, "rescued_total": 0, "stale_total": 0,
        "ready": 0, "scheduled": 0, "retryable": 0, "running": 0,
    }
    for name, n in own.items():
        if n or counts[name] or name not in ("ready", "scheduled", "retryable", "running"):
            rule(counts[name] == n, f"{name}: {counts[name]:,} in queue_stats, {n:,} by the clients", hard=True)
    ended = tally.completed + tally.failed
    lost = len(tally.enqueued - ended.keys())
    rule(lost == 0, f"lost: {lost:,} of {len(tally.enqueued):,}", hard=True)
    twice = sum(1 for n in ended.values() if n > 1) + len(ended.keys() - tally.enqueued)
    rule(twice == 0, f"ended twice, or never enqueued: {twice:,}", hard=True)
    for error in tally.errors:
        rule(False, error, hard=True)
    return out


def soak(minutes, rate, workers, major):
    tally = Tally()
    with Cluster(major, "release", preload=True, settings=SETTINGS) as cluster:
        database = cluster.database()
        # The reader's snapshot is older than every job. It has read none of our tables: a lock would be another matter.
        reader = database.connect(autocommit=False)
        reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        reader.execute("SELECT count(*) FROM pg_class")
        database.sql("SELECT awa.create_queue(%s, %s::jsonb)", [QUEUE, json.dumps(POLICY)])
        can_wait = database.value("SELECT awa.has_feature('wait')")
        producers = [threading.Thread(target=produce, args=(tally, database, rate, part)) for part in range(PRODUCERS)]
        crew = [threading.Thread(target=work, args=(tally, database, f"soak {n}", can_wait)) for n in range(workers)]
        lines, begun = [], time.monotonic()
        before = (lsn(database), 0)
        for thread in [*producers, *crew]:
            thread.start()
        while (left := begun + minutes * 60 - time.monotonic()) > 0.5 and not tally.errors:
            tally.stop_producing.wait(min(WINDOW, left))
            line, before = look(database, tally, begun, before)
            lines.append(line)
            say(line)
        tally.stop_producing.set()
        for thread in producers:
            thread.join()

        def drained():
            counts = stats(database)
            return not any(counts[name] for name in ("ready", "scheduled", "retryable", "running"))

        patience(drained, 60, tally)
        tally.stop_working.set()
        for thread in crew:
            thread.join()
        counts = stats(database)
        # What is finished goes when retention and the grace for old snapshots are over.
        patience(lambda: not ring(database)[1]["closed"], RETENTION + GRACE + 4 * SLOT_AGE, tally)
        last = ring(database)
        held = database.value("SELECT backend_xmin IS NOT NULL FROM pg_stat_activity WHERE pid = %s", [reader.info.backend_pid])
        note_emptied(database, tally)
        found = verdict(lines, tally, counts, last, rate)
        found.append(("ok" if held else "FAIL", "the reader held its snapshot to the end"))
        version = database.value("SELECT extversion FROM pg_extension WHERE extname = 'awa_queue'")
        where = f"awa_queue {version} on PostgreSQL {database.value('SHOW server_version').split(' ')[0]}"
    return found, where


def patience(condition, seconds, tally):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end and not tally.errors:
        time.sleep(0.5)


def main(arguments):
    parser = argparse.ArgumentParser(prog="bench/run soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=int, default=800, help="jobs a second (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="put the verdict into bench/RESULTS.md")
    parser.add_argument("--note", default="", help="a sentence about the machine")
    chosen = parser.parse_args(arguments)
    found, where = soak(chosen.minutes, chosen.rate, chosen.workers, int(os.environ.get("AWA_MAJOR", "15")))
    print()
    for word, text in found:
        print(f"  {word:<5} {text}")
    if chosen.write:
        head = (f"## Soak\n\n{where}, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores shared by server and clients: {chosen.minutes:g} minutes at"
                f" {chosen.rate} jobs/s in batches of {BATCH}, {chosen.workers} workers. One in {FAILS_EVERY} fails once, one in {REFUSED_EVERY:,} for good,"
                f" one in {LATER_EVERY} is scheduled {LATER} s later. Slots are sealed after {SLOT_AGE} s, retention is {RETENTION} s, snapshot_grace {GRACE} s;"
                f" a REPEATABLE READ reader holds its first snapshot all the time. {chosen.note}".rstrip() + "\n\n")
        results.put("soak", head + "\n".join(f"- {word}: {text}" for word, text in found))
    return 1 if any(word == "FAIL" for word, _ in found) else 0
