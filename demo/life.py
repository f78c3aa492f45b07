"""What the demo's queue is told, and what its jobs go through besides being done: some fail and are retried, some fail
for good, some are put off. All of it follows from a job's number, so that the proof knows what had to happen."""

QUEUE = "lines"

SETTINGS = {
    # So short that one can watch: by default a lease is 5 minutes and the first retry comes after about 2 seconds.
    "lease": "5 s",
    "backoff": {"base": "0.5 s", "factor": 2, "max": "2 s"},
    "max_attempts": 5,
    "description": "lines of text to count words of",
}

# Of so many jobs, one fails at its first attempt, at its first two, at each, and one is refused for good at once.
FAILS_ONCE, FAILS_TWICE, FAILS_ALWAYS, REFUSED = 50, 200, 1000, 2000
# One order in so many is put off by so many seconds. The first orders are not: the queue's rows are still few then.
LATER_EVERY, LATER = 40, 4.0

ALWAYS, NEVER_AGAIN = 99, -1


def fails(number):
    """At how many attempts job `number` fails; NEVER_AGAIN: at the first, and a retry would not help."""
    # The remainders are such that no kind hides another.
    for every, remainder, result in ((FAILS_ONCE, 3, 1), (FAILS_TWICE, 17, 2), (FAILS_ALWAYS, 333, ALWAYS), (REFUSED, 666, NEVER_AGAIN)):
        if number % every == remainder:
            return result
    return 0


def ends_well(number):
    return fails(number) not in (ALWAYS, NEVER_AGAIN)


def later(order):
    return order.number % LATER_EVERY == LATER_EVERY - 1
