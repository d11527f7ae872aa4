"""Where the time of a step of logistic regression goes: steps that do one thing more each.

python -m experiments run ladder                        # M = 100, batches of 50, SVGD with the exact median: the work of `steptime`

From the score alone up to `px.run`. All are compiled loops and take turns; what a rung adds is taken within a turn. Beside it stands the
time that the rung's float32 operations and exponentials would take at the rates that the machine reaches in large products.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import particlax as px
from benchmarks import entrants, machine
from benchmarks import logistic as steptime
from benchmarks.beside import where
from experiments import covertype, report
from experiments.study import Evaluation, Study, Table, by_seed
from particlax.integrators import Euler, Optax
from particlax.kernels import RBF, Fixed, Median


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the ladder."""

    data: str = "shaped"  # or covtype
    particles: int = 100
    batch: int = 50
    steps: int = 3000  # of a turn
    rounds: int = 15
    seeds: int = 1


Turn = Callable[[int], None]


def rungs(c: Config, seed: int) -> dict[str, Turn]:
    """Every rung, by what it adds, as a function of the number of steps."""
    settings = steptime.Config(data=c.data, particles=c.particles, batch=c.batch)
    work = steptime.work_of(settings, covertype.problem(c.data, seed), seed)
    target, start = covertype.target(len(work.y)), entrants.tree(jnp.asarray(work.start))
    stein = lambda bandwidth: (px.Stein(kernel=RBF(bandwidth)),)
    still = Euler(1e-9)
    adagrad = Optax(optax.adagrad(work.rate))
    svgd = px.Flow(target, stein(Median(subsample=None)), adagrad)
    arrays = {"x": jnp.asarray(work.x), "y": jnp.asarray(work.y)}
    batches = px.Minibatches(arrays, c.batch)
    key = jax.random.key(seed)

    def in_order(step: jax.Array) -> Any:
        begin = step % (len(work.y) // c.batch) * c.batch
        return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, begin, c.batch), arrays)

    anywhere = functools.partial(batches.batch, key)
    looked = lambda info, fine: fine & jnp.all(jnp.isfinite(info.log_density))

    def loop(flow: px.Flow, rows: Callable[[jax.Array], Any], look: Any = None) -> Turn:
        def body(_: Any, carry: Any) -> Any:
            state, fine = carry
            state, info = flow.step(key, state, rows(state.step))
            return state, look(info, fine) if look else fine

        go = jax.jit(lambda carry, steps: jax.lax.fori_loop(0, steps, body, carry))
        now = (flow.init(start), jnp.array(True))

        def turn(steps: int) -> None:
            nonlocal now
            now = jax.block_until_ready(go(now, steps))

        return turn

    state = svgd.init(start)

    def run(steps: int) -> None:
        nonlocal state
        result = px.run(svgd, state, steps=steps, key=key, data=batches, progress=False)
        state = jax.block_until_ready(result.state)

    return {
        "the score": loop(px.Flow(target, (px.Drift(),), still), in_order),
        "distances and mixing": loop(px.Flow(target, stein(Fixed(1.0)), still), in_order),
        "the exact median": loop(px.Flow(target, stein(Median(subsample=None)), still), in_order),
        "Adagrad": loop(svgd, in_order),
        "rows at random places": loop(svgd, anywhere),
        "the log density, looked at": loop(svgd, anywhere, looked),
        "px.run": run,
    }


def needs(c: Config, dim: int) -> dict[str, machine.Need]:
    """Counted for the rungs that have arithmetic of their own."""
    pairs, logits = c.particles**2, c.particles * c.batch
    return {
        "the score": machine.Need(flops=4 * logits * dim, exps=logits),
        "distances and mixing": machine.svgd(c.particles, dim),
        "the log density, looked at": machine.Need(exps=2 * logits),  # a logarithm is as dear
        "the exact median": machine.Need(flops=31 * pairs / 2),  # halvings of all pairs' bits
    }


def one_pass(c: Config, seed: int) -> Iterator[Evaluation]:
    """All rungs, in turns; an evaluation for each."""
    limits = machine.measured(small=c.steps < 100)
    made = rungs(c, seed)
    taken = np.array([[_spent(turn, c.steps) for turn in made.values()] for _ in range(c.rounds + 1)])  # fmt: skip
    taken = taken[1:]  # the first turn compiles
    added = np.median(np.diff(taken, axis=1, prepend=0), axis=0)
    need = needs(c, covertype.problem(c.data, seed).dim + 1)
    for name, whole, more in zip(made, np.median(taken, axis=0), added, strict=True):
        least = need[name].seconds(limits) if name in need else 0.0
        metrics = {"adds": name, "us": 1e6 * whole, "more": 1e6 * more, "least": 1e6 * least}
        yield Evaluation(metrics, 0.0, {"machine": limits.rounded()} | where())


def _spent(turn: Turn, steps: int) -> float:
    began = time.perf_counter()
    turn(steps)
    return (time.perf_counter() - began) / steps


def table(found: list[dict]) -> report.Rows:
    """By device and rung: microseconds of the step, what the rung adds, and the least that its arithmetic needs."""
    rows = [["device", "what is added", "microseconds a step", "more", "its arithmetic"]]
    for entry in found:
        m = entry["metrics"]
        least = f"{m['least']:.1f}" if m["least"] else "-"
        rows.append([entry["device"], str(m["adds"]), f"{m['us']:.0f}", f"{m['more']:+.0f}", least])
    return rows


STUDY = Study(
    name="ladder",
    title="Where a step of logistic regression spends its time",
    paper="",
    takes="1 minute",
    config=Config,
    runs=by_seed(one_pass),
    tables={"ladder": Table("microseconds of steps that do one thing more each", table)},
    smoke={"data": "synthetic", "particles": 10, "batch": 10, "steps": 20, "rounds": 2},
)
