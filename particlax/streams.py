"""Data larger than memory: batches gathered on the host by a thread, a chunk of steps ahead of the device."""

import copy
import functools
import json
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Key, PyTree

from particlax.checks import whole
from particlax.data import batch_rows, check_batch, transformed
from particlax.errors import DataError, known_options
from particlax.placement import Layout
from particlax.sharding import Shares
from particlax.target import num_rows

__all__ = ["Stream"]

STREAM_BYTES = 1 << 26
"""Size of the batches that go to the device at once; two such blocks are in memory, one in use and one to come."""
LONGEST = 4096
"""Most steps of one block."""
WAIT_SECONDS = 0.5
"""How long batches that come ready-made are waited for before those that have come are used."""


class Stream:
    """Batches that are read while the run goes on, for data that do not fit into memory.

    `Stream(arrays, n)` is `Minibatches(arrays, n)` for arrays on the disk, such as `np.memmap`: anything with `shape`, `dtype` and
    rows by index. Its batches are the same rows in the same order. `Stream(batches, num_data=N)` takes batches as they come: `batches(step)`
    is an iterator that begins with the batch of `step`, or `batches` is a Grain dataset, whose iterators tell and set their position.
    `transform(key, batch)` works as in `Minibatches`, on the device.

    >>> data = Stream({"x": np.arange(10.0)}, 4)
    >>> data.num_data, data.batch_size
    (10, 4)
    """

    @known_options
    def __init__(
        self,
        source: Any,
        batch_size: int | None = None,
        *,
        num_data: int | None = None,
        transform: Any = None,
    ):
        self.source, self.batch_size, self.transform = source, batch_size, transform
        self.ready_made = callable(source) or _is_dataset(source)
        if not self.ready_made:
            self.num_data = check_batch(source, batch_size, transform)
            if num_data not in (None, self.num_data):
                raise DataError(
                    f"num_data is {num_data} but the arrays have {self.num_data} rows; leave num_data out"
                )
            return
        if batch_size is not None:
            raise DataError(
                f"batch_size is {batch_size} but the batches come ready-made; leave it out, and give num_data=N"
            )
        if num_data is None:
            raise DataError(
                "batches came without num_data; expected the number N of data behind them, for the factor N / n: "
                "px.Stream(batches, num_data=N)"
            )
        whole("num_data", num_data, 1)
        self.num_data = num_data


def _is_dataset(source: Any) -> bool:
    """Whether it is neither an array nor a container of arrays, but something to iterate over."""
    plain = isinstance(source, (dict, list, tuple, str)) or hasattr(source, "shape")
    return not plain and hasattr(source, "__iter__")


class Block(eqx.Module):
    """The batches of several steps, stacked on the device."""

    arrays: PyTree
    first: Int[Array, ""]
    transform: Any

    def batch(self, key: Key[Array, ""], step: Int[Array, ""]) -> PyTree:
        """The batch of `step`, as `Minibatches.batch`."""
        at = lambda leaf: lax.dynamic_index_in_dim(leaf, step - self.first, keepdims=False)
        return transformed(self.transform, key, step, jax.tree.map(at, self.arrays))


class Feed:
    """Hands out the blocks of a run, loading the next one while the device works on this one.

    `span` is where the run began, the step it is at and the one it ends before; `position` what `position` gave for that step.
    """

    def __init__(
        self,
        stream: Stream,
        key: Array,
        span: tuple[int, int, int],
        position: Any = None,
        layout: Layout | None = None,
    ):
        first, step, self.last = span
        self.stream, total = stream, self.last - first
        source = stream.source
        self.batches = (
            _Ready(source, step, position) if stream.ready_made else _Gathered(stream, key)
        )
        # Threads start without the settings of the one that made them.
        self.x64 = bool(jax.config.jax_enable_x64)  # pyright: ignore
        self.example = self.batches.example()
        self.shares = None if layout is None else Shares(layout, num_rows(self.example))
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(self.example))
        room, wanted = max(1, STREAM_BYTES // max(size, 1)), max(1, min(total, LONGEST))
        self.rows = 1 << min(
            (wanted - 1).bit_length(), room.bit_length() - 1
        )  # one program: one shape
        self.block: Block | None = None
        self.start = self.end = step
        self.loader = _Loader()
        self.leave = weakref.finalize(self, self.loader.orders.put, None)
        self.coming = self._load(step)

    def at(self, step: int) -> Block:
        """The block that holds the batch of `step`."""
        if self.block is None or step >= self.end:
            self.block = None  # frees the old one before the new one is needed
            arrays, taken = self.coming.result()
            self.start, self.end = self.end, self.end + taken
            self.batches.forget(self.start)
            self.block = Block(arrays, jnp.int32(self.start), self.stream.transform)
            self.coming = self._load(self.end)
        return self.block

    def room(self, step: int) -> int:
        """How many steps the block of `step` still has."""
        self.at(step)
        return self.end - step

    def position(self, step: int) -> Any:
        """Where the stream must go on for `step`, as JSON; None where the step number says it all."""
        return self.batches.position(step)

    def close(self) -> None:
        """Leave the thread behind; it ends with its block."""
        self.leave()
        self.loader.join(timeout=5.0)

    def _load(self, step: int) -> Future:
        count = min(self.rows, self.last - step)
        return self.loader.submit(lambda: self._blocked(step, count))

    def _blocked(self, step: int, count: int) -> tuple[PyTree, int]:
        """The batches from `step` on, and how many: `count`, or fewer if they are slow to come."""
        if count < 1:
            return None, 0
        with jax.enable_x64(self.x64):
            rows = None if self.shares is None else self.shares.rows
            stacked = self.batches.stack(step, count, rows)
            count = len(jax.tree.leaves(stacked)[0])
            fill = lambda leaf: np.zeros((self.rows - count, *leaf.shape[1:]), leaf.dtype)
            full = jax.tree.map(lambda leaf: np.concatenate([leaf, fill(leaf)]), stacked)
            full = full if count < self.rows else stacked
            spread = jax.device_put if self.shares is None else self.shares.spread
            return jax.tree.map(spread, full), count


class _Loader(threading.Thread):
    """Does one piece of work after the other. A daemon: a source that hangs must not keep the process alive.

    One thread for all blocks of a feed, since glibc would give each of many a heap of its own, and keep a block's memory in every one.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True, name="particlax-stream")
        self.orders: queue.SimpleQueue = queue.SimpleQueue()
        self.start()

    def submit(self, work: Callable[[], PyTree]) -> Future:
        """What `work` will return or raise."""
        found = Future()
        self.orders.put((found, work))
        return found

    def run(self) -> None:
        while (order := self.orders.get()) is not None:
            found, work = order
            try:
                found.set_result(work())
            except BaseException as error:
                found.set_exception(error)
            del order, found, work  # a block must not outlive its use, nor a feed its run


@functools.partial(jax.jit, static_argnums=(2, 3))
def _rows_of(key: Array, steps: Array, size: int, num: int) -> Array:
    return jax.vmap(lambda step: batch_rows(key, step, size, num))(steps)


class _Gathered:
    """Rows of arrays, shuffled as `Minibatches` shuffles them."""

    def __init__(self, stream: Stream, key: Array):
        self.leaves, self.structure = jax.tree.flatten(stream.source)
        self.dtypes = [jax.dtypes.canonicalize_dtype(leaf.dtype) for leaf in self.leaves]
        self.size, self.num = int(stream.batch_size or 0), stream.num_data
        # The row numbers are worked out on the host: a device would do it after the chunk it is busy with.
        self.host = jax.local_devices(backend="cpu")[0]
        data = np.asarray(jax.random.key_data(key))  # wherever it is, in whichever process
        self.key = jax.random.wrap_key_data(
            jax.device_put(data, self.host), impl=jax.random.key_impl(key)
        )

    def example(self) -> PyTree:
        """A batch by shape and dtype."""
        pairs = zip(self.leaves, self.dtypes, strict=True)
        shapes = [
            np.broadcast_to(np.zeros((), d), (self.size, *leaf.shape[1:])) for leaf, d in pairs
        ]
        return jax.tree.unflatten(self.structure, shapes)

    def stack(self, step: int, count: int, places: np.ndarray | None) -> PyTree:
        """The batches of `count` steps, or of those before one that is not finite, stacked: all of them, or their rows at some places."""
        with jax.default_device(self.host):
            # A power of two: few shapes to compile for.
            steps = np.arange(step, step + (1 << (count - 1).bit_length()), dtype=np.int32)
            rows = np.asarray(_rows_of(self.key, steps, self.size, self.num))[:count]
            rows = rows if places is None else rows[:, places]
        # In the order of the file, each row once: kind to disks, and all that some formats allow.
        wanted, back = np.unique(rows, return_inverse=True)
        pairs = zip(self.leaves, self.dtypes, strict=True)
        read = [
            np.asarray(leaf[wanted]).astype(dtype, copy=False)[back.reshape(rows.shape)]
            for leaf, dtype in pairs
        ]
        stacked = jax.tree.unflatten(self.structure, read)
        good = _finite_steps(stacked, step)
        return jax.tree.map(lambda leaf: leaf[:good], stacked)

    def position(self, step: int) -> Any:
        """Nothing: rows are a function of the step number."""
        return None

    def forget(self, step: int) -> None:
        """Nothing is kept."""


class _Ready:
    """Batches from an iterator, one after the other."""

    def __init__(self, source: Any, step: int, position: Any):
        made: Any = source(step) if callable(source) else source
        self.iterator: Iterator = iter(made)
        self.tells = not callable(source) and hasattr(self.iterator, "get_state")
        if not callable(source) and not (self.tells and hasattr(self.iterator, "set_state")):
            raise DataError(
                f"the stream's source is a {type(source).__name__} whose iterators have no get_state and set_state, so that no "
                "run could resume; expected arrays, a function of the step number, or a Grain dataset"
            )
        if position is not None and self.tells:
            self.iterator.set_state(_from_json(position))  # pyright: ignore
        elif self.tells and step:
            raise DataError(
                f"the run goes on from step {step}, but nothing says where its data were; resume from a checkpoint, "
                "or give px.Stream a function of the step number"
            )
        self.places: dict[int, Any] = {step: self._place()}
        self.error: Exception | None = None
        self.first = self._next(step)
        self.step = step

    def _place(self) -> Any:
        # A copy: what an iterator tells may be what it goes on counting with.
        return copy.deepcopy(self.iterator.get_state()) if self.tells else None  # pyright: ignore

    def _next(self, step: int) -> PyTree:
        try:
            batch = next(self.iterator)
        except StopIteration:
            raise DataError(
                f"the stream ended before the batch of step {step}; expected one for every step. Repeat the data, or take "
                "fewer steps"
            ) from None
        return jax.tree.map(lambda a: np.array(a, _dtype(a)), batch)  # readers reuse their buffers

    def example(self) -> PyTree:
        """The first batch."""
        num_rows(self.first)
        self.shape = _shapes(self.first)
        return self.first

    def stack(self, step: int, count: int, places: np.ndarray | None) -> PyTree:
        """The batches of `count` steps, or fewer, stacked: all of each, or its rows at some places.

        Steps need not wait for slow ones, and an error counts when it is its batch's turn.
        """
        batches, until = [], time.monotonic() + WAIT_SECONDS
        for now in range(step, step + count):
            if batches and (self.error or time.monotonic() > until):
                break
            batch = self._checked(now, wait=not batches)
            if batch is None:
                break
            own = lambda leaf: leaf if places is None else leaf[places]
            batches.append(jax.tree.map(own, batch))
            self.places[now + 1] = self._place()
        return jax.tree.map(lambda *parts: np.stack(parts), *batches)

    def _checked(self, now: int, *, wait: bool) -> PyTree:
        """The batch of a step; its error is raised if nothing came before it, and otherwise kept for the next time."""
        try:
            if self.error:
                raise self.error
            batch = self.first if now == self.step else self._next(now)
            if _shapes(batch) != self.shape:
                raise DataError(
                    f"the batch of step {now} has {_shapes(batch)[1]} but the first had {self.shape[1]}; expected batches of one "
                    "shape. Drop the remainder of an epoch"
                )
            _finite_steps(jax.tree.map(lambda leaf: leaf[None], batch), now)
            return batch
        except Exception as error:
            self.error = error
            if wait:
                raise
            return None

    def position(self, step: int) -> Any:
        """Where the iterator was before the batch of `step`."""
        return _as_json(self.places[step]) if self.tells else None

    def forget(self, step: int) -> None:
        """Drop the places before `step`."""
        for old in [place for place in self.places.copy() if place < step]:
            del self.places[old]


def _dtype(array: Any) -> np.dtype:
    return jax.dtypes.canonicalize_dtype(np.asarray(array).dtype)


def _shapes(batch: PyTree) -> Any:
    leaves, structure = jax.tree.flatten(batch)
    return structure, [f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves]


def _finite_steps(stacked: PyTree, step: int) -> int:
    """How many of the stacked batches come before one that is not finite, which is an error when it is the first."""
    count = len(jax.tree.leaves(stacked)[0])
    for path, leaf in jax.tree_util.tree_leaves_with_path(stacked):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            good = np.isfinite(leaf).reshape(len(leaf), -1).all(1)
            if not good[0]:
                raise DataError(
                    f"the batch of step {step} is not finite in the data{jax.tree_util.keystr(path)}; expected finite numbers. "
                    "Leave such rows out, or fill what is missing"
                )
            count = min(count, len(good) if good.all() else int(np.argmin(good)))
    return count


def _as_json(place: Any) -> Any:
    if isinstance(place, bytes):
        return {"bytes": place.hex()}
    try:
        return json.loads(json.dumps(place, default=lambda number: number.tolist()))  # NumPy's
    except (TypeError, ValueError, AttributeError):
        raise DataError(
            f"get_state of the stream's iterator returned {place!r}, which JSON cannot hold; expected numbers, strings, lists, dicts "
            "or bytes"
        ) from None


def _from_json(place: Any) -> Any:
    return (
        bytes.fromhex(place["bytes"])
        if isinstance(place, dict) and set(place) == {"bytes"}
        else place
    )
