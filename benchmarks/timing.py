"""Seconds a turn of a compiled loop, ratios within a round, and the memory of a compiled program."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def seconds(call: Callable[[int], Any], turn: float = 0.1, repeats: int = 5) -> float:
    """Seconds a turn of call(n), which turns n times: the median over repeats that take about `turn` each."""

    def spent(count: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready(call(count))
        return time.perf_counter() - began

    def warm(count: int) -> float:
        spent(count)  # some programs are compiled anew for other numbers of turns
        return spent(count)

    count = 1
    while (taken := warm(count)) < turn / 2 and count < 1 << 14:
        count = int(min(8 * count, max(count + 1, turn / taken * count)))
    return float(np.median([spent(count) for _ in range(repeats)])) / count


def looped(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> Callable[[int], Any]:
    """`function` in a compiled loop; each turn's cloud depends on the turn before."""

    @jax.jit
    def many(x: jax.Array, count: int) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, x: x + 1e-12 * function(x), x)

    return functools.partial(many, x)


def times(step: np.ndarray, ours: np.ndarray) -> dict[str, float]:
    """Median milliseconds a step; the ratio to our time of the same round: median, first and last decile."""
    low, middle, high = np.quantile(step / ours, [0.1, 0.5, 0.9])
    found = {"ms": 1000 * np.median(step), "ratio": middle, "ratio_low": low, "ratio_high": high}
    return {key: float(value) for key, value in found.items()}


def held(compiled: Any) -> int:
    """Bytes that a compiled function holds at most, arguments and results included."""
    sizes = compiled.memory_analysis()
    return (
        sizes.temp_size_in_bytes
        + sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        - sizes.alias_size_in_bytes
    )
