"""What a cloud of networks predicts: the mixture of the particles' predictions, its scores and its uncertainty.

Networks are evaluated on the device, a batch of rows at a time, by one compiled function; results are gathered on the
host as NumPy arrays and scored in float64. So nothing here is for use inside `jax.jit`.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer, PyTree

from particlax import mixtures, outputs
from particlax.checks import as_generator, as_key, positive, refuse_not_finite, whole
from particlax.errors import DataError, TargetError, expect, known_options
from particlax.history import History
from particlax.networks import Network
from particlax.sweep import FLOOR, Sweep, merged

__all__ = ["Categorical", "CategoricalScores", "Entropy", "Normal", "NormalScores", "Reliability"]
__all__ += ["auroc", "categorical", "log_density", "normal", "snapshots", "temperature"]

RANGE = (0.01, 100.0)  # of temperatures

Apply: TypeAlias = Callable[..., Any] | Network
Labels: TypeAlias = Integer[Array | np.ndarray, "*n"]
Values: TypeAlias = Float[Array | np.ndarray, "..."]


class CategoricalScores(NamedTuple):
    """Means over all labels: exp(-log_density) is the perplexity, brier that of sum_c (p_c - 1[y = c])^2."""

    accuracy: float
    log_density: float
    brier: float
    ece: float


class Entropy(NamedTuple):
    """The uncertainty of each prediction in nats, total = data + model.

    `total` is H[mean_m p_m]; `data` is mean_m H[p_m], what would be left if the parameters were known; `model` is
    mean_m KL(p_m || mean_m p_m), the mutual information of label and parameters.
    """

    total: Float[np.ndarray, "*n"]
    data: Float[np.ndarray, "*n"]
    model: Float[np.ndarray, "*n"]


class Reliability(NamedTuple):
    """The reliability diagram: means in bins of confidence, equally wide over (0, 1]; NaN in empty ones."""

    confidence: Float[np.ndarray, " bins"]
    accuracy: Float[np.ndarray, " bins"]
    count: Int[np.ndarray, " bins"]  # pyright: ignore

    @property
    def ece(self) -> float:
        """The expected calibration error, sum_b count_b / n |accuracy_b - confidence_b|."""
        gaps = self.count * np.abs(self.accuracy - self.confidence)
        return float(np.nansum(gaps) / self.count.sum())


class Categorical(eqx.Module):
    """Predicted classes, made by `categorical`; true labels `y` are whole numbers below C, in the shape of `labels`."""

    log_mixture: Float[np.ndarray, "*n C"]
    data_entropy: Float[np.ndarray, "*n"]
    model_entropy: Float[np.ndarray, "*n"]
    log_probs: Float[np.ndarray, "M *n C"] | None = None  # None without keep, and after tempered

    def __getitem__(self, index: Any) -> "Categorical":
        """Some of the predictions, by a mask, a slice or row numbers: pred[mask].score(y[mask])."""
        at, data = mixtures.selected(index, self.data_entropy)
        each = None if self.log_probs is None else self.log_probs[(slice(None), *at)]
        return Categorical(self.log_mixture[at], data, self.model_entropy[at], each)

    def __len__(self) -> int:
        return len(self.data_entropy)

    def __iter__(self) -> Iterator["Categorical"]:
        return (self[row] for row in range(len(self)))

    @property
    def probs(self) -> Float[np.ndarray, "*n C"]:
        """The mixture 1/M sum_m p_m."""
        return np.exp(self.log_mixture.astype(np.float64))

    @property
    def labels(self) -> Int[np.ndarray, "*n"]:
        """The most probable class."""
        return self.log_mixture.argmax(-1)

    @property
    def confidence(self) -> Float[np.ndarray, "*n"]:
        """The probability of the most probable class."""
        return np.minimum(np.exp(self.log_mixture.max(-1).astype(np.float64)), 1)

    def log_density(self, y: Labels) -> Float[np.ndarray, "*n"]:
        """The log predictive density of each label."""
        places = mixtures.labels_of(y, self.log_mixture.shape)[..., None]
        return np.take_along_axis(self.log_mixture, places, -1)[..., 0].astype(np.float64)

    def score(self, y: Labels, bins: int = 15) -> CategoricalScores:
        """Accuracy, log predictive density, Brier score and expected calibration error."""
        density, diagram = self.log_density(y), self.reliability(y, bins)
        brier = np.sum(self.probs**2, -1) + 1 - 2 * np.exp(density)  # the square, multiplied out
        right = float(np.mean(self.labels == np.asarray(y)))
        return CategoricalScores(right, float(density.mean()), float(brier.mean()), diagram.ece)

    def entropy(self) -> Entropy:
        """The entropy of each prediction, split into a data and a model part."""
        total = self.data_entropy + self.model_entropy
        return Entropy(total, self.data_entropy, self.model_entropy)

    def reliability(self, y: Labels, bins: int = 15) -> Reliability:
        """How often predictions are right, by bins of their confidence."""
        whole("bins", bins, 1)
        right = (self.labels == mixtures.labels_of(y, self.log_mixture.shape)).ravel()
        sure = self.confidence.ravel()
        place = np.searchsorted(np.arange(bins + 1) / bins, sure) - 1  # (b / bins, (b + 1) / bins]
        count = np.bincount(place, minlength=bins)
        mean = lambda part: np.bincount(place, part, bins) / np.where(count, count, np.nan)
        return Reliability(mean(sure), mean(right), count)

    def tempered(self, temperature: float) -> "Categorical":
        """The mixture to the power 1/T, normalised: one distribution, so its entropy is all data."""
        from scipy.special import log_softmax

        positive("temperature", temperature, zero=False, schedule=False)
        log_p = log_softmax(self.log_mixture / np.float64(temperature), -1)
        data = -np.sum(np.exp(log_p) * np.maximum(log_p, FLOOR), -1)
        return Categorical(log_p, data, np.zeros_like(data))


@known_options
def categorical(
    apply: Apply, particles: PyTree, x: PyTree, *, batch_size: int = 1000, keep: bool = True
) -> Categorical:
    """The mixture p(y | x) = 1/M sum_m softmax(apply(particle_m, x))_y.

    `apply(params, rows)` returns the logits [n, C] of one particle, or [n, L, C] for L labels in each row; `particles` is a
    cloud, a run's history (its clouds together) or a run's result, which stateful and partly Bayesian networks need (`apply` may
    then be the `px.networks.Network`); `x` an array or pytree with n rows. The networks take turns, and their logits for
    `batch_size` rows are on the device; the log-probabilities [M, n, C] are gathered on the host. Without `keep` they are
    dropped, and host memory does not grow with M.

    >>> pred = categorical(lambda w, x: x @ w, jnp.array([[[0.0, 9.0]], [[9.0, 0.0]]]), jnp.ones((4, 1)))
    >>> pred.log_probs.shape, pred.probs[0].round(2).tolist(), bool(pred.entropy().model[0] > 0.69)  # log 2 = 0.693
    ((2, 4, 2), [0.5, 0.5], True)
    """
    networks = Sweep(apply, particles, x, batch_size, logits=True)
    mixture, data, model, *each = networks.run(results=4 if keep else 3)
    return Categorical(mixture[0], data[0], model[0], *each)


@known_options
def log_density(
    apply: Apply, particles: PyTree, x: PyTree, y: Labels, *, batch_size: int = 1000
) -> Float[np.ndarray, "*n"]:
    """log 1/M sum_m softmax(apply(particle_m, x))_y of the given labels, where C is too large for `categorical`.

    Of each network's logits only those of the labels are kept. For language models: logits [n, L, C], labels [n, L], a
    `batch_size` of a few sequences. exp(-mean) is the perplexity. Padding has labels too, such as 0, and is left out afterwards:
    log_density(...)[mask].mean().

    >>> logits = jnp.log(jnp.array([[[0.5, 0.25, 0.25]], [[0.25, 0.5, 0.25]]]))  # M = 2, n = 1, C = 3
    >>> np.exp(-log_density(lambda p, x: p, logits, jnp.zeros(1), jnp.array([0]))).round(3).tolist()
    [2.667]
    """
    networks = Sweep(apply, particles, x, batch_size, logits=True)
    return networks.run(mixtures.labels_of(y, networks.shape))[0][0].astype(np.float64)


def temperature(pred: Categorical, y: Labels) -> float:
    """The T that maximises the log density of held-out labels under `pred.tempered(T)` (Guo et al. 2017).

    The log density is concave in 1/T. T stays in [0.01, 100], and is an end where there is no maximum: 0.01 if all
    predictions are right, 100 if they are worse than guesses.

    >>> pred = categorical(lambda w, x: x @ w, jnp.eye(2)[None], 9 * jnp.eye(2)[jnp.array([0, 0, 0, 1])])
    >>> round(temperature(pred, jnp.array([0, 0, 1, 1])), 3)  # 3 of 4 are right: 1 / (1 + exp(-9/T)) = 3/4
    8.192
    """
    expect("pred", pred, Categorical, "px.predictive.categorical(apply, particles, x)")
    from scipy.optimize import brentq
    from scipy.special import log_softmax

    density = np.maximum(pred.log_density(y), FLOOR)
    log_p = np.maximum(pred.log_mixture.astype(np.float64), FLOOR)

    def slope(log_t: float) -> float:
        """The derivative of the mean log density by 1/T: the mean of log p_y - E_T[log p]."""
        weights = np.exp(log_softmax(log_p * np.exp(-log_t), -1))
        return float(np.mean(density - np.sum(weights * log_p, -1)))

    low, high = np.log(RANGE)
    if (cold := slope(low) > -1e-12) or slope(high) <= 0:  # up to rounding
        return RANGE[0] if cold else RANGE[1]
    return float(np.exp(brentq(slope, low, high, xtol=1e-10)))  # pyright: ignore


def auroc(inside: Values, outside: Values) -> float:
    """P(outside > inside) + P(outside = inside) / 2: how well a score tells inputs of another kind.

    Scores that should be higher outside: usually `pred.entropy().total`; `pred.entropy().model`, which only an ensemble
    has; as a baseline `1 - pred.confidence` (Hendrycks & Gimpel 2017).

    >>> auroc(np.array([0.0, 1.0]), np.array([1.0, 2.0]))
    0.875
    """
    for name, part in (("inside", inside), ("outside", outside)):
        if hasattr(part, "_fields") or isinstance(part, eqx.Module):
            raise DataError(
                f"{name} is {type(part).__name__}; expected a score for each input, for instance pred.entropy().total"
            )
        if np.asarray(part).dtype.kind in "cSUMm":
            raise DataError(
                f"{name} has dtype {np.asarray(part).dtype}; expected a real number for each input"
            )
    known, new = (np.sort(np.asarray(part, np.float64), axis=None) for part in (inside, outside))
    for name, part in (("inside", known), ("outside", new)):
        if not part.size or np.isnan(part[-1]):  # NaN sorts last
            raise DataError(f"{name} is empty or has NaN; expected a finite score for each input")
    below = sum(int(np.searchsorted(known, new, side).sum()) for side in ("left", "right"))
    return below / (2 * known.size * new.size)


class NormalScores(NamedTuple):
    """RMSE of the mean, mean log density of a row, and the share of y in the central 90 % interval."""

    rmse: float
    log_density: float
    coverage: float


class Normal(eqx.Module):
    """Predicted numbers, made by `normal`: 1/M sum_m N(means_m, sds_m^2), with independent outputs in each m.

    From arrays of your own: means [M, n] or [M, n, K], and sds of that shape, or with axes of 1 where they do not vary.

    >>> Normal(np.zeros((4, 3)), [[1.0], [1.0], [2.0], [2.0]]).sd.round(2).tolist()
    [1.58, 1.58, 1.58]
    """

    means: Float[np.ndarray, "M *n"] = eqx.field(converter=mixtures.floats)
    sds: Float[np.ndarray, "M ..."] = eqx.field(
        converter=mixtures.floats
    )  # broadcasts against the means

    def __check_init__(self) -> None:
        mixtures.check(self.means, self.sds)

    def __getitem__(self, index: Any) -> "Normal":
        """Some of the predictions, by a mask, a slice or row numbers: pred[mask].score(y[mask]).

        A mask of single outputs [n, K] makes each a prediction of its own: log densities are then means over outputs, not rows.
        """
        at, _ = mixtures.selected(index, self.means[0])
        sds = np.broadcast_to(self.sds, self.means.shape)
        return Normal(self.means[(slice(None), *at)], sds[(slice(None), *at)])

    def __len__(self) -> int:
        return self.means.shape[1]

    def __iter__(self) -> Iterator["Normal"]:
        return (self[row] for row in range(len(self)))

    @property
    def mean(self) -> Float[np.ndarray, "*n"]:
        """The mean of the mixture."""
        return self.means.mean(0, dtype=np.float64)

    @property
    def sd(self) -> Float[np.ndarray, "*n"]:
        """The sd of the mixture, the root of data_sd^2 + model_sd^2."""
        return np.hypot(self.data_sd, self.model_sd)

    @property
    def data_sd(self) -> Float[np.ndarray, "*n"]:
        """The noise: the root of mean_m sds^2, what would be left if the parameters were known."""
        squares = np.mean(self.sds.astype(np.float64) ** 2, 0)
        return np.sqrt(np.broadcast_to(squares, self.means.shape[1:]))

    @property
    def model_sd(self) -> Float[np.ndarray, "*n"]:
        """How much the particles disagree: the root of var_m means."""
        return self.means.std(0, dtype=np.float64)

    def log_density(self, y: Values) -> Float[np.ndarray, " n"]:
        """log 1/M sum_m prod_k N(y_k; means_mk, sds_mk^2) of each row."""
        variance = self.sds.astype(np.float64) ** 2
        each = -0.5 * (self._residuals(y) ** 2 + np.log(2 * np.pi * variance))
        each = each.reshape(*each.shape[:2], -1).sum(-1)
        return each.max(0) + np.log(np.mean(np.exp(each - each.max(0)), 0))

    def cdf(self, y: Values) -> Float[np.ndarray, "*n"]:
        """The distribution function of the mixture at y: uniform over the data if predictions are right."""
        from scipy.special import ndtr

        return ndtr(self._residuals(y)).mean(0)

    def quantile(self, q: float) -> Float[np.ndarray, "*n"]:
        """Where the mixture's distribution function is q: pred.quantile(0.05) and pred.quantile(0.95) bound the central 90 %."""
        return mixtures.quantile(self.means, self.sds, q)

    def draw(self, key: Any, num: int) -> Float[np.ndarray, "num *n"]:
        """`num` draws of y: a particle for each, the same for all rows, and noise."""
        whole("num", num, 1)
        random = as_generator(as_key(key))
        chosen = random.integers(len(self.means), size=num)
        noise = random.standard_normal((num, *self.means.shape[1:]))
        return self.means[chosen] + np.broadcast_to(self.sds, self.means.shape)[chosen] * noise

    def score(self, y: Values) -> NormalScores:
        """RMSE, log predictive density, and coverage of the central 90 % interval."""
        density, inside = self.log_density(y), np.abs(self.cdf(y) - 0.5) <= 0.45
        rmse = np.sqrt(np.mean((np.asarray(y, np.float64) - self.mean) ** 2))
        return NormalScores(float(rmse), float(density.mean()), float(inside.mean()))

    def _residuals(self, y: Values) -> np.ndarray:
        y, shape = np.asarray(y, np.float64), self.means.shape[1:]
        if y.shape != shape:
            raise DataError(f"y has shape {y.shape}; expected {shape}, as the means: reshape one")
        refuse_not_finite("y", y)
        return (y - self.means) / self.sds


@known_options
def normal(
    apply: Apply,
    particles: PyTree,
    x: PyTree,
    *,
    noise: float | Callable[..., Any] | Literal["network"],
    batch_size: int = 1000,
) -> Normal:
    """The mixture p(y | x) = 1/M sum_m N(apply(particle_m, x), noise^2).

    `apply(params, rows)` returns the means [n] or [n, ..., K] of one particle. `noise` is the sd: a number; for learned noise
    a function of the params of one particle that returns a number (or K of them); or "network" if `apply` returns the pair (means, sds).

    >>> cloud = {"w": jnp.array([1.0, 3.0]), "log_sd": jnp.zeros(2)}
    >>> pred = normal(lambda p, x: p["w"] * x, cloud, jnp.ones(5), noise=lambda p: jnp.exp(p["log_sd"]))
    >>> pred.score(2 * jnp.ones(5)).rmse
    0.0
    """
    if isinstance(noise, str) and noise == outputs.NETWORK:
        both = Sweep(apply, particles, x, batch_size, logits=False, pair=True).run()[0]
        if not np.all(both[..., 1] > 0):
            raise TargetError(
                f"apply returned sds down to {both[..., 1].min()}; expected sds > 0, for instance jax.nn.softplus(...) + 1e-3"
            )
        return Normal(both[..., 0], both[..., 1])
    if not callable(noise):
        positive("noise", noise, zero=False, also=outputs.NOISE)
    networks = Sweep(apply, particles, x, batch_size, logits=False)
    sd = noise if callable(noise) else lambda _: jnp.asarray(noise, float)
    try:
        sds, tail = np.asarray(jax.vmap(sd)(networks.params), np.float64), networks.shape[1:]
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise TargetError(
            f"noise(params) failed, {error!r}; expected a function of the params of one particle that returns an sd"
        ) from error
    if sds.shape[1:] != tail[max(0, len(tail) - sds.ndim + 1) :]:
        raise TargetError(
            f"noise returned shape {sds.shape[1:]} for one particle and {(networks.shape[0], *tail)} means; expected a positive sd, or one for "
            f"each output. Where it differs from row to row, apply returns the pair (means, sds), with noise={outputs.NETWORK!r}"
        )
    if not np.all((sds > 0) & (sds < np.inf)):
        raise TargetError(
            f"noise returned {sds[0]} for the first particle, {sds.min()} to {sds.max()} over all; expected a positive "
            "sd (or one for each output), for instance lambda params: jnp.exp(params['log_sd'])"
        )
    sds = sds.reshape(len(sds), 1, *[1] * (len(tail) - sds.ndim + 1), *sds.shape[1:])
    return Normal(networks.run()[0], sds)


def snapshots(history: PyTree, last: int | None = None) -> PyTree[Float[np.ndarray, "N ..."]]:
    """All clouds of a trajectory as one, leaves [T, M, ...] as [T M, ...]; or its `last` snapshots alone.

    >>> snapshots({"w": jnp.zeros((10, 4, 3))}, last=5)["w"].shape
    (20, 3)
    """
    return merged(history.particles if isinstance(history, History) else history, last)
