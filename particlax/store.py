"""Arrays to and from a folder of checkpoints: Orbax writes and reads them, in the background, and nothing is pickled."""

import contextlib
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

from particlax.errors import CheckpointError
from particlax.folder import ARRAYS, Folder


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise CheckpointError(
            "checkpoints need Orbax; install it with: pip install 'particlax[checkpoint]'"
        ) from error
    return orbax.checkpoint


def _checkpointer() -> Any:
    # A file for each array. One database for all of them (OCDBT) would lose about a kilobyte for each array and save.
    handler = _orbax().PyTreeCheckpointHandler(use_ocdbt=False)
    return _orbax().AsyncCheckpointer(handler)


class Store:
    """Writes checkpoints, one at a time, while the run goes on."""

    def __init__(self, folder: Folder):
        self.folder = folder
        self.orbax = _checkpointer()
        self.quiet = contextlib.ExitStack()
        self.quiet.enter_context(_quiet())
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.step = -1

    def save(self, step: int, tree: PyTree, content: dict, then: Callable[[], None]) -> None:
        """Start to write `tree`; `content` goes into the manifest, `then` is called when all is on the disk."""
        self.wait()
        arrays, leaves = encode(tree)
        self.step = step
        try:
            place = (self.folder.begin(step) / ARRAYS).absolute()
            self.orbax.save(str(place), args=_orbax().args.PyTreeSave(arrays))
        except Exception as error:
            raise self._failed(error) from error
        work = lambda: self._finish(step, {**content, "leaves": leaves}, then)
        self.thread = threading.Thread(target=work, name="particlax-checkpoint")
        self.thread.start()

    def _finish(self, step: int, content: dict, then: Callable[[], None]) -> None:
        try:
            self.orbax.wait_until_finished()
            self.folder.seal(step, content)
            then()
        except BaseException as error:
            self.error = error

    def wait(self) -> None:
        """Wait for the checkpoint under way; `CheckpointError` if it could not be written."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            error, self.error = self.error, None
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> CheckpointError:
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
    return np.asarray(array) if array.is_fully_addressable else array


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
    folder: Folder, step: int, leaves: list[dict[str, Any]], like: list[Any] | None
) -> list[Any]:
    """The leaves of a verified checkpoint, placed on devices as those of `like`; without it as NumPy arrays."""
    wanted = {
        f"{number:05d}": _blank(entry) if like is None else _placed(entry, like[number])
        for number, entry in enumerate(leaves)
        if np.prod(entry["shape"])
    }
    place = (folder.home(step) / ARRAYS).absolute()
    how = _orbax().checkpoint_utils.construct_restore_args(wanted)
    with _quiet(), contextlib.closing(_checkpointer()) as orbax:
        read = orbax.restore(str(place), args=_orbax().args.PyTreeRestore(wanted, restore_args=how))
    return decode(read, leaves)


def _blank(entry: dict[str, Any]) -> np.ndarray:
    return np.broadcast_to(np.zeros((), jnp.dtype(entry["dtype"])), entry["shape"])


def _empty(entry: dict[str, Any]) -> Array:
    return jnp.zeros(entry["shape"], jnp.dtype(entry["dtype"]))


def _placed(entry: dict[str, Any], like: Any) -> jax.ShapeDtypeStruct:
    plain = jax.random.key_data(like) if _is_key(like) and isinstance(like, jax.Array) else like
    here = getattr(plain, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
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
