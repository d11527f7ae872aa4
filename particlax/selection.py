"""Entries of a wanted rank among many numbers, without sorting them: by counting passes that narrow a bracket.

Numbers are not negative, so that their order is that of their bits. A pass says how many are not above a pivot, and which is the
next one. A small random sample gives the first bracket, then pivots are interpolated between the counts at its ends, a little
beyond the guess so that both ends move; where that does not halve the bracket twice in a row, its bits are halved instead. A
bracket with one number left takes some ten passes, and never more than a hundred.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

__all__ = ["adjacent", "bisected", "by_sort", "upper"]

COMPARED = range(496, 8129)
"""Sizes for which a GPU compares all numbers with all sooner than it sorts them."""
ROWS = 32
SAMPLE = 2048
"""Largest size of the sample for the first bracket."""

Look = Callable[[Array], tuple[Array, Array]]
"""look(pivot): how many numbers are <= pivot, and the least above it."""


class _Search(NamedTuple):
    """Entry `place` is in (low, high], given as bits; `below` and `upto` numbers are not above its ends."""

    stage: Array
    """0 while narrowing; then a pass at `low` finds the entry, and one at the entry the next."""
    low: Array
    high: Array
    below: Array
    upto: Array
    pivot: Array
    failed: Array
    """How often in a row an interpolation did not halve the numbers in the bracket."""
    entry: Array
    following: Array


def adjacent(
    look: Look, total: int, place: int, sample: Float[Array, " S"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The numbers at `place` (from 0) and `place` + 1 of `total` in order; `sample` is some of them.

    >>> numbers = jnp.array([5.0, 1.0, 3.0, 3.0])
    >>> look = lambda p: (jnp.sum(numbers <= p), jnp.min(jnp.where(numbers > p, numbers, jnp.inf)))
    >>> [float(n) for n in adjacent(look, 4, 2, numbers)]
    [3.0, 5.0]
    """
    kind = _integer(sample)
    bits = lambda number: lax.bitcast_convert_type(number, kind)
    first, second = (bits(guess) for guess in _guesses(sample, (place + 0.5) / total))
    zero, top = jnp.zeros((), sample.dtype), bits(jnp.array(jnp.inf, sample.dtype))

    def value(pattern: Array) -> Array:  # -1 is below all numbers
        number = lax.bitcast_convert_type(jnp.maximum(pattern, 0), sample.dtype)
        return jnp.where(pattern < 0, -1, number)

    def pivot(s: _Search, up: Array) -> Array:
        """Between the ends by their counts, one standard deviation past the place on the side of the older end."""
        inside = (s.upto - s.below).astype(sample.dtype)
        share = (place - s.below + 0.5) / inside
        share += jnp.where(up, 1, -1) * jnp.sqrt(jnp.maximum(share * (1 - share), 0) / inside)
        start, end = value(jnp.maximum(s.low, 0)), value(s.high)
        guess = bits((start + (end - start) * jnp.clip(share, 0, 1)).astype(sample.dtype))
        half = s.low + (s.high - s.low) // 2
        return jnp.where((s.failed > 1) | (s.high == top), half, guess)

    def narrow(s: _Search, count: Array) -> _Search:
        up, began = count <= place, s.upto - s.below
        new = s._replace(
            low=jnp.where(up, s.pivot, s.low),
            high=jnp.where(up, s.high, s.pivot),
            below=jnp.where(up, count, s.below),
            upto=jnp.where(up, s.upto, count),
        )
        halved = 2 * (new.upto - new.below) < began
        new = new._replace(failed=jnp.where(halved | (s.failed > 1), 0, s.failed + 1))
        beyond = (s.pivot == first) & (second > new.low) & (second < new.high)
        chosen = jnp.where(beyond, second, pivot(new, up))
        chosen = jnp.clip(chosen, new.low + 1, new.high - 1)
        done = (new.upto - new.below <= 1) | (new.high - new.low <= 1)
        return new._replace(stage=done.astype(jnp.int32), pivot=jnp.where(done, new.low, chosen))

    def step(s: _Search) -> _Search:
        # All stages in one body: compiled apart, numbers that `look` computes anew could round in another way.
        count, least = look(value(s.pivot))
        count = count.astype(jnp.int32)
        narrowed, searching = narrow(s, count), s.stage == 0
        found = s._replace(
            stage=s.stage + 1,
            pivot=bits(least),
            entry=jnp.where(s.stage == 1, least, s.entry),
            following=jnp.where(count > place + 1, s.entry, least),
        )
        return _Search(*[jnp.where(searching, a, b) for a, b in zip(narrowed, found, strict=True)])

    count = lambda number: jnp.array(number, jnp.int32)
    start = _Search(count(0), jnp.array(-1, kind), top, count(0), count(total), first, count(0), zero, zero)  # fmt: skip
    end = lax.while_loop(lambda s: s.stage < 3, step, start)
    return end.entry, end.following


def _integer(numbers: Array) -> Any:
    return jnp.int64 if numbers.dtype == jnp.float64 else jnp.int32


def _guesses(sample: Array, share: float) -> tuple[Array, Array]:
    """Numbers that most likely are below and above a share of all."""
    ordered, size = jnp.sort(sample), len(sample)
    error = 2.5 * (share * (1 - share) / size) ** 0.5
    at = lambda share: ordered[int(np.clip(share * size, 0, size - 1))]
    return at(share - error), at(share + error)


def _rows(numbers: Array, filling: Any) -> list[Array]:
    """A vector as rows to add up: XLA turns a sum of rows into vector operations, and a sum along a vector into a chain."""
    short = -len(numbers) % ROWS
    return list(jnp.pad(numbers, (0, short), constant_values=filling).reshape(ROWS, -1))


def _count(rows: list[Array], pivot: Array) -> Array:
    """How many are <= pivot; sums of floats vectorise where those of integers do not."""
    return jnp.sum(sum((row <= pivot).astype(jnp.float32) for row in rows)).astype(jnp.int32)


def bisected(numbers: Float[Array, " n"], place: int) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """As `adjacent`, for few numbers in memory: 31 bare counts (63 in float64) take less time than ten clever ones.

    >>> [float(n) for n in bisected(jnp.array([5.0, 1.0, 3.0, 3.0]), 2)]
    [3.0, 5.0]
    """
    bits = lax.bitcast_convert_type(numbers, _integer(numbers))
    info = jnp.iinfo(bits.dtype)
    rows = _rows(bits, info.max)

    def digit(k: Array, found: Array) -> Array:
        """The next bit of the entry is 1 if not enough numbers have the bits found so far and a 0 here."""
        bit = jnp.ones((), bits.dtype) << (info.bits - 2 - k).astype(bits.dtype)
        return jnp.where(_count(rows, found + (bit - 1)) <= place, found + bit, found)

    entry = lax.fori_loop(0, info.bits - 1, digit, jnp.zeros((), bits.dtype))
    above = [jnp.where(row <= entry, info.max, row) for row in rows]
    least = jnp.min(functools.reduce(jnp.minimum, above))
    following = jnp.where(_count(rows, entry) > place + 1, entry, least)
    both = [lax.bitcast_convert_type(found, numbers.dtype) for found in (entry, following)]
    return both[0], both[1]


def by_sort(numbers: Float[Array, " n"], place: int) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """As `adjacent`, by a sort, or for some sizes by comparing all with all: on a GPU one launch is enough."""
    places = (place, min(place + 1, len(numbers) - 1))
    if len(numbers) not in COMPARED:
        ordered = jnp.sort(numbers)
        return ordered[places[0]], ordered[places[1]]
    upto = jnp.sum((numbers[None, :] <= numbers[:, None]).astype(jnp.int32), 1)
    found = [jnp.min(jnp.where(upto > p, numbers, jnp.inf)) for p in places]
    return found[0], found[1]


def upper(num: int) -> np.ndarray:
    """Where the pairs i < j are in the flattened matrix."""
    rows, columns = np.triu_indices(num, 1)
    return (rows * num + columns).astype(np.int32)
