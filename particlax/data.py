"""Minibatches drawn on the device, as a pure function of key and step: no state to save."""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Key, PyTree

from particlax.checks import Part, refuse_not_finite
from particlax.errors import DataError, told
from particlax.noise import bits as random_bits
from particlax.noise import fold_in

__all__ = ["Minibatches"]

SMALL = 256
FEW = 128
"""Rows that a CPU copies one by one. Halves of a larger gather go to two threads, and to wake the second takes longer than to copy few rows."""


class Minibatches(Part):
    """Batches of `batch_size` rows of `arrays`, without replacement within an epoch.

    Epoch e goes once through a fresh pseudo-random permutation of the N rows; the N mod n rows that do not
    fill a batch are left out of that epoch. The permutation is evaluated only where it is needed (a
    shuffle of row numbers by arithmetic), so a batch costs O(n) and the batch of step t depends on the key
    and t alone: a resumed run sees the same batches.

    `transform(key, batch)`, if given, makes of each batch what the target sees, with a key of its own: random crops
    and flips, say. All particles see the same batch.

    >>> data = Minibatches({"x": jnp.arange(10.0)}, 4)
    >>> data.batch(jax.random.key(0), jnp.array(0))["x"].shape
    (4,)
    """

    arrays: PyTree
    batch_size: int
    num_data: int
    transform: Callable[[Key[Array, ""], PyTree], PyTree] | None

    def __init__(self, arrays: PyTree, batch_size: int, transform: Any = None):
        self.num_data = check_batch(arrays, batch_size, transform)
        refuse_wrapped(arrays)
        self.arrays = jax.tree.map(jnp.asarray, arrays)
        refuse_not_finite("the data", self.arrays)
        self.batch_size = batch_size
        self.transform = transform

    @property
    def batches_per_epoch(self) -> int:
        """Full batches in one pass over the data."""
        return self.num_data // self.batch_size

    def indices(self, key: Key[Array, ""], step: Int[Array, ""]) -> Int[Array, " n"]:
        """The row numbers of the batch of `step`."""
        return batch_rows(key, step, self.batch_size, self.num_data)

    def batch(self, key: Key[Array, ""], step: Int[Array, ""]) -> PyTree:
        """The batch of `step`."""
        batch = taken(self.arrays, self.indices(key, step))
        return transformed(self.transform, key, step, batch)


@jax.jit  # a loop that is not would be compiled at every call of one's own
def taken(arrays: PyTree, rows: Int[Array, " n"]) -> PyTree:
    """Rows of arrays; their numbers are never out of range, and to check them takes longer than to copy the rows."""
    if len(rows) <= FEW and jax.default_backend() == "cpu":
        one = lambda row: jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, row, keepdims=False), arrays)  # fmt: skip
        return lax.map(one, rows)
    return jax.tree.map(lambda leaf: leaf.at[rows].get(mode="promise_in_bounds"), arrays)


def batch_rows(
    key: Key[Array, ""], step: Int[Array, ""], batch_size: int, num_data: int
) -> Int[Array, " n"]:
    """The row numbers of the batch of `step`, among `num_data` rows that each epoch shuffles anew."""
    epoch, place = jnp.divmod(step, num_data // batch_size)
    position = place * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
    return permuted(fold_in(key, epoch), position, num_data)


def transformed(transform: Any, key: Key[Array, ""], step: Int[Array, ""], batch: PyTree) -> PyTree:
    """What the target sees of the batch of `step`."""
    if transform is None:
        return batch
    # Epochs fold their number into the key; transforms have the stream of an epoch never reached.
    own = fold_in(fold_in(key, 2**31 - 1), step)
    return transform(own, batch)


def refuse_batches(arrays: PyTree) -> None:
    """Refuse what yields batches in place of arrays."""
    array = isinstance(arrays, (str, range)) or any(hasattr(arrays, name) for name in AS_ARRAY)
    yields = (callable(arrays) or isinstance(arrays, Iterable)) and not array and _is_leaf(arrays)
    if yields:
        raise DataError(
            f"the data are {told(arrays)}; expected arrays. What yields batches goes into px.Stream(function, num_data=N), where function(step) "
            "returns an iterator of them that begins at that step"
        )


AS_ARRAY = ("__array__", "toarray", "dtype")
"""What tells of an array, or of something that becomes one."""


def held_as(array: np.ndarray) -> np.dtype:
    """The type in which JAX holds such an array, with the settings of today."""
    return jax.dtypes.canonicalize_dtype(array.dtype) if array.dtype.kind in "iu" else array.dtype


def refuse_wrapped(arrays: PyTree) -> None:
    """Refuse whole numbers of 64 bits that JAX, set to 32, would turn into others without a word."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        if isinstance(leaf, jax.Array):
            continue  # JAX holds it already
        plain = np.asarray(leaf)  # pandas has its own types
        kind, held = plain.dtype, held_as(plain)
        if kind.kind not in "iu" or not plain.size or held == kind:
            continue
        low, high = int(plain.min()), int(plain.max())
        if low < np.iinfo(held).min or high > np.iinfo(held).max:
            raise DataError(
                f"data{jax.tree_util.keystr(path)} is {kind} with numbers from {low} to {high}, and JAX holds them as {held}; expected numbers that "
                'fit: make floats of them, subtract what all have in common, or jax.config.update("jax_enable_x64", True)'
            )


def refuse_words(arrays: PyTree) -> None:
    """Refuse arrays of strings, dates or objects."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            continue  # random keys
        kind = getattr(leaf, "dtype", None)
        kind = kind if isinstance(kind, np.dtype) else np.asarray(leaf).dtype  # pandas has its own
        if isinstance(leaf, np.ma.MaskedArray):
            wish = "expected plain arrays: .filled(0), and where labels do not count batch['mask']"
            raise DataError(f"data{jax.tree_util.keystr(path)} is a masked array; {wish}")
        if hasattr(leaf, "toarray"):
            wish = "expected plain arrays: .toarray()"
            raise DataError(f"data{jax.tree_util.keystr(path)} is a sparse matrix; {wish}")
        if kind.kind in "OSUMm" or kind.names:
            raise DataError(
                f"data{jax.tree_util.keystr(path)} has dtype {kind}; expected numbers{_numbering(leaf, kind)}"
            )


def _is_leaf(value: Any) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of iterators, and will refuse them
        try:
            return jax.tree_util.all_leaves([value])
        except TypeError:
            return True


def _numbering(leaf: Any, kind: np.dtype) -> str:
    """How what is no array of numbers becomes one."""
    if not kind.names and (np.ndim(leaf) == 1 or kind.kind != "O"):
        return ". Number classes that have names: names, y = np.unique(y, return_inverse=True)"
    if kind.names:
        return ": use numpy.lib.recfunctions.structured_to_unstructured"
    if np.ndim(leaf):
        return ": .astype(np.float32), or of a pandas frame .to_numpy(np.float32)"
    return f", and this is {told(leaf)}"


SHOWN = 6
"""Shapes listed in an error."""


def check_batch(arrays: PyTree, batch_size: Any, transform: Any) -> int:
    """The number of rows of `arrays`, after checking that they have one and that the batch fits."""
    refuse_batches(arrays)
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    if not leaves:
        raise DataError("the data are empty; expected arrays with a leading data axis")
    refuse_words(arrays)
    sizes = {jax.tree_util.keystr(path): np.shape(leaf) for path, leaf in leaves}
    heads = {shape[0] if shape else None for shape in sizes.values()}
    if len(heads) > 1 or None in heads:
        some = dict(list(sizes.items())[:SHOWN])
        more = f" and {len(sizes) - SHOWN} more" if len(sizes) > SHOWN else ""
        raise DataError(
            f"the data have shapes {some}{more}; expected the same number of rows on axis 0 of every array "
            "(a list counts as a pytree of its elements: turn it into an array first)"
        )
    (num_data,) = heads
    assert num_data is not None
    whole_number = isinstance(batch_size, (int, np.integer)) and not isinstance(batch_size, bool)
    if not whole_number or batch_size < 1:
        hint = ": px.Minibatches({'x': x, 'y': y}, 100)" * bool(np.ndim(batch_size))
        raise DataError(f"batch_size is {told(batch_size)}; expected a positive int{hint}")
    if batch_size > num_data:
        raise DataError(
            f"batch_size is {batch_size} but the data have {num_data} rows; expected at most {num_data}"
        )
    if transform is not None and not callable(transform):
        raise DataError(f"transform is {told(transform)}; expected a function of a key and a batch")
    _refuse_other_arguments(transform)
    return num_data


def _refuse_other_arguments(transform: Any) -> None:
    if transform is None:
        return
    try:
        takes = inspect.signature(transform)
    except (TypeError, ValueError):  # it does not say
        return
    try:
        takes.bind(None, None)
    except TypeError:
        raise DataError(f"transform takes {takes}; expected transform(key, batch)") from None


@functools.partial(jax.jit, static_argnums=2)  # traced once: it is long
def permuted(key: Key[Array, ""], position: Int[Array, " n"], num: int) -> Int[Array, " n"]:
    """The images of `position` under a pseudo-random permutation of 0..num-1 chosen by `key`.

    The swap-or-not shuffle (Hoang, Morris & Rogaway 2012): in each round a random pairing x <-> k - x mod num, and for
    each pair a coin, here a hash of its larger member, that decides whether the two change places. Arithmetic alone, for
    any num and without a loop. (Small sets are permuted as a whole: it is as fast, and exact.)

    >>> sorted(permuted(jax.random.key(0), jnp.arange(10), 10).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    if num <= SMALL:
        return jax.random.permutation(key, num)[position].astype(jnp.int32)
    rounds = 2 * num.bit_length() + 8
    bits = random_bits(key, (2, rounds))
    pairings, coins, count = bits[0] % jnp.uint32(num), bits[1], jnp.uint32(num)
    value = position.astype(jnp.uint32)
    for i in range(rounds):
        other = pairings[i] - value  # below zero it wraps, and adding num mends it
        other = jnp.where(pairings[i] < value, other + count, other)
        swap = _mix(jnp.maximum(value, other) ^ coins[i]) >> 31 == 1
        value = jnp.where(swap, other, value)
    # The barrier keeps the compiler from computing all rounds again wherever a row number is used. (For a CPU it is dropped before that;
    # a branch in its place cost what it saved.)
    return lax.optimization_barrier(value.astype(jnp.int32))


def _mix(value: Array) -> Array:
    """A 32-bit integer hash (the finaliser of MurmurHash3)."""
    value = (value ^ (value >> 16)) * jnp.uint32(0x85EBCA6B)
    value = (value ^ (value >> 13)) * jnp.uint32(0xC2B2AE35)
    return value ^ (value >> 16)
