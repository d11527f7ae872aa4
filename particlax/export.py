"""Results for other tools."""

import warnings
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from particlax.errors import OptionError

__all__ = ["to_arviz"]


def to_arviz(particles: PyTree, history: PyTree = None) -> Any:
    """Particles as ArviZ data: one chain of M draws; with history (axis 0 time), M chains over time.

    Leaves become variables named by their path. Particles of an interacting flow are not independent
    draws of a chain: read its R-hat and ESS with that in mind.
    """
    try:
        import arviz
    except ImportError:
        raise OptionError(
            "to_arviz needs the arviz package, which is not installed; pip install particlax[arviz]"
        ) from None
    tree = particles if history is None else history
    leaves = jax.tree_util.tree_leaves_with_path(tree)

    def draws(leaf: Any) -> np.ndarray:
        leaf = np.asarray(leaf)
        return leaf[None] if history is None else np.swapaxes(leaf, 0, 1)

    posterior: dict = {_variable(path): draws(leaf) for path, leaf in leaves}
    with warnings.catch_warnings():  # more chains than draws is the usual case here
        warnings.filterwarnings("ignore", "More chains|Found chain dimension", UserWarning)
        if int(arviz.__version__.split(".")[0]) >= 1:
            return arviz.from_dict({"posterior": posterior})
        return arviz.from_dict(posterior=posterior)


def _variable(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".") or "x"
