"""The same run in several processes, and one that is stopped halfway and goes on in another: are the particles the same, bit for bit?

python -m experiments run repeat
python -m experiments run repeat --particles=20 --width=400       # for a GPU
python -m experiments run repeat --particles=20 --width=400 --lookup=true

On a GPU XLA times several programs for one computation and takes the fastest, so two processes can come to different ones, with other
roundings. A run with checkpoints has it choose without timing, unless told otherwise.
"""

import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from experiments import config, crash, report
from experiments.study import Evaluation, Run, Study, Table

ANEW = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
"""Whatever the environment says of keeping programs."""


class Way(NamedTuple):
    """How a run is compiled: in words, `repeatable` of its checkpoints, and its environment."""

    words: str
    repeatable: bool
    env: Callable[[Path], dict[str, str]]


def _told(flag: str) -> Callable[[Path], dict[str, str]]:
    return lambda folder: ANEW | {"XLA_FLAGS": f"--xla_gpu_{flag}"}


WAYS = {
    "default": Way("repeatable, the default", True, lambda folder: ANEW),
    "tuned": Way("`repeatable=False`", False, lambda folder: ANEW),
    "kept": Way("`repeatable=False`, JAX_COMPILATION_CACHE_DIR", False, crash.kept),
    "untuned": Way(
        "`repeatable=False`, --xla_gpu_autotune_level=0", False, _told("autotune_level=0")
    ),
    "deterministic": Way(
        "`repeatable=False`, --xla_gpu_deterministic_ops=true",
        False,
        _told("deterministic_ops=true"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the repetitions."""

    steps: int = 400
    every: int = 50
    particles: int = 4
    inputs: int = 784
    width: int = 100
    rows: int = 2000
    batch: int = 50
    lookup: bool = (
        False  # networks of words that are looked up, whose gradient is a sum without an order
    )
    again: int = 2  # times that the whole run is repeated
    ways: str = ""  # some of them, separated by semicolons
    seeds: int = 1


def work(c: Config, way: str, seed: int) -> Iterator[Evaluation]:
    """The run, its repetitions, and the one in two halves."""
    began = time.perf_counter()
    names = ("steps", "every", "particles", "inputs", "width", "rows", "batch", "lookup")
    settings = {name: getattr(c, name) for name in names}
    whole = crash.Config(**settings, repeatable=WAYS[way].repeatable)
    half = dataclasses.replace(whole, steps=c.steps // 2)
    with tempfile.TemporaryDirectory() as scratch:
        places = [Path(scratch) / f"run{place}" for place in range(c.again + 2)]
        env = WAYS[way].env(places[0])
        start = lambda settings, place: crash.launch(settings, seed, place, env=env)
        start(whole, places[0]).communicate()  # alone: it leaves its programs to the others
        children = [start(whole, place) for place in places[1:-1]]
        children.append(start(half, places[-1]))
        for child in children:
            child.communicate()
        start(whole, places[-1]).communicate()
        sums = [crash.digest(place) for place in places]
    assert all(step == c.steps for step, _ in sums), sums
    same = [one == sums[0] for one in sums[1:]]
    metrics = {"runs": c.again, "same": sum(same[:-1]), "resumed_same": same[-1]}
    yield Evaluation(metrics, time.perf_counter() - began)


def runs(c: Config) -> Iterator[Run]:
    """Every way with every seed."""
    settings = {k: v for k, v in dataclasses.asdict(c).items() if k not in ("ways", "seeds")}
    for seed in range(c.seeds):
        for way in config.chosen("way", c.ways, WAYS):
            yield Run({"way": way, **settings}, seed, functools.partial(work, c, way, seed))


def table(found: list[dict]) -> report.Rows:
    """One row for each device, size and way."""
    rows = [["device", "networks", "checkpoints, environment", "other processes with the same bits", "stopped halfway and resumed: the same bits"]]  # fmt: skip
    for entry in found:
        seen, c = entry["metrics"], entry["config"]
        rows.append(
            [
                entry["device"],
                f"{c['particles']} x {c['inputs']}-{c['width']}-10{', words' if c.get('lookup') else ''}, {c['steps']} steps",
                WAYS[c["way"]].words,
                f"{seen['same']:.0f} of {seen['runs']:.0f}",
                "yes" if seen["resumed_same"] else "no",
            ]
        )
    return rows


STUDY = Study(
    name="repeat",
    title="The same run in several processes",
    paper="",
    takes="2 minutes",
    config=Config,
    runs=runs,
    tables={"repeat": Table("The same run in several processes, bit for bit", table)},
    smoke={
        "ways": "default",
        "steps": 20,
        "every": 5,
        "again": 1,
        "inputs": 5,
        "width": 4,
        "rows": 50,
        "batch": 10,
    },
)
