"""Bayesian logistic regression on Covertype as in Liu & Wang (2016).

w | alpha ~ N(0, 1/alpha), alpha ~ Gamma(1, 0.01) (shape and rate), sampled as log alpha; class 2 against the rest; each feature
scaled to [0, 1] and a constant added; a random 80 % of the rows to train on. Particles start from the prior.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import particlax as px
from experiments import datasets

SHAPE, RATE = 1.0, 0.01
SYNTHETIC = {"synthetic": (5000, 8), "shaped": (581_012, 54)}
"""Rows and features of data that need no download: few to try things out, or as many as Covertype's."""


class Problem(NamedTuple):
    """One random split: rows `x` [n, d] with a last column of ones, labels `y` 0 or 1."""

    target: px.Target
    train: dict[str, jax.Array]
    test: dict[str, jax.Array]

    @property
    def num_data(self) -> int:
        """Training rows."""
        return len(self.train["y"])

    @property
    def dim(self) -> int:
        """Weights, the constant's included."""
        return self.train["x"].shape[1]


@functools.cache
def table(source: str) -> tuple[np.ndarray, np.ndarray]:
    """Scaled rows and labels of `covertype`, or of one of the synthetic sets."""
    if source == "covertype":
        raw = datasets.covertype()
        low, high = raw.x.min(0), raw.x.max(0)
        scaled = (raw.x - low.astype(np.float32)) / np.maximum(high - low, 1).astype(np.float32)
        label = (raw.y == 2).astype(np.float32)
    elif source in SYNTHETIC:
        num, dim = SYNTHETIC[source]
        rng = np.random.default_rng(0)
        scaled = rng.uniform(size=(num, dim)).astype(np.float32)
        logit = (scaled - 0.5) @ rng.normal(0, 3, dim)
        label = (rng.uniform(size=num) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    else:
        raise SystemExit(
            f"--data={source}: expected covertype or synthetic; or shaped, as many synthetic rows as Covertype has"
        )
    return np.hstack([scaled, np.ones((len(scaled), 1), np.float32)]), label


@functools.lru_cache(maxsize=8)
def problem(source: str, seed: int, rows: int = 0) -> Problem:
    """The split of a seed; with `rows`, only so many of its training rows."""
    x, y = table(source)
    order = np.random.default_rng(seed).permutation(len(x))
    held = len(x) // 5
    kept = order[held : held + rows] if rows else order[held:]
    train, test = (
        {"x": jnp.asarray(x[some]), "y": jnp.asarray(y[some])} for some in (kept, order[:held])
    )
    return Problem(target(len(kept)), train, test)


@functools.cache
def target(num_data: int) -> px.Target:
    """The posterior."""
    return px.Target(log_prior=log_prior, log_likelihood=log_likelihood, num_data=num_data)


def log_prior(p: dict[str, jax.Array]) -> jax.Array:
    """Of w and log alpha; the Jacobian of the logarithm turns alpha's power SHAPE - 1 into SHAPE."""
    alpha, w = jnp.exp(p["log_alpha"]), p["w"]
    normal = 0.5 * w.size * p["log_alpha"] - 0.5 * alpha * jnp.sum(w * w)
    return normal + SHAPE * p["log_alpha"] - RATE * alpha


@jax.custom_jvp
def softplus(z: jax.Array) -> jax.Array:
    """log(1 + exp(z)). JAX differentiates it by way of its value, which costs several times its derivative, the sigmoid.

    Values are added up, so log1p, which is slower and closer only for values next to nothing, would not make the sum more exact.
    """
    return jnp.maximum(z, 0) + jnp.log(1 + jnp.exp(-jnp.abs(z)))


softplus.defjvps(lambda tangent, value, z: tangent * jax.nn.sigmoid(z))


def log_likelihood(p: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """Of each row."""
    logit = batch["x"] @ p["w"]
    return batch["y"] * logit - softplus(logit)


def start(key: jax.Array, num: int, dim: int) -> dict[str, jax.Array]:
    """Particles from the prior."""
    first, second = jax.random.split(key)
    alpha = jax.random.gamma(first, SHAPE, (num,)) / RATE
    w = jax.random.normal(second, (num, dim)) / jnp.sqrt(alpha)[:, None]
    return {"w": w, "log_alpha": jnp.log(alpha)}


@jax.jit
def predict(w: jax.Array, test: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Test accuracy and mean log-likelihood of the mixture of the particles' predictions."""
    logit = jnp.matmul(test["x"], w.T, precision="highest")
    one, zero = (
        jax.nn.logsumexp(jax.nn.log_sigmoid(sign * logit), axis=1) - jnp.log(len(w))
        for sign in (1, -1)
    )
    is_one = test["y"] == 1
    right = (one > zero) == is_one
    return {
        "accuracy": jnp.mean(right),
        "log_likelihood": jnp.mean(jnp.where(is_one, one, zero)),
    }


class Normal(NamedTuple):
    """A Gaussian approximation of the posterior of w."""

    mean: np.ndarray
    covariance: np.ndarray

    def draws(self, num: int, seed: int) -> np.ndarray:
        """Independent draws."""
        rng = np.random.default_rng(seed)
        return rng.multivariate_normal(self.mean, self.covariance, num, method="cholesky")


@functools.lru_cache(maxsize=1)
def laplace(source: str, seed: int, rows: int = 0) -> Normal:
    """The Laplace approximation at the mode over w and log alpha, by Newton's method in float64."""
    split = problem(source, seed, rows)
    x, y = np.asarray(split.train["x"], float), np.asarray(split.train["y"], float)
    at = np.zeros(split.dim + 1)
    for _ in range(100):
        w, alpha = at[:-1], np.exp(at[-1])
        chance = 1 / (1 + np.exp(-(x @ w)))
        curve = np.empty((len(at), len(at)))
        curve[:-1, :-1] = (x * (chance * (1 - chance))[:, None]).T @ x + alpha * np.eye(len(w))
        curve[:-1, -1] = curve[-1, :-1] = alpha * w
        curve[-1, -1] = alpha * (w @ w / 2 + RATE)
        slope = np.append(x.T @ (y - chance) - alpha * w, len(w) / 2 + SHAPE - curve[-1, -1])
        # Far from the mode the curvature may not be positive: then leave out how w and alpha mix.
        if np.linalg.eigvalsh(curve)[0] <= 0:
            curve[:-1, -1] = curve[-1, :-1] = 0
        step = np.linalg.solve(curve, slope)
        at = at + step * min(1, 3 / np.abs(step).max())
        if np.abs(step).max() < 1e-8:
            return Normal(at[:-1], np.linalg.inv(curve)[:-1, :-1])
    raise RuntimeError("Newton's method did not converge in 100 steps")
