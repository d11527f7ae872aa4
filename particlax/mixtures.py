"""What predictions as arrays have in common: their checks, parts of them, quantiles of mixtures of normals."""

from typing import Any

import equinox as eqx
import numpy as np

from particlax.checks import positive, refuse_not_finite
from particlax.errors import DataError, OptionError

__all__ = ["check", "floats", "labels_of", "quantile", "selected"]


def floats(values: Any) -> np.ndarray:
    """An array of real numbers; whole ones become float64."""
    try:
        values = np.asarray(values)
        if values.dtype.kind not in "OSUMmc":
            return values if values.dtype.kind == "f" else values.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"means or sds are no array of numbers: {error}") from None
    raise DataError(f"means or sds have dtype {values.dtype}; expected real numbers")


def check(means: np.ndarray, sds: np.ndarray) -> None:
    """Refuse what is no mixture of normals."""
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


def quantile(means: np.ndarray, sds: np.ndarray, q: float) -> np.ndarray:
    """Where the distribution function of 1/M sum_m N(means_m, sds_m^2) is q."""
    from scipy.special import ndtr, ndtri

    positive("q", q, zero=False, schedule=False)
    if q >= 1:
        raise OptionError(f"q is {q}; expected a number between 0 and 1")
    ends = means + ndtri(float(q)) * sds.astype(np.float64)
    low, high = ends.min(0), ends.max(0)  # the mixture's is between those of its parts
    for _ in range(60):
        middle = (low + high) / 2
        below = ndtr((middle - means) / sds).mean(0) < q
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return (low + high) / 2


def selected(index: Any, like: np.ndarray) -> tuple[tuple, np.ndarray]:
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
    if isinstance(y, eqx.Module):
        raise DataError(f"the labels are a {type(y).__name__}; expected an array of whole numbers")
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
