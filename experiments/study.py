"""What an experiment is, and how its runs are done: a list of runs, tables and figures made of their records."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from experiments import records, report


class Evaluation(NamedTuple):
    """What a run measured at one moment; `seconds` since its start, `extra` is kept beside the metrics."""

    metrics: dict[str, Any]
    seconds: float
    extra: Mapping[str, Any] = MappingProxyType({})


class Run(NamedTuple):
    """One setting with one seed; `work` does it and gives its evaluations."""

    settings: dict[str, Any]
    seed: int
    work: Callable[[], Iterable[Evaluation]]


def by_seed(work: Callable[[Any, int], Iterable[Evaluation]]) -> Callable[[Any], Iterator[Run]]:
    """The runs of a study with one setting: work(config, seed) for every seed."""

    def runs(c: Any) -> Iterator[Run]:
        settings = {key: value for key, value in dataclasses.asdict(c).items() if key != "seeds"}
        for seed in range(c.seeds):
            yield Run(settings, seed, functools.partial(work, c, seed))

    return runs


class Table(NamedTuple):
    """A table made of records."""

    title: str
    rows: Callable[[list[dict]], report.Rows]


class Figure(NamedTuple):
    """A figure made of records; `draw` returns a matplotlib figure."""

    caption: str
    draw: Callable[[list[dict]], Any]


@dataclasses.dataclass(frozen=True)
class Study:
    """One experiment: what `python -m experiments` can list, run, tabulate, draw and report."""

    name: str
    title: str
    paper: str
    """What the paper shows or says here, so that a reader can compare."""
    takes: str
    """How long the default settings take on 2 cores."""
    config: type
    runs: Callable[[Any], Iterator[Run]]
    tables: dict[str, Table]
    figures: dict[str, Figure] = dataclasses.field(default_factory=dict)
    smoke: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Settings with which everything runs in seconds."""


COLUMNS = (
    BarColumn(bar_width=30),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TimeRemainingColumn(),
    TextColumn("{task.description}"),
)


QUIET = 20.0
"""Seconds without a word after which a run says what it measures on the way."""


def perform(study: Study, settings: Any, name: str, console: Console) -> list[dict]:
    """Do the runs that are not yet in the records `name`; all records of these settings.

    Every finished run is on the disk before the next one starts, so an interrupted study goes on where it was.
    """
    ledger = records.Ledger(records.home(study.name, name))
    if ledger.dropped:
        console.print(
            f"{ledger.dropped} records of an unfinished run were dropped; it is done again"
        )
    wanted = list(study.runs(settings))
    missing = [run for run in wanted if not ledger.has(run.settings, run.seed)]
    if len(missing) < len(wanted):
        where = ledger.path.relative_to(records.RESULTS.parent)
        console.print(
            f"{len(wanted) - len(missing)} of {len(wanted)} runs are in {where} already"
            + ("" if missing else "; delete the file, or give another --record=, to run them anew"),
            soft_wrap=True,
        )
    label = _labels(wanted)
    with Progress(*COLUMNS, console=console, disable=not missing) as bar:
        task = bar.add_task("", total=len(missing))
        for run in missing:
            bar.update(task, description=label(run))
            began = time.perf_counter()
            found = list(_heard(run.work(), label(run), console))
            ledger.add(_entries(study.name, run, found))
            seconds = time.perf_counter() - began
            console.print(f"{label(run)}: {_said(found[-1])} ({seconds:.1f} s)", soft_wrap=True)
            bar.advance(task)
    keys = [(run.settings, run.seed) for run in wanted]
    return [entry for entry in ledger.records if (entry["config"], entry["seed"]) in keys]


def _heard(evaluations: Iterable[Evaluation], label: str, console: Console) -> Iterator[Evaluation]:
    """The evaluations of a run; those that come late are printed at once, since a run that is cut short leaves no record."""
    last = time.perf_counter()
    for seen in evaluations:
        if time.perf_counter() - last >= QUIET:
            console.print(f"{label}, on the way: {_said(seen)}", soft_wrap=True)
            last = time.perf_counter()
        yield seen


def _labels(wanted: list[Run]) -> Callable[[Run], str]:
    """A name for a run: its seed and the settings in which the runs differ."""
    keys = list(wanted[0].settings) if wanted else []
    vary = [key for key in keys if len({str(run.settings[key]) for run in wanted}) > 1]
    words = lambda run: [f"{run.settings[key]}" for key in vary if run.settings[key] != ""]
    return lambda run: ", ".join([f"seed {run.seed}", *words(run)])


def _entries(name: str, run: Run, found: list[Evaluation]) -> list[dict]:
    return [
        records.record(
            name,
            run.settings,
            run.seed,
            metrics=seen.metrics,
            seconds=seen.seconds,
            place=(place, len(found)),
        )
        | dict(seen.extra)
        for place, seen in enumerate(found, 1)
    ]


def _said(seen: Evaluation) -> str:
    plain = {k: v for k, v in seen.metrics.items() if not isinstance(v, str) and np.ndim(v) == 0}
    return ", ".join(f"{key} {float(value):.4g}" for key, value in plain.items())
