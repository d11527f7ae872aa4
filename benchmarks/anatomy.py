"""What a step of networks spends its time on: its kernels, by JAX's profiler, beside the time that memory would take.

python -m experiments run anatomy --record=study-gpu      # 784-400-400-10, M = 20, batches of 100, RMSprop, as `interaction`

Roles are those of a GPU's kernels. On a CPU, operations of all threads are added up, those that hold others (loops, calls) are left
out, and an interaction's products are among the networks' own.
"""

import collections
import dataclasses
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import particlax as px
from benchmarks import interaction, machine
from benchmarks.beside import where
from experiments import mnist, report
from experiments.study import Evaluation, Study, Table, by_seed

ROLES = {"distances": ("_distance_body", "_gram_body"), "mixing": ("_mix_body",), "products": ("gemm", "dot", "cutlass", "ynn")}  # fmt: skip
"""Parts of kernels' names; matrix products are the networks' own."""
PASSES = 5
"""How often mixing, with RMSprop's step, reads or writes M D numbers: cloud, gradient and squares; cloud and squares."""
LARGE = 5.0
"""Microseconds from which a kernel counts as large: passes over the cloud, such as the optimizer's."""
HOLDERS = ("end: ", "Threadpool", "ThunkExecutor", "while", "call", "conditional")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the profile."""

    width: int = 400
    particles: int = 20
    batch: int = 100
    rows: int = 60_000
    steps: int = 50
    seeds: int = 1


class Profile(NamedTuple):
    """Microseconds of a step by kernel, how many are launched, and the time that none of them runs."""

    kernels: dict[str, float]
    launches: float
    idle: float


def profiled(go: Any, steps: int) -> Profile:
    """The kernels of go(), which takes so many steps."""
    jax.block_until_ready(go())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(go())
        (file,) = Path(folder).glob("**/*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
    spent, spans = collections.Counter(), []
    for event in _events(data):
        spent[event.name] += event.duration_ns
        spans.append((event.start_ns, event.start_ns + event.duration_ns))
    busy, end, first = 0.0, 0.0, min((a for a, _ in spans), default=0.0)
    for a, b in sorted(spans):
        busy += max(0.0, b - max(a, end))
        end = max(end, b)
    each = lambda ns: ns / steps / 1000
    kernels = {name: each(ns) for name, ns in spent.most_common()}
    return Profile(kernels, len(spans) / steps, each(max(end - first, 0.0) - busy))


def _events(data: Any) -> Iterator[Any]:
    for plane in data.planes:
        for line in plane.lines:
            gpu = plane.name.startswith("/device:GPU") and "Stream" in line.name
            if gpu or (plane.name == "/host:CPU" and line.name.startswith("tf_XLA")):
                yield from (e for e in line.events if not e.name.startswith(HOLDERS))


def shares(profile: Profile) -> dict[str, float]:
    """Microseconds of a step by role: the two kernels of an interaction, products, other large and small kernels, waiting."""
    found = dict.fromkeys([*ROLES, "passes", "small"], 0.0)
    for name, us in profile.kernels.items():
        roles = [role for role, parts in ROLES.items() if any(part in name for part in parts)]
        found[roles[0] if roles else "passes" if us > LARGE else "small"] += us
    return {**found, "idle": profile.idle, "launches": profile.launches}


def one_pass(c: Config, seed: int) -> Iterator[Evaluation]:
    """Each method in turn."""
    limits = machine.measured(small=c.steps < 10)
    rng = np.random.default_rng(seed)
    rows = {"x": rng.uniform(size=(c.rows, 784)).astype(np.float32), "y": rng.integers(0, 10, c.rows)}  # fmt: skip
    batches = px.Minibatches(rows, c.batch)
    keys = jax.random.split(jax.random.key(seed), c.particles)
    particles = jax.vmap(functools.partial(mnist.start, c.width))(keys)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(particles))
    flows = mnist.flows(mnist.Config(), c.width, c.rows)
    for name in interaction.PASSES:
        flow = flows[name]()
        state = flow.init(particles)

        def go(flow: px.Flow = flow) -> px.State:
            nonlocal state
            state = interaction.advance((flow, batches), state, jnp.int32(c.steps))
            return state

        profile = profiled(go, c.steps)
        pass_us = 1e6 * size / limits.bytes
        most = {name: float(f"{us:.4g}") for name, us in list(profile.kernels.items())[:25]}
        metrics = {"method": name, **shares(profile), "pass": pass_us}
        yield Evaluation(metrics, 0.0, {"kernels": most, "machine": limits.rounded()} | where())


def table(found: list[dict]) -> report.Rows:
    """By device and method: microseconds of a step by role; beside the interaction's two kernels the time of their bytes."""
    rows = [["device", "method", "distances (memory's limit)", "mixing and step (memory's limit)", "products", "other passes over the cloud", "small kernels", "waiting", "launches"]]  # fmt: skip
    for entry in found:
        m = entry["metrics"]
        beside = lambda role, passes, m=m: f"{m[role]:.0f} ({passes * m['pass']:.0f})" if m[role] else "-"  # fmt: skip
        rows.append([
            entry["device"], m["method"], beside("distances", 1), beside("mixing", PASSES),
            *[f"{m[role]:.0f}" for role in ("products", "passes", "small", "idle", "launches")],
        ])  # fmt: skip
    return rows


STUDY = Study(
    name="anatomy",
    title="What a step of 20 networks spends its time on",
    paper="",
    takes="1 minute on an H200",
    config=Config,
    runs=by_seed(one_pass),
    tables={"anatomy": Table("microseconds of a step", table)},
    smoke={"width": 16, "particles": 3, "rows": 500, "steps": 3},
)
