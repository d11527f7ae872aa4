"""Checks on chains: moments against loops and known truth, each alarm on chains made bad in that way."""

import numpy as np
import pytest
from scipy import stats

from particlax import evidence
from particlax.evidence import Chains, judge, moments

from . import references as ref

NAMES = ["a", "b", "c"]
CHECKS = ["mixing", "precision", "halves", "drift", "stein", "moving", "tails", "resolution"]
DIGITS = 2.0**-23


def good(seed=0, num=64, chains=128, dim=3):
    """Independent draws of N(m, sd^2), their log densities and scores."""
    rng = np.random.default_rng(seed)
    mean, sd = np.array([0.0, 5.0, -200.0])[:dim], np.array([1.0, 0.1, 30.0])[:dim]
    z = rng.normal(size=(num, chains, dim))
    return Chains(mean + sd * z, -0.5 * np.sum(z**2, 2), -z / sd, np.ones(chains, bool))


def verdicts(chains, tolerance=0.03, digits=DIGITS):
    names = NAMES[: chains.x.shape[2]]
    found = judge(chains, moments(chains.x), tolerance=tolerance, names=names, digits=digits)
    assert [check.name for check in found] == CHECKS
    return {check.name: check for check in found}


def failed(chains, **options):
    return {name for name, check in verdicts(chains, **options).items() if not check.passed}


# --------------------------------------------------------------------------------------------------- moments


def slow_moments(x):
    """Mean, sd, and standard errors between chains; R-hat of Gelman and Rubin; one coordinate."""
    num, chains = x.shape
    mean = sum(x[n, m] for n in range(num) for m in range(chains)) / x.size
    variance = sum((x[n, m] - mean) ** 2 for n in range(num) for m in range(chains)) / x.size
    chain_means = [x[:, m].mean() for m in range(chains)]
    between = sum((c - mean) ** 2 for c in chain_means) / (chains - 1)
    within = 0.0
    for m in range(chains):
        within += sum((x[:, m] - chain_means[m]) ** 2) / (num - 1) / chains
    squares = [np.mean((x[:, m] - mean) ** 2) for m in range(chains)]
    spread = np.sqrt(sum((s - variance) ** 2 for s in squares) / (chains - 1) / chains)
    error = np.sqrt(between / chains)
    ess = min(variance / error**2, x.size)
    rhat = np.sqrt((num - 1) / num + between / within)
    return mean, np.sqrt(variance), error, spread / (2 * variance), ess, rhat


def test_moments_equal_the_loops():
    x = np.stack([ref.cloud(12, 9, seed=s, centre=3.0) for s in range(3)], 2)
    found = moments(x)
    for d in range(3):
        expected = slow_moments(x[:, :, d])
        np.testing.assert_allclose([field[d] for field in found], expected, rtol=1e-10)


def autoregressive(rho, num, chains, seed=0):
    rng = np.random.default_rng(seed)
    x = np.zeros((num, chains))
    x[0] = rng.normal(size=chains)
    for n in range(1, num):
        x[n] = rho * x[n - 1] + np.sqrt(1 - rho**2) * rng.normal(size=chains)
    return x


@pytest.mark.parametrize("rho", [-0.3, 0.0, 0.6, 0.9])
def test_effective_size_of_autoregressive_chains(rho):
    """Var of a chain's mean is 1/N^2 sum_ij rho^|i-j|; the estimate has 2000 chains' relative error."""
    num, chains = 100, 2000
    lags = abs(np.subtract.outer(np.arange(num), np.arange(num)))
    variance = np.mean(rho ** lags.astype(float))
    found = moments(autoregressive(rho, num, chains)[..., None])
    error = np.sqrt(2 / (chains - 1))
    expected = min(chains / variance, num * chains)
    assert abs(found.ess[0] / expected - 1) < 6 * error
    np.testing.assert_allclose(found.mean_error[0] ** 2, variance / chains, rtol=6 * error)
    sd_variance = np.mean(rho ** (2.0 * lags)) / 2 / chains  # of log sd
    np.testing.assert_allclose(found.sd_error[0] ** 2, sd_variance, rtol=8 * error)


def test_rhat_of_shifted_chains():
    """Means spread by 0.5 sd: R-hat^2 is about 1 + 0.25."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3000)) + 0.5 * rng.normal(size=3000)
    np.testing.assert_allclose(moments(x[..., None]).rhat, np.sqrt(1.25), rtol=0.01)


def test_standard_errors_are_right():
    """Over 300 ensembles, the means deviate by as much as their standard errors say."""
    z, w = [], []
    for seed in range(300):
        found = moments(autoregressive(0.5, 20, 100, seed)[..., None])
        z.append(found.mean[0] / found.mean_error[0])
        w.append(np.log(found.sd[0]) / found.sd_error[0])
    for deviations in (z, w):
        assert abs(np.std(deviations) - 1) < 5 / np.sqrt(2 * 300)
        assert abs(np.mean(deviations)) < 6 / np.sqrt(300)


def test_a_constant_coordinate_has_no_effective_draws():
    found = moments(np.ones((10, 20, 1)))
    assert found.ess[0] == 0
    assert found.rhat[0] == found.sd_error[0] == np.inf
    assert found.sd[0] == 0


def test_chains_that_stand_still_have_not_mixed():
    x = np.tile(np.random.default_rng(0).normal(size=(1, 50, 1)), (10, 1, 1))
    found = moments(x)
    assert found.rhat[0] > 1e6  # infinite up to rounding
    np.testing.assert_allclose(found.ess, 50, rtol=0.05)


def test_error_is_the_larger_one_in_units_of_sd():
    found = moments(good().x)
    np.testing.assert_allclose(found.error, np.maximum(found.mean_error / found.sd, found.sd_error))


def test_shortfall_is_what_makes_up_the_error():
    """Errors fall with the root of the length: four times the error needs 16 times the length."""
    found = moments(good().x)
    worst = found.error.max()
    np.testing.assert_allclose(found.shortfall(worst / 4), 1.2 * 16 - 1)
    assert found.shortfall(10 * worst) == 0.25


# ------------------------------------------------------------------------------------------ good chains pass


def test_good_chains_pass():
    found = verdicts(good())
    assert all(check.passed for check in found.values())
    assert "at least" in found["precision"].text


def test_false_alarms_are_rare():
    """Eight checks of 1e-3 on 60 ensembles: 0.5 are expected, 5 would be a sign."""
    alarms = [failed(good(seed)) for seed in range(60)]
    assert sum(map(bool, alarms)) <= 4


def test_false_alarms_are_rare_where_differences_count_at_any_size():
    """With a tolerance of zero only the significance is left, in halves and drift."""
    alarms = [failed(good(seed, num=16), tolerance=1e-9) - {"precision"} for seed in range(60)]
    assert sum(map(bool, alarms)) <= 4


@pytest.mark.parametrize("chains", [16, 17])
def test_good_chains_of_few_particles_pass(chains):
    alarms = [failed(good(seed, num=512, chains=chains)) for seed in range(10)]
    assert sum(map(bool, alarms)) <= 1


def test_correlated_chains_pass_when_long_enough():
    x = np.stack([autoregressive(0.9, 400, 200, seed) for seed in range(2)], 2)
    chains = Chains(x, -0.5 * np.sum(x**2, 2), -x, np.ones(200, bool))
    assert failed(chains) == set()


def test_skewed_and_heavier_draws_pass():
    rng = np.random.default_rng(0)
    g, t = rng.gamma(3.0, size=(100, 200)), rng.standard_t(5, size=(100, 200))
    x = np.stack([np.log(g), t], 2)
    score = np.stack([3 - g, -6 * t / (5 + t**2)], 2)
    chains = Chains(x, 3 * np.log(g) - g - 3 * np.log1p(t**2 / 5), score, np.ones(200, bool))
    assert failed(chains) == set()


# ---------------------------------------------------------------- each alarm fires, and where it should alone


def changed(chains, *, x=None, score=None, log_density=None, moved=None):
    new = {"x": x, "score": score, "log_density": log_density, "moved": moved}
    return chains._replace(**{name: value for name, value in new.items() if value is not None})


def gaussian(x, mean=0.0, sd=1.0):
    """Chains at `x` with all that belongs to N(mean, sd^2) there."""
    z = (x - mean) / sd
    return Chains(x, -0.5 * np.sum(z**2, 2), -z / sd, np.ones(x.shape[1], bool))


def test_chains_that_have_not_mixed():
    rng = np.random.default_rng(0)
    x = np.sqrt(0.8) * rng.normal(size=(200, 400, 1)) + np.sqrt(0.2) * rng.normal(size=(1, 400, 1))
    found = verdicts(gaussian(x), tolerance=0.06)
    assert not found["mixing"].passed
    assert "(a; limit 1.05)" in found["mixing"].text
    assert failed(gaussian(x), tolerance=0.06) == {"mixing"}


def test_too_few_draws():
    found = verdicts(good(num=8))
    assert [name for name, check in found.items() if not check.passed] == ["precision"]
    assert "limit 0.03" in found["precision"].text


@pytest.mark.parametrize("kind", ["mean", "spread"])
def test_halves_that_differ(kind):
    """Even and odd chains are of different laws; the scores are those of the mixture's own moments."""
    x = np.random.default_rng(0).normal(size=(64, 128, 3))
    even = (np.arange(128) % 2 == 0)[:, None]
    x[:, :, 1:2] = x[:, :, 1:2] + 0.2 * even if kind == "mean" else x[:, :, 1:2] * (1 + 0.2 * even)
    chains = gaussian(x, x.mean((0, 1)), x.std((0, 1)))
    found = verdicts(chains)
    assert failed(chains) == {"halves"}
    assert found["halves"].text.startswith("b:" if kind == "mean" else "the spread of b:")


@pytest.mark.parametrize("kind", ["mean", "spread"])
def test_drift_of_a_coordinate(kind):
    x = np.random.default_rng(0).normal(size=(64, 128, 3))
    time = np.linspace(-0.5, 0.5, 64)[:, None]
    x[:, :, 2] = x[:, :, 2] + 0.6 * time if kind == "mean" else x[:, :, 2] * (1 + 0.5 * time)
    chains = gaussian(x, x.mean((0, 1)), x.std((0, 1)))
    steady = np.random.default_rng(1).normal(size=(64, 128))
    chains = changed(chains, log_density=steady)
    found = verdicts(chains)
    assert failed(chains) == {"drift"}
    assert found["drift"].text.startswith("c:" if kind == "mean" else "the spread of c:")


def test_drift_of_the_log_density():
    chains = good()
    rising = chains.log_density + np.linspace(0, 1, 64)[:, None]
    found = verdicts(changed(chains, log_density=rising))
    assert failed(changed(chains, log_density=rising)) == {"drift"}
    assert found["drift"].text.startswith("the log density:")


@pytest.mark.parametrize("change", [0.8, 1.25, 2.0, 0.0, -1.0])
def test_a_score_that_does_not_fit(change):
    """The draws of N(0, 1) with the score of another law: a wider, a narrower one, none, a wrong sign."""
    chains = good()
    score = chains.score * np.array([1.0, change, 1.0])
    assert failed(changed(chains, score=score)) == {"stein"}
    text = verdicts(changed(chains, score=score))["stein"].text
    assert text.startswith("the spread of b:")
    residual = float(text.split("at most ")[1].split()[0])
    assert abs(residual - abs(1 - change)) < 5 * max(abs(change), 1) * np.sqrt(2 / (64 * 128))


def test_a_score_with_a_mean():
    chains = good()
    score = chains.score + np.array([0.0, 0.0, 0.3 / 30])
    assert failed(changed(chains, score=score)) == {"stein"}
    assert verdicts(changed(chains, score=score))["stein"].text.startswith("c:")


def test_draws_cut_off_at_zero():
    """|z| of N(0, 1): E s = -0.8 and not 0; no chain has gone beyond the cut."""
    x = abs(np.random.default_rng(0).normal(size=(64, 128, 1)))
    assert failed(gaussian(x)) == {"stein"}


def test_a_correlated_gaussian_satisfies_the_identity():
    rng = np.random.default_rng(0)
    root = np.array([[1.0, 0.0], [0.999, 0.01]])
    z = rng.normal(size=(64, 128, 2))
    score = -z @ np.linalg.inv(root)
    x = z @ root.T
    chains = Chains(x, -0.5 * np.sum(z**2, 2), score, np.ones(128, bool))
    assert failed(chains) == set()
    wrong = changed(chains, score=-x)  # of N(0, I)
    assert "stein" in failed(wrong)


def test_a_stuck_chain():
    chains = good()
    moved = chains.moved.copy()
    moved[[3, 7]] = False
    assert failed(changed(chains, moved=moved)) == {"moving"}
    assert "2 of 128" in verdicts(changed(chains, moved=moved))["moving"].text


def test_a_constant_coordinate():
    chains = good()
    x = chains.x.copy()
    x[:, :, 1] = 5.0
    bad = changed(chains, x=x)
    assert {"moving", "mixing", "precision"} <= failed(bad)
    assert "b is the same" in verdicts(bad)["moving"].text


@pytest.mark.parametrize(
    ("law", "fires"),
    [
        (stats.cauchy, True),
        (stats.t(1.2), True),
        (stats.t(4), False),
        (stats.laplace, False),
        (stats.uniform, False),
    ],
)
def test_heavy_tails(law, fires):
    chains = good()
    x = chains.x.copy()
    x[:, :, 2] = law.rvs(size=(64, 128), random_state=0)
    found = verdicts(changed(chains, x=x))["tails"]
    assert found.passed is not fires
    assert found.text.startswith("the tails of c") is fires


def test_hill_index_of_exact_tails():
    """|x| = u^-index at the quantiles u = (k - 1/2) / n: Hill's estimate is the index itself."""
    size = ((np.arange(64 * 100) + 0.5) / (64 * 100)) ** -0.5
    sign = np.where(np.arange(6400) % 2, 1.0, -1.0)
    x = np.random.default_rng(0).permutation(size * sign).reshape(64, 100, 1)
    text = evidence._tails(gaussian(x), ["a"]).text
    np.testing.assert_allclose(float(text.split("index ")[1].split()[0]), 0.5, atol=0.02)


@pytest.mark.parametrize(("digits", "passes"), [(2.0**-52, True), (2.0**-23, False)])
def test_a_mean_beyond_the_resolution(digits, passes):
    """A mean of 1e6 sd is rounded to 0.12 sd in float32."""
    chains = good()
    far = changed(chains, x=chains.x + 1e6 * chains.x.std((0, 1)))
    assert failed(far, digits=digits) == (set() if passes else {"resolution"})
    if not passes:
        text = verdicts(far, digits=digits)["resolution"].text
        assert "float64" in text and "rounding of" in text


@pytest.mark.parametrize(("digits", "passes"), [(2.0**-52, True), (2.0**-23, False)])
def test_a_log_density_beyond_the_resolution(digits, passes):
    chains = good()
    far = changed(chains, log_density=chains.log_density - 1e7)
    assert failed(far, digits=digits) == (set() if passes else {"resolution"})
    if not passes:
        assert "the log density is rounded" in verdicts(far, digits=digits)["resolution"].text


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("field", ["score", "log_density"])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_numbers_that_are_none_never_pass(field, value):
    chains = good()
    bad = getattr(chains, field).copy()
    bad[3, 5] = value
    assert failed(changed(chains, **{field: bad}))
