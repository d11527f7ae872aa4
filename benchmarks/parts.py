"""The two parts of an interaction of networks on their own, beside the time that their bytes and their arithmetic need here.

python -m experiments run parts         # 784-400-400-10, M = 20, as `interaction`

Each part is taken in a compiled loop, as a run does. On a GPU turns of this length measure the launch as well: there `anatomy` takes the kernels'
own times.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import machine
from benchmarks.beside import where
from benchmarks.timing import seconds
from experiments import mnist, report
from experiments.study import Evaluation, Study, Table, by_seed
from particlax import pairwise


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the parts."""

    width: int = 400
    particles: int = 20
    turn: float = 0.3  # seconds
    seeds: int = 1


def needs(num: int, dim: int) -> dict[str, machine.Need]:
    """Differences and their squares for every pair; products with one or two matrices, in the fewest passes over the cloud."""
    numbers = 4 * num * dim
    return {
        "distances": machine.Need(flops=3 * dim * num * (num - 1) / 2, bytes=numbers),
        "mixing with scores": machine.Need(flops=4 * dim * num**2, bytes=3 * numbers),
        "mixing without scores": machine.Need(flops=2 * dim * num**2, bytes=2 * numbers),
    }


def calls(particles: Any) -> dict[str, Callable[[int], Any]]:
    """Every part as a function of the number of turns of a compiled loop: every call of its own would find its memory anew."""
    num = len(jax.tree.leaves(particles)[0])
    one = pairwise.Mixing(jnp.eye(num) + 0.1 / num)
    both = one._replace(right=0.5 * jnp.eye(num))

    def repeated(turn: Callable[[Any], Any], start: Any) -> Callable[[int], Any]:
        loop = lambda start, count: jax.lax.fori_loop(0, count, lambda _, now: turn(now), start)
        many, now = jax.jit(loop, donate_argnums=0), jax.tree.map(jnp.copy, start)

        def calls(count: int) -> Any:
            nonlocal now
            now = many(now, count)
            return now

        return calls

    def distances(now: Any) -> Any:
        x = jax.lax.optimization_barrier(now)[0]  # or all turns were one
        return x, pairwise.sqdist(x, x)

    def mixing(now: Any) -> Any:
        x, scores = now
        return x, pairwise.mixed(x, scores, both)

    return {
        "distances": repeated(distances, (particles, jnp.zeros((num, num)))),
        "mixing with scores": repeated(mixing, (particles, particles)),
        "mixing without scores": repeated(lambda x: pairwise.mixed(x, None, one), particles),
    }


def one_pass(c: Config, seed: int) -> Iterator[Evaluation]:
    """Part by part."""
    limits = machine.measured(small=c.turn < 0.1)
    keys = jax.random.split(jax.random.key(seed), c.particles)
    particles = jax.vmap(functools.partial(mnist.start, c.width))(keys)
    dim = sum(leaf.size for leaf in jax.tree.leaves(particles)) // c.particles
    need = needs(c.particles, dim)
    for name, call in calls(particles).items():
        spent = seconds(call, c.turn)
        memory, arithmetic = need[name].bytes / limits.bytes, need[name].flops / limits.flops
        metrics = {"part": name, "ms": 1000 * spent, "memory": 1000 * memory, "arithmetic": 1000 * arithmetic}  # fmt: skip
        yield Evaluation(metrics, 0.0, {"machine": limits.rounded()} | where())


def table(found: list[dict]) -> report.Rows:
    """By device and part: milliseconds, and what its bytes and its arithmetic need."""
    rows = [["device", "part", "ms", "its bytes, ms", "its arithmetic, ms"]]
    for entry in found:
        m = entry["metrics"]
        rows.append([entry["device"], m["part"], *[f"{m[key]:.2f}" for key in ("ms", "memory", "arithmetic")]])  # fmt: skip
    return rows


STUDY = Study(
    name="parts",
    title="The parts of an interaction of 20 networks",
    paper="",
    takes="1 minute",
    config=Config,
    runs=by_seed(one_pass),
    tables={"parts": Table("a call of each part", table)},
    smoke={"width": 16, "particles": 3, "turn": 0.01},
)
