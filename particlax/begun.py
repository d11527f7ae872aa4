"""Where a run begins, and a run that saves nothing."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from particlax import placement
from particlax.engine import Replaced
from particlax.errors import NonFiniteError
from particlax.flow import State
from particlax.particles import num_particles
from particlax.placement import Layout

__all__ = ["Begun", "NoSaver", "fresh"]


class Begun(NamedTuple):
    """Where a run starts: at the beginning, or where a checkpoint left it."""

    state: State
    log_density: Array
    replaced: list[Replaced]
    position: Any = None
    stopped: bool = False
    """Whether an observer has ended the run already."""
    observed: bool = True
    """Whether observers have seen it, and not raised."""


def fresh(state: State, layout: Layout | None = None) -> Begun:
    """The beginning."""
    with jax.debug_nans(False):  # this NaN is none that a program made
        unknown = jnp.full(num_particles(state.particles), jnp.nan, jnp.result_type(float))
        return Begun(state, placement.rows(layout, unknown), [])


class NoSaver:
    """A run without checkpoints."""

    steps = 0

    def __init__(self, layout: Layout | None = None):
        self.layout = layout

    def __enter__(self) -> "NoSaver":
        return self

    def __exit__(self, *error: Any) -> None:
        """Nothing is open."""

    def begin(self, config: Any, state: State, last: int, *, watched: bool) -> Begun:
        """The beginning, always."""
        return fresh(state, self.layout)

    def room(self, step: int) -> int:
        """Any number of steps."""
        return 1 << 30

    def look(self, begun: Begun, *, end: bool, snapshot: Callable[[], Any]) -> None:
        """Nothing to save."""

    def explained(self, error: NonFiniteError) -> NonFiniteError:
        """The error as it is."""
        return error

    def rescue(self, error: BaseException, begun: Begun) -> None:
        """Nowhere to save to."""

    def seen(self, begun: Begun, snapshot: Callable[[], Any]) -> None:
        """Nowhere to note it."""

    def again(self) -> str:
        """How to go on after another process was lost."""
        return "Run the same command again in all processes; with checkpoint='a folder' it would go on where it was"
