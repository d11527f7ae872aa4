"""The UCI regression study against NumPy in float64, and its tables on made-up records."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import uci, uci_tables
from experiments.fetching import UCI, DatasetError
from particlax import predictive

COMPILE_FAST = True

TINY = uci.Config(sets=(uci.SYNTHETIC,), particles=4, hidden=5, batch=20, steps=30)


def made_particle(rng, columns, hidden):
    """Weights, log gamma and log lambda, all drawn."""
    return {
        "w1": rng.normal(size=(columns, hidden)), "b1": rng.normal(size=hidden),
        "w2": rng.normal(size=hidden), "b2": rng.normal(),
        "log_gamma": rng.normal(), "log_lambda": rng.normal(),
    }  # fmt: skip


def prediction(p, x):
    """The network, a row and a unit at a time."""
    seen = []
    for row in x:
        out = p["b2"]
        for j in range(len(p["b1"])):
            inside = p["b1"][j] + sum(row[i] * p["w1"][i, j] for i in range(len(row)))
            out += p["w2"][j] * max(inside, 0.0)
        seen.append(out)
    return np.array(seen)


def log_density(p, x, y, shape=1.0, rate=0.1):
    """Likelihood, weights given lambda, and Gamma(shape, rate) of gamma and lambda with the Jacobians of the logarithms."""
    gamma, lam = np.exp(p["log_gamma"]), np.exp(p["log_lambda"])
    normal = lambda v, precision: 0.5 * np.log(precision / (2 * np.pi)) - 0.5 * precision * v**2
    total = sum(normal(error, gamma) for error in y - prediction(p, x))
    weights = np.concatenate([np.ravel(p[k]) for k in ("w1", "b1", "w2", "b2")])
    total += sum(normal(w, lam) for w in weights)
    for value in (gamma, lam):
        total += (shape - 1) * np.log(value) - rate * value + np.log(value)
    return total


def as_ours(p, slow):
    """The particle in the form in which the study holds it."""
    rest = {k: jnp.asarray(v) for k, v in p.items() if k != "log_lambda"}
    return rest | {"slow_lambda": jnp.asarray(p["log_lambda"] / slow)}


@pytest.mark.parametrize("settings", [{}, {"slow": 1.0, "shape": 2.5, "rate": 0.3}])
def test_the_target(x64, settings):
    """Differences, since constants do not matter."""
    rng = np.random.default_rng(0)
    c = dataclasses.replace(TINY, **settings)
    x, y = rng.normal(size=(7, 3)), rng.normal(size=7)
    points = [made_particle(rng, 3, 5) for _ in range(4)]
    goal = uci.target(c, 7)
    ours = [float(goal(as_ours(p, c.slow), {"x": x, "y": y})) for p in points]
    theirs = [log_density(p, x, y, c.shape, c.rate) for p in points]
    np.testing.assert_allclose(np.diff(ours), np.diff(theirs), rtol=1e-10)


def test_a_batch_stands_for_all_rows(x64):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(6, 3)), rng.normal(size=6)
    p = as_ours(made_particle(rng, 3, 5), TINY.slow)
    goal = uci.target(TINY, 6)
    halves = [float(goal(p, {"x": x[k::2], "y": y[k::2]})) for k in (0, 1)]
    np.testing.assert_allclose(np.mean(halves), float(goal(p, {"x": x, "y": y})), rtol=1e-10)


def test_slow_slows_log_lambda_alone(x64):
    """The same start and one step of the optimizer: log lambda moves by `slow` times as much."""
    moved = {}
    for slow in (1.0, 0.25):
        c = dataclasses.replace(TINY, slow=slow)
        given = uci.problem(c, uci.SYNTHETIC, 0)
        batch = {"x": jnp.asarray(given.x, float), "y": jnp.asarray(given.y, float)}
        flow = uci.flows(c, len(given.y))[uci_tables.ENSEMBLE]
        state = flow.init(uci.starts(c, 5, batch, jax.random.key(0)))
        after, _ = jax.jit(flow.step)(jax.random.key(0), state, batch)
        moved[slow] = {k: after.particles[k] - state.particles[k] for k in state.particles}
        moved[slow]["log_lambda"] = slow * moved[slow].pop("slow_lambda")
    fast = moved[1.0].pop("log_lambda")
    np.testing.assert_allclose(moved[0.25].pop("log_lambda"), 0.25 * fast, rtol=1e-4)
    np.testing.assert_allclose(np.abs(fast), c.step_size, rtol=1e-4)
    for name, value in moved[0.25].items():
        np.testing.assert_allclose(value, moved[1.0][name], atol=1e-8)


def test_the_start_is_theirs():
    rng = np.random.default_rng(2)
    rows = {"x": rng.normal(size=(40, 8)).astype(np.float32), "y": rng.normal(size=40)}
    c = dataclasses.replace(TINY, particles=5000)
    cloud = {k: np.asarray(v, float) for k, v in uci.starts(c, 20, rows, jax.random.key(3)).items()}
    assert not np.any(cloud["b1"])
    assert not np.any(cloud["b2"])
    np.testing.assert_allclose(cloud["w1"].std(), 1 / 3, rtol=0.02)
    np.testing.assert_allclose(cloud["w2"].std(), 1 / np.sqrt(21), rtol=0.03)
    lam = np.exp(c.slow * cloud["slow_lambda"])
    np.testing.assert_allclose([lam.mean(), lam.std()], 0.1, rtol=0.06)
    first = {k: v[0] for k, v in cloud.items()}
    error = prediction(first, rows["x"]) - rows["y"]
    np.testing.assert_allclose(first["log_gamma"], -np.log(np.mean(error**2)), rtol=1e-4)


# --------------------------------------------------------------------------------------------- the splits


@pytest.mark.parametrize("part", ["test", "validation"])
def test_a_split(part):
    """Every row is in one part, training rows are standardised by themselves; validation leaves the test rows alone."""
    c = dataclasses.replace(TINY, part=part)
    found = uci.read(uci.SYNTHETIC)
    given = uci.problem(c, uci.SYNTHETIC, 1)
    tests = set(found.y[found.test_index[1]])
    train = given.y * given.sd + given.mean
    num = 120 - 12 * (2 if part == "validation" else 1)
    assert len(given.dev_y) == round(0.1 * num)
    assert len(given.y) + len(given.dev_y) == num
    parts = np.concatenate([train, given.dev_y, given.test_y])
    wanted = set(found.y) if part == "test" else set(found.y) - tests
    np.testing.assert_allclose(np.sort(parts), np.sort(list(wanted)), rtol=1e-6)
    assert (set(given.test_y) == tests) == (part == "test")
    np.testing.assert_allclose([given.y.mean(), given.y.std()], [0, 1], atol=1e-6)
    np.testing.assert_allclose(given.x.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(given.x.std(0), [1, 1, 0], atol=1e-6)  # the last column is constant
    assert np.all(np.isfinite(given.test_x))


def test_parts_that_do_not_exist():
    with pytest.raises(SystemExit, match="expected test or validation"):
        uci.problem(dataclasses.replace(TINY, part="train"), uci.SYNTHETIC, 0)
    with pytest.raises(SystemExit, match="--tuning=own: expected widened or replaced"):
        uci.problem(dataclasses.replace(TINY, tuning="own"), uci.SYNTHETIC, 0)
    with pytest.raises(SystemExit, match="no set 'bostn'; the sets are: boston"):
        list(uci.runs(dataclasses.replace(TINY, sets=("bostn",))))
    with pytest.raises(SystemExit, match="no method 'SVDG'; the methods are: ensemble"):
        list(uci.runs(dataclasses.replace(TINY, methods="SVGD; SVDG")))


def test_the_runs_of_the_study():
    wanted = list(uci.runs(uci.Config()))
    splits = {name: {r.seed for r in wanted if r.settings["set"] == name} for name in UCI}
    assert {name: len(seen) for name, seen in splits.items()} == {n: UCI[n][1] for n in UCI}
    assert len(wanted) == 7 * (8 * 20 + 5)
    assert [r.settings["method"] for r in uci.runs(dataclasses.replace(TINY, methods="SVGD"))] == ["SVGD"] * 2  # fmt: skip


def test_the_released_settings_are_noted():
    c = dataclasses.replace(TINY, steps=4000)
    found = {r.settings["method"]: r.settings for r in uci.runs(c)}
    theirs, ours = found[uci.RELEASED], found["SVGD"]
    changed = {k: v for k, v in theirs.items() if v != ours[k]}
    changed.pop("method")
    assert changed == {"steps": 2000, "step_size": 1e-3, "final": 1.0, "slow": 1.0, "tuning": "replaced"}  # fmt: skip


# --------------------------------------------------------------------------------------------- the scores


def slow_scores(particles, x, y, mean, sd, factor):
    """RMSE of the mean prediction and mean log mixture density of y, in the units of y."""
    count = len(particles["b2"])
    each = [{k: v[m] for k, v in particles.items()} for m in range(count)]
    means = [prediction(p, x) * sd + mean for p in each]
    sds = [factor * sd * np.exp(-0.5 * p["log_gamma"]) for p in each]
    density = np.zeros(len(y))
    for m, s in zip(means, sds, strict=True):
        density += np.exp(-0.5 * ((y - m) / s) ** 2) / (s * np.sqrt(2 * np.pi)) / count
    return np.sqrt(np.mean((np.mean(means, 0) - y) ** 2)), np.mean(np.log(density))


def drawn(split, seed, count=4):
    """A cloud of particles that predict nothing in particular, and are sure of it."""
    rng = np.random.default_rng(seed)
    each = [made_particle(rng, split.x.shape[1], 5) for _ in range(count)]
    each = [p | {"log_gamma": p["log_gamma"] + 3} for p in each]
    cloud = {k: np.stack([np.asarray(p[k]) for p in each]) for k in each[0]}
    ours = {k: jnp.asarray(v, jnp.float32) for k, v in cloud.items() if k != "log_lambda"}
    return cloud, ours | {"slow_lambda": jnp.asarray(cloud["log_lambda"] / TINY.slow, jnp.float32)}


def test_the_scores_are_in_the_units_of_y():
    split = uci.problem(TINY, uci.SYNTHETIC, 0)
    cloud, ours = drawn(split, 5)
    seen = uci.evaluate(TINY, ours, split)
    assert seen["factor"] > 1
    for key, factor in (("ll", seen["factor"]), ("untuned_ll", 1.0)):
        rmse, ll = slow_scores(cloud, split.test_x.astype(float), split.test_y, split.mean, split.sd, factor)  # fmt: skip
        np.testing.assert_allclose([seen["rmse"], seen[key]], [rmse, ll], rtol=1e-4)
    alone = [
        slow_scores({k: v[[m]] for k, v in cloud.items()}, split.test_x.astype(float), split.test_y,
                    split.mean, split.sd, seen["factor"])
        for m in range(4)
    ]  # fmt: skip
    expected = np.mean(alone, 0)
    np.testing.assert_allclose([seen["single_rmse"], seen["single_ll"]], expected, rtol=1e-4)
    np.testing.assert_allclose(seen["lambda"], np.exp(np.median(cloud["log_lambda"])), rtol=1e-4)


def test_their_noise_is_the_error_on_the_development_set():
    c = dataclasses.replace(TINY, tuning="replaced")
    split = uci.problem(c, uci.SYNTHETIC, 0)
    cloud, ours = drawn(split, 7)
    sds = uci.tuned(c, ours, split)
    for m in range(4):
        one = {k: v[m] for k, v in cloud.items()}
        error = prediction(one, split.dev_x.astype(float)) * split.sd + split.mean - split.dev_y
        np.testing.assert_allclose(sds[m], np.sqrt(np.mean(error**2)), rtol=1e-5)
    seen = uci.evaluate(c, ours, split)
    cloud["log_gamma"] = -2 * np.log(sds[:, 0] / split.sd)
    _, ll = slow_scores(cloud, split.test_x.astype(float), split.test_y, split.mean, split.sd, 1.0)
    np.testing.assert_allclose(seen["ll"], ll, rtol=1e-5)


def test_other_units_shift_the_log_likelihood_by_the_log_of_the_unit():
    """y in thousandths: RMSE times 1000, log-likelihood minus log 1000, the same factor."""
    split = uci.problem(TINY, uci.SYNTHETIC, 0)
    small = split._replace(
        dev_y=1000 * split.dev_y, test_y=1000 * split.test_y, mean=1000 * split.mean, sd=1000 * split.sd
    )  # fmt: skip
    _, ours = drawn(split, 6)
    first, second = (uci.evaluate(TINY, ours, part) for part in (split, small))
    np.testing.assert_allclose(second["rmse"], 1000 * first["rmse"], rtol=1e-9)
    np.testing.assert_allclose(second["ll"], first["ll"] - np.log(1000), rtol=1e-9)
    np.testing.assert_allclose(second["factor"], first["factor"], rtol=1e-12)


def test_the_noise_is_widened_and_never_narrowed():
    rng = np.random.default_rng(0)
    y = rng.normal(size=2000)
    guess = lambda sd: predictive.Normal(np.zeros((1, 2000)), np.full((1, 1), sd))
    assert uci.best_factor(guess(3.0), y) == 1
    np.testing.assert_allclose(uci.best_factor(guess(0.5), y), 2, rtol=0.05)
    split = uci.problem(dataclasses.replace(TINY, development=0.0), uci.SYNTHETIC, 0)
    _, ours = drawn(split, 5)
    assert len(split.dev_y) == 0
    assert uci.evaluate(TINY, ours, split)["factor"] == 1.0


def test_learning():
    """The ensemble of a longer run predicts the sine that a line cannot."""
    c = dataclasses.replace(TINY, steps=1500, hidden=20, particles=5)
    (seen,) = uci.work(c, uci.SYNTHETIC, uci_tables.ENSEMBLE, 0)
    split = uci.problem(c, uci.SYNTHETIC, 0)
    assert seen.metrics["rmse"] < 0.4 * split.test_y.std()
    assert seen.metrics["ll"] > -np.log(split.test_y.std()) - 0.5 * np.log(2 * np.pi * np.e)


def test_a_real_split():
    if not os.environ.get("PARTICLAX_DATA"):
        pytest.skip("PARTICLAX_DATA does not name a folder with uci/naval.npz")
    try:
        given = uci.problem(uci.Config(), "naval", 0)
    except DatasetError as error:
        pytest.skip(f"no UCI sets there: {error}")
    assert given.x.shape == (11934 - 1193 - 500, 16)
    assert given.dev_x.shape == (500, 16)
    assert given.test_y.shape == (1193,)
    constant = np.flatnonzero(np.ptp(given.x, axis=0) == 0)
    assert len(constant) == 2
    assert np.abs(given.test_x[:, constant]).max() < 1e-3


# --------------------------------------------------------------------------------------------- the tables


def record(name, method, split, rmse, ll, **more):
    metrics = {
        "rmse": rmse,
        "ll": ll,
        "single_rmse": rmse + 1,
        "single_ll": ll - 1,
        "untuned_ll": ll,
    }
    metrics |= {"coverage": 0.9, "factor": 1.5, "noise": 2.0, "disagreement": 0.5, "lambda": 3.0}
    config = {"set": name, "method": method}
    return {"config": config, "seed": split, "metrics": metrics | more, "seconds": 1.0}


@pytest.fixture
def made():
    """SVGD is better than the ensemble by 0.1 on both splits of yacht, and unlike it by chance on boston."""
    return [
        record("yacht", "ensemble", 0, 0.7, -1.0), record("yacht", "ensemble", 1, 0.9, -1.2),
        record("yacht", "SVGD", 0, 0.6, -0.9), record("yacht", "SVGD", 1, 0.8, -1.1),
        record("boston", "ensemble", 0, 3.0, -2.5), record("boston", "ensemble", 1, 3.2, -2.6),
        record("boston", "SVGD", 0, 3.3, -2.3), record("boston", "SVGD", 1, 3.1, -2.7),
    ]  # fmt: skip


def test_scores_are_means_with_standard_errors(made):
    rows = uci_tables.scores(made, "rmse")
    assert rows[0] == ["set", "splits", "published SVGD", "single network", "ensemble", "SVGD"]
    assert rows[1] == ["yacht", "2", "0.864 ±0.052", "1.800 ±0.100", "0.800 ±0.100", "0.700 ±0.100"]
    assert rows[2][:3] == ["boston", "2", "2.957 ±0.099"]
    assert uci_tables.scores(made, "ll")[1][3:] == ["-2.100 ±0.100", "-1.100 ±0.100", "-1.000 ±0.100"]  # fmt: skip
    one = uci_tables.scores(made[:1], "ll")
    assert one[1][-1] == "-1.000 ±nan"


def test_pairs_are_differences_on_the_same_split(made):
    rows = uci_tables.pairs(made, "rmse")
    assert rows[0] == ["set", "single network", "SVGD"]
    assert rows[1] == ["yacht", "+1.000 ±0.000 worse", "-0.100 ±0.000 better"]
    assert rows[2] == ["boston", "+1.000 ±0.000 worse", "+0.100 ±0.200"]
    assert uci_tables.pairs(made, "ll")[1][2] == "+0.100 ±0.000 better"
    lonely = [r for r in made if (r["config"]["method"], r["seed"]) != ("ensemble", 1)]
    assert uci_tables.pairs(lonely, "rmse")[2][2] == "+0.300 ±nan"
    assert uci_tables.pairs([r for r in made if r["config"]["method"] == "SVGD"], "rmse")[1] == ["yacht", "-"]  # fmt: skip


def test_beside_the_published(made):
    """A mean that is better counts; clear are two errors and the rounding; a miss is named."""
    rows = {row[0]: row[1:] for row in uci_tables.against(made)[1:]}
    assert rows["ensemble"] == ["1 of 2", "0", "boston", "1 of 2", "0", "boston"]
    assert rows["SVGD"] == ["1 of 2", "0", "boston", "2 of 2", "1", "none"]
    assert rows["single network"][2] == "boston (clearly), yacht (clearly)"
    assert uci_tables.verdict((0.0035, 0.0), (0.004, 0.0), "rmse") == (True, False)
    assert uci_tables.verdict((0.0034, 0.0), (0.004, 0.0), "rmse") == (True, True)
    assert uci_tables.verdict((-2.5, 0.03), (-2.6, 0.04), "ll") == (True, False)
    assert uci_tables.verdict((-2.4, 0.03), (-2.6, 0.04), "ll") == (True, True)
    assert uci_tables.verdict((-2.6, 0.0), (-2.6, 0.0), "ll") == (False, False)
    assert len(uci_tables.against([record("synthetic", "SVGD", 0, 1.0, -1.0)])) == 1


def test_insides(made):
    rows = uci_tables.insides(made)
    assert len(rows) == 5
    assert rows[1] == ["yacht", "ensemble", "3", "2", "0.5", "1.50", "-1.100", "90.0%", "1.0"]


def test_validation_rows_have_a_table_of_their_own(made):
    tried = []
    for split, rmse in enumerate((1.0, 2.0)):
        entry = record("yacht", "SVGD", split, rmse, -rmse)
        entry["config"] |= {"part": "validation", "step_size": 0.01, "slow": 0.5}
        tried.append(entry)
    assert uci_tables.validation(made + tried) == [
        ["first step", "log lambda's share", "yacht: RMSE, LL"],
        ["0.01", "0.5", "1.500, -1.500"],
    ]
    assert uci_tables.scores(made + tried, "rmse") == uci_tables.scores(made, "rmse")
    assert uci_tables.insides(made + tried) == uci_tables.insides(made)
    assert len(uci_tables.validation(made)) == 1


def test_every_published_set_is_one_of_ours():
    assert set(uci_tables.PUBLISHED["rmse"]) == set(uci_tables.PUBLISHED["ll"]) == set(UCI)
