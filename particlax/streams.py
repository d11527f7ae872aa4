"""Data larger than memory: batches gathered on the host by a thread, a chunk of steps ahead of the device."""

import functools
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Key, PyTree

from particlax.checks import whole
from particlax.data import batch_rows, check_batch, refuse_batches, transformed
from particlax.errors import DataError, known_options
from particlax.placement import Layout
from particlax.ready import WAIT_SECONDS, Ready, finite_steps
from particlax.sharding import Shares
from particlax.target import num_rows

__all__ = ["Stream"]

STREAM_BYTES = 1 << 26
"""Size of the batches that go to the device at once; two such blocks are in memory, one in use and one to come."""
LONGEST = 4096
"""Most steps of one block."""


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
            refuse_batches(source)
            self.source = source = jax.tree.map(_by_position, source)
            if batch_size is None:
                raise DataError(
                    "px.Stream got arrays and no batch_size; expected px.Stream(arrays, 100). Batches that are ready come from a function of the step "
                    "at which to begin: px.Stream(lambda step: iter(batches[step:]), num_data=N)"
                )
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


def _by_position(leaf: Any) -> Any:
    """An array whose rows are taken by their number: pandas takes them by label. Types of others than NumPy are made its own."""
    try:
        np.dtype(leaf.dtype)
    except (AttributeError, TypeError):
        return np.asarray(leaf)
    return np.asarray(leaf) if hasattr(leaf, "iloc") else leaf


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
        # Threads start without the settings of the one that made them.
        self.x64 = bool(jax.config.jax_enable_x64)  # pyright: ignore
        self.batches = (
            Ready(stream.source, step, position, self.x64)
            if stream.ready_made
            else _Gathered(stream, key)
        )
        self.example = self.batches.example()
        self.shares = None if layout is None else Shares(layout, num_rows(self.example))
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(self.example))
        room, wanted = max(1, STREAM_BYTES // max(size, 1)), max(1, min(total, LONGEST))
        self.rows = 1 << min(
            (wanted - 1).bit_length(), room.bit_length() - 1
        )  # one program: one shape
        self.block: Block | None = None
        self.start = self.end = step
        self.batches.begin(self.rows)
        self.loader = _Loader()
        self.leave = weakref.finalize(self, _end, self.loader, self.batches)
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
        """How many steps the block of `step` still has; 0 if it is slow to come."""
        if (self.block is None or step >= self.end) and not wait([self.coming], WAIT_SECONDS).done:
            return 0
        self.at(step)
        return self.end - step

    def position(self, step: int) -> Any:
        """Where the stream must go on for `step`, as JSON; None where the step number says it all."""
        return self.batches.position(step)

    def close(self) -> None:
        """Leave the threads behind; they end with what they are at."""
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


def _end(loader: _Loader, batches: Any) -> None:
    batches.end()
    loader.orders.put(None)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _rows_of(key: Array, steps: Array, size: int, num: int) -> Array:
    rows = lambda step: batch_rows(key, step, size, num)
    # Other generators than Threefry draw for several keys at once what they draw for none of them alone.
    alike = str(jax.random.key_impl(key)) == "threefry2x32"
    return jax.vmap(rows)(steps) if alike else lax.map(rows, steps)


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
        read = []
        for leaf, dtype in zip(self.leaves, self.dtypes, strict=True):
            found = np.asarray(leaf[wanted])
            # Whole numbers are looked at before they are cut, others after.
            with np.errstate(over="ignore"):  # such numbers are not finite then, which is said
                found = found if found.dtype.kind in "iu" else found.astype(dtype, copy=False)
            read.append(found[back.reshape(rows.shape)])
        good = finite_steps(jax.tree.unflatten(self.structure, read), step)
        held = [
            rows[:good].astype(d, copy=False) for rows, d in zip(read, self.dtypes, strict=True)
        ]
        return jax.tree.unflatten(self.structure, held)

    def position(self, step: int) -> Any:
        """Nothing: rows are a function of the step number."""
        return None

    def forget(self, step: int) -> None:
        """Nothing is kept."""

    def begin(self, room: int) -> None:
        """Nothing to start."""

    def end(self) -> None:
        """Nothing to end."""
