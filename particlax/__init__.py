"""particlax: Bayesian sampling by moving particles, in JAX."""

from particlax import (
    checkpoints,
    diagnostics,
    diffusions,
    errors,
    integrators,
    kernels,
    metrics,
    modules,
    networks,
    particles,
    plots,
    predictive,
    schedules,
    zoo,
)
from particlax.algorithms import calibrated, pi_sgld, sghmc, sgld, svgd, w_sgld, w_sgld_b
from particlax.checkpoints import Checkpoints
from particlax.data import Minibatches
from particlax.flow import Flow
from particlax.flow import State as State
from particlax.run import Result as Result
from particlax.run import run
from particlax.sample import Sample as Sample
from particlax.sample import sample
from particlax.streams import Stream
from particlax.target import Target
from particlax.terms import Drift, Stein

__version__ = "0.1.0"

# What is made for users but not by them (Result, Sample, State) is here by name and not in the list.
__all__ = [
    "Checkpoints",
    "Drift",
    "Flow",
    "Minibatches",
    "Stein",
    "Stream",
    "Target",
    "calibrated",
    "checkpoints",
    "diagnostics",
    "diffusions",
    "errors",
    "integrators",
    "kernels",
    "metrics",
    "modules",
    "networks",
    "particles",
    "pi_sgld",
    "plots",
    "predictive",
    "run",
    "sample",
    "schedules",
    "sghmc",
    "sgld",
    "svgd",
    "w_sgld",
    "w_sgld_b",
    "zoo",
]


def __dir__() -> list[str]:
    """What is for users: the modules behind it would bury it."""
    return sorted([*__all__, "Result", "Sample", "State", "__version__"])
