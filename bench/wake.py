"""Waking: time from the COMMIT of an enqueue to the return of a CALL awa.wait that slept.

    bench/run wake [--rates 100,800] [--jobs 1000] [--write]

Workers are processes of their own. "sent" counts from the moment at which the producer sent COMMIT (its flush included), "done"
from its answer; a waiter is often back before that, which counts as 0. Only pick-ups by a waiter that had slept count. A wake-up
needs a processor at once, so the table also says how much of them the machine's host gave to others meanwhile ("steal").
"""

import argparse
import multiprocessing
import os
import time

import psycopg
import results
from server import server


def worker(dsn, found):
    connection = psycopg.connect(dsn, autocommit=True)
    while True:
        asleep = time.monotonic()
        connection.execute("CALL awa.wait('{q}', '5 s')")
        back = time.monotonic()
        rows = connection.execute("SELECT receipt, args FROM awa.claim('q')").fetchall()
        for receipt, number in rows:
            found.put((number, asleep, back))
            connection.execute("SELECT awa.complete(ARRAY[%s::int8])", [receipt])


def processor_time():
    """(all of it, what the host gave to others), in ticks since the machine started."""
    with open("/proc/stat") as file:
        ticks = [int(n) for n in file.readline().split()[1:9]]
    return sum(ticks), ticks[7]


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] * 1000


def measure(cluster, rate, jobs, workers):
    db = cluster.database()
    db.sql("SELECT awa.create_queue('q')")
    dsn = f"host={cluster.dir} user=postgres dbname={db.name}"
    found = multiprocessing.Queue()
    processes = [multiprocessing.Process(target=worker, args=(dsn, found), daemon=True) for _ in range(workers)]
    for process in processes:
        process.start()
    time.sleep(1)
    producer = db.connect(autocommit=False)
    sent, done = {}, {}
    ticks, stolen = processor_time()
    begin = time.monotonic()
    for i in range(jobs):
        time.sleep(max(0, begin + i / rate - time.monotonic()))
        producer.execute("SELECT awa.enqueue('q', to_jsonb(%s::int))", [i])
        sent[i] = time.monotonic()
        producer.commit()
        done[i] = time.monotonic()
    took = time.monotonic() - begin
    later, stolen_later = processor_time()
    picked = [found.get(timeout=30) for _ in range(jobs)]
    for process in processes:
        process.terminate()
        process.join()
    slept = [(n, back) for n, asleep, back in picked if asleep < sent[n]]
    from_sent = [back - sent[n] for n, back in slept]
    from_done = [max(0.0, back - done[n]) for n, back in slept]
    return {
        "rate": jobs / took, "jobs": jobs, "slept": len(slept), "steal": (stolen_later - stolen) / (later - ticks),
        "sent": (percentile(from_sent, 0.5), percentile(from_sent, 0.99)),
        "done": (percentile(from_done, 0.5), percentile(from_done, 0.99)),
    }


def table(found):
    lines = ["| jobs/s | picked up by a waiter that slept | from COMMIT sent: p50, p99 ms | from COMMIT answered: p50, p99 ms | steal |",
             "| - | - | - | - | - |"]
    for f in found:
        lines.append(f"| {f['rate']:.0f} | {f['slept']:,} of {f['jobs']:,} | {f['sent'][0]:.2f}, {f['sent'][1]:.2f}"
                     f" | {f['done'][0]:.2f}, {f['done'][1]:.2f} | {f['steal']:.0%} |")
    return "\n".join(lines)


def main(arguments):
    parser = argparse.ArgumentParser(prog="bench/run wake", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="100,400,800", help="jobs a second (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2000, help="jobs a rate (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="put the table into bench/RESULTS.md")
    parser.add_argument("--note", default="", help="a sentence about the machine")
    chosen = parser.parse_args(arguments)
    major = int(os.environ.get("AWA_MAJOR", "15"))
    found = []
    with server(major) as cluster:
        for rate in chosen.rates.split(","):
            found.append(measure(cluster, float(rate), chosen.jobs, chosen.workers))
            print(table(found).splitlines()[-1] if len(found) > 1 else table(found), flush=True)
    if chosen.write:
        head = (f"## Waking\n\nawa_queue on PostgreSQL {major}, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores shared by server and"
                f" clients, preloaded, fsync on; {chosen.workers} workers in CALL awa.wait, one producer, one job a transaction."
                f" {chosen.note}".rstrip() + "\n\n")
        results.put("wake", head + table(found))
    return 0
