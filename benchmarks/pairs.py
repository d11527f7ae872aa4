"""How fast the sums over all pairs are, by kernel and by plain XLA: a JSON line for each.

python -m benchmarks.pairs                              # on a GPU, about 2 minutes
python -m benchmarks.pairs --only=median,step           # some of: sizes, dims, terms, median, step
python -m benchmarks.pairs --sizes=2048,131072          # other clouds for the part `sizes`
python -m benchmarks.pairs --smoke                      # tiny clouds, anywhere

Every figure is the median over repeats of a compiled loop. `limit` is in pairs a second: 4e12 by an H200's exponential units,
or its 67 TFLOP/s of float32 over 4 D operations for a pair, whichever is less. `error` is the largest difference
from NumPy in float64 over some rows, relative to the largest entry.
"""

import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import particlax as px
from particlax import gpu, pairwise
from particlax.terms import Cloud, Frame

EXPONENTIALS, FLOPS = 4e12, 67e12
PARTS = ("step", "median", "sizes", "dims", "terms")
PLAIN_MOST = 1 << 17
"""Largest cloud for which plain XLA is timed as well."""
Row = dict[str, Any]


def cloud(num: int, dim: int) -> tuple[jax.Array, jax.Array]:
    """Normal particles a little off the origin, and the scores of a standard normal."""
    x = 0.5 + jax.random.normal(jax.random.key(num + dim), (num, dim))
    return x, -x


def seconds(call: Callable[[int], Any], turn: float = 0.1, repeats: int = 5) -> float:
    """Seconds a turn of call(n), which turns n times: the median over repeats that take about `turn` each."""

    def spent(count: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready(call(count))
        return time.perf_counter() - began

    spent(1)
    count = 1
    while (taken := spent(count)) < turn / 2 and count < 1 << 14:
        count = int(min(8 * count, max(count + 1, turn / taken * count)))
    return float(np.median([spent(count) for _ in range(repeats)])) / count


def looped(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> Callable[[int], Any]:
    """`function` in a compiled loop; each turn's cloud depends on the turn before."""

    @jax.jit
    def many(x: jax.Array, count: int) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, x: x + 1e-12 * function(x), x)

    return functools.partial(many, x)


def mebibytes(compiled: Any) -> float:
    """What a compiled function holds at most, arguments and results included."""
    sizes = compiled.memory_analysis()
    parts = (sizes.temp_size_in_bytes, sizes.argument_size_in_bytes, sizes.output_size_in_bytes)
    return sum(parts) / 2**20


def measured(
    what: str, function: Any, x: jax.Array, truth: Any = None, most: int = PLAIN_MOST
) -> Iterator[Row]:
    """A row for the kernel and, for at most so many particles, one for plain XLA."""
    num, dim = x.shape
    limit = min(EXPONENTIALS, FLOPS / (4 * dim))
    for path in ("fused", "plain") if num <= most else ("fused",):
        gpu.MODE = None if path == "fused" else "plain"
        fresh = functools.partial(function)  # the mode is read while tracing
        spent = seconds(looped(fresh, x))
        compiled = jax.jit(fresh).lower(x).compile()
        row = {"what": what, "M": num, "D": dim, "path": path, "ms": 1e3 * spent}
        row |= {"pairs_per_s": num**2 / spent, "fraction": num**2 / spent / limit}
        row |= {"mib": mebibytes(compiled)}
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
    whole = lambda x: jnp.broadcast_to(pairwise.median_sqdist(x), x.shape)
    yield from measured("median", whole, x, truth, most=8192)


def step(num: int, kernel: Any) -> Iterator[Row]:
    """Whole SVGD steps by `px.run`."""
    target, key = px.Target(lambda x: -0.5 * jnp.sum(x**2)), jax.random.key(0)
    x = cloud(num, 2)[0]
    for path in ("fused", "plain") if num <= PLAIN_MOST else ("fused",):
        gpu.MODE = None if path == "fused" else "plain"
        flow = px.svgd(target, optimizer=optax.adagrad(0.1), kernel=kernel)
        run = lambda n, flow=flow: px.run(flow, x, steps=n, key=key, progress=False).particles
        spent = seconds(run, turn=0.2)
        median = "all" if kernel.bandwidth.subsample is None else kernel.bandwidth.subsample
        yield {"what": "step", "M": num, "D": 2, "path": path, "median": median, "ms": 1e3 * spent}
    gpu.MODE = None


def rows(only: tuple[str, ...], sizes: list[int], smoke: bool) -> Iterator[Row]:
    """All rows of the parts asked for."""
    exact, usual = px.kernels.RBF(px.kernels.Median(subsample=None)), px.kernels.RBF()
    parts = {
        "sizes": [functools.partial(stein, num, 2) for num in sizes],
        "dims": [functools.partial(stein, 300 if smoke else 65536, dim) for dim in (16, 64)],
        "terms": [functools.partial(terms, 300 if smoke else 131072)],
        "median": [
            functools.partial(median, n) for n in ([300] if smoke else [512, 2000, 8000, 32000])
        ],
        "step": [functools.partial(step, n, exact) for n in ([300] if smoke else [2000, 8000])],
    }
    parts["step"] += [] if smoke else [functools.partial(step, n, usual) for n in (8000, 1 << 20)]
    for name in only:
        for part in parts[name]:
            yield from part()


def main(arguments: list[str]) -> None:
    """Print the rows as they come."""
    given = dict(a.removeprefix("--").split("=") for a in arguments if "=" in a)
    smoke = "--smoke" in arguments
    only = tuple(given.get("only", ",".join(PARTS)).split(","))
    if unknown := set(only) - set(PARTS):
        raise SystemExit(f"unknown parts {sorted(unknown)}; expected some of {PARTS}")
    usual = [256] if smoke else [1 << k for k in range(11, 21)]
    sizes = [int(size) for size in given["sizes"].split(",")] if "sizes" in given else usual
    device = jax.devices()[0].device_kind
    for row in rows(only, sizes, smoke):
        short = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
        print(json.dumps({**short, "device": device}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
