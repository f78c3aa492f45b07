"""Waiting for a condition, never for a time."""

import time


def wait_until(condition, timeout=15.0, what=None, step=0.005):
    """Calls condition() until its result is true and returns that result.

    Raises AssertionError after timeout seconds and names the last result, so that a failure tells what was there instead.
    """
    deadline = time.monotonic() + timeout
    while True:
        last = condition()
        if last:
            return last
        if time.monotonic() > deadline:
            name = what or getattr(condition, "__name__", "condition")
            raise AssertionError(f"waited {timeout} s for: {name}; last seen: {last!r}")
        time.sleep(step)
        step = min(step * 1.5, 0.1)
