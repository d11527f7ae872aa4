"""Seconds that the first call of `px.run` spends on tracing and compiling, for every sampler.

python -m experiments run compile

Each sampler has a fresh process, in which JAX has compiled something trivial before. A first run of one step compiles, a second one does
not; their difference is counted. The target is a normal in two dimensions, M = 50.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import particlax as px
from benchmarks.beside import where
from experiments import records, report
from experiments.study import Evaluation, Run, Study, Table
from particlax.diffusions import GFSD, Blob, Langevin, Sinkhorn
from particlax.integrators import RMS

TARGET = px.Target(lambda x: -0.5 * jnp.sum(x**2))
ADAM = optax.adam(0.05)
SAMPLERS: dict[str, Callable[[], px.Flow]] = {
    "sgld": lambda: px.sgld(TARGET, step_size=0.1),
    "sgld, RMS": lambda: px.sgld(TARGET, integrator=RMS(0.1)),
    "sghmc": lambda: px.sghmc(TARGET, step_size=0.1),
    "svgd": lambda: px.svgd(TARGET, optimizer=ADAM),
    "w_sgld": lambda: px.w_sgld(TARGET, optimizer=ADAM),
    "w_sgld, Sinkhorn": lambda: px.w_sgld(TARGET, optimizer=ADAM, coupling=Sinkhorn()),
    "w_sgld_b": lambda: px.w_sgld_b(TARGET, optimizer=ADAM),
    "pi_sgld": lambda: px.pi_sgld(TARGET, optimizer=ADAM),
    "pi_sgld, Blob": lambda: px.pi_sgld(TARGET, diffusion=Blob(), optimizer=ADAM),
    "pi_sgld, GFSD": lambda: px.pi_sgld(TARGET, diffusion=GFSD(), optimizer=ADAM),
    "pi_sgld, Langevin": lambda: px.pi_sgld(TARGET, diffusion=Langevin(), step_size=0.1),
    "calibrated": lambda: px.calibrated(TARGET),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the comparison."""

    samplers: tuple[str, ...] = tuple(SAMPLERS)
    particles: int = 50
    repeats: int = 3


def first_call(name: str, num: int) -> float:
    """Seconds of the first run of one step, less those of a second."""
    start = 1 + jax.random.normal(jax.random.key(0), (num, 2))  # compiles something trivial
    flow, key = SAMPLERS[name](), jax.random.key(1)
    spent = []
    for _ in range(2):
        began = time.perf_counter()
        jax.block_until_ready(px.run(flow, start, steps=1, key=key, progress=False).particles)
        spent.append(time.perf_counter() - began)
    return spent[0] - spent[1]


def apart(name: str, num: int) -> float:
    """`first_call` in a fresh process."""
    places = [str(records.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(places), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "benchmarks.compiling", name, str(num)]
    options: dict[str, Any] = {"env": {**os.environ, **environment}, "stdout": subprocess.PIPE}
    return json.loads(subprocess.run(command, check=True, **options).stdout)


def work(c: Config, name: str) -> Iterator[Evaluation]:
    """Several processes, one after another."""
    spent = [apart(name, c.particles) for _ in range(c.repeats)]
    yield Evaluation({"compile": np.median(spent), "most": max(spent)}, sum(spent), where())


def runs(c: Config) -> Iterator[Run]:
    """One for each sampler."""
    for name in c.samplers:
        settings = {"sampler": name, "M": c.particles, "repeats": c.repeats}
        yield Run(settings, 0, lambda n=name: work(c, n))


def table(found: list[dict]) -> report.Rows:
    """By device and sampler: seconds until the first step, median and most."""
    lines = [["device", "sampler", "seconds to trace and compile", "most"]]
    for entry in found:
        m, name = entry["metrics"], f"px.{entry['config']['sampler']}"
        lines.append([entry["device"], name, f"{m['compile']:.2f}", f"{m['most']:.2f}"])
    return lines


STUDY = Study(
    name="compile",
    title="What the first call costs: tracing and compiling every sampler",
    paper="",
    takes="4 minutes",
    config=Config,
    runs=runs,
    tables={"compile": Table("the first px.run of each sampler, in a fresh process", table)},
    smoke={"samplers": ("sgld",), "repeats": 1},
)

if __name__ == "__main__":
    print(json.dumps(first_call(sys.argv[1], int(sys.argv[2]))))
