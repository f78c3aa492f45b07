"""bench/RESULTS.md: the tables of the benchmark, and after them sections that are measured by runs of their own."""

import re
from pathlib import Path

FILE = Path(__file__).resolve().parent / "RESULTS.md"
# A section's name is what writes it: bench/run NAME --write.
SECTIONS = ("life", "soak", "wake")


def _marks(name):
    return f"<!-- {name}: by bench/run {name} --write -->", f"<!-- end of {name} -->"


def _section(name):
    begin, end = map(re.escape, _marks(name))
    return re.compile(f"\n*{begin}.*?{end}\n*", re.DOTALL)


def put(name, text):
    """Replaces one section, or with name None all that is not in a section."""
    old = FILE.read_text() if FILE.exists() else ""
    kept = {}
    for section in SECTIONS:
        found = _section(section).search(old)
        if found:
            kept[section] = found.group().strip()
            old = old.replace(found.group(), "\n")
    if name is None:
        old = text
    else:
        begin, end = _marks(name)
        kept[name] = f"{begin}\n{text.strip()}\n{end}"
    FILE.write_text("\n\n".join([old.strip(), *(kept[s] for s in SECTIONS if s in kept)]) + "\n")
