"""Step time of SVGD for logistic regression on Covertype, beside other packages, all in one pass.

python -m benchmarks steptime                     # or: python -m experiments run steptime
python -m benchmarks steptime --data=shaped       # rows as many and as long as Covertype's, drawn and not downloaded

The machine should have nothing else to do: Pyro's threads, waiting for one another, suffer most. Times are medians over rounds,
ratios are taken within a round. Accuracy is that of the particles after the timed steps: each entrant has really done the
work, though not the same number of steps.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import beside, machine
from benchmarks.entrants import ENTRANTS, OURS, Work, matrix
from experiments import covertype, report
from experiments.study import Evaluation, Run, Study, Table


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the comparison."""

    particles: int = 100
    batch: int = 50
    adagrad: float = 2.0
    rounds: int = 15
    turn: float = 0.5  # seconds
    entrants: tuple[str, ...] = tuple(ENTRANTS)
    seeds: int = 1
    data: str = "covertype"


def work_of(c: Config, split: covertype.Problem, seed: int) -> Work:
    """The split and a start from the prior."""
    start = matrix(covertype.start(jax.random.key(seed), c.particles, split.dim))
    x, y = (np.asarray(split.train[key]) for key in ("x", "y"))
    return Work(x, y, start, c.batch, c.adagrad)


def one_pass(c: Config, seed: int) -> Iterator[Evaluation]:
    """All entrants, in turns; an evaluation for each."""
    split = covertype.problem(c.data, seed)
    work = work_of(c, split, seed)
    need = machine.regression(len(work.start), work.start.shape[1], c.batch)
    judge = lambda particles: covertype.predict(jnp.asarray(particles[:, :-1]), split.test)
    yield from beside.one_pass(c, work, need, judge)


def runs(c: Config) -> Iterator[Run]:
    """One pass over the entrants per seed."""
    beside.known(c.entrants)
    settings = {**dataclasses.asdict(c), "entrants": list(c.entrants)}
    settings.pop("seeds")
    for seed in range(c.seeds):
        yield Run(settings, seed, lambda s=seed: one_pass(c, s))


def table(found: list[dict]) -> report.Rows:
    """A row per device and entrant; over several passes, medians."""
    lines = [["device", *beside.HEAD, "steps", "accuracy", "log-likelihood"]]
    more = {"steps": ".0f", "accuracy": ".2%", "log_likelihood": ".4f"}
    for device, here in beside.by_device(found).items():
        for data in dict.fromkeys(r["config"]["data"] for r in here):
            of = device + (", random data of the same shape" if data == "shaped" else "")
            some = [r for r in here if r["config"]["data"] == data]
            lines += [[of, *row] for row in beside.rows(some, more)]
    return lines


STUDY = Study(
    name="steptime",
    title="Step time of SVGD on Covertype logistic regression beside other packages",
    paper="",
    takes="2 minutes",
    config=Config,
    runs=runs,
    tables={"steptime": Table("one step of SVGD, all packages in one pass", table)},
    smoke={
        "particles": 20,
        "rounds": 3,
        "turn": 0.02,
        "entrants": (OURS, "NumPy"),
        "data": "synthetic",
    },
)
