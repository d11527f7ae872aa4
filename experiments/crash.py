"""Kill a run at random moments, again and again: it must end in the particles of a run that nobody disturbed.

python -m experiments run crash

Networks of the size of MNIST's (random rows in its place: what is learned does not matter here) train in a process of
their own, with a checkpoint every few steps. SIGKILL ends it at random moments, every other time while a checkpoint is being written.
After each kill the same command goes on. Nothing older than the last complete checkpoint may be lost, and the last state must be
that of an uninterrupted run, bit for bit.
"""

import dataclasses
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import particlax as px
from experiments import records, report
from experiments.study import Evaluation, Study, Table, by_seed
from particlax.folder import DamagedError, Folder

WORDS = 30
"""Of a row, where words are looked up."""
PAUSE = 0.05
"""Seconds after each step of a run that is to be killed, so that it does not end before."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the crash test."""

    kills: int = 50
    steps: int = 3000
    every: int = 10
    keep: int = 3
    particles: int = 4
    inputs: int = 784
    width: int = 100
    rows: int = 2000
    batch: int = 50
    repeatable: bool = True  # for a GPU: the same program in every process
    lookup: bool = False  # words that are looked up, in place of numbers
    seeds: int = 1


def networks(c: Config, seed: int) -> tuple[px.Flow, Any, px.Minibatches, Any]:
    """Flow, start, data and key of networks with one hidden layer."""
    key = jax.random.key(seed)
    keys = jax.random.split(key, 4)
    lookup = c.lookup  # all that `apply` has of the settings
    apply = lambda p, x: jnp.tanh(jnp.sum(p["a"][x], 1) if lookup else x @ p["a"]) @ p["b"]
    flow = px.svgd(px.networks.classifier(apply, num_data=c.rows), optimizer=optax.adam(1e-3))
    shapes = {"a": (c.particles, c.inputs, c.width), "b": (c.particles, c.width, 10)}
    pairs = zip(shapes.items(), keys, strict=False)
    start = {name: jax.random.normal(k, shape) / shape[1] ** 0.5 for (name, shape), k in pairs}
    x = jax.random.normal(keys[2], (c.rows, c.inputs))
    if c.lookup:
        x = jax.random.randint(keys[2], (c.rows, WORDS), 0, c.inputs)
    labels = jax.random.randint(keys[3], (c.rows,), 0, 10)
    return flow, start, px.Minibatches({"x": x, "y": labels}, c.batch), key


def work(c: Config, seed: int) -> Iterator[Evaluation]:
    """All kills on one run, and the comparison."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        killed, calm = Path(scratch) / "killed", Path(scratch) / "calm"
        dice = random.Random(seed)
        launch(c, seed, calm).communicate()  # first: it leaves its compiled programs to the others
        found = [_kill(c, seed, killed, dice, place % 2 == 1) for place in range(c.kills)]
        launch(c, seed, killed).communicate()
        equal = digest(killed) == digest(calm)
    metrics = {
        "kills": sum(one["killed"] for one in found),
        "while_writing": sum(one["killed"] and one["writing"] for one in found),
        "lost_checkpoints": sum(one["lost"] for one in found),
        "damaged_checkpoints": sum(one["damaged"] for one in found),
        "most_steps_done_again": max(one["again"] for one in found),
        "equal": equal,
    }
    yield Evaluation(metrics, time.perf_counter() - began)


def kept(folder: Path) -> dict[str, str]:
    """Environment in which compiled programs are kept beside a folder, and found there."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def launch(
    c: Config, seed: int, folder: Path, pause: float = 0.0, *, env: Mapping[str, str] | None = None
) -> subprocess.Popen:
    """Start the run in a process of its own, or go on with it."""
    settings = {
        "config": dataclasses.asdict(c), "seed": seed, "folder": str(folder), "pause": pause
    }  # fmt: skip
    command = [sys.executable, "-m", "experiments.crash", json.dumps(settings)]
    return subprocess.Popen(
        command,
        cwd=records.ROOT,
        env={**os.environ, **(kept(folder) if env is None else env)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _kill(c: Config, seed: int, folder: Path, dice: random.Random, writing: bool) -> dict[str, Any]:
    """Let the run go on, and kill it: soon after it steps, or while it writes a checkpoint."""
    process = launch(c, seed, folder, PAUSE)
    assert process.stdout is not None
    first = process.stdout.readline()  # it has come to its first chunk
    time.sleep(dice.uniform(0.0, 0.6))
    while writing and process.poll() is None and not list(folder.glob("unfinished-*")):
        time.sleep(1e-4)
    time.sleep(dice.uniform(0.0, 0.003 if writing else 0.03))
    seen = Folder(folder).steps()
    alive = process.poll() is None
    process.send_signal(signal.SIGKILL)
    rest = process.communicate()[0]
    reached = [int(line) for line in (first + rest).split() if line.isdigit()]
    left = Folder(folder).steps()
    return {
        "killed": alive,
        "writing": bool(list(folder.glob("unfinished-*"))),
        "lost": int(max(seen, default=0) > max(left, default=0)),
        "damaged": sum(not _good(folder, step) for step in left),
        "again": max(reached, default=0) - max(left, default=0),
    }


def _good(folder: Path, step: int) -> bool:
    try:
        return bool(Folder(folder).verify(step))
    except DamagedError:
        return False


def digest(folder: Path) -> tuple[int, str]:
    """The step and a sum over every array of the last state."""
    last = px.checkpoints.load(folder)
    whole = hashlib.sha256()
    for leaf in jax.tree.leaves((last.particles, last.log_density)):
        whole.update(np.asarray(leaf).tobytes())
    return last.step, whole.hexdigest()


def worker(settings: dict[str, Any]) -> None:
    """The run that is killed. It prints the steps that it has come to."""
    c = Config(**settings["config"])
    flow, start, data, key = networks(c, settings["seed"])
    saved = px.Checkpoints(settings["folder"], every=c.every, keep=c.keep, repeatable=c.repeatable)

    def tell(snapshot: Any) -> None:
        print(int(snapshot.state.step), flush=True)
        time.sleep(settings["pause"])

    px.run(
        flow,
        start,
        steps=c.steps,
        key=key,
        data=data,
        checkpoint=saved,
        observers=tell,
        observe_every=1,
        progress=False,
    )


def table(found: list[dict]) -> report.Rows:
    """One row for each seed."""
    names = [
        "kills",
        "while_writing",
        "lost_checkpoints",
        "damaged_checkpoints",
        "most_steps_done_again",
    ]
    rows = [["seed", *(name.replace("_", " ") for name in names), "bit for bit"]]
    for entry in found:
        seen = entry["metrics"]
        rows.append(
            [
                str(entry["seed"]),
                *(f"{seen[name]:.0f}" for name in names),
                "yes" if seen["equal"] else "NO",
            ]
        )
    return rows


STUDY = Study(
    name="crash",
    title="A run that is killed again and again",
    paper="",
    takes="8 minutes",
    config=Config,
    runs=by_seed(work),
    tables={"crash": Table("SIGKILL at random moments, and what the run ends in", table)},
    smoke={"kills": 1, "steps": 60, "inputs": 5, "width": 4, "rows": 50, "batch": 10},
)


if __name__ == "__main__":
    worker(json.loads(sys.argv[1]))
