"""Clouds that a run keeps along the way."""

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, Int, PyTree

from particlax import placement
from particlax.checks import whole
from particlax.engine import kept
from particlax.errors import OptionError, told
from particlax.flow import State

__all__ = ["History"]

EMPTY = (
    "the history has no clouds: the run took no step that `thin` divides; expected thin <= steps"
)
HISTORY_BYTES = 1 << 26
"""Size of the device buffer that collects history between two looks."""


class History(eqx.Module):
    """Clouds kept along the way; axis 0 is time."""

    steps: Int[np.ndarray, " T"]
    particles: PyTree[Float[np.ndarray, "T M ..."]]
    carried: PyTree = ()
    """What the particles carried then, such as batch-norm statistics; leading axes T and M."""

    def last(self, num: int) -> "History":
        """The last `num` clouds."""
        whole("num", num, 1)
        if not len(self.steps):
            raise OptionError(EMPTY)
        if num > len(self.steps):
            raise OptionError(
                f"last({num}) of a history of {len(self.steps)} clouds; expected at most {len(self.steps)}"
            )
        return self[-num:]

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: slice) -> "History":
        """Some of the clouds, by a slice: history[100:], history[::2]."""
        if not isinstance(index, slice):
            raise OptionError(
                f"the index is {told(index)}; expected a slice of clouds, as history[100:]. One cloud is history.particles at that place"
            )
        return jax.tree.map(lambda leaf: leaf[index], self)


class Keeper:
    """Collects every `thin`-th cloud on the host, from device buffers of bounded size."""

    def __init__(self, state: State, thin: int | None, steps: int):
        cloud = sum(leaf.nbytes for leaf in jax.tree.leaves(kept(state)))
        self.thin = thin or 0
        self.rows = 0
        if thin:  # powers of two: few sizes, few compilations
            wanted, room = max(1, -(-steps // thin)), max(1, HISTORY_BYTES // max(cloud, 1))
            self.rows = 1 << min((wanted - 1).bit_length(), room.bit_length() - 1)
        self.steps: list[np.ndarray] = []
        self.clouds: list[PyTree] = []
        self.like = kept(state) if thin else None

    def room(self, step: int) -> int:
        return self.rows * self.thin - step % self.thin if self.thin else 1 << 30

    def keep(self, start: int, size: int, buffer: PyTree) -> None:
        if not self.thin:
            return
        steps = np.arange(start + 1, start + size + 1, dtype=np.int64)
        steps = steps[steps % self.thin == 0]
        self.steps.append(steps)
        self.clouds.append(jax.tree.map(lambda rows: placement.on_host(rows[: len(steps)]), buffer))

    def history(self) -> History | None:
        if not self.thin:
            return None
        if not self.clouds:
            empty = jax.tree.map(lambda a: np.zeros((0, *a.shape), a.dtype), self.like)
            return History(np.zeros(0, np.int64), *empty)
        clouds = jax.tree.map(lambda *parts: np.concatenate(parts), *self.clouds)
        return History(np.concatenate(self.steps), *clouds)
