"""The input: lines of text that every Debian machine has, and this repository's own files.

It is read once and written down, one order a line, so that all processes see the same even if a file changes meanwhile.
"""

import json
from collections import namedtuple
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# An order is what one business transaction brings in: some consecutive lines of one file. before: how many lines the orders
# before it have; lines: [(line number, text)].
Order = namedtuple("Order", "number before file lines")

ORDER_LINES = 50
# Longer lines are data rather than text, and would only make the figures depend on them.
LONGEST_LINE = 400


def _folder(folder, *patterns):
    return sorted({path for pattern in patterns for path in Path("/").glob(f"{folder}/{pattern}") if path.is_file()})


def files():
    """All sources, best known first: the licences (Debian's base-files), our own files, Perl's and Python's libraries."""
    yield from _folder("usr/share/common-licenses", "*")
    for name in ("src", "sql", "tests", "demo", "bench", "tools"):
        yield from _folder(str(ROOT / name).lstrip("/"), "**/*.rs", "**/*.sql", "**/*.py", "**/*.md")
    yield from _folder("usr/share/perl", "5*/**/*.pm", "5*/**/*.pod")
    yield from _folder("usr/lib", "python3*/**/*.py")


def name_of(path):
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def usable(text):
    # jsonb can't hold the character NUL.
    return text.strip() != "" and len(text) <= LONGEST_LINE and "\0" not in text


def read(path):
    return path.read_text(encoding="utf-8", errors="replace")


def _lines(limit):
    """(file, line number, text) of every usable line, round and round until there are `limit`."""
    given, turn = 0, 0
    while given < limit:
        before = given
        for path in files():
            name = name_of(path) + (f" (round {turn + 1})" if turn else "")
            for number, text in enumerate(read(path).split("\n"), 1):
                if usable(text):
                    yield name, number, text
                    given += 1
                    if given == limit:
                        return
        if given == before:
            raise SystemExit("demo: no text found on this machine")
        turn += 1


def orders(limit):
    """`limit` lines as orders of up to ORDER_LINES lines of one file."""
    number, before, file, lines = 0, 0, None, []
    for name, line, text in _lines(limit):
        if lines and (name != file or len(lines) == ORDER_LINES):
            yield Order(number, before, file, lines)
            number, before, lines = number + 1, before + len(lines), []
        file = name
        lines.append((line, text))
    if lines:
        yield Order(number, before, file, lines)


def save(path, chosen):
    with open(path, "w", encoding="utf-8") as out:
        for order in chosen:
            out.write(json.dumps(order) + "\n")


def share(path, part, parts):
    """The orders of one of several producers."""
    with open(path, encoding="utf-8") as saved:
        for number, line in enumerate(saved):
            if number % parts == part:
                yield Order(*json.loads(line))
