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

__all__ = ["adjacent", "by_sort", "narrowed", "upper"]

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


def _table(numbers: Array, filling: Any) -> Array:
    """A vector as rows to add up: XLA turns a sum of rows into vector operations, and a sum along a vector into a chain."""
    short = -len(numbers) % ROWS
    return jnp.pad(numbers, (0, short), constant_values=filling).reshape(ROWS, -1)


def _least(rows: list[Array]) -> Array:
    return jnp.min(functools.reduce(jnp.minimum, rows))


def _count(rows: list[Array], pivot: Array) -> Array:
    """How many are <= pivot; sums of floats vectorise where those of integers do not."""
    return jnp.sum(sum((row <= pivot).astype(jnp.float32) for row in rows)).astype(jnp.int32)


def narrowed(numbers: Float[Array, " n"], place: int) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """As `adjacent`, for few numbers in memory, where what counts is how many operations a pass has: all that it knows is one vector.

    >>> [float(n) for n in narrowed(jnp.array([5.0, 1.0, 3.0, 3.0]), 2)]
    [3.0, 5.0]
    """
    kind = _integer(numbers)
    top = jnp.iinfo(kind).max
    table = _table(lax.bitcast_convert_type(jnp.abs(numbers), kind), top)  # no sign: -0 and NaN
    value = lambda bits: lax.bitcast_convert_type(bits, numbers.dtype)

    def pivot(low: Array, high: Array, below: Array, upto: Array, passes: Array) -> Array:
        """Where the entry should be by the counts at both ends, now a little above and now below; every third time halfway, by bits."""
        inside = (upto - below).astype(numbers.dtype)
        beyond = jnp.where(passes % 2 == 0, 0.35, -0.35) * lax.rsqrt(inside)
        share = jnp.clip(((place - below).astype(numbers.dtype) + 0.5) / inside + beyond, 0, 1)
        start, end = value(jnp.maximum(low, 0)), value(high)
        guess = lax.bitcast_convert_type(start + (end - start) * share, kind)
        guess = jnp.where(passes % 3 == 2, low + (high - low) // 2, guess)
        return jnp.clip(guess, low + 1, high - 1)  # whatever the guess

    def look(known: Array) -> Array:
        """A pass: the entry is in (low, high], and `below` and `upto` numbers are not above these."""
        low, high, below, upto, passes, middle = known
        rows = list(lax.optimization_barrier(table))  # else XLA cuts them apart before the loop
        count = _count(rows, middle).astype(kind)
        up = count <= place
        ends = (jnp.where(up, middle, low), jnp.where(up, high, middle))
        counts = (jnp.where(up, count, below), jnp.where(up, upto, count))
        return jnp.stack([*ends, *counts, passes + 1, pivot(*ends, *counts, passes + 1)])

    several = lambda known: (known[1] - known[0] > 1) & (known[3] - known[2] > 1)
    rows = list(table)
    least, most = _least(rows), jnp.max(functools.reduce(jnp.maximum, [jnp.where(row == top, 0, row) for row in rows]))  # fmt: skip
    first = (least - 1, most, *(jnp.array(n, kind) for n in (0, len(numbers), 0)))
    low = lax.while_loop(several, look, jnp.stack([*first, pivot(*first)]))[0]
    entry = _least([jnp.where(row <= low, top, row) for row in rows])
    above = _least([jnp.where(row <= entry, top, row) for row in rows])
    following = jnp.where(_count(rows, entry) > place + 1, entry, above)
    return value(entry), value(following)


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
