"""The experiments from the command line.

python -m experiments list                            what there is
python -m experiments run NAME [--key=value ...]      do the runs that have no record yet; --help lists the settings
python -m experiments run NAME --smoke                a tiny version, in seconds
python -m experiments table NAME [--record=NAME]      its tables, from the records
python -m experiments figure NAME [--record=NAME]     its figures, from the records
python -m experiments report [--record=NAME]          one page with every table and figure, beside the paper's

Records are JSON lines in results/NAME/. With the default settings they are called `study` (committed, and what the
tables of README and docs are made of), with others `trial`, unless --record= says otherwise.
"""

import dataclasses
import difflib
import sys
from pathlib import Path

from rich.console import Console

from experiments import config, records, report
from experiments.fetching import DatasetError
from experiments.registry import STUDIES
from experiments.study import Study, perform


@dataclasses.dataclass(frozen=True)
class Which:
    """Which records to read."""

    record: str = records.STUDY


def find(name: str) -> Study:
    """The study of that name, or an end with the names there are."""
    if name not in STUDIES:
        near = difflib.get_close_matches(name, STUDIES, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise config.ConfigError(f"no experiment {name!r}{hint} There are: {', '.join(STUDIES)}")
    return STUDIES[name]


def found(study: Study, name: str) -> list[dict]:
    """The records of a study, or an end that says how to make them."""
    seen = records.read(study.name, name)
    if not seen:
        raise config.ConfigError(
            f"no records {records.home(study.name, name).name} of {study.name!r} in results/{study.name}; "
            f"make them with: python -m experiments run {study.name} (takes {study.takes})"
        )
    return seen


def list_studies(console: Console) -> None:
    """One line per study: name, what, time, how many records it has."""
    rows = [["name", "what", "takes", "records"]]
    for study in STUDIES.values():
        seen = records.read(study.name)
        revisions = "/".join(sorted({entry["revision"] for entry in seen}))
        kept = f"{len(seen)} ({revisions})" if seen else "none yet"
        rows.append([study.name, study.title, study.takes, kept])
    report.show(console, "python -m experiments run NAME", rows)


def run(name: str, arguments: list[str], console: Console) -> list[dict]:
    """Do a study and print its tables."""
    study = find(name)
    smoke = "--smoke" in arguments
    given = [a for a in arguments if not a.startswith("--record=") and a != "--smoke"]
    settings = config.parse(study.config, given)
    if smoke:
        changed = {key for key, *_ in (a.removeprefix("--").partition("=") for a in given)}
        tiny = {key: value for key, value in study.smoke.items() if key not in changed}
        settings = dataclasses.replace(settings, **tiny)
    standard = "smoke" if smoke else records.STUDY if settings == study.config() else "trial"
    named = [a.partition("=")[2] for a in arguments if a.startswith("--record=")]
    label = named[-1] if named else standard
    if smoke and not named:
        records.home(study.name, label).unlink(missing_ok=True)
    try:
        seen = perform(study, settings, label, console)
    except KeyboardInterrupt:
        console.print(
            "interrupted; finished runs are kept and the same command goes on with the others"
        )
        raise SystemExit(130) from None
    tabulate(study, seen, console)
    return seen


def tabulate(study: Study, seen: list[dict], console: Console) -> None:
    """Print the tables of a study."""
    for table in study.tables.values():
        if len(rows := table.rows(seen)) > 1:
            report.show(console, table.title, rows)
    revisions = ", ".join(sorted({entry["revision"] for entry in seen}))
    console.print(f"python -m experiments run {study.name}; revision {revisions}", soft_wrap=True)
    if study.paper:
        console.print(f"the paper: {study.paper}", soft_wrap=True)


def draw(study: Study, seen: list[dict], folder: Path) -> dict[str, Path]:
    """Save the figures of a study as PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, figure in study.figures.items():
        paths[name] = folder / f"{name}.png"
        drawn = figure.draw(seen)
        drawn.savefig(paths[name], dpi=130)
        drawn.clear()
    return paths


def images(record: str) -> Path:
    """Where figures go: those of the study are the ones that README and docs show."""
    return records.ROOT / "docs" / "images" if record == records.STUDY else Path("out") / record


def build_report(record: str, console: Console) -> Path:
    """One self-contained page: for every study its tables and figures beside what the paper says."""
    parts = [report.contents({study.name: study.title for study in STUDIES.values()})]
    for study in STUDIES.values():
        seen = records.read(study.name, record)
        parts.append(report.heading(study.name, study.title, study.paper))
        if not seen:
            parts.append(report.text(f"Not run yet: python -m experiments run {study.name}"))
            continue
        devices = ", ".join(sorted({entry["device"] for entry in seen}))
        revisions = ", ".join(sorted({entry["revision"] for entry in seen}))
        command = f"python -m experiments run {study.name}"
        parts.append(
            report.text(f"{command} (takes {study.takes}). {devices}; revision {revisions}.")
        )
        for name, path in draw(study, seen, Path("out") / record).items():
            parts.append(report.figure(name, path, study.figures[name].caption))
        made = [(table.title, table.rows(seen)) for table in study.tables.values()]
        parts += [report.table(title, rows) for title, rows in made if len(rows) > 1]
    path = Path("out") / ("report.html" if record == records.STUDY else f"report-{record}.html")
    path.parent.mkdir(exist_ok=True)
    page = report.page(path, "particlax: every table and figure, beside the paper's", parts)
    console.print(f"report: {page}", soft_wrap=True)
    return page


def main(arguments: list[str]) -> None:
    """Dispatch on the first word."""
    console = Console()
    match arguments:
        case ["list"]:
            list_studies(console)
        case ["run", name, *rest]:
            run(name, rest, console)
        case ["table", name, *rest]:
            tabulate(find(name), found(find(name), config.parse(Which, rest).record), console)
        case ["figure", name, *rest]:
            record = config.parse(Which, rest).record
            seen = found(find(name), record)
            if not find(name).figures:
                raise config.ConfigError(
                    f"{name!r} has tables only: python -m experiments table {name}"
                )
            for path in draw(find(name), seen, images(record)).values():
                console.print(f"figure: {path}", soft_wrap=True)
        case ["report", *rest]:
            build_report(config.parse(Which, rest).record, console)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except DatasetError as error:
        raise SystemExit(str(error)) from None
