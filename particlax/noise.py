"""Normals, bits and keys as `jax.random` makes them, number for number, at a third of the time on a CPU.

JAX's generator (Threefry-2x32, 20 rounds; Salmon et al. 2011) hashes the key with each number's place. For a CPU JAX compiles the
rounds as a loop that writes all numbers to memory at every turn. Here they are written out: one expression, which XLA fuses with
what follows, so that numbers stay in registers. A number depends on the key and its place alone, wherever it is computed.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import define_prng_impl, threefry_prng_impl
from jaxtyping import Array, Float, Key, UInt32

__all__ = ["bits", "fold_in", "normal"]

TURNS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)
MOST = 1 << 32
"""Numbers whose places one 32-bit word counts."""


def normal(key: Key[Array, ""], shape: tuple[int, ...], dtype: Any = None) -> Float[Array, "..."]:
    """The numbers of `jax.random.normal(key, shape, dtype)`.

    >>> key = jax.random.key(0)
    >>> bool(jnp.allclose(normal(key, (3, 2)), jax.random.normal(key, (3, 2))))
    True
    """
    if math.prod(shape) < MOST:
        key = _faster(key)
    return jax.random.normal(key, shape, dtype)


def bits(key: Key[Array, ""], shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """The numbers of `jax.random.bits(key, shape, "uint32")`.

    >>> key = jax.random.key(0)
    >>> bool(jnp.all(bits(key, (3, 2)) == jax.random.bits(key, (3, 2), "uint32")))
    True
    """
    return jax.random.bits(_faster(key), shape, jnp.uint32)


def fold_in(key: Key[Array, ""], data: Any) -> Key[Array, ""]:
    """The key `jax.random.fold_in(key, data)`.

    >>> key = jax.random.key(0)
    >>> bool(fold_in(key, 3) == jax.random.fold_in(key, 3))
    True
    """
    if not _threefry_key(key):
        return jax.random.fold_in(key, data)
    first, second = jax.random.key_data(key)
    words = _hashed(first, second, jnp.uint32(data))
    return jax.random.wrap_key_data(jnp.stack(words), impl=jax.random.key_impl(key))


def _threefry_key(key: Array) -> bool:
    return str(jax.random.key_impl(key)) == "threefry2x32"


def _faster(key: Array) -> Array:
    """The same key, whose bits are written out; another one as it is."""
    if not jax.config.jax_threefry_partitionable or not _threefry_key(key):  # pyright: ignore
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=_written_out())


@functools.cache
def _written_out() -> Any:
    """JAX's generator with our form of its bits."""
    same = threefry_prng_impl
    return define_prng_impl(
        key_shape=same.key_shape, seed=same.seed, split=same.split, fold_in=same.fold_in,
        random_bits=_bits, name="threefry2x32, written out", tag="fry",
    )  # fmt: skip


def _bits(key: UInt32[Array, "2"], width: int, shape: tuple[int, ...]) -> Array:
    """Bits as JAX takes them from the two words of a hash."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    places = [
        lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride)
        for axis, stride in enumerate(strides)
    ]
    place = sum(places[1:], places[0]) if places else jnp.zeros((), jnp.uint32)
    first, second = _threefry(key[0], key[1], place)
    if width == 64:
        return first.astype(jnp.uint64) << 32 | second.astype(jnp.uint64)
    return (first ^ second).astype(f"uint{width}")


def _threefry(key: Array, other: Array, place: Array) -> tuple[Array, Array]:
    """The hash of (0, place), both 32-bit words."""
    keys = (key, other, key ^ other ^ PARITY)
    a, b = jnp.broadcast_to(key, place.shape), place + other
    for group in range(1, 6):
        for turn in TURNS[(group - 1) % 2]:
            a = a + b
            b = (b << turn | b >> (32 - turn)) ^ a
        a, b = a + keys[group % 3], b + keys[(group + 1) % 3] + np.uint32(group)
    return a, b


_hashed = jax.jit(_threefry)  # traced once: it is long
