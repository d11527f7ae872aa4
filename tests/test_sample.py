"""`px.sample`: right draws or a plain word that they are not, on easy, hard and impossible densities.

What it promises is a standard error of `tolerance` for means (in sd) and sds (relative): five of them are allowed.
"""

import inspect
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import particlax as px
from particlax import modes, phases
from particlax.errors import OptionError, ParticleError, TargetError
from particlax.moves import SNAPSHOTS, Density, hop, window
from particlax.sample import FEWEST, Summary

M = 128
TOLERANCE = 0.015
CHECKS = [
    "mixing",
    "precision",
    "halves",
    "drift",
    "stein",
    "moving",
    "tails",
    "resolution",
    "gradient",
    "modes",
]


def bell(x):
    return -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(x))


def go(log_density, init=None, *, seed=0, **options):
    options = {"progress": False, "key": jax.random.key(seed)} | options
    return px.sample(log_density, init, **options)


def flat(tree, lead=1):
    leaves = [np.asarray(leaf, float) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(*leaf.shape[:lead], -1) for leaf in leaves], -1)


def right(result, mean, sd, tolerance=TOLERANCE):
    """Chains, and the draws picked from them, have these moments."""
    chains, draws = flat(result.chains, 2), flat(result.draws)
    more = np.hypot(tolerance, 1 / np.sqrt(len(draws)))
    for points, error in ((chains.reshape(-1, draws.shape[1]), tolerance), (draws, more)):
        assert np.all(abs(points.mean(0) - mean) < 5 * error * sd), points.mean(0)
        assert np.all(abs(points.std(0) / sd - 1) < 5 * error), points.std(0)


def failed(result):
    return {check.name for check in result.evidence if not check.passed}


@pytest.fixture(scope="module")
def plain():
    """N(0, I) in D = 2, with nothing given that has a default."""
    return go(bell, jnp.zeros(2))


# ----------------------------------------------------------------------------------------------- Gaussians


def test_a_gaussian(plain):
    assert plain.converged is True
    assert failed(plain) == set()
    right(plain, 0.0, 1.0)


def test_a_condition_number_of_a_million():
    sd = np.geomspace(1.0, 1e3, 10)
    axes, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(10, 10)))
    whiten = jnp.asarray(axes.T / sd[:, None], jnp.float32)
    result = go(lambda x: -0.5 * jnp.sum((whiten @ (x - 3.0)) ** 2), jnp.ones(10))
    assert result.converged
    right(result, 3.0, np.sqrt(np.sum((axes * sd) ** 2, 1)))
    z = (flat(result.chains, 2).reshape(-1, 10) - 3.0) @ axes / sd  # along the axes, too
    assert np.all(abs(z.mean(0)) < 5 * TOLERANCE)
    assert np.all(abs(z.std(0) - 1) < 5 * TOLERANCE)


SCALES = tuple(10.0**k for k in range(-3, 6))


def scaled(x):
    return -0.5 * jnp.sum((x / jnp.array(SCALES)) ** 2)


@pytest.mark.parametrize("away", [0.0, 1.0, 1000.0])
def test_scales_from_a_thousandth_to_a_hundred_thousand(away):
    """From zero, and from 1000 sd away, which is where float32 has no steps of 1 in the last coordinate."""
    result = go(scaled, away * jnp.array(SCALES), budget=10_000)
    assert result.converged
    right(result, 0.0, np.array(SCALES))


def test_a_start_1000_sd_away():
    result = go(bell, jnp.full(2, 1000.0))
    assert result.converged
    right(result, 0.0, 1.0)


def test_fewer_particles_than_dimensions():
    """20 in 60 dimensions; the budget is too short for the tolerance, or not: the moments are right."""
    sd = np.geomspace(0.1, 10, 60)
    scale = jnp.asarray(sd, jnp.float32)
    result = go(
        lambda x: -0.5 * jnp.sum((x / scale) ** 2),
        jnp.zeros(60),
        num_particles=20,
        num_draws=1000,
        tolerance=0.04,
        budget=10_000,
    )
    assert result.chains.shape[1:] == (20, 60)
    assert result.converged or failed(result) <= {"precision", "budget"}
    right(result, 0.0, sd, tolerance=0.04)


# ----------------------------------------------------------------------------------------- what goes in, and out


def test_the_parts_of_the_outcome(plain):
    assert plain.draws.shape == (4000, 2)
    assert plain.draws.dtype == jnp.float32
    assert isinstance(plain.draws, jax.Array)
    assert plain.particles.shape == (M, 2)
    assert plain.chains.shape[1:] == (M, 2)
    assert plain.chains.shape[0] % SNAPSHOTS == 0
    assert plain.names == ("x[0]", "x[1]")
    assert plain.modes == (1.0,)
    assert [check.name for check in plain.evidence] == CHECKS
    assert plain.reasons == tuple(check.text for check in plain.evidence)
    assert plain.evaluations % M == 0
    assert plain.seconds > 0
    np.testing.assert_array_equal(plain.chains[-1], plain.particles)


def test_draws_are_different_ones_of_the_chains(plain):
    rows = {tuple(row) for row in flat(plain.chains, 2).reshape(-1, 2)}
    drawn = [tuple(row) for row in flat(plain.draws)]
    assert set(drawn) <= rows
    x = flat(plain.chains, 2).reshape(-1, 2)
    repeated = len(x) - len(rows)  # refused moves
    assert len(drawn) - len(set(drawn)) <= repeated


@pytest.mark.parametrize("num", [1, 7, 6000])
def test_as_many_draws_as_asked_for(num):
    result = go(bell, jnp.zeros(2), num_draws=num)
    assert result.draws.shape == (num, 2)
    assert len(result.chains) * M >= num


def test_more_draws_than_a_round_keeps_are_repeated_evenly():
    result = go(bell, jnp.zeros(2), num_draws=150_000)
    kept = result.chains.shape[0] * M
    assert result.draws.shape == (150_000, 2)
    _, counts = np.unique(np.asarray(result.draws), axis=0, return_counts=True)
    rows, repeats = np.unique(flat(result.chains, 2).reshape(-1, 2), axis=0, return_counts=True)
    assert len(counts) == len(rows)
    assert np.all(counts <= repeats * -(-150_000 // kept))


def test_the_same_key_gives_the_same_draws(plain):
    again = go(bell, jnp.zeros(2))
    np.testing.assert_array_equal(again.draws, plain.draws)
    np.testing.assert_array_equal(again.chains, plain.chains)
    assert again.evaluations == plain.evaluations
    old = go(bell, jnp.zeros(2), key=jax.random.PRNGKey(0))
    np.testing.assert_array_equal(old.draws, plain.draws)


def test_another_key_gives_other_draws(plain):
    other = go(bell, jnp.zeros(2), seed=1)
    rows = {tuple(row) for row in flat(plain.draws)}
    assert not any(tuple(row) in rows for row in flat(other.draws))
    right(other, 0.0, 1.0)


def test_a_target_is_a_log_density(plain):
    result = go(px.Target(bell), jnp.zeros(2))
    np.testing.assert_array_equal(result.draws, plain.draws)


def test_a_start_from_a_function_of_a_key():
    seen = []

    def draw(key):
        seen.append(key)
        return 3 * jax.random.normal(key, (2,))

    result = go(bell, draw)
    assert len(seen) == M
    assert len({tuple(np.asarray(jax.random.key_data(k))) for k in seen}) == M
    assert result.converged
    right(result, 0.0, 1.0)


@pytest.mark.parametrize("spread", [0.0, 5.0])
def test_a_start_from_a_cloud(spread):
    cloud = np.float32(2 + spread * np.random.default_rng(0).normal(size=(M, 2)))
    kept = cloud.copy()
    result = go(bell, particles=cloud)
    np.testing.assert_array_equal(cloud, kept)
    assert result.converged
    right(result, 0.0, 1.0)


@pytest.fixture(scope="module")
def tree():
    def log_density(p):
        return -0.5 * ((p["a"] - 1) / 2) ** 2 - 0.5 * jnp.sum(p["net"]["w"] ** 2) - p["s"] ** 2 * 50

    return go(log_density, {"net": {"w": np.zeros((2, 3))}, "a": 0, "s": 0.0}, num_draws=500)


def test_a_pytree_with_scalars(tree):
    assert tree.converged
    assert jax.tree.map(jnp.shape, tree.draws) == {
        "a": (500,),
        "net": {"w": (500, 2, 3)},
        "s": (500,),
    }
    assert tree.names == ("a", *(f"net.w[{i},{j}]" for i in range(2) for j in range(3)), "s")
    right(tree, np.array([1.0, *[0.0] * 6, 0.0]), np.array([2.0, *[1.0] * 6, 0.1]))
    assert {leaf.dtype for leaf in jax.tree.leaves(tree.particles)} == {np.dtype(np.float32)}


def test_the_summary(tree):
    table = tree.summary()
    assert list(table.rows) == list(tree.names)
    x, draws = flat(tree.chains, 2).reshape(-1, 8), flat(tree.draws)
    for d, row in enumerate(table.rows.values()):
        assert tuple(row) == Summary.COLUMNS
        np.testing.assert_allclose(
            [row["mean"], row["sd"]], [x[:, d].mean(), x[:, d].std()], atol=1e-5
        )
        np.testing.assert_allclose(
            [row["5%"], row["50%"], row["95%"]],
            np.quantile(draws[:, d], [0.05, 0.5, 0.95]),
            rtol=1e-6,
        )
        assert 0 < row["error"] <= TOLERANCE * row["sd"]
        assert 0 < row["ess"] <= len(x)
    lines = str(table).split("\n")
    assert lines[0].split() == list(Summary.COLUMNS)
    assert [line.split()[0] for line in lines[1:9]] == list(tree.names)
    np.testing.assert_allclose(float(lines[1].split()[1]), x[:, 0].mean(), rtol=1e-3)
    assert lines[9].startswith("converged after")
    assert len({len(line) for line in lines[:9]}) == 1


def test_what_is_printed(plain):
    assert repr(plain) == str(plain)
    lines = str(plain).split("\n")
    assert lines[0].startswith(f"converged after {plain.evaluations:,} score evaluations in ")
    assert [line[:4] for line in lines[1:]] == ["  + "] * len(CHECKS)


def test_as_arviz_data(tree):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("arviz")
    posterior, num = tree.to_arviz().posterior, len(tree.chains["a"])
    assert posterior["net.w"].shape == (M, num, 2, 3)
    assert posterior["a"].shape == (M, num)
    np.testing.assert_array_equal(posterior["s"].values[5], tree.chains["s"][:, 5])


def test_float64():
    with jax.enable_x64(True):
        mean = 1e9
        result = go(lambda x: -0.5 * jnp.sum((x - mean) ** 2), jnp.full(2, mean + 5), num_draws=100)
        assert result.draws.dtype == result.particles.dtype == jnp.float64
        assert result.converged
        right(result, mean, 1.0)


def test_float32_where_float64_is_needed():
    """The same density: float32 cannot tell its draws apart."""
    mean = 1e9
    result = go(lambda x: -0.5 * jnp.sum((x - mean) ** 2), jnp.full(2, mean), budget=2000)
    assert not result.converged


@pytest.mark.parametrize("shown", [True, False])
def test_progress_leaves_nothing_behind(shown, capsys):
    go(bell, jnp.zeros(2), progress=shown)
    out, err = capsys.readouterr()
    assert out.strip() == err.strip() == ""


def test_a_second_call_compiles_nothing():
    traces = []

    def log_density(x):
        traces.append(1)
        return bell(x)

    options = {"num_particles": 16, "tolerance": 0.1, "num_draws": 100}
    go(log_density, jnp.zeros(2), **options)
    first, compiled = len(traces), (window._cache_size(), hop._cache_size())
    go(log_density, jnp.ones(2), seed=1, **options | {"tolerance": 0.05, "budget": 5000})
    assert (window._cache_size(), hop._cache_size()) == compiled
    assert len(traces) - first <= 1  # the check before anything is compiled


# ------------------------------------------------------------------------------------------------- the budget


@pytest.mark.parametrize("budget", [1000, 1001, 1500, 4000])
def test_the_budget_is_kept_on_a_gaussian(budget):
    result = go(bell, jnp.zeros(2), budget=budget, tolerance=1e-4)
    assert not result.converged
    assert {"budget"} <= failed(result) <= {"budget", "precision"}
    assert f"budget of {budget}" in str(result)
    assert 0.4 * budget * M < result.evaluations <= budget * M
    assert result.draws.shape == (4000, 2)


# ------------------------------------------------------------------------------------------------ two modes


def two_modes(dim):
    centre = jnp.zeros(dim).at[0].set(10.0)

    def log_density(x):
        parts = -0.5 * jnp.sum((x - centre) ** 2), -0.5 * jnp.sum((x + centre) ** 2)
        return jnp.logaddexp(jnp.log(0.75) + parts[0], jnp.log(0.25) + parts[1])

    return log_density


TWO = {dim: two_modes(dim) for dim in (2, 10)}


@pytest.fixture(scope="module", params=TWO)
def both(request):
    dim = request.param
    return dim, go(TWO[dim], lambda key: 12 * jax.random.normal(key, (dim,)), budget=20_000)


def test_two_modes_have_their_shares(both):
    dim, result = both
    assert len(result.modes) == 2
    np.testing.assert_allclose(result.modes, [0.75, 0.25], rtol=0.2)
    np.testing.assert_allclose(np.mean(np.asarray(result.draws)[:, 0] > 0), 0.75, atol=0.05)
    assert result.converged
    right(result, 5.0 * np.eye(dim)[0], np.sqrt(1 + 75 * np.eye(dim)[0]))
    text = next(check.text for check in result.evidence if check.name == "modes")
    assert text.startswith("2 modes were found, with shares 0.7")
    assert "nothing of modes that no particle has reached" in text


@pytest.mark.parametrize("dim", TWO)
def test_a_start_that_sees_one_mode(dim, both):
    """Nobody could know of the other; the evidence says so."""
    result = go(TWO[dim], 10 * jnp.eye(dim)[0], budget=20_000)
    assert result.modes == (1.0,)
    assert result.converged
    right(result, 10.0 * np.eye(dim)[0], 1.0)
    assert "nothing of modes that no particle has reached" in str(result)


@pytest.mark.parametrize("budget", [1000, 1300, 3000])
def test_the_budget_is_kept_with_modes(budget):
    start = lambda key: 12 * jax.random.normal(key, (2,))
    result = go(TWO[2], start, budget=budget, tolerance=1e-4)
    assert result.evaluations <= budget * M


def test_modes_are_found_again_once_they_are_known():
    """The ways between neighbours are looked at where they are, whatever mixture is in use."""
    rng, first = np.random.default_rng(0), np.arange(M) < 96
    x = rng.normal(size=(M, 2)) + np.where(first, 10, -10)[:, None] * np.array([1.0, 0.0])
    density = Density.of(px.Target(TWO[2]), jnp.zeros(2))
    ensemble = phases.Ensemble(density, jax.random.key(0), jnp.asarray(x, jnp.float32), 10_000)
    assert ensemble.fine.all()
    once = ensemble._modes()
    assert len(set(once[first]) & set(once[~first])) == 0
    ensemble.mixture = modes.fit(x[None], first.astype(int)[None])
    np.testing.assert_array_equal(ensemble._modes(), once)


def test_modes_are_kept_from_a_round_that_was_thinned():
    """Hops lie between windows; clouds of a window that were dropped do not make them crossings."""
    rng, first = np.random.default_rng(0), np.arange(M) < 96
    x = rng.normal(size=(M, 2)) + np.where(first, 10, -10)[:, None] * np.array([1.0, 0.0])
    density = Density.of(px.Target(TWO[2]), jnp.zeros(2))
    ensemble = phases.Ensemble(density, jax.random.key(0), jnp.asarray(x, jnp.float32), 10_000)
    ensemble.mixture = modes.fit(x[None], first.astype(int)[None])
    done = ensemble.round(8 * SNAPSHOTS)
    ensemble.learn(done.chains.x, done.chains.log_density, done.fresh)
    assert ensemble.mixture is not None
    for _ in range(6):  # down to two clouds
        ensemble.frozen.halve()
    assert len(ensemble.frozen) == 2
    for _ in range(3):
        ensemble.frozen = phases._Kept(1)
        ensemble.round(8 * SNAPSHOTS)
        ensemble.frozen.halve()
        chains = ensemble.frozen.chains()
        ensemble.learn(chains.x, chains.log_density, np.concatenate(ensemble.frozen.fresh))
        assert ensemble.mixture is not None


# ------------------------------------------------------------------------------------ densities that are none

IMPROPER = {
    "flat": lambda x: 0.0 * jnp.sum(x),
    "half flat": lambda x: -0.5 * x[0] ** 2,
    "unbounded": lambda x: 0.5 * jnp.sum(x**2),
    "linear": jnp.sum,
}


@pytest.mark.parametrize("name", IMPROPER)
def test_no_finite_integral(name):
    result = go(IMPROPER[name], jnp.zeros(2), budget=3000)
    assert not result.converged
    assert str(result).startswith("NOT converged")
    assert "budget" in failed(result)
    assert ("run away to infinity" in str(result)) or name == "unbounded"
    assert result.draws.shape == (4000, 2)
    assert all(line.startswith("  ! ") for line in str(result).split("\n")[1:])


def half(x):
    return jnp.where(x[0] > 0, bell(x), -jnp.inf)


def jump(x):
    """Twice the mass on the right."""
    return bell(x) + jnp.where(x[0] > 0, jnp.log(2.0), 0.0)


def steps(x):
    """N(0, 1) seen through a grid of half an sd: no slope anywhere in x[0]."""
    return -0.5 * (jnp.round(2 * x[0]) / 2) ** 2 - 0.5 * x[1] ** 2


def no_slope(x):
    return -0.5 * jax.lax.stop_gradient(x[0]) ** 2 - 0.5 * x[1] ** 2


def wrong_slope(x):
    """The slope of a Gaussian of half the sd."""
    wide, narrow = -0.5 * jnp.sum(x**2), -2.0 * jnp.sum(x**2)
    return narrow + jax.lax.stop_gradient(wide - narrow)


def grid_sd():
    k = np.arange(-12, 13) / 2
    p = np.exp(-0.5 * k**2) / np.sum(np.exp(-0.5 * k**2))
    return np.sqrt(np.sum(p * k**2) + 1 / 48)


ABS = np.sqrt(2 / np.pi)
"""E |z|; with 2/3 of the mass on the right the mean is a third of it."""
BROKEN = {
    "half": (half, ABS, np.sqrt(1 - ABS**2)),
    "jump": (jump, ABS / 3, np.sqrt(1 - ABS**2 / 9)),
    "steps": (steps, 0.0, grid_sd()),
    "no slope": (no_slope, 0.0, 1.0),
    "wrong slope": (wrong_slope, 0.0, 1.0),
}


@pytest.mark.parametrize("name", BROKEN)
def test_densities_that_break_the_rules(name):
    """Metropolis' test makes the draws right even so, or the outcome says that they are not."""
    log_density, mean, sd = BROKEN[name]
    result = go(log_density, jnp.full(2, 0.5), budget=5000)
    if result.converged:
        right(result, np.array([mean, 0.0]), np.array([sd, 1.0]))
    else:
        assert failed(result) - {"budget", "precision"}, str(result)
    assert ("stein" in failed(result)) or result.converged or "mixing" in failed(result)


def test_heavy_tails_are_told():
    result = go(lambda x: -jnp.sum(jnp.log1p(x**2)), jnp.zeros(2), budget=10_000)
    assert not result.converged
    assert failed(result) & {"tails", "mixing", "drift", "precision"}


# -------------------------------------------------------------------------------------------------- bad input


def bad(x):
    """NaN on the right, -inf on the left, N(0, I) close to zero only."""
    return jnp.where(jnp.sum(x**2) < 9, bell(x), jnp.where(x[0] > 0, jnp.nan, -jnp.inf))


FEW = {"num_particles": 16, "budget": 2000}


@pytest.mark.parametrize("x", [50.0, -50.0])
@pytest.mark.parametrize("how", ["init", "function", "particles"])
def test_a_start_where_there_is_no_density(x, how):
    point = jnp.full(2, x)
    start = {
        "init": {"init": point},
        "function": {"init": lambda key: point},
        "particles": {"particles": jnp.tile(point, (16, 1))},
    }[how]
    with pytest.raises(TargetError, match=r"all 16 starting points.*Start where the density is"):
        go(bad, **start, **FEW)


def test_a_start_from_which_one_particle_sees_the_density():
    """Around init every particle comes closer; in a cloud the others take its place."""
    cloud = np.full((16, 2), 50.0, np.float32)
    cloud[3] = 0.0
    for result in (go(bad, particles=cloud, **FEW), go(bad, jnp.array([0.0, 2.99]), **FEW)):
        assert np.isfinite(result.draws).all()
        assert np.all(np.sum(np.asarray(result.draws) ** 2, 1) < 9)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_start_that_is_no_number(value):
    with pytest.raises(ParticleError, match=r"NaN or infinite coordinates.*init or particles"):
        go(bell, jnp.array([0.0, value]))
    with pytest.raises(ParticleError, match="NaN or infinite coordinates"):
        go(bell, particles=np.where(np.eye(20, 2), value, 0.0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "neither of init and particles"),
        ({"init": jnp.zeros(2), "particles": jnp.zeros((M, 2))}, "both of init and particles"),
        ({"init": jnp.zeros(2), "num_particles": FEWEST - 1}, "num_particles is 15"),
        ({"init": jnp.zeros(2), "num_draws": 0}, "num_draws is 0"),
        ({"init": jnp.zeros(2), "budget": 999}, "budget is 999.*>= 1000"),
        ({"init": jnp.zeros(2), "tolerance": 0.0}, "tolerance is 0.0"),
        ({"init": jnp.zeros(2), "tolerance": -1.0}, "tolerance is -1.0"),
        ({"init": jnp.zeros(2), "tolerance": float("nan")}, "tolerance is nan"),
        ({"init": jnp.zeros(2), "steps": 100}, "sample has no option 'steps'.*budget"),
        ({"init": jnp.zeros(2), "draws": 100}, "did you mean 'num_draws'"),
        ({"init": lambda key: jnp.zeros(int(jax.random.randint(key, (), 1, 5)))}, "one shape"),
    ],
)
def test_options_that_are_refused(options, words):
    with pytest.raises(OptionError, match=words):
        go(bell, **options)


def test_too_few_particles():
    with pytest.raises(ParticleError, match=r"there are 15 particles; expected at least 16"):
        go(bell, particles=jnp.zeros((15, 2)))


@pytest.mark.parametrize("empty", [{}, [], None])
def test_a_start_without_coordinates(empty):
    with pytest.raises((ParticleError, OptionError)):
        go(bell, empty)


def test_a_point_of_no_dimension():
    with pytest.raises(ParticleError):
        go(bell, jnp.zeros(0))


def test_a_start_of_whole_numbers_from_a_function():
    with pytest.raises(ParticleError, match="int32"):
        go(bell, lambda key: jnp.zeros(2, int))


def test_a_log_density_that_is_no_scalar():
    with pytest.raises(TargetError, match=r"shape \(2,\) for one particle; expected a scalar"):
        go(lambda x: -(x**2), jnp.zeros(2))


def test_a_target_with_data():
    target = px.Target(log_prior=bell, log_likelihood=lambda p, batch: batch[:, 0], num_data=5)
    with pytest.raises(OptionError, match=r"likelihood with data.*closes over all data"):
        go(target, jnp.zeros(2))


# ------------------------------------------------------------------------------------- what once fooled it


def nested(dim, scale):
    """Half of the mass in a spike inside the other half."""
    spike = lambda x: -0.5 * jnp.sum((x / scale) ** 2) - dim * jnp.log(scale)
    return lambda x: jnp.logaddexp(-0.5 * jnp.sum(x**2), spike(x))


@pytest.mark.parametrize(("dim", "scale"), [(10, 0.1), (20, 0.15)])
def test_a_mode_inside_another_is_not_overlooked(dim, scale):
    """One chain in 128 sits in the spike: averages do not see it, and it is half of the mass."""
    result = go(nested(dim, scale), jnp.zeros(dim), budget=5000)
    ratio = np.asarray(result.draws).std(0) / np.sqrt(0.5 * (1 + scale**2))
    assert not result.converged or np.all(np.abs(ratio - 1) < 0.1)


def test_a_wide_mode_is_not_taken_for_one_that_is_behind():
    dim, scale = 100, 1 / 30
    narrow = lambda x: -0.5 * jnp.sum(((x - 5) / scale) ** 2) - dim * jnp.log(scale)
    both = lambda x: jnp.logaddexp(jnp.log(0.7) - 0.5 * jnp.sum(x**2), jnp.log(0.3) + narrow(x))
    start = np.random.default_rng(0).normal(size=(M, dim))
    start[:38] = 5 + scale * start[:38]
    result = go(both, particles=jnp.asarray(start, jnp.float32), budget=3000)
    wide = np.asarray(result.particles).mean(1) < 2.5
    assert 0.5 < wide.mean() < 0.9


@pytest.mark.parametrize("seed", range(3))
def test_no_sd_is_vouched_for_where_tails_are_too_heavy(seed):
    law = lambda x: -1.85 * jnp.log1p(x**2 / 2.7)
    result = px.sample(law, jnp.zeros(()), key=jax.random.key(seed), budget=20_000, progress=False)
    ratio = float(np.asarray(result.draws).std() / np.sqrt(2.7 / 0.7))
    assert not result.converged or abs(ratio - 1) < 0.1


def test_twelve_modes():
    angle = np.arange(12) * np.pi / 6
    centres = 10 * np.stack([np.cos(angle), np.sin(angle)], 1)

    def ring(x):
        return jax.nn.logsumexp(-0.5 * jnp.sum((x - jnp.asarray(centres, x.dtype)) ** 2, 1) / 0.09)

    result = go(ring, lambda key: 12 * jax.random.normal(key, (2,)))
    assert result.converged
    assert len(result.modes) == 12
    shares = np.bincount(
        np.argmin(((np.asarray(result.draws)[:, None] - centres) ** 2).sum(2), 1), minlength=12
    )
    np.testing.assert_allclose(shares / 4000, 1 / 12, atol=0.03)


def test_a_gradient_that_is_nan_where_the_density_is_not():
    cut = lambda x: -0.5 * jnp.sum(x**2) + 0 * jnp.sum(jnp.where(x > -2, jnp.sqrt(x + 2), 0.0))
    result = go(cut, jnp.zeros(2), budget=5000)
    assert not result.converged
    assert any("jnp.where" in reason for reason in result.reasons)


def test_a_log_density_in_numpy():
    with pytest.raises(TargetError, match=r"jax\.numpy"):
        go(lambda x: -np.sum(np.asarray(x) ** 2), jnp.zeros(2))


def test_a_rare_mode_that_was_seen_is_not_forgotten(key):
    """Two in a hundred draws are far away: windows in which no particle is there must not end the search."""

    def density(x):
        near, far = jnp.log(0.98) - 0.5 * x**2, jnp.log(0.02) - 0.5 * (x - 20) ** 2
        return jnp.logaddexp(near, far)

    start = lambda key: 20.0 * jax.random.bernoulli(key) + 0.0
    done = px.sample(density, start, key=key, progress=False, budget=20_000)
    assert len(done.modes) == 2
    assert abs(float(done.moments.mean[0]) - 0.4) < 0.15
    assert abs(float(done.moments.sd[0]) - 2.97) < 0.4


def test_slopes_that_overflow_where_nobody_goes_are_no_complaint(key):
    """A hierarchical model: in float32 the slope overflows at points that would be refused anyway."""
    y = np.array([1.0, -1.0, 2.0, 0.0, 0.5])

    def density(p):
        inner = -0.5 * jnp.sum((p["th"] / jnp.exp(p["lt"])) ** 2) - 5 * p["lt"]
        return inner - 0.5 * jnp.sum((p["th"] - y) ** 2) - 0.5 * p["lt"] ** 2

    done = px.sample(density, {"th": jnp.zeros(5), "lt": 0.0}, key=key, progress=False)
    assert done.converged, str(done)
    place = done.names.index("lt")
    np.testing.assert_allclose(done.moments.mean[place], -0.548, atol=0.05)  # by quadrature
    np.testing.assert_allclose(done.moments.sd[place], 0.719, rtol=0.06)


@pytest.mark.parametrize(
    ("density", "words"),
    [
        (lambda x: None, "returned None.*return"),
        (math.log, "jnp.log in place of math.log"),
        (lambda x: -(x**2) if x > 0 else -x, r"jnp.where in place of `if`"),
    ],
)
def test_common_slips_have_words(density, words, key):
    with pytest.raises(TargetError, match=words):
        px.sample(density, 1.0, key=key, progress=False)


def test_parameters_keep_names_of_their_own(key):
    start = {"a": {"b": 0.0}, "a.b": 1.0}
    done = px.sample(
        lambda p: -0.5 * p["a"]["b"] ** 2 - 0.5 * p["a.b"] ** 2, start, key=key, progress=False
    )
    assert len(set(done.names)) == 2


def test_quantities_that_follow_from_a_point(key):
    """With moments of their own, from the same chains."""
    start = {"mu": 0.0, "log_tau": 0.0, "z": jnp.zeros(2)}

    def density(p):
        return -0.5 * p["mu"] ** 2 - 2 * p["log_tau"] ** 2 - 0.5 * jnp.sum(p["z"] ** 2)

    done = px.sample(density, start, key=key, progress=False)
    transform = lambda p: {"tau": jnp.exp(p["log_tau"]), "theta": p["mu"] + p["z"]}
    table = done.summary(transform)
    assert list(table.rows) == ["tau", "theta[0]", "theta[1]"]
    tau = np.exp(np.asarray(done.chains["log_tau"], float))
    row = table.rows["tau"]
    np.testing.assert_allclose([row["mean"], row["sd"]], [tau.mean(), tau.std()], rtol=1e-4)
    np.testing.assert_allclose(row["error"], tau.mean(0).std(ddof=1) / np.sqrt(M), rtol=1e-3)
    assert abs(row["mean"] - np.exp(0.125)) < 5 * row["error"]
    np.testing.assert_allclose(table.rows["theta[1]"]["sd"], np.sqrt(2), rtol=0.05)
    same = done.summary(lambda p: p)
    for name, plain in done.summary().rows.items():
        np.testing.assert_allclose(
            list(same.rows[name].values()), list(plain.values()), rtol=1e-3, atol=1e-4
        )
    exported = done.to_arviz(transform)["posterior"]
    assert exported["theta"].shape == (M, len(tau), 2)
    with pytest.raises(OptionError, match="transform is 'tau'; expected a function"):
        inspect.unwrap(type(done).summary)(done, "tau")
    with pytest.raises(OptionError, match="transform gave nothing"):
        done.summary(lambda p: None)
