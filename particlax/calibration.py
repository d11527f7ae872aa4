"""Calibration: make a cloud's own diffusion force satisfy what every density satisfies.

Every density mu satisfies E[-grad log mu(x) phi(x)] = E[grad phi(x)] for smooth test functions phi. A force t
that stands for -grad log mu is corrected until this holds on the cloud, for a class of phi:

- `calibrated`: phi linear. Centre t and multiply it by the inverse of C = 1/M sum_i t_i (x_i - m)^T.
- `matched`: phi linear, exactly, and phi in the kernel's space, up to a ridge. Score matching
  (Hyvärinen 2005) of t + g over g = b + A x + sum_j K(x, x_j) w_j, whose linear part is free.

Where the force then balances the drift, Stein's identity holds for these phi, so on a Gaussian target the cloud has
exactly the target's mean and covariance. The first amplifies whatever shape t has, and on skewed targets spreads
too far; the second adds the shape that is missing.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from particlax import medians, pairwise, sharding
from particlax.blocks import wide
from particlax.errors import OptionError, ParticleError
from particlax.pairwise import matmul
from particlax.particles import dimension, flatten, num_particles

__all__ = ["calibrated", "matched"]

WIDTH = 4.0
"""Bandwidth of the test functions over the median of squared distances: wide, they bend slowly."""
RIDGE = 1e-4
JITTER = 1e-6
"""Added to K's diagonal, so that it can be factored."""


def calibrated(force: PyTree, x: PyTree) -> PyTree:
    """C^-1 (t_i - mean t) with C = 1/M sum_i t_i (x_i - m)^T.

    >>> x = jax.random.normal(jax.random.key(0), (50, 3))
    >>> t = calibrated(jnp.tanh(x), x)
    >>> bool(jnp.allclose(t.T @ (x - x.mean(0)) / 50, jnp.eye(3), atol=1e-5))
    True
    """
    matrix, unflatten = flatten(force)
    matrix, points = wide(matrix), wide(flatten(x)[0])
    matrix, points = _centred(matrix), _centred(points)
    moment = matmul(matrix.T, points) / len(points)
    return unflatten(sharding.by_rows(lambda rows: jnp.linalg.solve(moment, rows.T).T, matrix))


def matched(force: PyTree, x: PyTree) -> PyTree:
    """t + g, with the g of the module's class that matches the score of the cloud best.

    g minimises 1/M sum_i |t_i + g_i|^2 - 2 div(t + g)_i + RIDGE/M |w|_K^2; the divergence of t does not enter.
    In whitened coordinates z, with `off` the residual of the regression on [1, z], R R^T = K, and
    psi = off(R): t' = z + off(t) + psi u, (psi^T psi + RIDGE) u / M = R^-1 mean grad K - R^T (z + off(t)) / M.

    >>> x = jax.random.normal(jax.random.key(0), (50, 3))
    >>> t = matched(jnp.tanh(x), x)
    >>> bool(jnp.allclose(t.T @ (x - x.mean(0)) / 50, jnp.eye(3), atol=1e-4))
    True
    """
    matrix, unflatten = flatten(force)
    return unflatten(sharding.together(_matched, matrix, flatten(x)[0], rows=True))


def _centred(a: Array) -> Array:
    return a - a.mean(0, keepdims=True)


def _matched(matrix: Float[Array, "M D"], points: Float[Array, "M D"]) -> Float[Array, "M D"]:
    points = wide(points)
    root = math.sqrt(len(points))
    points = _centred(points)
    # Once more: a mean far from zero is rounded by more than a narrow cloud can bear.
    q, r = jnp.linalg.qr(_centred(points))
    z, factor = root * q, r / root  # x - m = z factor
    t = matmul(wide(matrix), factor.T)  # a force is a gradient: it is mapped by the transpose
    h = WIDTH * medians.median_sqdist(z)
    # What float32 rounds off in K comes back ten thousand times as large; a cloud's own rounding does not.
    with jax.enable_x64(True):
        double = [lax.convert_element_type(a, jnp.float64) for a in (t, z, h)]
        t = lax.convert_element_type(_white(*double), t.dtype)
    return jax.scipy.linalg.solve_triangular(factor, t.T).T


def _white(
    t: Float[Array, "M D"], z: Float[Array, "M D"], h: Float[Array, ""]
) -> Float[Array, "M D"]:
    num = len(z)

    def off(a: Array) -> Array:
        return _centred(a) - matmul(z, matmul(z.T, a)) / num

    # K needs to be seen as a matrix here, to be factored: M is small where this is used.
    r2 = pairwise.sqdist(z, z)
    kernel = jnp.exp(-r2 / h)
    rest = off(t)
    slope = (2 / h) * (kernel.sum(1)[:, None] * z - matmul(kernel, z)) / num
    lower = jnp.linalg.cholesky(kernel + JITTER * jnp.eye(num, dtype=z.dtype))
    psi = off(lower)
    normal = matmul(psi.T, psi) / num + (RIDGE / num) * jnp.eye(num, dtype=z.dtype)
    loads = jax.scipy.linalg.solve_triangular(lower, slope, lower=True)
    loads = loads - matmul(lower.T, z + rest) / num
    weights = jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(normal, lower=True), loads)
    # `off` once more: rounding must not touch the linear identities.
    return z + rest + off(matmul(psi, weights))


def as_calibration(value: Any) -> Any:
    """Refuse what is not False, True (or "linear") or "matched"."""
    if not (isinstance(value, bool) or value in ("linear", "matched")):
        raise OptionError(
            f'calibrate is {value!r}; expected False, True (the linear one) or "matched" (safe on skewed targets)'
        )
    return value


def apply(kind: bool | str, force: PyTree, x: PyTree) -> PyTree:
    """The force, calibrated as `kind` says."""
    if not kind:
        return force
    return matched(force, x) if kind == "matched" else calibrated(force, x)


def check(kind: bool | str, particles: PyTree) -> None:
    """Refuse clouds with too few particles to calibrate on."""
    num, dim = num_particles(particles), dimension(particles)
    needed = dim + 2 if kind == "matched" else dim + 1
    if kind and num < needed:
        shown = "True" if kind is True else repr(kind)
        raise ParticleError(
            f"calibrate={shown} needs more particles than coordinates but there are {num} particles in "
            f"D = {dim}; give at least {needed} particles or use calibrate=False"
        )
