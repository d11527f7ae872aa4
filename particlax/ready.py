"""Batches that come ready-made, from an iterator: one thread asks for them, so that a slow one holds up nobody."""

import copy
import inspect
import json
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from particlax.data import held_as, refuse_wrapped
from particlax.errors import DataError, told
from particlax.target import num_rows

__all__ = ["Ready", "finite_steps"]

WAIT_SECONDS = 0.5
"""How long batches are waited for before those that have come are used, and before a run looks up."""


AHEAD = 64
"""Batches that may wait to be stacked."""


class _Come(NamedTuple):
    """A batch and where the iterator is after it, or what the iterator raised in its place."""

    batch: PyTree
    place: Any = None
    error: BaseException | None = None


class Ready:
    """Batches from an iterator, one after the other, from `step` on; `position` is where it was before that batch."""

    def __init__(self, source: Any, step: int, position: Any, x64: bool):
        self.iterator: Iterator = _begun(source, step)
        self.tells = not callable(source) and hasattr(self.iterator, "get_state")
        if not callable(source) and not (self.tells and hasattr(self.iterator, "set_state")):
            raise DataError(
                f"the stream's source is a {type(source).__name__} whose iterators have no get_state and set_state, so that no "
                "run could resume; expected arrays, a Grain dataset, or a function of the step number that returns an iterator of batches "
                "from that step on"
            )
        if position is not None and self.tells:
            self.iterator.set_state(_from_json(position))  # pyright: ignore
        elif self.tells and step:
            raise DataError(
                f"the run goes on from step {step}, but nothing says where its data were; resume from a checkpoint, "
                "or give px.Stream a function of the step number"
            )
        self.x64, self.next_step, self.ended = x64, step, threading.Event()
        self.places: dict[int, Any] = {step: self._place()}
        self.failed: BaseException | None = None
        first = self._pull(step)
        if first.error is not None:
            raise first.error
        self.first = first
        num_rows(first.batch)
        self.shape = _shapes(first.batch)

    def _place(self) -> Any:
        # A copy: what an iterator tells may be what it goes on counting with.
        return copy.deepcopy(self.iterator.get_state()) if self.tells else None  # pyright: ignore

    def _pull(self, step: int) -> _Come:
        try:
            with jax.enable_x64(self.x64):
                batch = next(self.iterator)
                refuse_wrapped(batch)
                # Readers reuse their buffers.
                batch = jax.tree.map(lambda a: np.array(a, _dtype(a)), batch)
            return _Come(batch, self._place())
        except StopIteration:
            return _Come(
                None,
                error=DataError(
                    f"the stream ended before the batch of step {step}; expected one for every step. Repeat the data, or take "
                    "fewer steps"
                ),
            )
        except BaseException as error:
            return _Come(None, error=error)

    def example(self) -> PyTree:
        """The first batch."""
        return self.first.batch

    def begin(self, room: int) -> None:
        """Start to ask for batches, some ahead of those that are stacked, but no more than `room`."""
        self.come: queue.Queue[_Come] = queue.Queue(max(1, min(room, AHEAD)))
        self.come.put(self.first)
        # A daemon: a source that hangs must not keep the process alive.
        threading.Thread(target=self._fill, daemon=True, name="particlax-batches").start()

    def end(self) -> None:
        """Ask for no more."""
        self.ended.set()

    def _fill(self) -> None:
        step = self.next_step + 1
        while not self.ended.is_set():
            come = self._pull(step)
            while not self.ended.is_set():
                try:
                    self.come.put(come, timeout=WAIT_SECONDS)
                    break
                except queue.Full:
                    pass
            if come.error is not None:
                return
            step += 1

    def stack(self, step: int, count: int, places: np.ndarray | None) -> PyTree:
        """The batches of `count` steps, or fewer, stacked: all of each, or its rows at some places.

        Steps need not wait for slow ones, and an error counts when it is its batch's turn.
        """
        batches, until = [], time.monotonic() + WAIT_SECONDS
        while len(batches) < count and (not batches or self.failed is None):
            batch = self._taken(step + len(batches), until if batches else None)
            if batch is None:
                break
            own = lambda leaf: leaf if places is None else leaf[places]
            batches.append(jax.tree.map(own, batch))
        return jax.tree.map(lambda *parts: np.stack(parts), *batches)

    def _taken(self, now: int, until: float | None) -> PyTree:
        """The batch of a step, or None if it does not come in time; its error is raised if it may be waited for, and else kept."""
        if self.failed is None:
            come = self._waited(until)
            if come is None:
                return None
            self.failed = come.error or self._wrong(now, come.batch)
            if self.failed is None:
                self.places[now + 1] = come.place
                return come.batch
        if until is None:
            raise self.failed
        return None

    def _waited(self, until: float | None) -> _Come | None:
        while True:
            left = WAIT_SECONDS if until is None else max(0.0, until - time.monotonic())
            try:
                return self.come.get(timeout=left) if left else self.come.get_nowait()
            except queue.Empty:
                if until is not None:
                    return None
                if self.ended.is_set():
                    raise DataError("the stream was closed") from None

    def _wrong(self, now: int, batch: PyTree) -> DataError | None:
        if _shapes(batch) != self.shape:
            return DataError(
                f"the batch of step {now} has {_shapes(batch)[1]} but the first had {self.shape[1]}; expected batches of one "
                "shape. Drop the remainder of an epoch"
            )
        try:
            finite_steps(jax.tree.map(lambda leaf: leaf[None], batch), now)
        except DataError as error:
            return error
        return None

    def position(self, step: int) -> Any:
        """Where the iterator was before the batch of `step`."""
        return _as_json(self.places[step]) if self.tells else None

    def forget(self, step: int) -> None:
        """Drop the places before `step`."""
        for old in [place for place in self.places.copy() if place < step]:
            del self.places[old]


def _begun(source: Any, step: int) -> Iterator:
    """An iterator of batches from that step on."""
    if not callable(source):
        return iter(source)
    wish = "expected a function of the step number that returns an iterator of batches from that step on"
    try:
        inspect.signature(source).bind(step)
    except TypeError:
        raise DataError(f"the stream's source takes {inspect.signature(source)}; {wish}") from None
    except ValueError:  # it does not say
        pass
    made = source(step)
    # Iterated over, a batch would be the names of its parts, or its rows.
    if isinstance(made, (Mapping, np.ndarray, jax.Array)) or not isinstance(made, Iterable):
        raise DataError(
            f"the stream's source returned {told(made)} for step {step}; {wish}: one batch for each step is (batch(t) for t in itertools.count(step))"
        )
    return iter(made)


def _dtype(array: Any) -> np.dtype:
    return jax.dtypes.canonicalize_dtype(np.asarray(array).dtype)


def _shapes(batch: PyTree) -> Any:
    leaves, structure = jax.tree.flatten(batch)
    return structure, [f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves]


def finite_steps(stacked: PyTree, step: int) -> int:
    """How many of the stacked batches come before one that is not finite, or whose whole numbers JAX cannot hold: an error when it is the first."""
    count = len(jax.tree.leaves(stacked)[0])
    for path, leaf in jax.tree_util.tree_leaves_with_path(stacked):
        if (held := held_as(leaf)) != leaf.dtype:
            steps, most = leaf.reshape(len(leaf), -1), np.iinfo(held)
            good = (steps.min(1) >= most.min) & (steps.max(1) <= most.max)
            if not good[0]:
                refuse_wrapped(jax.tree.map(lambda part: part[0], stacked))
            count = min(count, len(good) if good.all() else int(np.argmin(good)))
        elif jnp.issubdtype(leaf.dtype, jnp.inexact):
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
        _refuse_odd_names(place)
        return json.loads(json.dumps(place, default=lambda number: number.tolist()))  # NumPy's
    except (TypeError, ValueError, AttributeError):
        raise DataError(
            f"get_state of the stream's iterator returned {place!r}, which JSON cannot hold; expected numbers, strings, lists, dicts "
            "with strings as keys, or bytes"
        ) from None


def _refuse_odd_names(place: Any) -> None:
    """JSON would make strings of other keys, and the iterator would not know them again."""
    if isinstance(place, dict):
        if not all(isinstance(name, str) for name in place):
            raise TypeError
        place = list(place.values())
    if isinstance(place, (list, tuple)):
        for part in place:
            _refuse_odd_names(part)


def _from_json(place: Any) -> Any:
    return (
        bytes.fromhex(place["bytes"])
        if isinstance(place, dict) and set(place) == {"bytes"}
        else place
    )
