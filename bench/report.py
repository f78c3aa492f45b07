"""Figures as tables in Markdown."""

import peers

AWA = peers.AWA.name


def plain(found):
    """For JSON: keys that are tuples become text."""
    if isinstance(found, dict):
        return {k if isinstance(k, str) else " | ".join(map(str, k)): plain(v) for k, v in found.items()}
    if isinstance(found, (list, tuple)):
        return [plain(v) for v in found]
    return found if isinstance(found, (str, int, float, bool)) or found is None else float(found)


def number(value):
    value = float(value)
    if value != value:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + " - |" * len(head)]
    lines += ["| " + " | ".join(v if isinstance(v, str) else number(v) for v in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def targets(found):
    rows = []

    def row(what, wanted, value, text, good):
        rows.append((what, wanted, text, "yes" if good else "NO"))

    if "calls" in found:
        enqueue = float(found["calls"][(AWA, "enqueue", 20)][2]) / 20
        work = float(found["calls"][(AWA, "claim + complete", 20)][2]) / 20
        row("WAL of an enqueue of 20, bytes a job, commit included", "<= 230", enqueue, number(enqueue), enqueue <= 230)
        row("WAL of claim and complete of 20, bytes a job, both commits included", "<= 30", work, number(work), work <= 30)
        row("WAL of a job's life at batch 20", "<= 260", 0, number(enqueue + work), enqueue + work <= 260)
    if "held" in found:
        values = list(found["held"].values())
        ratio = values[0][0] / values[1][0]
        row("32 producers that hold their transaction 50 ms, one lane: times the same with the lane lock held to COMMIT",
            ">= 20", ratio, number(ratio), ratio >= 20)
    if "enqueue" in found and "work" in found:
        life = found["enqueue"][(AWA, 20, 32, 1)][4] + found["work"][(AWA, 20, 32, 1, False)][4]
        row("statements of a job's life at batch 20, autocommit", "<= 0.15", life, f"{life:.3f}", life <= 0.1505)
        one, eight = (found["enqueue"][(AWA, 20, 32, lanes)][0] for lanes in (1, 8))
        row("32 producers of 20: one lane against eight, jobs a second", ">= 0.9", one / eight, number(one / eight), one / eight >= 0.9)
    if "retained" in found:
        rows_of = found["retained"]
        first, last = rows_of[0][2], [r for r in rows_of if r[0] == ""][-1]
        ratio = float(last[2]["claim us"]) / float(first["claim us"])
        row(f"time of a claim of 20, {last[1]:,} retained jobs against {rows_of[0][1]:,}", "<= 1.1", ratio, f"x {ratio:.2f}", ratio <= 1.1)
        worst = max(float(r[2]["claim buffers"]) for r in rows_of if r[0]) / float(last[2]["claim buffers"])
        row("claim buffers with an old snapshot, a producer and a claimer left open, against none", "<= 1.1", worst,
            f"x {worst:.2f}", worst <= 1.1)
        dead = max(r[3] for r in rows_of)
        row("dead tuples in the four logs", "0", dead, f"{dead:,}", dead == 0)
    if "by id" in found:
        p50 = found["by id"][0]
        row(f"awa.job(id) among {found['by id'][3]:,} retained jobs, p50 ms with the round trip", "about 1", p50, number(p50), p50 <= 1.2)
    return table(["what", "wanted", "measured", "reached"], rows)


def tables(found):
    out = [
        "# Figures\n",
        f"awa_queue {found['version']} on PostgreSQL {found['postgres']}, {found['date']}, {found['cores']} cores shared by server and"
        f" clients, fsync and synchronous_commit on, preloaded, args of 100 bytes."
        f" Medians of {found['rounds']} interleaved rounds, {found['seconds']} s a cell of many clients; {found['minutes']:.0f} minutes in all."
        f" {found['note']}".rstrip() + "\n",
        "Reproduce: `make bench` (quick) or `tools/with-15 bench/run --full`; `bench/README.md` says what is measured and how.\n",
        "## Against what was aimed at\n",
        targets(found),
    ]
    if "calls" in found:
        out += ["## One session: a call in the server\n",
                "Loops inside the server, a COMMIT after each call (two for claim + complete), synchronous_commit off: CPU and wall"
                " microseconds per turn and WAL bytes per job, commits included, without full-page images.\n"]
        rows = []
        for (peer, what, n), (wall, cpu, wal) in found["calls"].items():
            rows.append((what, str(n) if n else "", peer, cpu, wall, float(wal) / (n or 1)))
        rows.sort(key=lambda r: (r[0] == "COMMIT alone", r[0] != "enqueue", r[0] != "claim + complete", int(r[1] or 0)))
        out.append(table(["call", "jobs", "", "CPU us", "wall us", "WAL bytes per job"], rows))
        out.append("Right after a checkpoint, with full-page images:\n")
        out.append(table(["call of 20", "WAL bytes per job", "images", "jobs"],
                         [(what, wal, f"{images:,}", f"{jobs:,}") for what, (wal, images, jobs) in found["images"].items()]))
        out.append("Shared buffers touched by one call:\n")
        out.append(table(["call", "jobs", *[p.name for p in peers.PEERS]], [
            (what, str(n), *[found["buffers"][(p.name, what, n)] for p in peers.PEERS])
            for what, n in dict.fromkeys((what, n) for _, what, n in found["buffers"])]))
    if "held" in found:
        out += ["## 32 producers on one lane, each transaction of 20 jobs held open for 50 ms\n",
                table(["", "transactions/s (at most 640)", "p50 ms", "p99 ms"], [(way, *v) for way, v in found["held"].items()])]
    for part, title, head in (
        ("enqueue", "Enqueue", "An enqueue of so many jobs, autocommit."),
        ("work", "Claim and complete", "Two statements, two commits; fused is complete_and_claim, one statement and one commit. Rows are"
                                       " counted in the server."),
    ):
        if part in found:
            out += [f"## {title}\n", head + "\n"]
            rows = []
            for key, (rate, p50, p99, wal, statements) in sorted(found[part].items(), key=lambda kv: (kv[0][1:4])):
                name = key[0] + (", fused" if len(key) > 4 and key[4] else "")
                rows.append((str(key[1]), str(key[2]), str(key[3]), name, rate, p50, p99, wal, f"{statements:.3f}"))
            out.append(table(["jobs", "clients", "lanes", "", "jobs/s", "p50 ms", "p99 ms", "WAL bytes per job", "statements per job"], rows))
    if "retained" in found:
        out += ["## Claims of 20 while much is retained\n",
                "A fresh session each; times in the server; the first claim of a session (median of five, with the round trip) fills its caches. With what is left open, 40,000 more jobs went through meanwhile.\n",
                table(["", "retained jobs", "first claim us", "claim us", "complete us", "claim buffers", "dead tuples in the logs"], [
                    (situation or "nothing left open", f"{size:,}", cost["first claim us"], cost["claim us"], cost["complete us"],
                     cost["claim buffers"], f"{dead:,}") for situation, size, cost, dead in found["retained"]]),
                "Buffers grow with the height of a slot's indexes (one level at a thousand jobs, two or three from some ten thousand"
                " on), and no further, because a slot's size is bounded.\n"]
        p50, p99, touched, jobs = found["by id"]
        out += [f"awa.job(id) among {jobs:,} retained jobs: p50 {number(p50)} ms, p99 {number(p99)} ms with the round trip,"
                f" {number(touched)} buffers.\n"]
    return "\n".join(out)
