"""Arrays to and from a folder of checkpoints: Orbax writes and reads them, in the background, and nothing is pickled."""

import contextlib
import itertools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from particlax import heaps
from particlax.errors import CheckpointError
from particlax.folder import ARRAYS, Folder
from particlax.processes import Team

ALONE = Team()
WAIT_SECONDS = 600
"""How long processes wait for each other to write their parts of a checkpoint."""
_teams = itertools.count()


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise CheckpointError(
            "checkpoints need Orbax; install it with: pip install 'particlax[checkpoint]'"
        ) from error
    return orbax.checkpoint


def _checkpointer(team: Team) -> Any:
    """Orbax for one process alone, or for all, each of which writes and reads its own parts of arrays."""
    options = _orbax().options
    alone = {"primary_host": jax.process_index(), "active_processes": {jax.process_index()}}
    who = options.MultiprocessingOptions(**({} if team.several else alone))
    # A file for each array. One database for all of them (OCDBT) would lose about a kilobyte for each array and save.
    handler = _orbax().PyTreeCheckpointHandler(use_ocdbt=False, multiprocessing_options=who)
    # Folders made in the background are announced under numbers that two runs, each in a process of its own, would share.
    waiting = options.AsyncOptions(
        timeout_secs=WAIT_SECONDS,
        barrier_sync_fn=_barrier(who, team),
        create_directories_asynchronously=False,
    )
    return _orbax().AsyncCheckpointer(handler, async_options=waiting, multiprocessing_options=who)


def _barrier(who: Any, team: Team) -> Any:
    """Orbax's wait for the other processes, each time under another name: its own are the same for every checkpoint."""
    wait = _orbax().multihost.get_barrier_sync_fn(processes=who.active_processes)
    # Counted by what all processes do alike, not by what each does on its own.
    number, turns = next(_teams) if team.several else 0, itertools.count()

    def barrier(*, key: str, timeout_ms: int) -> None:
        wait(key=f"particlax {number} {key} {next(turns)}", timeout_ms=timeout_ms)

    return barrier


class Store:
    """Writes checkpoints, one at a time, while the run goes on."""

    def __init__(self, folder: Folder, team: Team = ALONE):
        self.folder, self.team = folder, team
        self.orbax = _checkpointer(team)
        self.quiet = contextlib.ExitStack()
        self.quiet.enter_context(_quiet())
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.step = -1

    def save(self, step: int, tree: PyTree, content: dict, then: Callable[[], None]) -> None:
        """Start to write `tree`; `content` goes into the manifest, `then` is called when all is on the disk."""
        self.wait()
        heaps.lean()
        arrays, leaves = encode(tree)
        self.step = step
        place = self.folder.unfinished(step) / ARRAYS
        self.team.by_first(self._begin)
        try:
            self.orbax.save(str(place.absolute()), args=_orbax().args.PyTreeSave(arrays))
        except Exception as error:
            raise self._failed(error) from error
        work = lambda: self._finish(step, {**content, "leaves": leaves}, then)
        self.thread = threading.Thread(target=work, name="particlax-checkpoint")
        self.thread.start()

    def _begin(self) -> None:
        try:
            self.folder.begin(self.step)
        except OSError as error:
            raise self._failed(error) from error

    def _finish(self, step: int, content: dict, then: Callable[[], None]) -> None:
        try:
            self.orbax.wait_until_finished()  # and so have all processes
            if self.team.first:
                self.folder.seal(step, content)
                then()
        except BaseException as error:
            self.error = error
        heaps.settle()

    def wait(self) -> None:
        """Wait for the checkpoint under way; `CheckpointError` if it could not be written."""
        self.team.each(self._joined)

    def _joined(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            error, self.error = self.error, None
            raise self._failed(error) from error

    def settle(self) -> None:
        """Wait without telling other processes: on the way out of an error that they may not have."""
        self._joined()

    def _failed(self, error: BaseException) -> CheckpointError:
        if self.team.first:
            self.folder.abandon(self.step)
        reason = " ".join(str(error).split()) or type(error).__name__
        # TensorStore says it in the middle of a page about where.
        if code := re.search(r"os_error_code='(\d+)'", reason):
            reason = os.strerror(int(code[1]))
        return CheckpointError(
            f"the checkpoint of step {self.step} could not be written to {self.folder.path}: {reason[:300]}"
        )

    def close(self) -> None:
        """Let Orbax go; call `wait` first."""
        with self.quiet:
            self.orbax.close()
        heaps.settle()  # a save that failed at its start has not


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Errors of Orbax come as ours, in one line, without its traceback in the log before them."""
    log, foreign = logging.getLogger("absl"), lambda record: "orbax" not in record.pathname
    log.addFilter(foreign)
    try:
        yield
    finally:
        log.removeFilter(foreign)


def _on_host(array: Array) -> Any:
    """Whole arrays as NumPy's. (Orbax asks TensorStore for statistics when it writes JAX's, which leaks memory.)"""
    whole = array.is_fully_addressable or array.is_fully_replicated
    return np.asarray(array) if whole else array


def encode(tree: PyTree) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The arrays of a tree by number, and what JSON must say about each leaf: place, shape, dtype, kind of key."""
    arrays: dict[str, Any] = {}
    leaves: list[dict[str, Any]] = []
    for number, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        plain = jax.random.key_data(leaf) if _is_key(leaf) else jnp.asarray(leaf)
        entry = {"place": [_label(key) for key in path]}
        entry |= {"shape": list(plain.shape), "dtype": str(plain.dtype)}
        if _is_key(leaf):
            entry["key"] = str(jax.random.key_impl(leaf))
        leaves.append(entry)
        if plain.size:  # Orbax refuses arrays without elements; their shape says all
            arrays[f"{number:05d}"] = _on_host(plain)
    return arrays, leaves


def decode(arrays: dict[str, Any], leaves: list[dict[str, Any]]) -> list[Any]:
    """The leaves of the tree that was encoded."""
    found = []
    for number, entry in enumerate(leaves):
        name = f"{number:05d}"
        value = arrays[name] if name in arrays else _empty(entry)
        found.append(
            jax.random.wrap_key_data(value, impl=entry["key"]) if "key" in entry else value
        )
    return found


def read(
    folder: Folder,
    step: int,
    leaves: list[dict[str, Any]],
    like: list[Any] | None,
    team: Team = ALONE,
) -> list[Any]:
    """The leaves of a verified checkpoint, placed on devices as those of `like`; without it as NumPy arrays."""
    wanted = {
        f"{number:05d}": _blank(entry) if like is None else _placed(entry, like[number])
        for number, entry in enumerate(leaves)
        if np.prod(entry["shape"])
    }
    place = (folder.home(step) / ARRAYS).absolute()
    how = _orbax().checkpoint_utils.construct_restore_args(wanted)
    with _quiet(), contextlib.closing(_checkpointer(team)) as orbax:
        read = orbax.restore(str(place), args=_orbax().args.PyTreeRestore(wanted, restore_args=how))
    return decode(read, leaves)


def _blank(entry: dict[str, Any]) -> np.ndarray:
    return np.broadcast_to(np.zeros((), jnp.dtype(entry["dtype"])), entry["shape"])


def _empty(entry: dict[str, Any]) -> Array:
    return jnp.zeros(entry["shape"], jnp.dtype(entry["dtype"]))


def _placed(entry: dict[str, Any], like: Any) -> jax.ShapeDtypeStruct:
    plain = jax.random.key_data(like) if _is_key(like) and isinstance(like, jax.Array) else like
    here = getattr(plain, "sharding", None) or jax.sharding.SingleDeviceSharding(
        jax.local_devices()[0]
    )
    return jax.ShapeDtypeStruct(entry["shape"], jnp.dtype(entry["dtype"]), sharding=here)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)


def _label(key: Any) -> list[Any]:
    """One step of the way to a leaf, as JSON: ["attr", name], ["key", key] or ["item", number]."""
    if isinstance(key, jax.tree_util.GetAttrKey):
        return ["attr", key.name]
    if isinstance(key, jax.tree_util.DictKey):
        return ["key", key.key if isinstance(key.key, (str, int)) else repr(key.key)]
    if isinstance(key, jax.tree_util.SequenceKey):
        return ["item", key.idx]
    return ["item", getattr(key, "key", 0)]
