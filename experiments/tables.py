"""Tables in README.md and docs/ are written from the records in results/, never by hand.

python -m experiments.tables            # rewrite every marked table
python -m experiments.tables --check    # fail if one is out of date
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

from experiments import records, report
from experiments.registry import STUDIES

TABLES: dict[str, Callable[[], report.Rows]] = {
    name: lambda study=study, table=table: table.rows(records.read(study.name))
    for study in STUDIES.values()
    for name, table in study.tables.items()
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
