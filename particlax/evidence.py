"""Is an ensemble of independent chains where it should be? Each check says what it saw.

Chains are independent given a frozen kernel, so every standard error here is taken between chains
and needs no model of the correlation in time.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from particlax import modes

__all__ = ["Chains", "Check", "Moments", "judge", "mixing", "moments", "strangers"]

MIXED = 1.05
"""Largest R-hat of chains that have mixed."""
ALARM = 1e-3
"""Chance of a false alarm of one check, over all coordinates."""
STEIN = 0.1
"""Largest Stein residual in whitened coordinates, where 1 is the whole identity."""
HEAVY = 0.3
"""Tail index (Hill) beyond which an sd cannot be vouched for: its own error rests on fourth moments, which an index
over 0.25 does not have. Cauchy has 1, Student's t with 5 degrees 0.2, an exponential 0.25, Gauss about 0.1."""
TAIL = 0.02
"""Share of the draws that make the tail."""


class Chains(NamedTuple):
    """What a round of N steps of M chains leaves: axis 0 is time."""

    x: Float[np.ndarray, "N M D"]
    log_density: Float[np.ndarray, "N M"]
    score: Float[np.ndarray, "N M D"]
    moved: Bool[np.ndarray, " M"]


class Check(NamedTuple):
    """One piece of evidence."""

    name: str
    passed: bool
    text: str


class Moments(NamedTuple):
    """Per coordinate: mean, sd, standard error of the mean and of log sd, effective size, R-hat."""

    mean: Float[np.ndarray, " D"]
    sd: Float[np.ndarray, " D"]
    mean_error: Float[np.ndarray, " D"]
    sd_error: Float[np.ndarray, " D"]
    ess: Float[np.ndarray, " D"]
    rhat: Float[np.ndarray, " D"]

    @property
    def error(self) -> Float[np.ndarray, " D"]:
        """The standard error of the mean, in sd, or of log sd, whichever is larger."""
        mean = self.mean_error / np.maximum(self.sd, np.finfo(float).tiny)
        return np.maximum(mean, self.sd_error)

    def shortfall(self, tolerance: float) -> float:
        """How much longer the chains should be to come safely below `tolerance`, as a share of their length."""
        return max(1.2 * float(self.error.max() / tolerance) ** 2 - 1, 0.25)


def moments(x: Float[np.ndarray, "N M D"]) -> Moments:
    """The moments of all draws and how well they are known, from the differences between chains.

    ESS = variance / (standard error)^2, and R-hat = sqrt((N - 1)/N + B/W) with B the variance of chain
    means and W the mean variance within chains.

    >>> found = moments(np.random.default_rng(0).normal(size=(50, 100, 1)))
    >>> bool(3000 < found.ess[0] < 8000), bool(found.rhat[0] < 1.01)
    (True, True)
    """
    num, chains = x.shape[:2]
    mean, variance = x.mean((0, 1)), x.var((0, 1))
    between = x.mean(0).var(0, ddof=1)
    within = x.var(0, ddof=1).mean(0)
    spread = ((x - mean) ** 2).mean(0).std(0, ddof=1) / np.sqrt(chains)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ess = np.minimum(variance * chains / between, num * chains)
        rhat = np.sqrt((num - 1) / num + between / within)
        sd_error = spread / (2 * variance)
    # A coordinate without any spread has no effective draws, and one that no chain changes has not mixed.
    ess, rhat = np.where(variance > 0, ess, 0.0), np.where(within > 0, rhat, np.inf)
    sd_error = np.where(variance > 0, sd_error, np.inf)
    return Moments(mean, np.sqrt(variance), np.sqrt(between / chains), sd_error, ess, rhat)


def judge(
    chains: Chains,
    found: Moments,
    *,
    tolerance: float,
    names: list[str],
    digits: float,
) -> list[Check]:
    """All checks of one round. `digits` is the relative rounding error of the particles' dtype."""
    return [
        _mixing(chains, names),
        _precision(found, tolerance, names),
        _halves(chains, found, tolerance, names),
        _drift(chains, found, tolerance, names),
        _stein(chains, found, names),
        _moving(chains, found, names),
        _tails(chains, names),
        _resolution(chains, found, digits, names),
    ]


def _limit(tests: int, chains: int) -> float:
    """How many standard errors are too many: Student's t, over all tests of a check."""
    from scipy.special import stdtrit

    return float(-stdtrit(max(chains - 1, 1), ALARM / (2 * tests)))


def mixing(x: Float[np.ndarray, "N M D"], log_density: Float[np.ndarray, "N M"]) -> np.ndarray:
    """R-hat of every coordinate, of its distance from the median (so that scales count), and of the log density."""
    level = log_density[..., None]
    seen = [x, np.abs(x - np.median(x, (0, 1))), level - level.mean()]
    return np.concatenate([moments(part).rhat for part in seen])


def strangers(log_density: Float[np.ndarray, "N M"]) -> int:
    """Chains that stay where the log density is not what it is for the others.

    One such chain in a hundred hardly moves an average, but it may stand for a mode of any weight.
    """
    means, spread = log_density.mean(0), np.maximum(log_density.std(0).mean(), 1e-12)
    gap = np.abs(means - np.median(means))
    usual = 1.4826 * np.median(gap)  # the chains' own spread, whatever a few of them do
    return int(np.sum((gap > 10 * usual) & (gap > 3 * spread)))


def _mixing(chains: Chains, names: list[str]) -> Check:
    rhat = mixing(chains.x, chains.log_density)
    worst, odd = int(np.argmax(rhat)), strangers(chains.log_density)
    labels = [*names, *(f"the spread of {name}" for name in names), "the log density"]
    if not rhat[worst] <= MIXED:
        text = f"R-hat is up to {rhat[worst]:.4g} ({labels[worst]}; limit {MIXED}): the chains have not mixed"
        return Check("mixing", False, text)
    if odd:
        text = f"{odd} of {len(chains.moved)} chains stay at log densities unlike the others': a mode of its own?"
        return Check("mixing", False, text)
    return Check(
        "mixing", True, f"R-hat is at most {rhat[worst]:.4g}, for means, scales and log density"
    )


def _precision(found: Moments, tolerance: float, names: list[str]) -> Check:
    worst = int(np.argmax(found.error))
    passed = bool(found.error[worst] <= tolerance)
    mean = np.max(found.mean_error / np.maximum(found.sd, np.finfo(float).tiny))
    text = (
        f"means are known to {mean:.3f} sd and sds to {100 * found.sd_error.max():.1f} % (standard "
        f"errors); effective sample size at least {found.ess.min():.0f}"
    )
    return Check(
        "precision", passed, text + ("" if passed else f" ({names[worst]}; limit {tolerance})")
    )


def _differences(
    gap: np.ndarray, error: np.ndarray, *, least: float, num: int
) -> tuple[bool, int, str]:
    """Whether no `gap` is both larger than `least` and significant; the worst, and what it is."""
    score = np.abs(gap) / np.maximum(error, 1e-12)
    # Written so that NaN is bad.
    bad = ~((score <= _limit(len(gap), num)) | (np.abs(gap) <= least))
    worst = int(np.argmax(np.where(bad, np.abs(gap), -1) if bad.any() else score))
    return (
        not bool(bad.any()),
        worst,
        f"{np.abs(gap[worst]):.3f} ({score[worst]:.3g} standard errors)",
    )


def _halves(chains: Chains, found: Moments, tolerance: float, names: list[str]) -> Check:
    """Do two halves of the ensemble, which share no chain, agree on mean and spread?"""
    z = _standard(chains.x, found)
    seen = np.concatenate([z, z**2 / 2], 2).mean(0)  # half of a square's change is that of log sd
    parts = seen[::2], seen[1::2]
    gap = parts[0].mean(0) - parts[1].mean(0)
    error = np.sqrt(sum(part.var(0, ddof=1) / len(part) for part in parts))
    passed, worst, size = _differences(gap, error, least=tolerance, num=len(parts[1]))
    text = f"two halves of the ensemble differ by at most {size} in units of sd"
    return Check("halves", passed, text if passed else f"{_label(worst, names)}: {text}")


def _drift(chains: Chains, found: Moments, tolerance: float, names: list[str]) -> Check:
    """Does the second half of the round continue where the first was, in mean, spread, log density?"""
    z = _standard(chains.x, found)
    level = chains.log_density - chains.log_density.mean()
    level = level / max(level.std(), np.finfo(float).tiny)
    seen = np.concatenate([z, z**2 / 2, level[..., None]], 2)
    middle = len(seen) // 2
    change = seen[middle:].mean(0) - seen[:middle].mean(0)
    error = change.std(0, ddof=1) / np.sqrt(len(change))
    passed, worst, size = _differences(change.mean(0), error, least=tolerance, num=len(change))
    text = f"first and second half of the round differ by at most {size} in units of sd"
    return Check("drift", passed, text if passed else f"{_label(worst, names)}: {text}")


def _stein(chains: Chains, found: Moments, names: list[str]) -> Check:
    """E s = 0 and E s_d (x_d - m_d) = -1, in coordinates whitened by the draws' own covariance."""
    flat = (chains.x - found.mean).reshape(-1, chains.x.shape[2])
    factor = modes.factor(flat.T @ flat / len(flat), len(flat))
    z = modes.whitened(flat, factor).reshape(chains.x.shape)
    score = (chains.score.reshape(flat.shape) @ factor).reshape(chains.x.shape)
    seen = np.concatenate([score, score * z + 1], 2).mean(0)
    error = seen.std(0, ddof=1) / np.sqrt(len(seen))
    passed, worst, size = _differences(seen.mean(0), error, least=STEIN, num=len(seen))
    text = f"Stein residuals are at most {size}"
    if not passed:
        text = (
            f"{_label(worst, names)}: {text}: the score does not fit the draws. The density may be cut off or "
            "jump somewhere, its gradient may not be that of its value, or the chains are not where they should be"
        )
    return Check("stein", passed, text)


def _moving(chains: Chains, found: Moments, names: list[str]) -> Check:
    stuck = int(np.sum(~chains.moved))
    if stuck:
        text = f"{stuck} of {len(chains.moved)} chains never accepted a move"
        return Check("moving", False, text)
    if not found.sd.all():
        name = names[int(np.argmin(found.sd))]
        return Check(
            "moving",
            False,
            f"{name} is the same in all draws: nothing moves it. Is the log density unbounded, or its sign wrong?",
        )
    return Check("moving", True, "every chain moved")


def _tails(chains: Chains, names: list[str]) -> Check:
    """Hill's index of the largest deviations of each coordinate."""
    x = chains.x.reshape(-1, chains.x.shape[2])
    size = np.sort(np.abs(x - np.median(x, 0)), 0)[-max(int(TAIL * len(x)), 20) :]
    index = np.mean(np.log(np.maximum(size / np.maximum(size[0], 1e-300), 1)), 0)
    worst = int(np.argmax(index))
    passed = bool(index[worst] <= HEAVY)
    text = f"tails have index {index[worst]:.2f} or less (0.25: no fourth moment, 0.5: no variance)"
    if not passed:
        text = (
            f"the tails of {names[worst]} have index {index[worst]:.2f} (0.25: no fourth moment, 0.5: no variance): its sd "
            "cannot be vouched for; read quantiles"
        )
    return Check("tails", passed, text)


def _resolution(chains: Chains, found: Moments, digits: float, names: list[str]) -> Check:
    """Can the dtype tell the draws, and their log densities, apart?"""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        size = digits * np.abs(found.mean) / found.sd
    size = np.where(found.sd > 0, size, 0.0)  # without any spread, it is `_moving` that complains
    level = digits * float(np.median(np.abs(chains.log_density)))
    remedy = "Use float64: jax.config.update('jax_enable_x64', True)"
    worst = int(np.argmax(size))
    if not size[worst] < 0.05:
        text = f"rounding of {names[worst]} is {size[worst]:.2g} of its sd. {remedy}, or centre it"
        return Check("resolution", False, text)
    if not level < 0.25:
        return Check("resolution", False, f"the log density is rounded to {level:.2g}. {remedy}")
    return Check("resolution", True, "rounding is far below the spread")


def _standard(x: np.ndarray, found: Moments) -> np.ndarray:
    return (x - found.mean) / np.maximum(found.sd, np.finfo(float).tiny)


def _label(place: int, names: list[str]) -> str:
    return [*names, *(f"the spread of {name}" for name in names), "the log density"][place]
