"""Waiting for a condition, never for a time."""

import time


class OutOfPatience(AssertionError):
    """What was waited for did not come in time: because it never would, or because the machine had other things to do."""


def wait_until(condition, timeout=15.0, what=None, step=0.005):
    """Calls condition() until its result is true and returns that result.

    Raises OutOfPatience after timeout seconds and names the last result, so that a failure tells what was there instead.
    """
    deadline = time.monotonic() + timeout
    while True:
        last = condition()
        if last:
            return last
        if time.monotonic() > deadline:
            name = what or getattr(condition, "__name__", "condition")
            raise OutOfPatience(f"waited {timeout} s for: {name}; last seen: {last!r}")
        time.sleep(step)
        step = min(step * 1.5, 0.1)
