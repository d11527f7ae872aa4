"""What interaction costs: a step of each particle method over a step of the same networks without interaction.

python -m experiments run interaction                 # 784-400-400-10, M = 20, batches of 100, RMSprop: table 1's work
python -m experiments run interaction --widths=800

The networks without interaction are written in plain JAX: a vmapped gradient and optax. Each method is one compiled loop of steps,
batches included; methods take turns, and a ratio is taken within a turn. The data are noise: time does not depend on them.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import particlax as px
from benchmarks import machine
from benchmarks.beside import where
from benchmarks.timing import times
from experiments import mnist, report
from experiments.study import Evaluation, Run, Study, Table

ALONE = "plain JAX"
PASSES = {"RMSprop": 0, "SGLD": 0, "SVGD": 1, "w-SGLD": 1, "w-SGLD-B": 1, "pi-SGLD": 1}
"""Every method, and how often its interaction must read or write M D numbers that the networks' own step does not: once, for the
distances. Cloud and gradient can be mixed where the optimizer reads them."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the comparison."""

    widths: tuple[int, ...] = (400,)
    particles: int = 20
    batch: int = 100
    rows: int = 60_000
    rounds: int = 11
    turn: float = 1.0  # seconds; a CPU finds its memory anew at every call
    seeds: int = 1


@eqx.filter_jit(donate="all-except-first")
def advance(fixed: tuple[px.Flow, px.Minibatches], state: px.State, steps: jax.Array) -> px.State:
    """So many steps, in a compiled loop."""
    flow, batches = fixed
    key = jax.random.key(0)
    one = lambda _, now: flow.step(key, now, batches.batch(key, now.step))[0]
    return jax.lax.fori_loop(0, steps, one, state)


@eqx.filter_jit(donate="all-except-first")
def advance_alone(fixed: tuple[px.Flow, px.Minibatches], state: Any, steps: jax.Array) -> Any:
    """The same networks without particlax: a vmapped gradient, and the optimizer of `fixed`."""
    flow, batches = fixed
    key, optimizer = jax.random.key(0), flow.integrator.optimizer  # pyright: ignore
    loss = lambda particle, batch: -flow.target(particle, batch)

    def one(step: jax.Array, state: Any) -> Any:
        particles, memory = state
        slopes = jax.vmap(jax.grad(loss), (0, None))(particles, batches.batch(key, step))
        updates, memory = optimizer.update(slopes, memory, particles)
        return optax.apply_updates(particles, updates), memory

    return jax.lax.fori_loop(0, steps, one, state)


class Entrant:
    """A method, warmed up, with the number of steps that fill a turn."""

    def __init__(self, go: Any, fixed: tuple[px.Flow, px.Minibatches], state: Any, turn: float):
        self.go, self.fixed, self.state, self.steps = go, fixed, state, 3
        self.seconds()
        while (spent := self.seconds()) * self.steps < turn / 2:
            self.steps = max(2 * self.steps, int(turn / spent))

    def seconds(self) -> float:
        """Seconds a step, over one turn."""
        began = time.perf_counter()
        self.state = jax.block_until_ready(self.go(self.fixed, self.state, jnp.int32(self.steps)))
        return (time.perf_counter() - began) / self.steps


def one_pass(c: Config, width: int, seed: int) -> Iterator[Evaluation]:
    """All methods, in turns; an evaluation for each."""
    limits = machine.measured(small=c.turn < 0.1)
    rng = np.random.default_rng(seed)
    rows = {
        "x": rng.uniform(size=(c.rows, 784)).astype(np.float32),
        "y": rng.integers(0, 10, c.rows),
    }
    batches = px.Minibatches(rows, c.batch)
    keys = jax.random.split(jax.random.key(seed), c.particles)
    particles = jax.vmap(functools.partial(mnist.start, width))(keys)
    flows = {name: flow() for name, flow in mnist.flows(mnist.Config(), width, c.rows).items()}
    rms = flows["RMSprop"]
    start = jax.tree.map(jnp.copy, (particles, rms.integrator.init(particles)))
    entrants = {ALONE: Entrant(advance_alone, (rms, batches), start, c.turn)}
    for name in PASSES:
        flow = flows[name]
        entrants[name] = Entrant(advance, (flow, batches), flow.init(particles), c.turn)
    taken = np.array([[e.seconds() for e in entrants.values()] for _ in range(c.rounds)])
    for name, steps in zip(entrants, taken.T, strict=True):
        metrics = {"method": name, **times(steps, taken[:, 0])}
        yield Evaluation(metrics, float(steps.sum()), {"machine": limits.rounded()} | where())


def runs(c: Config) -> Iterator[Run]:
    """One pass per width and seed."""
    settings = dataclasses.asdict(c)
    for name in ("widths", "seeds"):
        settings.pop(name)
    for width in c.widths:
        for seed in range(c.seeds):
            todo = functools.partial(one_pass, c, width, seed)
            yield Run({"width": width, **settings}, seed, todo)


def table(found: list[dict]) -> report.Rows:
    """By device and width: ms a step of each method, and its time over that of networks that do not interact."""
    rows = [["device", "network", "method", "ms a step", "time over no interaction (deciles)", "of the machine's limit"]]  # fmt: skip
    for entry in found:
        m, c = entry["metrics"], entry["config"]
        width, limits = c["width"], machine.Limits(**entry["machine"])
        need = machine.networks(c["particles"], (784, width, width, 10), c["batch"], PASSES.get(m["method"], 0))  # fmt: skip
        limit = 1000 * need.seconds(limits) / m["ms"]
        ratio = f"{m['ratio']:.2f} ({m['ratio_low']:.2f} to {m['ratio_high']:.2f})"
        alone = m["method"] in (ALONE, "RMSprop")
        name = f"{m['method']} (no interaction)" if alone else m["method"]
        rows.append([
            entry["device"], f"784-{width}-{width}-10", name, f"{m['ms']:.3f}", ratio, f"{limit:.0%}"
        ])  # fmt: skip
    return rows


STUDY = Study(
    name="interaction",
    title="What interaction costs, in steps of 20 networks",
    paper="",
    takes="1 minute on an H200, 2 on 2 cores",
    config=Config,
    runs=runs,
    tables={"interaction": Table("a step of each method, in one pass", table)},
    smoke={"widths": (16,), "particles": 3, "rows": 500, "rounds": 2, "turn": 0.01},
)
