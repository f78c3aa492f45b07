"""Waking: time from the COMMIT of an enqueue to the return of a CALL awa.wait that slept.

    PYTHONPATH=tests target/venv/bin/python bench/wake.py [--flavour injection] [--rates 100,800] [--jobs 1000]

Workers are processes of their own. "sent" counts from the moment at which the producer sent COMMIT (its flush included), "done"
from its answer; a waiter is often back before that, which counts as 0. Only pick-ups by a waiter that had slept count.
"""

import argparse
import multiprocessing
import time

import psycopg
from harness import Cluster


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
    begin = time.monotonic()
    for i in range(jobs):
        time.sleep(max(0, begin + i / rate - time.monotonic()))
        producer.execute("SELECT awa.enqueue('q', to_jsonb(%s::int))", [i])
        sent[i] = time.monotonic()
        producer.commit()
        done[i] = time.monotonic()
    took = time.monotonic() - begin
    picked = [found.get(timeout=30) for _ in range(jobs)]
    for process in processes:
        process.terminate()
        process.join()
    slept = [(n, back) for n, asleep, back in picked if asleep < sent[n]]
    from_sent = [back - sent[n] for n, back in slept]
    from_done = [max(0.0, back - done[n]) for n, back in slept]
    print(
        f"{jobs / took:6.0f} jobs/s, {len(slept)} of {jobs} by a waiter that slept:"
        f"  sent p50 {percentile(from_sent, 0.5):.2f} p99 {percentile(from_sent, 0.99):.2f} ms"
        f"  done p50 {percentile(from_done, 0.5):.2f} p99 {percentile(from_done, 0.99):.2f} ms",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavour", default="release")
    parser.add_argument("--rates", default="100,400,800")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    with Cluster(flavour=options.flavour, preload=True, settings={"fsync": "on"}) as cluster:
        for rate in options.rates.split(","):
            measure(cluster, float(rate), options.jobs, options.workers)


if __name__ == "__main__":
    main()
