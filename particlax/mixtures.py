"""Mixtures of what the particles predict, classes or numbers: their scores, their calibration and their uncertainty.

They are made on the host, of NumPy arrays, by `px.predictive`; scores are in float64.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from particlax.checks import as_generator, as_key, positive, refuse_not_finite, whole
from particlax.errors import DataError, OptionError
from particlax.sweep import FLOOR

__all__ = ["Categorical", "CategoricalScores", "Entropy", "Normal", "NormalScores", "Reliability"]

Labels: TypeAlias = Integer[Array | np.ndarray, "*n"]
Values: TypeAlias = Float[Array | np.ndarray, "..."]


def _floats(values: Any) -> np.ndarray:
    try:
        values = np.asarray(values)
        if values.dtype.kind not in "OSUMmc":
            return values if values.dtype.kind == "f" else values.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"means or sds are no array of numbers: {error}") from None
    raise DataError(f"means or sds have dtype {values.dtype}; expected real numbers")


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
        at, data = _selected(index, self.data_entropy)
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
        places = labels_of(y, self.log_mixture.shape)[..., None]
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
        right = (self.labels == labels_of(y, self.log_mixture.shape)).ravel()
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

    means: Float[np.ndarray, "M *n"] = eqx.field(converter=_floats)
    sds: Float[np.ndarray, "M ..."] = eqx.field(converter=_floats)  # broadcasts against the means

    def __check_init__(self) -> None:
        means, sds = self.means, self.sds
        fits = len(means.shape) == len(sds.shape) > 1 and means.size and sds.size
        if not fits or any(s not in (1, m) for s, m in zip(sds.shape, means.shape, strict=True)):
            raise DataError(
                f"sds have shape {sds.shape} for means of shape {means.shape}; expected means [M, n] or [M, n, K], and sds of that shape, or with "
                "axes of 1: sds[:, None] for one of each particle, sds[None] for one of each row"
            )
        refuse_not_finite("means", means)
        refuse_not_finite("sds", sds)
        if not np.all(sds > 0):
            raise DataError(f"sds reach down to {sds.min()}; expected numbers > 0")

    def __getitem__(self, index: Any) -> "Normal":
        """Some of the predictions, by a mask, a slice or row numbers: pred[mask].score(y[mask]).

        A mask of single outputs [n, K] makes each a prediction of its own: log densities are then means over outputs, not rows.
        """
        at, _ = _selected(index, self.means[0])
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
        from scipy.special import ndtr, ndtri

        positive("q", q, zero=False, schedule=False)
        if q >= 1:
            raise OptionError(f"q is {q}; expected a number between 0 and 1")
        ends = self.means + ndtri(float(q)) * self.sds.astype(np.float64)
        low, high = ends.min(0), ends.max(0)  # the mixture's is between those of its parts
        for _ in range(60):
            middle = (low + high) / 2
            below = ndtr((middle - self.means) / self.sds).mean(0) < q
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return (low + high) / 2

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


def _selected(index: Any, like: np.ndarray) -> tuple[tuple, np.ndarray]:
    """An index of the axes of `like`, in NumPy's words, and what it selects; numbers of rows keep their axis."""
    parts = index if isinstance(index, tuple) else (index,)
    at = tuple(
        part if isinstance(part, slice) else np.atleast_1d(np.asarray(part)) for part in parts
    )
    try:
        found = like[at]
    except IndexError as error:
        raise DataError(
            f"predictions of shape {list(like.shape)} have no such part: {error}; expected a mask of that shape or of its "
            "first axis, a slice, or numbers of rows"
        ) from None
    if not found.size:
        raise DataError(f"none of the predictions of shape {list(like.shape)} is selected")
    return at, found


def labels_of(y: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The labels of predictions of shape [n, ..., C], checked."""
    y, (*wanted, num) = np.asarray(y), shape
    whole_numbers = y.dtype.kind in "biu"
    if list(y.shape) != wanted or not whole_numbers or y.min() < 0 or y.max() >= num:
        seen = f" from {y.min()} to {y.max()}" if whole_numbers and y.size else ""
        raise DataError(
            f"the labels are {y.dtype}{list(y.shape)}{seen}; expected whole numbers from 0 to {num - 1} of shape {wanted}. "
            "Count classes from 0, convert floats with .astype(int) and one-hot labels with .argmax(-1); what fills up shorter sequences "
            "has labels too, such as 0, and is left out by a mask afterwards"
        )
    return y.astype(np.int32)
