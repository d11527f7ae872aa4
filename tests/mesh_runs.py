"""A small regression and its start, for the runs of tests/test_mesh.py and of the processes that it starts."""

import jax
import numpy as np

import particlax as px

STEPS = 8


def regression():
    """Forty rows of three numbers."""
    return px.Target(
        log_prior=lambda w: -0.5 * w @ w,
        log_likelihood=lambda w, batch: -((batch @ w) ** 2),
        num_data=40,
    )


regression.rows = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)


def start():
    """Eight particles."""
    return jax.random.normal(jax.random.key(0), (8, 3))
