"""Analytic targets with reference samples: the paper's four 2-D densities and classic test cases.

Every density has `log_density(x)` for one point, `sample(key, num)` for reference draws, the true `mean` and
`covariance`, and a partition into named `regions` (its modes, or stretches of a ridge) with true `shares`.

>>> import particlax as px
>>> target = px.Target(px.zoo.Banana().log_density)
"""

import abc
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from particlax.errors import OptionError

__all__ = [
    "U1",
    "U2",
    "U3",
    "U4",
    "Banana",
    "Density",
    "Funnel",
    "Gaussian",
    "GaussianMixture",
    "LogGamma",
    "StudentT",
]


class Density(abc.ABC):
    """A log density with known answers."""

    dim: int
    regions: tuple[str, ...] = ("all",)

    @abc.abstractmethod
    def log_density(self, x: Float[Array, " D"]) -> Float[Array, ""]:
        """The unnormalised log density at one point."""

    @abc.abstractmethod
    def sample(self, key: Key[Array, ""], num: int) -> Float[Array, "num D"]:
        """Independent reference draws."""

    @property
    def mean(self) -> Float[np.ndarray, " D"]:
        """The true mean; zero unless a density says otherwise."""
        return np.zeros(self.dim)

    @property
    @abc.abstractmethod
    def covariance(self) -> Float[np.ndarray, "D D"]:
        """The true covariance."""

    def region(self, x: Float[Array, "N D"]) -> Int[Array, " N"]:
        """The index of the region in which each point lies."""
        return jnp.zeros(len(x), jnp.int32)

    @property
    def shares(self) -> Float[np.ndarray, " R"]:
        """The true probability of each region."""
        return np.ones(1)


class Gaussian(Density):
    """N(mean, covariance).

    >>> Gaussian([0.0, 0.0], [[1.0, 0.5], [0.5, 1.0]]).dim
    2
    """

    def __init__(self, mean, covariance):
        self._mean = np.asarray(mean, float)
        self._covariance = np.asarray(covariance, float)
        self.dim = len(self._mean)
        if self._covariance.shape != (self.dim, self.dim):
            raise OptionError(
                f"covariance has shape {self._covariance.shape} for a mean of {self.dim} coordinates; "
                f"expected ({self.dim}, {self.dim})"
            )
        self._precision = np.linalg.inv(self._covariance)
        self._factor = np.linalg.cholesky(self._covariance)

    def log_density(self, x: Float[Array, " D"]) -> Float[Array, ""]:
        centred = x - jnp.asarray(self._mean, x.dtype)
        return -0.5 * centred @ (jnp.asarray(self._precision, x.dtype) @ centred)

    def sample(self, key: Key[Array, ""], num: int) -> Float[Array, "num D"]:
        white = jax.random.normal(key, (num, self.dim))
        return jnp.asarray(self._mean) + white @ jnp.asarray(self._factor).T

    @property
    def mean(self) -> Float[np.ndarray, " D"]:
        return self._mean

    @property
    def covariance(self) -> Float[np.ndarray, "D D"]:
        return self._covariance


class GaussianMixture(Density):
    """sum_k weights_k N(means_k, sd_k^2 I); its regions are the components.

    >>> GaussianMixture([[-2.0], [2.0]], sds=0.5, weights=[0.3, 0.7]).mean.tolist()
    [0.7999999999999999]
    """

    def __init__(self, means, sds=1.0, weights=None):
        self.means = np.asarray(means, float)
        num, self.dim = self.means.shape
        self.sds = np.broadcast_to(np.asarray(sds, float), (num,))
        weights = np.ones(num) if weights is None else np.asarray(weights, float)
        self.weights = weights / weights.sum()
        self.regions = tuple(f"component {k}" for k in range(num))

    def _components(self, x: Array) -> Array:
        r2 = jnp.sum((x[..., None, :] - jnp.asarray(self.means, x.dtype)) ** 2, -1)
        constant = np.log(self.weights) - self.dim * np.log(self.sds)
        return jnp.asarray(constant, x.dtype) - 0.5 * r2 / jnp.asarray(self.sds, x.dtype) ** 2

    def log_density(self, x: Float[Array, " D"]) -> Float[Array, ""]:
        return jax.nn.logsumexp(self._components(x))

    def sample(self, key: Key[Array, ""], num: int) -> Float[Array, "num D"]:
        pick, move = jax.random.split(key)
        k = jax.random.choice(pick, len(self.weights), (num,), p=jnp.asarray(self.weights))
        noise = jax.random.normal(move, (num, self.dim))
        return jnp.asarray(self.means)[k] + jnp.asarray(self.sds)[k, None] * noise

    @property
    def mean(self) -> Float[np.ndarray, " D"]:
        return self.weights @ self.means

    @property
    def covariance(self) -> Float[np.ndarray, "D D"]:
        centred = self.means - self.mean
        within = (self.weights @ self.sds**2) * np.eye(self.dim)
        return within + (self.weights[:, None] * centred).T @ centred

    def region(self, x: Float[Array, "N D"]) -> Int[Array, " N"]:
        return jnp.argmax(self._components(x), axis=1)

    @functools.cached_property
    def shares(self) -> Float[np.ndarray, " R"]:  # pyright: ignore
        draws = self.sample(jax.random.key(0), 1 << 18)
        return np.bincount(np.asarray(self.region(draws)), minlength=len(self.weights)) / len(draws)


class Banana(Density):
    """x_1 ~ N(0, sd^2), x_2 | x_1 ~ N(bend (x_1^2 - sd^2), 1): mean zero, strongly curved.

    >>> Banana().covariance.tolist()
    [[4.0, 0.0], [0.0, 3.0]]
    """

    dim = 2

    def __init__(self, sd: float = 2.0, bend: float = 0.25):
        self.sd, self.bend = sd, bend

    def log_density(self, x: Float[Array, " D"]) -> Float[Array, ""]:
        centre = self.bend * (x[0] ** 2 - self.sd**2)
        return -0.5 * (x[0] / self.sd) ** 2 - 0.5 * (x[1] - centre) ** 2

    def sample(self, key: Key[Array, ""], num: int) -> Float[Array, "num D"]:
        z = jax.random.normal(key, (num, 2))
        first = self.sd * z[:, 0]
        return jnp.stack([first, self.bend * (first**2 - self.sd**2) + z[:, 1]], 1)

    @property
    def mean(self) -> Float[np.ndarray, " D"]:
        return np.zeros(2)

    @property
    def covariance(self) -> Float[np.ndarray, "D D"]:
        return np.diag([self.sd**2, 1 + 2 * self.bend**2 * self.sd**4])


class Funnel(Density):
    """Neal's funnel: x_1 ~ N(0, sd^2), the others N(0, exp(x_1)).

    >>> Funnel(dim=3, sd=1.0).covariance[0, 0].item()
    1.0
    """

    def __init__(self, dim: int = 10, sd: float = 3.0):
        self.dim, self.sd = dim, sd

    def log_density(self, x: Float[Array, " D"]) -> Float[Array, ""]:
        neck = -0.5 * (x[0] / self.sd) ** 2
        return neck - 0.5 * jnp.sum(x[1:] ** 2) * jnp.exp(-x[0]) - 0.5 * (self.dim - 1) * x[0]

    def sample(self, key: Key[Array, ""], num: int) -> Float[Array, "num D"]:
        z = jax.random.normal(key, (num, self.dim))
        first = self.sd * z[:, :1]
        return jnp.concatenate([first, jnp.exp(first / 2) * z[:, 1:]], 1)

    @property
    def covariance(self) -> Float[np.ndarray, "D D"]:
        return np.diag([self.sd**2] + [float(np.exp(self.sd**2 / 2))] * (self.dim - 1))


class LogGamma(Density):
    """Independent logarithms of Gamma(shape, 1): log-concave and skewed to the left.

    >>> round(LogGamma(shape=1.0).mean[0].item(), 4)
    -0.5772
    """

    def __init__(self, shape: float = 2.0, dim: int = 1):
        self.shape, self.dim = shape, dim

    def log_density(self, x: Float[Array, " D"]) -> Float[Array, ""]:
        return jnp.sum(self.shape * x - jnp.exp(x))

    def sample(self, key: Key[Array, ""], num: int) -> Float[Array, "num D"]:
        return jax.random.loggamma(key, self.shape, (num, self.dim))

    @property
    def mean(self) -> Float[np.ndarray, " D"]:
        return np.full(self.dim, float(jax.scipy.special.digamma(self.shape)))

    @property
    def covariance(self) -> Float[np.ndarray, "D D"]:
        return float(jax.scipy.special.polygamma(1, self.shape)) * np.eye(self.dim)


class StudentT(Density):
    """Student's t with unit scale: tails like r^-(df + dim).

    >>> StudentT(dim=2, df=4.0).covariance[0, 0].item()
    2.0
    """

    def __init__(self, dim: int = 10, df: float = 5.0):
        self.dim, self.df = dim, df

    def log_density(self, x: Float[Array, " D"]) -> Float[Array, ""]:
        return -0.5 * (self.df + self.dim) * jnp.log1p(jnp.sum(x**2) / self.df)

    def sample(self, key: Key[Array, ""], num: int) -> Float[Array, "num D"]:
        half, other = jax.random.split(key)
        chi2 = 2 * jax.random.gamma(half, self.df / 2, (num, 1))
        return jax.random.normal(other, (num, self.dim)) * jnp.sqrt(self.df / chi2)

    @property
    def covariance(self) -> Float[np.ndarray, "D D"]:
        """Infinite up to df = 2."""
        spread = self.df / (self.df - 2) if self.df > 2 else np.inf
        return np.diag(np.full(self.dim, spread))


BOX, BOX_SD, EXTENT, CELLS = 4.0, 0.2, 6.0, 1200


class _Plane(Density):
    """A density on the plane, cut off smoothly beyond |z| = 4, with answers from a fine grid."""

    dim = 2

    @abc.abstractmethod
    def _inside(self, z: Float[Array, "... 2"]) -> Float[Array, "..."]:
        """The log density of the paper, over the last axis."""

    def log_density(self, x: Float[Array, " D"]) -> Float[Array, ""]:
        beyond = jnp.maximum(jnp.abs(x) - BOX, 0)
        return self._inside(x) - 0.5 * jnp.sum((beyond / BOX_SD) ** 2, -1)

    @functools.cached_property
    def _grid(self) -> tuple[np.ndarray, np.ndarray]:
        """Cell centres, first coordinate slowest, and their probabilities."""
        side = (np.arange(CELLS) + 0.5) / CELLS * 2 * EXTENT - EXTENT
        cells = np.stack(np.meshgrid(side, side, indexing="ij"), -1).reshape(-1, 2)
        log_p = np.asarray(jax.vmap(self.log_density)(jnp.asarray(cells)), np.float64)
        p = np.exp(log_p - log_p.max())
        return cells, p / p.sum()

    def _draw(self, quantiles: np.ndarray, rng: np.random.Generator) -> Array:
        cells, p = self._grid
        picked = np.minimum(np.searchsorted(np.cumsum(p), quantiles), len(p) - 1)
        inside = rng.uniform(-EXTENT / CELLS, EXTENT / CELLS, (len(quantiles), 2))
        return jnp.asarray(cells[picked] + inside)

    def sample(self, key: Key[Array, ""], num: int) -> Float[Array, "num D"]:
        rng = _numpy(key)
        return self._draw(rng.random(num), rng)

    def systematic(self, key: Key[Array, ""], num: int) -> Float[Array, "num D"]:
        """Draws by systematic resampling of the grid: exact to 1/num along the first coordinate."""
        rng = _numpy(key)
        return self._draw((np.arange(num) + rng.random()) / num, rng)

    @property
    def mean(self) -> Float[np.ndarray, " D"]:
        cells, p = self._grid
        return p @ cells

    @property
    def covariance(self) -> Float[np.ndarray, "D D"]:
        cells, p = self._grid
        centred = cells - self.mean
        return (p[:, None] * centred).T @ centred

    @functools.cached_property
    def shares(self) -> Float[np.ndarray, " R"]:  # pyright: ignore
        cells, p = self._grid
        region = np.asarray(self.region(jnp.asarray(cells)))
        return np.bincount(region, weights=p, minlength=len(self.regions))


def _numpy(key: Key[Array, ""]) -> np.random.Generator:
    return np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist())


def _wave(z: Array) -> Array:
    return jnp.sin(jnp.pi * z[..., 0] / 2)


class U1(_Plane):
    """Two crescents facing each other (Rezende & Mohamed 2015, table 1); regions: left and right."""

    regions = ("left", "right")

    def _inside(self, z: Float[Array, "... 2"]) -> Float[Array, "..."]:
        radius = jnp.sqrt(jnp.sum(z**2, -1) + 1e-12)
        sides = [-0.5 * ((z[..., 0] - c) / 0.6) ** 2 for c in (2.0, -2.0)]
        return -0.5 * ((radius - 2) / 0.4) ** 2 + jnp.logaddexp(*sides)

    def region(self, x: Float[Array, "N D"]) -> Int[Array, " N"]:
        return (x[:, 0] > 0).astype(jnp.int32)


class U2(_Plane):
    """A sine-shaped ridge of even height; regions: its four half-periods."""

    regions = ("z1 < -2", "-2 to 0", "0 to 2", "z1 > 2")

    def _inside(self, z: Float[Array, "... 2"]) -> Float[Array, "..."]:
        return -0.5 * ((z[..., 1] - _wave(z)) / 0.4) ** 2

    def region(self, x: Float[Array, "N D"]) -> Int[Array, " N"]:
        return jnp.searchsorted(jnp.array([-2.0, 0.0, 2.0]), x[:, 0]).astype(jnp.int32)


class _Forked(_Plane):
    """A ridge that parts into an upper and a lower branch `gap` apart."""

    widths: tuple[float, float]
    fork: tuple[float, float]

    @abc.abstractmethod
    def _gap(self, z: Array) -> Array:
        """How far the lower branch lies under the upper one."""

    def _branches(self, z: Array) -> tuple[Array, Array]:
        upper = z[..., 1] - _wave(z)
        lower = upper + self._gap(z)
        return -0.5 * (upper / self.widths[0]) ** 2, -0.5 * (lower / self.widths[1]) ** 2

    def _inside(self, z: Float[Array, "... 2"]) -> Float[Array, "..."]:
        return jnp.logaddexp(*self._branches(z))

    def region(self, x: Float[Array, "N D"]) -> Int[Array, " N"]:
        upper, lower = self._branches(x)
        low, high = self.fork
        branch = jnp.where(upper >= lower, 1, 2)
        left = jnp.where(x[:, 0] < low, 0, branch)
        return jnp.where(x[:, 0] > high, 3, left).astype(jnp.int32)


class U3(_Forked):
    """A ridge that parts and joins again; regions: left stem, upper and lower branch, right stem."""

    regions = ("left stem", "upper branch", "lower branch", "right stem")
    widths = (0.35, 0.35)
    fork = (-0.25, 2.25)

    def _gap(self, z: Array) -> Array:
        return 3 * jnp.exp(-0.5 * ((z[..., 0] - 1) / 0.6) ** 2)


class U4(_Forked):
    """A ridge that parts for good; regions: left stem, upper branch, lower branch."""

    regions = ("left stem", "upper branch", "lower branch")
    widths = (0.4, 0.35)
    fork = (1.0, np.inf)

    def _gap(self, z: Array) -> Array:
        return 3 * jax.nn.sigmoid((z[..., 0] - 1) / 0.3)
