"""Gaussian priors of networks' weights, by layer."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from particlax.blocks import wide
from particlax.checks import Part, number, positive
from particlax.errors import OptionError
from particlax.particles import by_prefix, leaf_names

__all__ = ["GaussianPrior"]

Prior = float | Mapping[str, float]


class GaussianPrior(Part):
    """log N(params; 0, variance), up to a constant; `variance` for all, or by name of a layer or leaf.

    The longest name that begins a leaf's path counts; "" stands for all others.

    >>> prior = GaussianPrior({"": 1.0, "out": 0.25})
    >>> float(prior({"dense": jnp.ones(2), "out": jnp.ones(2)}))
    -5.0
    """

    variance: Any

    def __init__(self, variance: Prior = 1.0):
        by_name = dict(variance) if isinstance(variance, Mapping) else {"": variance}
        for name, value in by_name.items():
            positive(
                f"prior variance of {name or 'all layers'!r}", value, zero=False, schedule=False
            )
        self.variance = tuple((name, number(value)) for name, value in by_name.items())

    def tempered(self, cold: float) -> "GaussianPrior":
        """`cold` times the log prior."""
        return GaussianPrior({name: value / cold for name, value in self.variance})

    def __call__(self, params: PyTree) -> Float[Array, ""]:
        leaves = jax.tree.leaves(params)
        variances = self._variances(leaf_names(params))
        squares = [
            jnp.sum(wide(leaf) ** 2) / variance
            for leaf, variance in zip(leaves, variances, strict=True)
        ]
        return -0.5 * jnp.sum(jnp.stack(squares))

    @property
    def precision(self) -> float | None:
        """1 / variance, if there is one for all: the score is then -precision * params."""
        return 1 / self.variance[0][1] if [name for name, _ in self.variance] == [""] else None

    def _variances(self, names: list[str]) -> list[float]:
        known = dict(self.variance)
        found = by_prefix(names, list(known), "the prior")
        for name, prefix in zip(names, found, strict=True):
            if prefix is None:
                raise OptionError(
                    f"the prior has no variance for {name!r}; it names {sorted(known)}. Add it, or '' for all others"
                )
        return [known[prefix] for prefix in found if prefix is not None]
