"""How fast the sums over all pairs are, by kernel and by plain XLA.

python -m experiments run pairs                         # on a GPU, about 4 minutes
python -m experiments run pairs --only=median,step      # some of: step, median, sizes, dims, terms, wide
python -m experiments run pairs --sizes=2048,131072     # other clouds for the part `sizes`

Every figure is the median over repeats of a compiled loop. `limit` is in pairs a second: 4e12 by an H200's exponential units,
or its 67 TFLOP/s of float32 over 4 D operations for a pair, whichever is less; for few particles in many dimensions four passes
over the cloud at the bandwidth measured in the same run. `error` is the largest difference
from NumPy in float64 over some rows, relative to the largest entry.
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
from benchmarks import machine, scale
from benchmarks.timing import held, looped, seconds
from experiments import config, report
from experiments.study import Evaluation, Run, Study, Table
from particlax import gpu, medians, pairwise
from particlax.terms import Cloud, Frame

EXPONENTIALS, FLOPS = 4e12, 67e12
PARTS = ("step", "median", "sizes", "dims", "terms", "wide")
PLAIN_MOST = 1 << 17
"""Largest cloud for which plain XLA is timed as well."""
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the comparison."""

    only: tuple[str, ...] = PARTS
    sizes: tuple[int, ...] = tuple(1 << k for k in range(11, 21))
    dims: int = 65536  # particles in 16 and 64 dimensions
    terms: int = 131072
    medians: tuple[int, ...] = (512, 2000, 8000, 32000)
    steps: tuple[int, ...] = (2000, 8000)  # with the exact median
    usual: tuple[int, ...] = (8000, 1 << 20)  # with the default, over a subsample
    wide: tuple[int, int] = (16, 25_000_000)  # particles and dimensions
    seeds: int = 1


def cloud(num: int, dim: int) -> tuple[jax.Array, jax.Array]:
    """Normal particles a little off the origin, and the scores of a standard normal."""
    x = 0.5 + jax.random.normal(jax.random.key(num + dim), (num, dim))
    return x, -x


def paths(num: int, most: int) -> list[str]:
    """The kernel where there is one, and plain XLA where there is none or at most so many particles."""
    fused = ["fused"] if gpu.possible() else []
    return fused + (["plain"] if num <= most or not fused else [])


def measured(
    what: str, function: Any, x: jax.Array, truth: Any = None, most: int = PLAIN_MOST
) -> Iterator[Row]:
    """A row for the kernel and, for at most so many particles, one for plain XLA."""
    num, dim = x.shape
    limit = min(EXPONENTIALS, FLOPS / (4 * dim))
    for path in paths(num, most):
        gpu.MODE = None if path == "fused" else "plain"
        fresh = functools.partial(function)  # the mode is read while tracing
        spent = seconds(looped(fresh, x))
        compiled = jax.jit(fresh).lower(x).compile()
        row = {"what": what, "M": num, "D": dim, "path": path, "ms": 1e3 * spent}
        row |= {"pairs_per_s": num**2 / spent, "fraction": num**2 / spent / limit}
        row |= {"mib": held(compiled) / 2**20}
        if truth is not None:
            places, expected = truth
            found = np.asarray(compiled(x)[places], float)
            row["error"] = np.abs(found - expected).max() / np.abs(expected).max()
        yield row
    gpu.MODE = None


def stein_truth(x: jax.Array, score: jax.Array, h: float) -> tuple[np.ndarray, np.ndarray]:
    """The Stein direction of some rows in float64."""
    points, s = np.asarray(x, float), np.asarray(score, float)
    rows = np.linspace(0, len(points) - 1, 16).astype(int)
    expected = []
    for i in rows:
        diff = points[i] - points
        value = np.exp(-np.sum(diff**2, 1) / h)
        expected.append((value @ s + 2 / h * value @ diff) / len(points))
    return rows, np.stack(expected)


def term(kind: Any, x: jax.Array) -> jax.Array:
    """A term's velocity at a cloud with the score -x."""
    return kind(Cloud(x, -x, jnp.int32(0), Frame(), x), None, kind.init(x))[0].drift


def stein(num: int, dim: int) -> Iterator[Row]:
    """The Stein direction with a fixed bandwidth."""
    (x, score), h = cloud(num, dim), float(dim)
    truth = stein_truth(x, score, h)
    kind = px.Stein(kernel=px.kernels.RBF(bandwidth=h))
    yield from measured("stein", functools.partial(term, kind), x, truth)


def wide(num: int, dim: int) -> Iterator[Row]:
    """The Stein direction of few particles in many dimensions, with the default median."""
    x, score = cloud(num, dim)
    bandwidth = machine.measured(small=dim < 1e6).bytes
    kind = px.Stein()
    for path in paths(num, PLAIN_MOST):
        gpu.MODE = None if path == "fused" else "plain"
        move = jax.jit(lambda x, s: kind(Cloud(x, s, jnp.int32(0), Frame(), x), None, ())[0].drift)
        spent = seconds(lambda n, move=move: [move(x, score) for _ in range(n)][-1])
        passes = 4 * x.nbytes / bandwidth
        row = {"what": "stein, default median", "M": num, "D": dim, "path": path, "ms": 1e3 * spent}
        yield row | {"fraction": passes / spent}
    gpu.MODE = None


def terms(num: int) -> Iterator[Row]:
    """The deterministic diffusions."""
    x, rbf = cloud(num, 2)[0], px.kernels.RBF(bandwidth=2.0)
    transport = px.diffusions.Transport(coupling=px.diffusions.FixedScale(lam=2.0))
    kinds = {
        "blob": px.diffusions.Blob(kernel=rbf),
        "gfsd": px.diffusions.GFSD(kernel=rbf),
        "transport": transport,
    }
    for name, kind in kinds.items():
        yield from measured(name, functools.partial(term, kind), x)


def median(num: int) -> Iterator[Row]:
    """The exact median over all pairs."""
    x = cloud(num, 2)[0]
    distances = np.asarray(jax.jit(pairwise.sqdist)(x, x)) if num <= 8192 else None
    truth = None
    if distances is not None:
        exact = np.median(np.sqrt(distances[np.triu_indices(num, 1)].astype(float))) ** 2
        truth = (0, np.full(2, exact))
    whole = lambda x: jnp.broadcast_to(medians.median_sqdist(x), x.shape)
    yield from measured("median", whole, x, truth, most=8192)


def step(num: int, kernel: Any) -> Iterator[Row]:
    """Whole SVGD steps by `px.run`."""
    target, key = px.Target(lambda x: -0.5 * jnp.sum(x**2)), jax.random.key(0)
    x = cloud(num, 2)[0]
    for path in paths(num, PLAIN_MOST):
        gpu.MODE = None if path == "fused" else "plain"
        flow = px.svgd(target, optimizer=optax.adagrad(0.1), kernel=kernel)
        run = lambda n, flow=flow: px.run(flow, x, steps=n, key=key, progress=False).particles
        spent = seconds(run, turn=2.0)  # a call's start, 10 ms on a GPU, is not to count
        median = "all" if kernel.bandwidth.subsample is None else kernel.bandwidth.subsample
        yield {"what": "step", "M": num, "D": 2, "path": path, "median": median, "ms": 1e3 * spent}
    gpu.MODE = None


def parts(c: Config) -> Iterator[tuple[str, int, int, Callable[[], Iterator[Row]]]]:
    """Name, particles, dimensions and work of everything that is timed."""
    exact, usual = px.kernels.RBF(px.kernels.Median(subsample=None)), px.kernels.RBF()
    known: dict[str, list[tuple[int, int, Any]]] = {
        "step": [(num, 2, functools.partial(step, num, exact)) for num in c.steps]
        + [(num, 2, functools.partial(step, num, usual)) for num in c.usual],
        "median": [(num, 2, functools.partial(median, num)) for num in c.medians],
        "sizes": [(num, 2, functools.partial(stein, num, 2)) for num in c.sizes],
        "dims": [(c.dims, dim, functools.partial(stein, c.dims, dim)) for dim in (16, 64)],
        "terms": [(c.terms, 2, functools.partial(terms, c.terms))],
        "wide": [(*c.wide, functools.partial(wide, *c.wide))],
    }
    if unknown := [name for name in c.only if name not in known]:
        raise config.ConfigError(f"--only={unknown[0]}: expected some of {', '.join(known)}")
    for name in c.only:
        for num, dim, work in known[name]:
            yield name, num, dim, work


def runs(c: Config) -> Iterator[Run]:
    """One for each of them; its evaluations are the paths."""
    for place, (name, num, dim, work) in enumerate(parts(c)):
        usual = name == "step" and place >= len(c.steps)
        settings = {"part": name, "M": num, "D": dim, "median": "512" if usual else "all"}
        yield Run(settings, 0, functools.partial(evaluated, work))


def evaluated(work: Callable[[], Iterator[Row]]) -> Iterator[Evaluation]:
    """The rows as evaluations."""
    began = time.perf_counter()
    for row in work():
        metrics = {k: v for k, v in row.items() if k not in ("M", "D", "median")}
        yield Evaluation(metrics, time.perf_counter() - began)


def table(found: list[dict]) -> report.Rows:
    """By work: ms of the kernel and of plain XLA, pairs a second, the share of the limit, memory, error."""
    rows = [["device", "what", "M", "D", "kernel, ms", "plain XLA, ms", "pairs a second", "of the limit", "memory, MiB", "error"]]  # fmt: skip
    by: dict[tuple, dict[str, dict]] = {}
    for entry in found:
        c, m = entry["config"], entry["metrics"]
        place = (entry["device"], m["what"], c["M"], c["D"], c["median"])
        by.setdefault(place, {})[m["path"]] = m
    for (device, what, num, dim, over), ways in by.items():
        fast, plain = ways.get("fused", {}), ways.get("plain", {})
        name = (
            what
            if what != "step"
            else "SVGD step, " + {"all": "exact median"}.get(over, f"median of {over}")
        )
        show = lambda key, kind, m: f"{m[key]:{kind}}" if key in m else "-"
        best, on_gpu = fast or plain, device.startswith("gpu")
        rows.append([
            device, name, f"{num:,}", f"{dim}", show("ms", ".4g", fast), show("ms", ".4g", plain), show("pairs_per_s", ".2e", best),
            show("fraction", ".0%", best) if on_gpu else "-", show("mib", ".3g", best), show("error", ".0e", best),
        ])  # fmt: skip
    return rows


STUDY = Study(
    name="pairs",
    title="Sums over all pairs, by kernel and by plain XLA",
    paper="",
    takes="4 minutes on an H200; for a GPU",
    config=Config,
    runs=runs,
    tables={
        "pairs": Table("Sums over all pairs", table),
        "scale-cloud": Table("Predicted: a million particles in 2-D", scale.clouds_table),
        "scale-networks": Table("Predicted: 64 networks of 1e8 parameters", scale.networks_table),
    },
    smoke={
        "sizes": (256,),
        "dims": 300,
        "terms": 256,
        "medians": (300,),
        "steps": (300,),
        "usual": (),
        "wide": (4, 10_000),
    },
)
