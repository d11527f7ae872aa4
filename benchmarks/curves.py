"""Cost against the number of particles and against the dimension: seconds and memory of the Stein direction and of a whole SVGD step.

python -m experiments run curves                          # on a CPU
python -m experiments run curves --record=study-gpu       # on a GPU: a file of its own, the same figure

Sizes are doubled until a call takes longer than `most` seconds or holds more than `mebibytes`. Memory is what the compiled program
says: arguments, results and temporary arrays.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import particlax as px
from benchmarks.beside import where
from benchmarks.pairs import cloud, term
from benchmarks.timing import held, looped, seconds
from experiments import report
from experiments.study import Evaluation, Figure, Run, Study, Table

WHATS = {"stein": "Stein direction", "step": "SVGD step"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the curves."""

    least: int = 64  # particles, in two dimensions
    dims: int = 32  # particles, in more and more dimensions
    most: float = 1.0  # seconds
    mebibytes: int = 4096
    doublings: int = 24  # at most
    turn: float = 0.1


def stein(x: jax.Array) -> jax.Array:
    """The Stein direction with a fixed bandwidth."""
    return term(px.Stein(kernel=px.kernels.RBF(bandwidth=float(x.shape[1]))), x)


def step(flow: px.Flow, state: px.State) -> px.State:
    """A whole step: score, bandwidth by the default median, direction, Adagrad."""
    return flow.step(jax.random.key(0), state)[0]


def measured(what: str, num: int, dim: int, turn: float) -> tuple[float, int]:
    """Seconds of a call inside a compiled loop, and the bytes that it holds."""
    x = cloud(num, dim)[0]
    if what == "stein":
        return seconds(looped(stein, x), turn), held(jax.jit(stein).lower(x).compile())
    target = px.Target(lambda x: -0.5 * jnp.sum(x**2))
    one = functools.partial(step, px.svgd(target, optimizer=optax.adagrad(0.1)))
    state = one.args[0].init(x)

    @functools.partial(jax.jit, donate_argnums=0)
    def many(state: px.State, count: int) -> px.State:
        return jax.lax.fori_loop(0, count, lambda _, s: one(s), state)

    def call(count: int) -> px.State:
        nonlocal state
        state = many(state, count)
        return state

    size = held(jax.jit(one, donate_argnums=0).lower(state).compile())
    return seconds(call, turn), size


def line(c: Config, what: str, against: str) -> Iterator[Evaluation]:
    """One curve, from the least size up."""
    began = time.perf_counter()
    for doubling in range(c.doublings):
        num, dim = (c.least << doubling, 2) if against == "M" else (c.dims, 2 << doubling)
        spent, size = measured(what, num, dim, c.turn)
        metrics = {"M": num, "D": dim, "seconds": spent, "bytes": size}
        yield Evaluation(metrics, time.perf_counter() - began, where())
        if 4 * spent > c.most or 4 * size > c.mebibytes * 2**20:
            return


def runs(c: Config) -> Iterator[Run]:
    """Both works against both sizes."""
    settings = dataclasses.asdict(c)
    for against in ("M", "D"):
        for what in WHATS:
            todo = functools.partial(line, c, what, against)
            yield Run({"what": what, "against": against, **settings}, 0, todo)


def curve(found: list[dict], device: str, what: str, against: str, key: str) -> np.ndarray:
    """Sizes and values [2, n] of one curve, by size."""
    here = [
        r["metrics"] for r in found
        if (r["device"], r["config"]["what"], r["config"]["against"]) == (device, what, against)
    ]  # fmt: skip
    points = sorted((m[against], m[key]) for m in here)
    return np.array(points).reshape(-1, 2).T


def exponent(sizes: np.ndarray, values: np.ndarray) -> float:
    """The slope of a curve in logarithms, by least squares over the upper half of its points."""
    half = slice(len(sizes) // 2 if len(sizes) > 3 else 0, None)
    return float(np.polyfit(np.log(sizes[half]), np.log(values[half]), 1)[0])


def devices(found: list[dict]) -> list[str]:
    """CPUs first."""
    return sorted({r["device"] for r in found})


def table(found: list[dict]) -> report.Rows:
    """By device and work: the exponents of time and memory, and the largest size with its cost."""
    lines = [["device", "what", "against", "up to", "seconds", "exponent", "MiB", "exponent"]]
    for device in devices(found):
        for against in ("M", "D"):
            for what, name in WHATS.items():
                sizes, spent = curve(found, device, what, against, "seconds")
                taken = curve(found, device, what, against, "bytes")[1]
                if len(sizes) < 2:
                    continue
                lines.append([
                    device, name, against, f"{int(sizes[-1]):,}", f"{spent[-1]:.3g}", f"{exponent(sizes, spent):.2f}",
                    f"{taken[-1] / 2**20:.3g}", f"{exponent(sizes, taken):.2f}",
                ])  # fmt: skip
    return lines


CAPTION = (
    "Seconds and memory of one call against the number of particles in two dimensions (left) and against the dimension for 32 particles "
    "(right). Exponents are slopes over the upper half of each curve. Memory is that of the compiled program: "
    "arguments, results and temporary arrays."
)
COLOURS = {"cpu": "#1f78b4", "gpu": "#238b45"}
STYLES = {"stein": ("-", "o"), "step": ("--", "s")}


def draw(found: list[dict]) -> Any:
    """Time above, memory below; particles left, dimensions right."""
    figure, panels = report.panels(2, 2, (11, 8), sharex="col")
    dims = found[0]["config"]["dims"]
    for column, against in enumerate(("M", "D")):
        for row, (key, label, scale) in enumerate((("seconds", "seconds", 1), ("bytes", "MiB", 2**20))):  # fmt: skip
            axis = panels[row, column]
            for device in devices(found):
                for what, name in WHATS.items():
                    sizes, values = curve(found, device, what, against, key)
                    if len(sizes) < 2:
                        continue
                    style, marker = STYLES[what]
                    kind = device.partition(":")[0]
                    text = f"{kind.upper()}, {name}: {against}$^{{{exponent(sizes, values):.2f}}}$"
                    axis.loglog(
                        sizes, values / scale, style, color=COLOURS.get(kind, "#8c6bb1"), marker=marker, ms=3.5, lw=1.4,
                        label=text, base=10,
                    )  # fmt: skip
            axis.grid(True, which="major", color="#e3e6ea", lw=0.8)
            axis.legend(frameon=False, fontsize=9, loc=("upper left", "lower right")[row])
            axis.set_ylabel(label)
        panels[0, column].set_title("D = 2" if against == "M" else f"M = {dims}", fontsize=11)
        panels[1, column].set_xlabel("particles M" if against == "M" else "dimensions D")
    return figure


STUDY = Study(
    name="curves",
    title="Cost against the number of particles and the dimension",
    paper="",
    takes="4 minutes",
    config=Config,
    runs=runs,
    tables={"curves": Table("exponents over the upper half of each curve", table)},
    figures={"curves": Figure(CAPTION, draw)},
    smoke={"doublings": 3, "turn": 0.01},
)
