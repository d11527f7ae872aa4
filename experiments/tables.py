"""Tables in README.md and docs/ are written from the records in results/, never by hand.

python -m experiments.tables            # rewrite every marked table
python -m experiments.tables --check    # fail if one is out of date
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

from experiments import few, records, reference, report, toy

TABLES: dict[str, Callable[[], report.Rows]] = {
    "toy-2000": lambda: toy.summary(records.read("toy"), 2000),
    "toy-50": lambda: toy.summary(records.read("toy"), 50),
    **{
        f"toy-{num}-{name}": lambda num=num, name=name: toy.table(records.read("toy"), num, name)
        for num in (2000, 50)
        for name in toy.DENSITIES
    },
    "reference": lambda: reference.table(records.read("reference")),
    "reference-summary": lambda: reference.summary(records.read("reference")),
    "few-summary": lambda: few.summary(records.read("few")),
    "kernels": lambda: few.by_kernel(records.read("kernels")),
    "few-sd": lambda: few.table(records.read("few"), 100),
    **{
        f"few-{num}": lambda num=num: few.grid(records.read("few"), num)
        for num in (20, 50, 100, 200)
    },
}
MARKED = re.compile(r"<!-- table: (\S+) -->\n.*?<!-- end -->", re.DOTALL)


def filled(text: str) -> str:
    """The text with every marked table made anew."""

    def one(match: re.Match[str]) -> str:
        name = match.group(1)
        return f"<!-- table: {name} -->\n{report.markdown(TABLES[name]())}\n<!-- end -->"

    return MARKED.sub(one, text)


def pages() -> list[Path]:
    """The files that may hold marked tables."""
    return [records.ROOT / "README.md", *sorted((records.ROOT / "docs").glob("*.md"))]


def main(check: bool) -> None:
    """Rewrite the tables, or say which are out of date."""
    stale = [page for page in pages() if filled(page.read_text()) != page.read_text()]
    if check and stale:
        raise SystemExit(
            f"out of date: {', '.join(p.name for p in stale)}; run python -m experiments.tables"
        )
    for page in stale:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main(check="--check" in sys.argv[1:])
