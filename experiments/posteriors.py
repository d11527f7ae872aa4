"""Real posteriors with reference draws (from posteriordb), written once, in unconstrained coordinates.

The folder is found by an argument or by the environment variable PARTICLAX_POSTERIORDB.
"""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import beta as beta_law
from jax.scipy.stats import norm

Tree = dict[str, Any]


class Posterior(NamedTuple):
    """A log density on an unconstrained pytree, and how to read its draws."""

    name: str
    log_density: Callable[[Tree], jax.Array]
    point: Tree
    """One point, the origin: what `px.sample` starts from."""
    constrain: Callable[[Tree], jax.Array]
    """The reported parameters of one point, in the order of the reference draws."""
    unconstrain: Callable[[np.ndarray], Tree]
    """The inverse, for checking the density on reference draws."""
    names: list[str]
    mean: np.ndarray
    sd: np.ndarray
    draws: np.ndarray


def home(folder: str | None = None) -> Path | None:
    """The folder of posteriors, or None when it is not there."""
    given = folder or os.environ.get("PARTICLAX_POSTERIORDB")
    return Path(given) if given and Path(given).is_dir() else None


def half_cauchy(x: jax.Array, scale: float) -> jax.Array:
    """Log density of HalfCauchy(scale), up to a constant."""
    return -jnp.log1p((x / scale) ** 2)


def linear_regression(features: np.ndarray, y: np.ndarray, prior: Callable) -> tuple:
    """y ~ Normal(features @ beta, sigma) with `prior(beta, sigma)`, in (beta, log sigma)."""
    x, seen = jnp.asarray(features), jnp.asarray(y)

    def log_density(p: Tree) -> jax.Array:
        sigma = jnp.exp(p["log_sigma"])
        likelihood = jnp.sum(norm.logpdf(seen, x @ p["beta"], sigma))
        return likelihood + prior(p["beta"], sigma) + p["log_sigma"]

    point = {"beta": jnp.zeros(x.shape[1]), "log_sigma": jnp.zeros(())}
    return (
        log_density,
        point,
        lambda p: jnp.append(p["beta"], jnp.exp(p["log_sigma"])),
        lambda v: {"beta": v[:-1], "log_sigma": np.log(v[-1])},
    )


def kidscore(data: Tree) -> tuple:
    """kidiq-kidscore_interaction."""
    hs, iq = (np.asarray(data[k], float) for k in ("mom_hs", "mom_iq"))
    features = np.stack([np.ones_like(hs), hs, iq, hs * iq], 1)
    score = np.asarray(data["kid_score"], float)
    return linear_regression(features, score, lambda beta, sigma: half_cauchy(sigma, 2.5))


def mesquite(data: Tree) -> tuple:
    """mesquite-logmesquite."""
    logged = ("diam1", "diam2", "canopy_height", "total_height", "density")
    columns = [np.log(np.asarray(data[k], float)) for k in logged]
    group = np.asarray(data["group"], float)
    features = np.stack([np.ones_like(group), *columns, group], 1)
    weight = np.log(np.asarray(data["weight"], float))
    return linear_regression(features, weight, lambda beta, sigma: 0.0)


def sblrc(data: Tree) -> tuple:
    """sblrc-blr."""

    def prior(beta: jax.Array, sigma: jax.Array) -> jax.Array:
        return jnp.sum(norm.logpdf(beta, 0, 10)) + norm.logpdf(sigma, 0, 10)

    return linear_regression(np.asarray(data["X"], float), np.asarray(data["y"], float), prior)


def autoregression(data: Tree) -> tuple:
    """arK-arK: the same regression on lagged values."""
    y, lags = np.asarray(data["y"], float), int(data["K"])
    columns = [y[lags - k : len(y) - k] for k in range(1, lags + 1)]
    features = np.stack([np.ones(len(y) - lags), *columns], 1)

    def prior(beta: jax.Array, sigma: jax.Array) -> jax.Array:
        return jnp.sum(norm.logpdf(beta, 0, 10)) + half_cauchy(sigma, 2.5)

    return linear_regression(features, y[lags:], prior)


def eight_schools(data: Tree) -> tuple:
    """eight_schools-eight_schools_noncentered, in (z, mu, log tau)."""
    y, sigma = (jnp.asarray(data[k], float) for k in ("y", "sigma"))

    def log_density(p: Tree) -> jax.Array:
        tau = jnp.exp(p["log_tau"])
        prior = jnp.sum(norm.logpdf(p["z"])) + norm.logpdf(p["mu"], 0, 5)
        likelihood = jnp.sum(norm.logpdf(y, p["mu"] + tau * p["z"], sigma))
        return likelihood + prior + half_cauchy(tau, 5.0) + p["log_tau"]

    def constrain(p: Tree) -> jax.Array:
        tau = jnp.exp(p["log_tau"])
        return jnp.concatenate([p["mu"] + tau * p["z"], jnp.stack([p["mu"], tau])])

    def unconstrain(v: np.ndarray) -> Tree:
        return {"z": (v[:-2] - v[-2]) / v[-1], "mu": v[-2], "log_tau": np.log(v[-1])}

    point = {"z": jnp.zeros(len(y)), "mu": jnp.zeros(()), "log_tau": jnp.zeros(())}
    return log_density, point, constrain, unconstrain


def garch(data: Tree) -> tuple:
    """garch-garch11, in (mu, log alpha0, logit alpha1, logit of beta1 / (1 - alpha1))."""
    y, first = jnp.asarray(data["y"], float), float(data["sigma1"])

    def natural(p: Tree) -> tuple[jax.Array, ...]:
        alpha1 = jax.nn.sigmoid(p["a"])
        return p["mu"], jnp.exp(p["log_alpha0"]), alpha1, (1 - alpha1) * jax.nn.sigmoid(p["b"])

    def log_density(p: Tree) -> jax.Array:
        mu, alpha0, alpha1, beta1 = natural(p)

        def after(variance: jax.Array, previous: jax.Array) -> tuple[jax.Array, jax.Array]:
            new = alpha0 + alpha1 * (previous - mu) ** 2 + beta1 * variance
            return new, new

        start = jnp.asarray(first**2, mu.dtype)
        _, variances = jax.lax.scan(after, start, y[:-1].astype(mu.dtype))
        sds = jnp.sqrt(jnp.concatenate([start[None], variances]))
        jacobian = p["log_alpha0"] + jnp.log(alpha1) + 2 * jnp.log1p(-alpha1)
        jacobian += jax.nn.log_sigmoid(p["b"]) + jax.nn.log_sigmoid(-p["b"])
        return jnp.sum(norm.logpdf(y, mu, sds)) + jacobian

    def unconstrain(v: np.ndarray) -> Tree:
        share = v[3] / (1 - v[2])
        logit = lambda q: np.log(q / (1 - q))
        return {"mu": v[0], "log_alpha0": np.log(v[1]), "a": logit(v[2]), "b": logit(share)}

    point = {name: jnp.zeros(()) for name in ("mu", "log_alpha0", "a", "b")}
    return log_density, point, lambda p: jnp.stack(natural(p)), unconstrain


def gp_poisson(data: Tree) -> tuple:
    """gp_pois_regr-gp_pois_regr, in (log rho, log alpha, z)."""
    x, k = jnp.asarray(data["x"], float), jnp.asarray(data["k"], float)
    gaps = (x[:, None] - x[None, :]) ** 2

    def factor(rho: Any, alpha: Any) -> jax.Array:
        # The model's 1e-10 on the diagonal is below float32's reach; 1e-6 alpha^2 moves nothing visible.
        jitter = 1e-10 if gaps.dtype == jnp.float64 else 1e-6 * alpha**2
        covariance = alpha**2 * jnp.exp(-gaps / (2 * rho**2)) + jitter * jnp.eye(len(x))
        return jnp.linalg.cholesky(covariance)

    def constrain(p: Tree) -> jax.Array:
        rho, alpha = jnp.exp(p["log_rho"]), jnp.exp(p["log_alpha"])
        return jnp.concatenate([jnp.stack([rho, alpha]), factor(rho, alpha) @ p["z"]])

    def log_density(p: Tree) -> jax.Array:
        values = constrain(p)
        rho, alpha, f = values[0], values[1], values[2:]
        prior = 24 * p["log_rho"] - 4 * rho - 0.5 * (alpha / 2) ** 2 + jnp.sum(norm.logpdf(p["z"]))
        return prior + jnp.sum(k * f - jnp.exp(f)) + p["log_rho"] + p["log_alpha"]

    def unconstrain(v: np.ndarray) -> Tree:
        z = np.linalg.solve(np.asarray(factor(v[0], v[1]), float), v[2:])
        return {"log_rho": np.log(v[0]), "log_alpha": np.log(v[1]), "z": z}

    point = {"log_rho": jnp.zeros(()), "log_alpha": jnp.zeros(()), "z": jnp.zeros(len(x))}
    return log_density, point, constrain, unconstrain


def mixture(data: Tree) -> tuple:
    """low_dim_gauss_mix, in (mu1, log(mu2 - mu1), log sigma, logit theta)."""
    y = jnp.asarray(data["y"], float)

    def natural(p: Tree) -> tuple[jax.Array, jax.Array, jax.Array]:
        mu = jnp.stack([p["mu1"], p["mu1"] + jnp.exp(p["log_gap"])])
        return mu, jnp.exp(p["log_sigma"]), jax.nn.sigmoid(p["logit"])

    def log_density(p: Tree) -> jax.Array:
        mu, sigma, theta = natural(p)
        parts = norm.logpdf(y[:, None], mu, sigma) + jnp.log(jnp.stack([theta, 1 - theta]))
        likelihood = jnp.sum(jax.nn.logsumexp(parts, axis=1))
        prior = jnp.sum(norm.logpdf(mu, 0, 2)) + jnp.sum(norm.logpdf(sigma, 0, 2))
        prior += beta_law.logpdf(theta, 5, 5) + jnp.log(theta) + jnp.log1p(-theta)
        return likelihood + prior + p["log_gap"] + jnp.sum(p["log_sigma"])

    def unconstrain(v: np.ndarray) -> Tree:
        return {
            "mu1": v[0],
            "log_gap": np.log(v[1] - v[0]),
            "log_sigma": np.log(v[2:4]),
            "logit": np.log(v[4] / (1 - v[4])),
        }

    def constrain(p: Tree) -> jax.Array:
        mu, sigma, theta = natural(p)
        return jnp.concatenate([mu, sigma, theta[None]])

    point = {"mu1": jnp.zeros(()), "log_gap": jnp.zeros(()), "log_sigma": jnp.zeros(2)}
    return log_density, {**point, "logit": jnp.zeros(())}, constrain, unconstrain


MODELS: dict[str, Callable[[Tree], tuple]] = {
    "arK-arK": autoregression,
    "eight_schools-eight_schools_noncentered": eight_schools,
    "garch-garch11": garch,
    "gp_pois_regr-gp_pois_regr": gp_poisson,
    "kidiq-kidscore_interaction": kidscore,
    "low_dim_gauss_mix-low_dim_gauss_mix": mixture,
    "mesquite-logmesquite": mesquite,
    "sblrc-blr": sblrc,
}


def load(name: str, folder: Path) -> Posterior:
    """One posterior with its reference."""
    data = json.loads(gzip.decompress((folder / name / "data.json.gz").read_bytes()))
    reference = json.loads((folder / name / "reference_summary.json").read_text())
    stored = np.load(folder / name / "reference_draws.npz")
    mean, sd = (np.asarray(reference[key], float) for key in ("mean", "sd"))
    names = [str(entry) for entry in stored["names"]]
    log_density, point, constrain, unconstrain = MODELS[name](data)
    reading = (log_density, point, constrain, unconstrain)
    return Posterior(name, *reading, names, mean, sd, stored["draws"])
