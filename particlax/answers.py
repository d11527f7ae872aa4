"""What terms and integrators hand back, checked while a step is traced: shapes that differ would otherwise broadcast."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from particlax.errors import OptionError
from particlax.terms import Term, Velocity


def answered(term: Term, found: Any, x: PyTree, memory: PyTree) -> tuple[Velocity, PyTree]:
    """What a term gave for a cloud, or a clear refusal."""
    name = type(term).__name__
    if not (type(found) is tuple and len(found) == 2 and isinstance(found[0], Velocity)):
        raise OptionError(
            f"the term {name} gave {_told(found)}; expected a pair, px.terms.Velocity(drift, noise) and its new memory (as the old "
            "one, if it keeps nothing)"
        )
    velocity, new = found
    if velocity.noise is not None and not term.noisy:
        raise OptionError(
            f"the term {name} gave noise, but is not declared to; declare it `noisy` (`noisy: ClassVar[bool] = True` in its class), so that "
            "it gets a key and integrators that would distort its noise are refused"
        )
    drift = jax.tree.map(jnp.zeros_like, x) if velocity.drift is None else velocity.drift
    for what, tree in (("drift", drift), ("noise", velocity.noise)):
        if tree is not None:
            _alike(
                f"the {what} of the term {name}",
                tree,
                x,
                "one for every particle, shaped as the cloud",
            )
    _alike(f"the memory that the term {name} gave", new, memory, "as `init` made it")
    return Velocity(drift, velocity.noise), new


def stepped(integrator: Any, found: Any, values: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
    """Where an integrator moved the particles, and its memory, or a clear refusal."""
    name = type(integrator).__name__
    if not (isinstance(found, tuple) and len(found) == 2):
        raise OptionError(
            f"the integrator {name} gave {_told(found)}; expected a pair, the particles and its new memory"
        )
    moved, new = found
    _alike(
        f"what the integrator {name} made of the particles", moved, values, "shaped as they were"
    )
    _alike(f"the memory that the integrator {name} gave", new, memory, "as `init` made it")
    return moved, new


def _alike(what: str, tree: PyTree, like: PyTree, wanted: str) -> None:
    """Refuse another structure or other shapes."""
    structures = jax.tree.structure(tree), jax.tree.structure(like)
    if structures[0] != structures[1]:
        raise OptionError(f"{what} is {structures[0]}; expected {wanted}: {structures[1]}")
    for (path, leaf), other in zip(
        jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(like), strict=True
    ):
        if jnp.shape(leaf) != jnp.shape(other):
            place = jax.tree_util.keystr(path)
            raise OptionError(
                f"{what}{' at ' * bool(place)}{place} has shape {jnp.shape(leaf)}; expected {wanted}: {jnp.shape(other)}"
            )


def _told(found: Any) -> str:
    if isinstance(found, Velocity):
        return "a Velocity alone"
    if isinstance(found, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in found)}"
    return f"{type(found).__name__}"
