"""Step time of SVGD for logistic regression on Covertype, beside other packages, all in one pass.

python -m benchmarks      # or: python -m experiments run steptime

Everything runs on the CPU, which should have nothing else to do: Pyro's threads, waiting for one another, suffer most.
Times are medians over rounds, ratios are taken within a round. Accuracy is that of the particles after the timed
steps: each entrant has really done the work, though not the same number of steps.
"""

import contextlib
import dataclasses
import difflib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import particlax as px
from benchmarks import rounds
from benchmarks.entrants import ENTRANTS, OURS, Work, matrix
from experiments import covertype, report
from experiments.config import ConfigError
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
    paces: dict[str, rounds.Pace] = {}
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "work.npz"
        work_of(c, split, seed).save(path)
        workers: dict[str, rounds.Worker] = {}
        for name in c.entrants:
            worker = stack.enter_context(rounds.started(name, path))
            try:
                paces[name] = rounds.warm(worker, c.turn)
                workers[name] = worker
            except rounds.WorkerError as error:
                if name == OURS:
                    raise
                failed[name] = str(error)
        seconds = rounds.timed(list(workers.values()), list(paces.values()), c.rounds)
        steps = dict(zip(workers, seconds.T, strict=True))
        for name in c.entrants:
            if name in failed:
                yield Evaluation({"entrant": name}, 0.0, {"notes": failed[name]})
                continue
            w = jnp.asarray(workers[name].particles()[:, :-1])
            metrics = {"entrant": name, **times(steps[name], steps[OURS])}
            metrics |= {"startup": paces[name].startup, "steps": workers[name].steps}
            metrics |= covertype.predict(w, split.test)
            spent = float(steps[name].sum() * paces[name].steps)
            yield Evaluation(metrics, spent, about(name, paces[name].versions))


def times(step: np.ndarray, ours: np.ndarray) -> dict[str, float]:
    """Median milliseconds a step; the ratio to our time of the same round: median, first and last decile."""
    low, middle, high = np.quantile(step / ours, [0.1, 0.5, 0.9])
    found = {"ms": 1000 * np.median(step), "ratio": middle, "ratio_low": low, "ratio_high": high}
    return {key: float(value) for key, value in found.items()}


def about(name: str, versions: dict[str, str]) -> dict:
    """What a record says beside the numbers; its own package's version first."""
    return {
        "notes": ENTRANTS[name].notes,
        "versions": {**versions, "particlax": px.__version__, "jax": jax.__version__},
        "device": f"cpu: {rounds.cores()} cores",
    }


def runs(c: Config) -> Iterator[Run]:
    """One pass over the entrants per seed."""
    for name in c.entrants:
        if name not in ENTRANTS:
            near = difflib.get_close_matches(name, ENTRANTS, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise ConfigError(f"no entrant {name!r}{hint} There are: {', '.join(ENTRANTS)}")
    if OURS not in c.entrants:
        raise ConfigError(f"--entrants= is without {OURS}, to which the others are compared")
    settings = {**dataclasses.asdict(c), "entrants": list(c.entrants)}
    settings.pop("seeds")
    for seed in range(c.seeds):
        yield Run(settings, seed, lambda s=seed: one_pass(c, s))


def table(found: list[dict]) -> report.Rows:
    """A row per entrant; over several passes, medians."""
    rows = [["package", "used as", "ms a step", "time over particlax's (deciles)", "start-up, s",
             "steps", "accuracy, %", "log-likelihood"]]  # fmt: skip
    for name in dict.fromkeys(r["metrics"]["entrant"] for r in found):
        here = [r for r in found if r["metrics"]["entrant"] == name]
        done = [r for r in here if "ms" in r["metrics"]]
        if not done:
            rows.append([name, here[-1]["notes"], *"------"])
            continue
        middle = lambda key, done=done: float(np.median([r["metrics"][key] for r in done]))
        spread = f"{middle('ratio_low'):.2f} to {middle('ratio_high'):.2f}"
        rows.append([
            named(name, done[-1]["versions"]), done[-1]["notes"], f"{middle('ms'):.3f}",
            f"{middle('ratio'):.2f} ({spread})", f"{middle('startup'):.1f}",
            f"{middle('steps'):.0f}", f"{100 * middle('accuracy'):.2f}",
            f"{middle('log_likelihood'):.4f}",
        ])  # fmt: skip
    return rows


def named(name: str, versions: dict[str, str]) -> str:
    """An entrant with the version of its package."""
    return f"{name} {next(iter(versions.values())).partition('+')[0]}"


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
