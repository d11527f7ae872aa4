"""A cloud as matrices with a row for each particle."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from particlax import gpu, skinny
from particlax.particles import dimension, flatten, num_particles

__all__ = ["alone", "as_matrices", "few", "wide", "wide_type"]

FLAT_DIM = 4096
"""Largest D for which a cloud of several leaves is joined into one matrix."""
APART = 8
"""Most leaves of a cloud of few particles that a GPU kernel takes one by one."""

Blocks = list[Array]


def alone(tree: PyTree) -> list[int]:
    """Leaves that are matrices of their own.

    Small leaves are joined: one matrix in all up to FLAT_DIM coordinates, above that large leaves stay alone, and so do some small
    ones where a kernel takes them as they are.
    """
    leaves = jax.tree.leaves(tree)
    most = FLAT_DIM if dimension(tree) <= FLAT_DIM else skinny.LEAST
    if gpu.possible() and few(tree) and len(leaves) <= APART:
        most = 0
    return [i for i, leaf in enumerate(leaves) if dimension(leaf) > most]


def as_matrices(tree: PyTree) -> tuple[Blocks, Callable[[Blocks], PyTree]]:
    """A cloud as matrices with M rows, computed in at least float32, and the way back."""
    leaves, structure = jax.tree.flatten(tree)
    own = alone(tree)
    joined = [i for i in range(len(leaves)) if i not in own]
    blocks = [wide(leaves[i].reshape(leaves[i].shape[0], -1)) for i in own]
    unflatten: Any = None
    if joined:
        matrix, unflatten = flatten([wide(leaves[i]) for i in joined])
        blocks.append(matrix)

    def back(blocks: Blocks) -> PyTree:
        parts: list[Any] = list(leaves)
        for i, block in zip(own, blocks, strict=False):
            parts[i] = block.reshape(block.shape[0], *leaves[i].shape[1:])
        if joined:
            for i, part in zip(joined, unflatten(blocks[-1]), strict=True):
                parts[i] = part
        cast = [part.astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
        return jax.tree.unflatten(structure, cast)

    return blocks, back


def few(x: PyTree) -> bool:
    """Whether a cloud has so few particles in so many dimensions that `mixing` is for it."""
    return skinny.suits(num_particles(x)) and dimension(x) > FLAT_DIM


def wide(block: Array) -> Array:
    """At least float32: sums over pairs, solves and factorisations need it."""
    return block.astype(wide_type(block))


def wide_type(*arrays: Array) -> Any:
    """The type of the arrays together, or float32 if that is shorter or whole numbers."""
    kind = jnp.result_type(*arrays)
    return kind if jnp.issubdtype(kind, jnp.floating) and kind.itemsize >= 4 else jnp.float32
