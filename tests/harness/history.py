"""What the tables say of each job: its entries, who took them, how each attempt ended. Jobs carry a number in their args.

Read in one statement each, so nobody may write meanwhile. Slots that were emptied are not told of.
"""

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field

ENDS = set("cxkfdrtlz")
NEXT_ATTEMPT = set("tl")
SAME_ATTEMPT = set("zr")


@dataclass
class Attempt:
    """An entry of a job and, where it was claimed, the claim."""

    job_id: int
    number: int
    attempt: int
    max_attempts: int
    queue_id: int
    receipt: int = None
    claim_no: int = None
    worker: str = None
    claimed_at: object = None
    expires_at: object = None
    outcome: str = None
    closed_at: object = None
    brought_back: bool = False
    cancel_requested: bool = False


@dataclass
class History:
    jobs: dict = field(default_factory=lambda: defaultdict(list))  # job_id -> attempts in their order
    deferred: dict = field(default_factory=dict)  # job_id -> (number, attempt, state)
    letters: dict = field(default_factory=dict)  # job_id -> (number, attempt)
    wrong: list = field(default_factory=list)

    def attempts(self):
        return [a for attempts in self.jobs.values() for a in attempts]


def read(db):
    h = History()
    segments = defaultdict(list)
    for row in db.sql("SELECT slot, first_entry_id, n, lane_id, first_seq FROM awa_internal.segments ORDER BY 1, 2"):
        segments[row[0]].append(row[1:])
    at = {}  # (slot, lane, seq) -> Attempt
    for slot, entry_id, job_id, attempt, most, number in db.sql(
        "SELECT slot, entry_id, coalesce(job_id, entry_id), attempt, max_attempts, args::int8 FROM awa_internal.ready"
    ):
        of_slot = segments[slot]
        i = bisect_right(of_slot, entry_id, key=lambda s: s[0]) - 1
        first_entry, n, lane, first_seq = of_slot[i] if i >= 0 else (entry_id + 1, 0, 0, 0)
        if not first_entry <= entry_id < first_entry + n:
            h.wrong.append(f"entry {entry_id} of job {number} is in no segment")
            continue
        key = slot, lane, first_seq + entry_id - first_entry
        if key in at:
            h.wrong.append(f"two entries at {key}: {at[key]} and {number}")
        at[key] = Attempt(job_id, number, attempt, most, lane >> 8)
    if len(at) != sum(n for of_slot in segments.values() for _, n, _, _ in of_slot):
        h.wrong.append("segments name more entries than there are rows")
    seqs = defaultdict(set)
    for _, lane, seq in at:
        if seq in seqs[lane]:
            h.wrong.append(f"seq {seq} of lane {lane} was given out twice")
        seqs[lane].add(seq)
    claimed = {}  # (claim_no, index) -> Attempt
    sizes = {}
    for slot, claim_no, lane, first_seq, n, worker, claimed_at, expires_at in db.sql(
        "SELECT slot, claim_no, lane_id, first_seq, n, worker, claimed_at, expires_at FROM awa_internal.claims"
    ):
        if claim_no in sizes:
            h.wrong.append(f"claim number {claim_no} was given out twice")
        sizes[claim_no] = n
        for k in range(n):
            a = at.get((slot, lane, first_seq + k))
            if a is None:
                h.wrong.append(f"claim {claim_no} took what is not there: seq {first_seq + k} of lane {lane}")
            elif a.claim_no is not None:
                h.wrong.append(f"job {a.number} was taken twice in one entry: {a} and claim {claim_no} of {worker}")
            else:
                a.claim_no, a.receipt = claim_no, claim_no << 16 | slot << 10 | k
                a.worker, a.claimed_at, a.expires_at = worker, claimed_at, expires_at
                claimed[claim_no, k] = a
    for claim_no, outcome, n, which, closed_at in db.sql(
        "SELECT claim_no, outcome::text, n, which, closed_at FROM awa_internal.closures"
    ):
        if claim_no not in sizes:
            h.wrong.append(f"a closure of claim {claim_no}, which there is not")
            continue
        bits = [k for k in range(sizes[claim_no]) if which is None or bytes(which)[k // 8] >> k % 8 & 1]
        if len(bits) != n:
            h.wrong.append(f"a closure of claim {claim_no} says {n} and means {bits}")
        for k in bits:
            a = claimed.get((claim_no, k))
            if a is None:
                continue  # told of already
            if outcome in ENDS:
                if a.outcome is not None:
                    h.wrong.append(f"job {a.number} ended twice in one attempt: {a} and {outcome}")
                a.outcome, a.closed_at = outcome, closed_at
            elif outcome == "b":
                if a.brought_back:
                    h.wrong.append(f"job {a.number} was brought back twice from one ending: {a}")
                a.brought_back = True
            else:
                a.cancel_requested = True
    h.deferred = {j: (n, a, s) for j, n, a, s in db.sql(
        "SELECT job_id, args::int8, attempt, state::text FROM awa_internal.deferred")}
    h.letters = {j: (n, a) for j, n, a in db.sql("SELECT job_id, args::int8, attempt FROM awa_internal.dead_letters")}
    for a in at.values():
        h.jobs[a.job_id].append(a)
    for attempts in h.jobs.values():
        attempts.sort(key=lambda a: (a.claimed_at is None, a.claimed_at, a.claim_no))
    for job_id in h.deferred:
        h.jobs.setdefault(job_id, [])
    for job_id in set(h.jobs) | set(h.letters):
        _follow(h, job_id)
    return h


def _follow(h, job_id):
    """A job is in one place at a time, and each of its attempts follows from the one before."""
    attempts, deferred = h.jobs.get(job_id, []), h.deferred.get(job_id)
    story = [(a.attempt, a.outcome, "b" if a.brought_back else "") for a in attempts], deferred, h.letters.get(job_id)

    def wrong(what):
        h.wrong.append(f"job {job_id} {what}: {story}")

    expected, alive, dead = 1, True, False
    for a in attempts:
        if not alive:
            return wrong("goes on although it has ended, or is in two places")
        if a.attempt != expected:
            return wrong(f"has attempt {a.attempt} instead of {expected}")
        alive = a.outcome is None
        dead = a.outcome is not None and a.outcome in "fd"
        if alive:
            expected = None  # nothing may come after an entry that is ready or running
            continue
        if a.outcome in NEXT_ATTEMPT:
            if a.attempt >= a.max_attempts:
                return wrong(f"has another attempt after the last of {a.max_attempts}")
            alive, expected = True, a.attempt + 1
        elif a.outcome in SAME_ATTEMPT:
            alive, expected = True, a.attempt
        elif a.outcome == "d" and a.attempt < a.max_attempts:
            return wrong(f"failed by its lease before the last attempt of {a.max_attempts}")
        elif a.brought_back:
            if a.outcome == "c":
                return wrong("was brought back after its completion")
            alive, expected, dead = True, 1, False
    last = attempts[-1] if attempts else None
    waits_in_a_lane = last is not None and last.outcome is None
    if deferred is not None:
        if waits_in_a_lane or not alive:
            wrong("is deferred and somewhere else, too")
        elif deferred[1] != expected:
            wrong(f"is deferred with attempt {deferred[1]} instead of {expected}")
    elif alive and not waits_in_a_lane:
        wrong("is lost: it should go on and is nowhere")
    if dead != (job_id in h.letters):
        wrong("failed and has no dead letter" if dead else "has a dead letter and has not failed")
