"""Small runs that tests/test_mesh.py and the processes that it starts have in common."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import particlax as px
from particlax.placement import on_host

STEPS = 8
ROWS = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
STEPPING = {name: {"step_size": 0.01} for name in ("sgld", "sghmc")} | {"calibrated": {}}


def regression():
    """Forty rows of three numbers."""
    return px.Target(
        log_prior=lambda w: -0.5 * w @ w,
        log_likelihood=lambda w, batch: -((batch @ w) ** 2),
        num_data=40,
    )


def start():
    """Eight particles for it."""
    return jax.random.normal(jax.random.key(0), (8, 3))


def target():
    return px.Target(lambda x: -0.5 * jnp.sum(jnp.cosh(x["w"])) - 0.5 * jnp.sum(x["b"] ** 2))


def cloud(num, dim):
    keys = jax.random.split(jax.random.key(22))
    return {
        "w": jax.random.normal(keys[0], (num, 1, dim - 1)),
        "b": jax.random.normal(keys[1], (num,)),
    }


def sampler(name):
    stepping = STEPPING.get(name, {"optimizer": optax.adam(0.01)})
    return getattr(px.algorithms, name)(target(), **stepping)


def special_runs():
    """By name: flow and particles, and options of the run."""
    layers = px.svgd(target(), step_size=0.01, kernel=px.kernels.LayerWise())
    apply = lambda x, rows: rows @ x["w"][0] + x["b"]
    functions = px.networks.FunctionSpace(apply, px.Minibatches(ROWS, 10))
    spread = px.Flow(target(), (px.Drift(), functions), px.integrators.Euler(0.01))
    cliff = px.Target(lambda x: jnp.where(x[0] > 0.5, jnp.nan, -0.5 * jnp.sum(x**2)))
    low = -1 + 0.5 * jax.random.normal(jax.random.key(3), (8, 2))
    return {
        "layers": ((layers, cloud(16, 4)), {}),
        "functions": ((spread, cloud(16, 4)), {}),
        "mended": ((px.sgld(cliff, step_size=0.1), low), {"steps": 30, "on_nonfinite": "replace"}),
    }


def go(flow, particles, mesh=None, steps=5, **options):
    key = jax.random.key(1)
    return px.run(flow, particles, steps=steps, key=key, progress=False, mesh=mesh, **options)


def gap(one, many):
    """The largest difference of two results, which must have replaced the same particles."""
    assert one.replaced == many.replaced
    pairs = zip(jax.tree.leaves(one.state), jax.tree.leaves(many.state), strict=True)
    return max(float(np.max(np.abs(np.asarray(a) - on_host(b)))) for a, b in pairs)
