"""The median of all squared distances on a GPU, exact, by radix selection on the floats' bits.

A pass over the pairs finds four bits of the entry with the wanted rank: it counts how many of the entries that begin with the
bits known so far go on with which of the 16 digits. Seven passes leave four bits, and an eighth finds those and the entry
after. Nothing is stored: every pass computes the distances anew, of one triangle of the matrix.

A pass before them guesses the first eleven bits: it counts in 15 places around the mean square. If the guess holds, as for most
clouds, three of the seven have nothing to do.

Counting is what costs. A thread counts in fields of 4 bits, eight to a word, by adding 1 << 4 * digit, and moves them into wider
fields before they are full.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from particlax import gpu
from particlax.fused import DIRECT_DIM, squares

__all__ = ["middle", "suits"]

LEAST = 256
"""Fewest particles for which the kernel pays."""
BLOCK, COLS = 64, 8
"""Particles in a block of the triangle (a field of 8 bits counts as many), and columns at a time (a field of 4 bits)."""
PROGRAMS, MOST = 2112, 7
"""Programs of one warp to aim at, 16 for each processor of an H100; and blocks of a program whose counts fit 16 bits."""
DIGITS = 16
PLACES = (0, 2, 1, 3, 8, 10, 9, 11)
"""The first digit that each of the widest words counts; its other half counts the fourth after."""
GUESS = 20
"""Bits that a guess leaves open."""
FIRST, NEXT, LAST = 0, 1, 2
"""Kinds of passes: the guess, then seven that find a digit if more than four bits are open, then the last."""


def suits(x: Array) -> bool:
    """Whether the median of this cloud is for this module."""
    return x.dtype == jnp.float32 and len(x) >= LEAST and 0 < x.shape[1] <= DIRECT_DIM


def middle(x: Float[Array, "M D"], rank: Any) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The entries of ranks `rank` and `rank` + 1, from 1, of all M^2 squared distances with the zeros of the diagonal."""
    x, blocks = lax.stop_gradient(x), math.ceil(len(x) / BLOCK)
    padded = jnp.pad(x, ((0, blocks * BLOCK - len(x)), (0, 0)), constant_values=jnp.inf).T
    kinds = (FIRST, *(NEXT,) * 7, LAST)
    # A row of counts for each pass, and one for the entry after.
    table = np.zeros((len(kinds) + 1, 2 * DIGITS), np.float32)
    table[-1] = np.inf
    table, state = jnp.asarray(table), _guess(x, rank)
    for kind in kinds:
        table, state = _pass(padded, state, table, kind=kind)
    known, need, *_ = state
    upto = jnp.cumsum(_counts(table[-2]))
    values = []
    for wanted in (need, need + 1):
        digit = jnp.sum((upto < wanted).astype(jnp.int32))
        bits = lax.bitcast_convert_type(known + digit, jnp.float32)
        values.append(jnp.where(digit < DIGITS, bits, table[-1, 0]))
    return values[0], values[1]


def _guess(x: Array, rank: Any) -> Array:
    """The state before the first pass, whose places reach from a third of the mean square to its 1.4-fold.

    A state is the bits known, the rank among the entries that begin with them, the number of bits open, the number of
    the pass, and whether the pass before has counted.
    """
    mean = 2 * jnp.sum(jnp.mean((x - jnp.mean(x, 0)) ** 2, 0))
    bits = lax.bitcast_convert_type(mean, jnp.int32) >> GUESS
    begin = jnp.maximum(bits - 13, 0) << GUESS
    return jnp.stack([begin, *(jnp.asarray(a, jnp.int32) for a in (rank, GUESS + 4, 0, 0))])


def _grid(blocks: int) -> tuple[int, int]:
    """Pairs of rows of the triangle, the p-th and the p-th last, which together have blocks + 1; programs for each."""
    pairs = math.ceil(blocks / 2)
    return pairs, min(blocks + 1, max(PROGRAMS // pairs, math.ceil((blocks + 1) / MOST)))


@functools.partial(jax.jit, static_argnames="kind")
def _pass(x: Array, state: Array, table: Array, *, kind: int) -> tuple[Array, Array]:
    """The table with the counts of one more pass, and what was known before it."""
    blocks = x.shape[1] // BLOCK
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (table, state)]
    kernel = functools.partial(_body, blocks=blocks, kind=kind)
    args = (x, state, table)
    return gpu.launch(kernel, shapes, _grid(blocks), *args, warps=1, stages=1, aliases={2: 0})


def _body(
    x_ref: Any, state_ref: Any, _: Any, table_ref: Any, new_ref: Any, *, blocks: int, kind: int
) -> None:
    """Some blocks of a pair of rows of the triangle."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    known, need, left, number, counted = (state_ref[k] for k in range(5))
    if kind != FIRST:
        advanced = _advance(known, need, left, number, _counts(table_ref[number - 1, :]))
        before = (known, need, left)
        known, need, left = (
            jnp.where(counted > 0, *both) for both in zip(advanced, before, strict=True)
        )
    busy = left > 4 if kind == NEXT else left > 0
    for k, value in enumerate((known, need, left, number + 1, busy.astype(jnp.int32))):
        new_ref[k] = value
    pair, first, stride = pl.program_id(0), pl.program_id(1), _grid(blocks)[1]
    load = lambda start, size: [x_ref[d, pl.ds(start, size)] for d in range(x_ref.shape[0])]
    zero = jnp.zeros(BLOCK, jnp.int32)

    def block(k: Any, carry: Any) -> Any:
        place = first + k * stride
        beyond = jnp.maximum(place - (blocks - pair - 1), 0)  # in the second row of the pair
        row = jnp.where(beyond > 0, blocks - 1 - pair, pair)
        col = jnp.where(beyond > 0, row + beyond - 1, pair + place)
        rows = [a[None, :] for a in load(row * BLOCK, BLOCK)]

        def step(t: Any, carry: Any) -> Any:
            r2 = squares(rows, [a[:, None] for a in load(col * BLOCK + t * COLS, COLS)])
            bits = lax.bitcast_convert_type(r2, jnp.int32)
            words = _digits(bits, known, left, kind)
            *fields, after = carry
            fields = _add(fields, [a for word in words for a in _parts(word, 4, 0x0F0F0F0F)])
            if kind == LAST:
                larger = jnp.where(bits - known >= DIGITS, r2, jnp.inf)
                after = jnp.minimum(after, jnp.min(larger, 0))
            return *fields, after

        *fields, after = lax.fori_loop(0, BLOCK // COLS, step, (*(zero,) * 4, carry[-1]))
        # A block off the diagonal stands for its mirror image as well.
        weight = jnp.minimum(col - row + 1, 2)
        wider = [weight * a for word in fields for a in _parts(word, 8, 0x00FF00FF)]
        return *_add(carry[:-1], wider), after

    size = jnp.where(2 * pair == blocks - 1, blocks - pair, blocks + 1)  # a middle row has no other
    steps = jnp.where(busy, jnp.maximum((size - first + stride - 1) // stride, 0), 0)
    start = (*(zero,) * 8, jnp.full(BLOCK, jnp.inf))
    *fields, after = lax.fori_loop(0, steps, block, start)

    @pl.when(steps > 0)
    def _write() -> None:
        triton.atomic_add(table_ref, (number, pl.ds(0, 2 * DIGITS)), _floats(fields))
        if kind == LAST:
            least = jnp.broadcast_to(jnp.min(after), (2 * DIGITS,))
            triton.atomic_min(table_ref, (number + 1, pl.ds(0, 2 * DIGITS)), least)


def _counts(row: Array) -> Array:
    """Counts from a row of the table, which holds what each program has below 256, and then the rest.

    Both are floats, because Pallas adds no other vectors for many programs at once, and stay below 2^24, so exact.
    """
    place = lax.broadcasted_iota(jnp.int32, (2 * DIGITS, DIGITS), 0)
    digit = lax.broadcasted_iota(jnp.int32, (2 * DIGITS, DIGITS), 1)
    whole = row.astype(jnp.int32)[:, None]
    low, high = jnp.where(place == digit, whole, 0), jnp.where(place == digit + DIGITS, whole, 0)
    return jnp.sum(low + (high << 8), 0)


def _floats(fields: Sequence[Array]) -> Array:
    """A row of the table from the widest fields of all threads."""
    place = lax.broadcasted_iota(jnp.int32, (2 * DIGITS,), 0)
    row = jnp.zeros_like(place)
    for digit, word in zip(PLACES, fields, strict=True):
        for half, counted in enumerate(_parts(jnp.sum(word), 16, 0xFFFF)):
            row = jnp.where(place & (DIGITS - 1) == digit + 4 * half, counted, row)
    return jnp.where(place < DIGITS, row & 255, row >> 8).astype(jnp.float32)


def _advance(
    known: Array, need: Array, left: Array, number: Array, counts: Array
) -> tuple[Array, Array, Array]:
    """The state's first three after the counts of the pass before."""
    place = lambda axis: lax.broadcasted_iota(jnp.int32, (DIGITS, DIGITS), axis)
    upto = jnp.sum(jnp.where(place(0) <= place(1), counts[:, None], 0), 0)
    short = upto < need
    digit = jnp.sum(short.astype(jnp.int32))
    missed = (number == 1) & ((digit == 0) | (digit == DIGITS))  # a wrong guess: from the start
    digit = jnp.minimum(digit, DIGITS - 1)
    known = jnp.where(missed, 0, known + (digit << (left - 4)))
    need -= jnp.where(missed, 0, jnp.max(jnp.where(short, upto, 0)))
    return known, need, jnp.where(missed, 32, left - 4)


def _digits(bits: Array, known: Array, left: Array, kind: int) -> list[Array]:
    """How many columns have which digit, for every row: eight digits to a word.

    Entries that do not begin with the bits known have no digit, and no place in a word; at a guess, those below have the first.
    """
    right = lambda a: lax.shift_right_logical(a, jnp.broadcast_to(left - 4, a.shape))
    digit = right(bits) - right(known)
    if kind == FIRST:
        digit = jnp.maximum(digit, 0)
    if kind == LAST:  # so many bits that four times the digit would overflow
        digit = jnp.minimum(digit.astype(jnp.uint32), jnp.uint32(DIGITS)).astype(jnp.int32)
    return [jnp.sum(gpu.one_at(4 * digit - first), 0) for first in (0, 32)]


def _parts(word: Array, width: int, mask: int) -> list[Array]:
    """Every other field of a word, and those between."""
    return [word & mask, lax.shift_right_logical(word, jnp.full_like(word, width)) & mask]


def _add(sums: Sequence[Array], more: Sequence[Array]) -> list[Array]:
    return [a + b for a, b in zip(sums, more, strict=True)]
