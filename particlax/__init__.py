"""particlax: Bayesian sampling by moving particles, in JAX."""

from particlax import (
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
from particlax.data import Minibatches
from particlax.flow import Flow, State
from particlax.run import Result, run
from particlax.sample import Sample, sample
from particlax.target import Target
from particlax.terms import Drift, Stein

__version__ = "0.1.0"

__all__ = [
    "Drift",
    "Flow",
    "Minibatches",
    "Result",
    "Sample",
    "State",
    "Stein",
    "Target",
    "calibrated",
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
