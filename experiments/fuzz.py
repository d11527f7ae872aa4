"""Random runs, many of them: every outcome must be a finite result or a documented error.

python -m experiments run fuzz

The cases are those of tests/test_fuzz.py (particles of every form and dtype, sizes, options, schedules, batches, checkpoints; and trees
that are saved and read back), with more of them and other ones for every seed. A case that fails ends the study with its report.
"""

import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from experiments import records, report
from experiments.study import Evaluation, Study, Table, by_seed


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the fuzzing."""

    cases: int = 20_000
    seeds: int = 1


class FailedError(Exception):
    """A case ended otherwise."""


def work(c: Config, seed: int) -> Iterator[Evaluation]:
    """All cases, in a process of their own."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        seen = Path(scratch) / "seen.xml"
        command = [sys.executable, "-m", "pytest", "tests/test_fuzz.py", "-q", "--capture=sys", "-p", "no:xdist", "-p", "no:cacheprovider",
                   f"--hypothesis-seed={seed}", f"--junitxml={seen}", "-o", "junit_family=xunit1"]  # fmt: skip
        child = subprocess.run(
            command,
            check=False,
            cwd=records.ROOT,
            env={**os.environ, "PARTICLAX_FUZZ": str(c.cases)},
            stdout=subprocess.PIPE,  # progress goes to stderr, and is seen
            text=True,
        )
        if child.returncode:
            raise FailedError(f"{child.stdout}\nended with {child.returncode}: {' '.join(command)}")
        tree = ElementTree.parse(seen)
    told = {entry.get("name"): entry.get("value", "") for entry in tree.iter("property")}
    counts = {name: int(told[name]) for name in ("results", "errors", "trees")}
    cases = counts["results"] + counts["errors"]
    yield Evaluation({"cases": cases, **counts}, time.perf_counter() - began)


def table(found: list[dict]) -> report.Rows:
    """One row for each seed. There is no other outcome: the study would have ended."""
    rows = [["seed", "random runs", "finite results", "documented errors", "trees saved and read back", "minutes"]]  # fmt: skip
    for entry in found:
        seen = entry["metrics"]
        names = ("cases", "results", "errors")
        counts = [f"{seen[name]:,.0f}" for name in names]
        rows.append([str(entry["seed"]), *counts, f"{seen['trees']:,.0f}", f"{entry['seconds'] / 60:.0f}"])  # fmt: skip
    return rows


STUDY = Study(
    name="fuzz",
    title="Random runs: a finite result or a documented error",
    paper="",
    takes="an hour",
    config=Config,
    runs=by_seed(work),
    tables={"fuzz": Table("Random runs and what they ended in", table)},
    smoke={"cases": 20},
)
