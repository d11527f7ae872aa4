"""Step time and memory of SVGD with many particles in two dimensions, exact median, beside other packages, all in one pass.

python -m benchmarks clouds          # or: python -m experiments run clouds

The target is a normal, whose score costs nothing: what is timed is the sum over all pairs and the median.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from benchmarks import beside, machine
from benchmarks.entrants import OURS, Work
from experiments import report
from experiments.study import Evaluation, Run, Study, Table


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the comparison."""

    particles: tuple[int, ...] = (2000, 8000)
    adagrad: float = 0.1
    rounds: int = 5
    turn: float = 0.5  # seconds
    entrants: tuple[str, ...] = (OURS, "BlackJAX", "NumPyro", "NumPy")
    numpyro: int = 4000  # most particles for NumPyro, which is slower and larger than the others
    seeds: int = 1


def work_of(c: Config, num: int, seed: int) -> Work:
    """A start that is wider than the target and off its centre."""
    start = np.random.default_rng(seed).normal(0.5, 1.5, (num, 2)).astype(np.float32)
    none = np.zeros(0, np.float32)
    return Work(none[:, None], none, start, 1, c.adagrad)


def one_pass(c: Config, num: int, seed: int) -> Iterator[Evaluation]:
    """All entrants, in turns; an evaluation for each, with how far the cloud is from the target's spread."""
    judge = lambda particles: {"sd": float(np.std(particles))}
    names = tuple(n for n in c.entrants if n != "NumPyro" or num <= c.numpyro)
    settings = dataclasses.replace(c, entrants=names)
    yield from beside.one_pass(settings, work_of(c, num, seed), machine.svgd(num, 2), judge)


def runs(c: Config) -> Iterator[Run]:
    """One pass over the entrants per size and seed."""
    beside.known(c.entrants)
    settings = {**dataclasses.asdict(c), "entrants": list(c.entrants)}
    for name in ("particles", "seeds"):
        settings.pop(name)
    for num in c.particles:
        for seed in range(c.seeds):
            todo = lambda n=num, s=seed: one_pass(c, n, s)
            yield Run({"M": num, **settings}, seed, todo)


def table(found: list[dict]) -> report.Rows:
    """A row per device, size and entrant; over several passes, medians."""
    lines = [["device", "M", *beside.HEAD]]
    for device, here in beside.by_device(found).items():
        for num in dict.fromkeys(r["config"]["M"] for r in here):
            rows = beside.rows([r for r in here if r["config"]["M"] == num])
            lines += [[device, f"{num:,}", *row] for row in rows]
    return lines


STUDY = Study(
    name="clouds",
    title="Step time and memory of SVGD with many particles beside other packages",
    paper="",
    takes="4 minutes",
    config=Config,
    runs=runs,
    tables={
        "clouds": Table("one step of SVGD, D = 2, exact median, all packages in one pass", table)
    },
    smoke={"particles": (600,), "rounds": 2, "turn": 0.02, "entrants": (OURS, "NumPy")},
)
