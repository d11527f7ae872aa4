"""What a step of each method of the CIFAR-10 study costs, and what last layers alone save.

python -m experiments run cifar-time

Every method is timed in a process of its own, so that the memory it took is its own too. Images are noise of CIFAR-10's size.
"""

import dataclasses
import functools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax

import particlax as px
from experiments import cifar, cifar_tables, config
from experiments.study import Evaluation, Run, Study, Table


@dataclasses.dataclass(frozen=True)
class Config(cifar.Config):
    """Settings of the timing."""

    data: str = "noise"
    steps: int = 1000  # a call has costs of its own, a tenth of a second
    layers: str = "out"  # with these layers alone as particles, some methods are timed again
    again: str = "Adam; SVGD; pi-SGLD"


def memory() -> dict[str, float]:
    """The most memory that arrays have taken on the device, in MiB, where it says so."""
    seen = jax.devices()[0].memory_stats() or {}
    return {"peak_mib": seen["peak_bytes_in_use"] / 2**20} if "peak_bytes_in_use" in seen else {}


def timed(c: Config, method: str) -> dict[str, Any]:
    """Seconds to compile, ms a step (the best of three times `steps` steps), memory."""
    moving, state, batches, _ = cifar.begun(c, method, 0)
    onward = functools.partial(px.run, moving, key=jax.random.key(0), data=batches, progress=False)
    began = time.perf_counter()
    state = onward(state, steps=1).state
    compiled = time.perf_counter() - began
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        state = jax.block_until_ready(onward(state, steps=c.steps).state)
        taken.append(time.perf_counter() - began)
    return {"ms": 1000 * min(taken) / c.steps, "compile_s": compiled, **memory()}


def apart(c: Config, method: str) -> Iterator[Evaluation]:
    """`timed` in a fresh process."""
    chosen = dataclasses.replace(c, methods=method)
    settings = [
        f"--{field.name}={config.shown(getattr(chosen, field.name))}"
        for field in dataclasses.fields(c)
        if getattr(chosen, field.name) != getattr(Config(), field.name)
    ]
    began = time.perf_counter()
    command = [sys.executable, "-m", "experiments.cifar_time", *settings]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    yield Evaluation(json.loads(done.stdout.splitlines()[-1]), time.perf_counter() - began)


def runs(c: Config) -> Iterator[Run]:
    """Every method, then some with few layers as particles."""
    todo = [(method, "") for method in cifar.checked(c)]
    todo += [(method, c.layers) for method in config.names(c.again)]
    for method, layers in todo:
        chosen = dataclasses.replace(c, bayesian=layers)
        settings = {
            "method": method, "bayesian": layers, "particles": c.particles, "batch": c.batch, "conv": c.conv,
            "precision": c.precision, "widths": list(c.widths), "dense": c.dense, "data": c.data, "steps": c.steps,
        }  # fmt: skip
        yield Run(settings, 0, functools.partial(apart, chosen, method))


STUDY = Study(
    name="cifar-time",
    title="CIFAR-10: time and memory of a step",
    paper="",
    takes="three minutes on an H200",
    config=Config,
    runs=runs,
    tables={"cifar-time": Table("Time and memory of a step", cifar_tables.times)},
    smoke={
        "methods": "Adam",
        "again": "",
        "particles": 2,
        "widths": (8, 8, 8),
        "dense": 16,
        "precision": "float32",
        "data": "synthetic",
        "steps": 2,
    },
)


if __name__ == "__main__":
    wanted = config.parse(Config, sys.argv[1:])
    print(json.dumps(timed(wanted, wanted.methods)))
