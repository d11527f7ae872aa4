"""Tables in README.md and docs/ are written from the records in results/, never by hand, and so are marked figures.

python -m experiments.tables            # rewrite every marked table, draw every marked figure
python -m experiments.tables --check    # fail if a table is out of date
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

from experiments import records, report
from experiments.registry import STUDIES
from experiments.study import Figure, Study

TABLES: dict[str, Callable[[], report.Rows]] = {
    name: lambda study=study, table=table: table.rows(records.read(study.name))
    for study in STUDIES.values()
    for name, table in study.tables.items()
}
FIGURES: dict[str, tuple[Study, Figure]] = {
    name: (study, figure) for study in STUDIES.values() for name, figure in study.figures.items()
}
MARKED = re.compile(r"<!-- (table|figure): (\S+) -->\n.*?<!-- end -->", re.DOTALL)


def filled(text: str) -> str:
    """The text with every marked table made anew, and every figure that has records shown with its caption."""

    def one(match: re.Match[str]) -> str:
        kind, name = match.groups()
        made = report.markdown(TABLES[name]()) + "\n" if kind == "table" else shown(name)
        return f"<!-- {kind}: {name} -->\n{made}<!-- end -->"

    return MARKED.sub(one, text)


def shown(name: str) -> str:
    """A figure as Markdown; nothing while it has no records."""
    study, figure = FIGURES[name]
    if not records.read(study.name):
        return ""
    return f"![{study.title}](images/{name}.png)\n\n{figure.caption}\n"


def draw(name: str) -> None:
    """A figure as it stands in docs/images, if it has records."""
    study, figure = FIGURES[name]
    if seen := records.read(study.name):
        drawn = figure.draw(seen)
        drawn.savefig(records.ROOT / "docs" / "images" / f"{name}.png", dpi=130)
        drawn.clear()


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
    if check:
        return
    for page in pages():
        for kind, name in MARKED.findall(page.read_text()):
            if kind == "figure":
                draw(name)


if __name__ == "__main__":
    main(check="--check" in sys.argv[1:])
