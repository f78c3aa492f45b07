"""Measures awa_queue beside the same work in plain SQL, on a private server. Runs of their own, with options of their own:
bench/run soak (a steady stream for minutes), bench/run life (what retries, schedules and heartbeats cost) and
bench/run wake (how soon a waiter has a job)."""

import argparse
import datetime
import json
import os
import sys
import time
from pathlib import Path

import calls
import life
import load
import report
import results
import scenarios
import soak
import wake
from server import database, server

ROOT = Path(__file__).resolve().parents[1]
OWN_RUNS = {"life": life.main, "soak": soak.main, "wake": wake.main}
PARTS = ("calls", "held", "enqueue", "work", "retained")


def arguments():
    parser = argparse.ArgumentParser(prog="bench/run", description=__doc__)
    parser.add_argument("--full", action="store_true", help="all cells, three rounds, a million retained jobs (about 25 minutes;"
                        " without: about 4)")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (quick: 1, full: 3)")
    parser.add_argument("--retained", type=int, help="finished jobs to keep at most (quick: 200,000, full: 1,000,000)")
    parser.add_argument("--write", action="store_true", help="put the tables into bench/RESULTS.md")
    parser.add_argument("--note", default="", help="a sentence about the machine for the head of the tables")
    chosen = parser.parse_args()
    chosen.parts = chosen.parts.split(",")
    unknown = set(chosen.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part: {', '.join(sorted(unknown))}")
    return chosen


def main():
    if len(sys.argv) > 1 and sys.argv[1] in OWN_RUNS:
        return OWN_RUNS[sys.argv[1]](sys.argv[2:])
    chosen = arguments()
    full = chosen.full
    rounds = chosen.rounds or (3 if full else 1)
    seconds = 3 if full else 1
    begun = time.monotonic()

    def progress(text):
        print(f"{time.monotonic() - begun:6.1f} s  {text}", file=sys.stderr, flush=True)

    shapes = [(c, lanes) for c in (1, 8, 32) for lanes in (1, 8)] if full else [(1, 1), (8, 1), (32, 1), (32, 8)]
    found = {"date": datetime.date.today().isoformat(), "full": full, "rounds": rounds, "seconds": seconds, "note": chosen.note, "cores": os.cpu_count()}
    with server(int(os.environ.get("AWA_MAJOR", "15"))) as cluster:
        def fresh():
            # Each part has a database of its own, so that none inherits another's leftovers.
            return database(cluster)

        probe = fresh()
        found["postgres"] = probe.value("SHOW server_version").split(" ")[0]
        found["version"] = probe.value("SELECT extversion FROM pg_extension WHERE extname = 'awa_queue'")
        probe.drop()
        for part in chosen.parts:
            db = fresh()
            if part == "calls":
                found["calls"] = calls.run(db, 1.0 if full else 0.3, rounds, progress)
                found["images"] = calls.images(db)
                progress("buffers per call")
                found["buffers"] = calls.touched(db)
            elif part == "held":
                found["held"] = scenarios.held(cluster, db, 5 if full else 4, rounds, progress)
            elif part == "enqueue":
                cells = [(n, c, lanes) for n in load.ENQUEUE_BATCHES for c, lanes in shapes]
                found["enqueue"] = load.enqueue(cluster, db, cells, seconds, rounds, progress)
            elif part == "work":
                cells = [(n, c, lanes) for n in load.WORK_BATCHES for c, lanes in shapes]
                found["work"] = load.work(cluster, db, cells, seconds, rounds, 600_000 if full else 120_000, progress)
            elif part == "retained":
                most = chosen.retained or (1_000_000 if full else 200_000)
                sizes = [size for size in (1_000, 10_000, 100_000, 1_000_000) if size < most] + [most]
                found["retained"] = scenarios.retained(cluster, db, sizes, progress)
                progress("jobs by id")
                found["by id"] = scenarios.by_id(db, sizes[-1])
            db.drop()
    found["minutes"] = (time.monotonic() - begun) / 60
    text = report.tables(found)
    print(text)
    keep = ROOT / "target" / "bench"
    keep.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    (keep / f"{stamp}.json").write_text(json.dumps(report.plain(found), indent=1))
    if chosen.write:
        results.put(None, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
