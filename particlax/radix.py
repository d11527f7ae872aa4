"""The median of all squared distances on a GPU, exact, by radix selection on the floats' bits.

Seven passes over the pairs find four bits each of the entry with the wanted rank: each counts how many of the entries that
begin with the bits known so far go on with which of the 16 digits. An eighth finds the last three bits and the entry after. Nothing is stored:
every pass computes the distances anew, of one triangle of the matrix.

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

LEAST = 1024
"""Fewest particles for which the kernel pays."""
BLOCK, COLS = 64, 8
"""Particles in a block of the triangle (a field of 8 bits counts as many), and columns at a time (a field of 4 bits)."""
PROGRAMS, MOST = 2112, 7
"""Programs of one warp to aim at, 16 for each processor of an H100; and blocks of a program whose counts fit 16 bits."""
DIGITS = 16
PLACES = (0, 2, 1, 3, 8, 10, 9, 11)
"""The first digit that each of the widest words counts; its other half counts the fourth after."""
TOP, PASSES = 31, 8
"""Bits of a float but for its sign, and passes to find them: 7 with 4 bits, one with 3."""


def suits(x: Array) -> bool:
    """Whether the median of this cloud is for this module."""
    return x.dtype == jnp.float32 and len(x) >= LEAST and 0 < x.shape[1] <= DIRECT_DIM


def middle(x: Float[Array, "M D"], rank: Any) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The entries of ranks `rank` and `rank` + 1, from 1, of all M^2 squared distances with the zeros of the diagonal."""
    x, blocks = lax.stop_gradient(x), math.ceil(len(x) / BLOCK)
    padded = jnp.pad(x, ((0, blocks * BLOCK - len(x)), (0, 0)), constant_values=jnp.inf).T
    table = np.zeros((PASSES + 2, 2 * DIGITS), np.float32)
    table[0, 0] = len(x) ** 2  # as if a pass before the first had found everything at digit 0
    table[-1] = np.inf
    table, state = jnp.asarray(table), jnp.array([0, rank, TOP, 0], jnp.int32)
    for k in range(PASSES):
        table, state = _pass(padded, state, table, last=k == PASSES - 1)
    upto = jnp.cumsum(_counts(table[PASSES])[:8])
    values = []
    for need in (state[1], state[1] + 1):
        digit = jnp.sum((upto < need).astype(jnp.int32))
        bits = lax.bitcast_convert_type(state[0] + digit, jnp.float32)
        values.append(jnp.where(digit < 8, bits, table[-1, 0]))
    return values[0], values[1]


def _grid(blocks: int) -> tuple[int, int]:
    """Pairs of rows of the triangle, the p-th and the p-th last, which together have blocks + 1; programs for each."""
    pairs = math.ceil(blocks / 2)
    return pairs, min(blocks + 1, max(PROGRAMS // pairs, math.ceil((blocks + 1) / MOST)))


@functools.partial(jax.jit, static_argnames="last")
def _pass(x: Array, state: Array, table: Array, *, last: bool) -> tuple[Array, Array]:
    """The table with the counts of one more pass, and what was known before it."""
    blocks = x.shape[1] // BLOCK
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (table, state)]
    kernel = functools.partial(_body, blocks=blocks, last=last)
    args = (x, state, table)
    return gpu.launch(kernel, shapes, _grid(blocks), *args, warps=1, stages=1, aliases={2: 0})


def _body(
    x_ref: Any, state_ref: Any, _: Any, table_ref: Any, new_ref: Any, *, blocks: int, last: bool
) -> None:
    """Some blocks of a pair of rows of the triangle."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    known, need, shift, number = (state_ref[k] for k in range(4))
    known, need, shift = _advance(known, need, shift, _counts(table_ref[number, :]))
    for k, value in enumerate((known, need, shift, number + 1)):
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
            words = _last_bits(bits, known) if last else _digits(bits, known, shift)
            *fields, after = carry
            fields = _add(fields, [a for word in words for a in _parts(word, 4, 0x0F0F0F0F)])
            if last:
                larger = jnp.where(bits - known >= 8, r2, jnp.inf)
                after = jnp.minimum(after, jnp.min(larger, 0))
            return *fields, after

        *fields, after = lax.fori_loop(0, BLOCK // COLS, step, (*(zero,) * 4, carry[-1]))
        # A block off the diagonal stands for its mirror image as well.
        weight = jnp.minimum(col - row + 1, 2)
        wider = [weight * a for word in fields for a in _parts(word, 8, 0x00FF00FF)]
        return *_add(carry[:-1], wider), after

    size = jnp.where(2 * pair == blocks - 1, blocks - pair, blocks + 1)  # a middle row has no other
    steps = jnp.maximum((size - first + stride - 1) // stride, 0)
    start = (*(zero,) * 8, jnp.full(BLOCK, jnp.inf))
    *fields, after = lax.fori_loop(0, steps, block, start)
    triton.atomic_add(table_ref, (number + 1, pl.ds(0, 2 * DIGITS)), _floats(fields))
    if last:
        least = jnp.broadcast_to(jnp.min(after), (2 * DIGITS,))
        triton.atomic_min(table_ref, (number + 2, pl.ds(0, 2 * DIGITS)), least)


def _counts(row: Array) -> Array:
    """Counts from a row of the table, which holds what is below 2048 of them and then the rest: floats that stay exact.

    Floats, because Pallas adds nothing else at once for many programs.
    """
    place = lax.broadcasted_iota(jnp.int32, (2 * DIGITS, DIGITS), 0)
    digit = lax.broadcasted_iota(jnp.int32, (2 * DIGITS, DIGITS), 1)
    whole = row.astype(jnp.int32)[:, None]
    low, high = jnp.where(place == digit, whole, 0), jnp.where(place == digit + DIGITS, whole, 0)
    return jnp.sum(low + (high << 11), 0)


def _floats(fields: Sequence[Array]) -> Array:
    """A row of the table from the widest fields of all threads."""
    place = lax.broadcasted_iota(jnp.int32, (2 * DIGITS,), 0)
    row = jnp.zeros_like(place)
    for digit, word in zip(PLACES, fields, strict=True):
        for half, counted in enumerate(_parts(jnp.sum(word), 16, 0xFFFF)):
            row = jnp.where(place & (DIGITS - 1) == digit + 4 * half, counted, row)
    return jnp.where(place < DIGITS, row & 2047, row >> 11).astype(jnp.float32)


def _advance(known: Array, need: Array, shift: Array, counts: Array) -> tuple[Array, Array, Array]:
    """Bits known, rank among the entries that begin with them, and where their next digit ends."""
    place = lambda axis: lax.broadcasted_iota(jnp.int32, (DIGITS, DIGITS), axis)
    upto = jnp.sum(jnp.where(place(0) <= place(1), counts[:, None], 0), 0)
    short = upto < need
    digit = jnp.minimum(jnp.sum(short.astype(jnp.int32)), DIGITS - 1)
    return known | (digit << shift), need - jnp.max(jnp.where(short, upto, 0)), shift - 4


def _digits(bits: Array, known: Array, shift: Array) -> list[Array]:
    """How many columns have which digit, for every row: eight digits to a word.

    Entries that do not begin with the bits known differ from them above the digit, and so have no place in a word.
    """
    right = lambda a: lax.shift_right_logical(a, jnp.broadcast_to(shift, a.shape))
    digit = right(bits) ^ right(known)
    return [jnp.sum(gpu.one_at(4 * digit - first), 0) for first in (0, 32)]


def _last_bits(bits: Array, known: Array) -> list[Array]:
    """The same for the last three bits."""
    place = jnp.minimum((bits - known).astype(jnp.uint32), jnp.uint32(8)).astype(jnp.int32)
    found = jnp.sum(gpu.one_at(4 * place), 0)
    return [found, jnp.zeros_like(found)]


def _parts(word: Array, width: int, mask: int) -> list[Array]:
    """Every other field of a word, and those between."""
    return [word & mask, lax.shift_right_logical(word, jnp.full_like(word, width)) & mask]


def _add(sums: Sequence[Array], more: Sequence[Array]) -> list[Array]:
    return [a + b for a, b in zip(sums, more, strict=True)]
