"""Bad input: the right class, and a message with what came, what was expected and what to do.

The type checks of the import hook in conftest.py would speak before the library does, so these tests use a
second copy of the package, imported without the hook: what users get.
"""

import importlib
import sys
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

COMPILE_FAST = True


def _without_hook():
    hooked = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "particlax"}
    for name in hooked:
        del sys.modules[name]
    plain = importlib.import_module("particlax")
    for name in [n for n in sys.modules if n.split(".")[0] == "particlax"]:
        del sys.modules[name]
    sys.modules.update(hooked)
    return plain


px = _without_hook()
E = px.errors
KEY = jax.random.key(0)


def bell(x):
    return -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(x))


def some(num=6, dim=2):
    return jax.random.normal(jax.random.key(3), (num, dim))


def raises(kind, *words, absent=()):
    """A context that wants the class and, somewhere in the message, every word."""

    class Expect:
        def __enter__(self):
            self.context = pytest.raises(Exception)
            self.info = self.context.__enter__()
            return self

        def __exit__(self, *error):
            done = self.context.__exit__(*error)
            value = self.info.value
            assert isinstance(value, kind), f"{type(value).__name__}: {value}"
            self.value, text = value, str(value)
            for word in words:
                assert word in text, f"{word!r} is not in: {text}"
            for word in absent:
                assert word not in text, f"{word!r} should not be in: {text}"
            return done

    return Expect()


@pytest.fixture
def target():
    return px.Target(bell)


@pytest.fixture
def flow(target):
    return px.svgd(target, step_size=0.1)


def go(flow, particles, steps=3, **options):
    return px.run(flow, particles, steps=steps, key=KEY, progress=False, **options)


# Errors are one family.


def test_family():
    for name in E.__all__:
        assert issubclass(getattr(E, name), E.ParticlaxError)
    assert issubclass(E.NonFiniteError, FloatingPointError)
    for name in ("ParticleError", "TargetError", "DataError", "OptionError"):
        assert issubclass(getattr(E, name), ValueError)


# Particles


def test_different_leading_sizes(flow):
    with raises(E.ParticleError, "['net']['w']", "(5, 3)", "5", "4", "['b']", "same number"):
        flow.init({"b": jnp.zeros(4), "net": {"w": jnp.zeros((5, 3))}})


@pytest.mark.parametrize("empty", [{}, (), [], None])
def test_empty_pytree(flow, empty):
    with raises(E.ParticleError, "empty pytree", "expected", "leading particle axis"):
        go(flow, empty)


def test_zero_particles(flow):
    with raises(E.ParticleError, "['w']", "leading size 0", "no particles", "at least one"):
        go(flow, {"w": jnp.zeros((0, 3))})


def test_scalar_leaf(flow):
    with raises(E.ParticleError, "['s']", "scalar", "leading particle axis", "px.particles.normal"):
        go(flow, {"s": jnp.array(1.0), "w": jnp.zeros((4, 3))})


@pytest.mark.parametrize("rule", ["Median", "ReferenceMedian", "HeatEquation"])
def test_one_particle_with_a_median(target, rule):
    kernel = px.kernels.RBF(getattr(px.kernels, rule)())
    for flow in (
        px.svgd(target, kernel=kernel, step_size=0.1),
        px.w_sgld_b(target, kernel=kernel, step_size=0.1),
        px.w_sgld(target, coupling=px.diffusions.FixedScale(lam=kernel.bandwidth), step_size=0.1),
        px.w_sgld(target, coupling=px.diffusions.Sinkhorn(lam=kernel.bandwidth), step_size=0.1),
    ):
        with raises(E.ParticleError, rule, "1 particle", "more particles", "fixed bandwidth"):
            go(flow, some(1))


def test_one_particle_with_a_fixed_bandwidth_is_fine(target):
    flow = px.svgd(target, kernel=px.kernels.RBF(1.0), step_size=0.1)
    assert np.isfinite(go(flow, some(1)).particles).all()


EQUAL = {"a": jnp.ones((5, 2)), "b": jnp.zeros(5)}


@pytest.mark.parametrize("name", ["svgd", "w_sgld", "w_sgld_b", "pi_sgld"])
def test_all_particles_equal(target, name):
    flow = getattr(px, name)(target, step_size=0.1)
    with raises(E.ParticleError, "all 5 particles are equal", "distinct", "px.particles.normal"):
        go(flow, EQUAL)


@pytest.mark.parametrize("name", ["svgd", "w_sgld_b"])
def test_all_particles_equal_with_a_fixed_bandwidth(target, name):
    """Nothing can part them here either: the answer would be one point M times."""
    flow = getattr(px, name)(target, kernel=px.kernels.RBF(1.0), step_size=0.1)
    with raises(E.ParticleError, "all 5 particles are equal", "distinct", "px.particles.normal"):
        go(flow, EQUAL)


@pytest.mark.parametrize("metric", ["Diagonal", "Ensemble"])
def test_all_particles_equal_in_a_metric_of_the_cloud(target, metric):
    """The cloud's covariance is zero, so that not even noise would move it."""
    flow = px.sgld(target, step_size=0.1, metric=getattr(px.metrics, metric)())
    with raises(E.ParticleError, metric, "equal", "expected"):
        go(flow, EQUAL)


def test_equal_starts_of_noisy_chains_are_fine(target):
    result = go(px.sgld(target, step_size=0.1), EQUAL)
    assert len(np.unique(np.asarray(result.particles["b"]))) == 5


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, bool, jnp.complex64])
def test_leaves_that_are_not_real_floats(flow, dtype):
    with raises(E.ParticleError, "['n']", np.dtype(dtype).name, "floating", ".astype(float)"):
        go(flow, {"n": jnp.ones((4, 2), dtype), "w": some(4)})


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_starting_particles_not_finite(flow, bad):
    with raises(E.ParticleError, "1 of 6", "['w']", "[4]", "finite starting points"):
        go(flow, {"w": some().at[4, 1].set(bad)})


def test_calibrate_with_too_few_particles(target):
    for flow in (
        px.w_sgld(target, calibrate=True, step_size=0.1),
        px.w_sgld_b(target, calibrate=True, step_size=0.1),
    ):
        words = ("calibrate=True", "4 particles", "D = 4", "at least 5", "calibrate=False")
        with raises(E.ParticleError, *words):
            go(flow, some(4, 4))
        assert np.isfinite(go(flow, some(5, 4), steps=1).log_density).all()


@pytest.mark.parametrize(("metric", "least"), [("Ensemble", 5), ("Diagonal", 2)])
def test_metric_with_too_few_particles(target, metric, least):
    flow = px.sgld(target, step_size=0.1, metric=getattr(px.metrics, metric)())
    words = (metric, f"at least {least}", "D = 3", f"there are {least - 1}", "more particles")
    with raises(E.ParticleError, *words):
        go(flow, some(least - 1, 3))
    go(flow, some(least, 3))


# Log densities


def test_log_density_returns_a_vector(target):
    flow = px.sgld(px.Target(lambda x: -0.5 * x**2), step_size=0.1)
    with raises(E.TargetError, "log_density", "(2,)", "expected a scalar", "Sum"):
        go(flow, some())


def test_log_density_written_for_the_whole_cloud():
    flow = px.sgld(px.Target(lambda x: -0.5 * jnp.sum(x**2, -1, keepdims=True)), step_size=0.1)
    with raises(E.TargetError, "(1,)", "one particle", "vmap"):
        go(flow, some())


def test_log_density_returns_an_integer():
    flow = px.sgld(px.Target(lambda x: jnp.array(3)), step_size=0.1)
    with raises(E.TargetError, "log_density", "int32", "floating"):
        go(flow, some())


def test_log_density_returns_nan():
    flow = px.sgld(px.Target(lambda x: jnp.where(x[0] > 0, jnp.nan, bell(x))), step_size=0.1)
    cloud = jnp.array([[-1.0, 0.0], [1.0, 0.0], [-2.0, 0.0], [3.0, 0.0]])
    with raises(
        E.NonFiniteError, "step 0", "NaN", "2 of 4", "1, 3", "Check the log density"
    ) as caught:
        go(flow, cloud)
    assert caught.value.step == 0
    assert caught.value.particles == [1, 3]
    assert np.array_equal(caught.value.state.particles, cloud)


def test_log_density_is_nan_everywhere_with_one_step():
    flow = px.sgld(px.Target(lambda x: jnp.nan * jnp.sum(x)), step_size=0.1)
    with raises(E.NonFiniteError, "step 0", "the starting points", "6 of 6"):
        go(flow, some(), steps=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ("no log density", "log_density")),
        ({"log_prior": bell}, ("log_prior", "log_likelihood", "num_data")),
        ({"log_density": bell, "num_data": 3}, ("together", "alone")),
        ({"log_density": 3.0}, ("log_density is 3.0", "expected a function")),
        ({"log_prior": bell, "log_likelihood": bell}, ("num_data is None", "positive int")),
        ({"log_prior": bell, "log_likelihood": bell, "num_data": 0}, ("num_data is 0", "N")),
        ({"log_prior": bell, "log_likelihood": bell, "num_data": 2.5}, ("num_data is 2.5",)),
        ({"log_prior": 1, "log_likelihood": bell, "num_data": 2}, ("log_prior is 1", "function")),
    ],
)
def test_target_options(options, words):
    with raises(E.OptionError, *words):
        px.Target(**options)


# Batches


def likelihood(params, batch):
    return -0.5 * (batch["y"] - batch["x"] @ params) ** 2


DATA = {"x": np.ones((10, 2), np.float32), "y": np.zeros(10, np.float32)}


def regression(function=likelihood, num_data=10):
    target = px.Target(log_prior=bell, log_likelihood=function, num_data=num_data)
    return px.sgld(target, step_size=0.01)


def test_missing_batch():
    flow = regression()
    words = ("likelihood", "no batch", "flow.step(key, state, batch)", "data=", "px.Minibatches")
    with raises(E.DataError, *words):
        flow.step(KEY, flow.init(some()))
    with raises(E.DataError, *words):
        go(flow, some())


def test_batch_for_a_plain_target(flow):
    words = ("a batch came", "plain log_density", "leave", "log_likelihood=")
    with raises(E.DataError, *words):
        flow.step(KEY, flow.init(some()), DATA)
    with raises(E.DataError, *words):
        go(flow, some(), data=DATA)
    with raises(E.DataError, *words):
        go(flow, some(), data=px.Minibatches(DATA, 5))


def test_batch_leaves_of_different_sizes():
    wrong = {"x": jnp.ones((10, 2)), "y": jnp.zeros(9)}
    flow = regression()
    words = ("['x']", "(10, 2)", "['y']", "(9,)", "same number")
    with raises(E.DataError, *words):
        flow.step(KEY, flow.init(some()), wrong)
    with raises(E.DataError, *words):
        go(flow, some(), data=wrong)
    with raises(E.DataError, *words):
        px.Minibatches(wrong, 3)


@pytest.mark.parametrize("wrong", [{**DATA, "z": np.float32(1.0)}, np.float32(1.0)])
def test_scalar_in_the_batch(wrong):
    flow = regression()
    with raises(E.DataError, "scalar", "leading data axis"):
        flow.step(KEY, flow.init(some()), wrong)
    with raises(E.DataError, "()", "expected"):
        go(flow, some(), data=wrong)
    with raises(E.DataError, "()", "axis 0"):
        px.Minibatches(wrong, 3)


def test_empty_batch():
    flow = regression()
    with raises(E.DataError, "empty", "(0, 2)", "at least one datum"):
        flow.step(KEY, flow.init(some()), {"x": jnp.ones((0, 2)), "y": jnp.zeros(0)})
    with raises(E.DataError, "data are empty", "expected arrays"):
        px.Minibatches({}, 1)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda p, b: jnp.sum(likelihood(p, b)), "()"),
        (lambda p, b: likelihood(p, b)[:, None], "(10, 1)"),
        (lambda p, b: likelihood(p, b)[:3], "(3,)"),
    ],
)
def test_likelihood_of_wrong_shape(function, shape):
    with raises(E.TargetError, "log_likelihood", shape, "batch of 10", "(10,)", "Do not sum"):
        go(regression(function), some(), data=DATA)


def test_prior_returns_a_vector():
    target = px.Target(log_prior=lambda x: -(x**2), log_likelihood=likelihood, num_data=10)
    with raises(E.TargetError, "log_prior", "(2,)", "scalar"):
        go(px.sgld(target, step_size=0.01), some(), data=DATA)


def test_batch_larger_than_the_data():
    with raises(E.DataError, "batch_size is 11", "10 rows", "at most 10"):
        px.Minibatches(DATA, 11)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, None, "3"])
def test_batch_size_is_no_positive_int(size):
    with raises(E.DataError, f"batch_size is {size!r}", "positive int"):
        px.Minibatches(DATA, size)


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: px.Minibatches(d, 5)])
def test_num_data_mismatch(wrap):
    with raises(E.DataError, "10 rows", "num_data=12", "same number", "num_data / batch size"):
        go(regression(num_data=12), some(), data=wrap(DATA))


# Options


def test_noisy_term_with_an_optimizer(target):
    words = ("Langevin", "rescale the noise", "RMS", "Euler", "Blob")
    with raises(E.OptionError, *words):
        px.pi_sgld(target, diffusion=px.diffusions.Langevin(), optimizer=optax.adam(0.1))
    with raises(E.OptionError, *words):
        px.sgld(target, integrator=px.integrators.Optax(optax.sgd(0.1)))
    with raises(E.OptionError, *words):
        terms = (px.Drift(), px.diffusions.Langevin())
        px.Flow(target, terms, px.integrators.Optax(optax.adam(0.1)))


def test_rms_with_ensemble_and_noise(target):
    rms, ensemble = px.integrators.RMS(0.1), px.metrics.Ensemble()
    with raises(E.OptionError, "RMS", "Ensemble", "Langevin", "Use Euler", "Diagonal"):
        px.sgld(target, integrator=rms, metric=ensemble)
    px.sgld(target, integrator=rms, metric=px.metrics.Diagonal())
    px.w_sgld_b(target, integrator=rms, metric=ensemble)


WRONG = [-1.0, np.nan, np.inf, -np.inf, jnp.array(-0.5), optax.constant_schedule(-1.0)]


def makers(t):
    return {
        "step_size": [
            lambda v: px.sgld(t, step_size=v),
            lambda v: px.svgd(t, step_size=v),
            lambda v: px.sghmc(t, step_size=v),
            px.integrators.RMS,
        ],
        "weight": [
            px.Drift,
            px.Stein,
            lambda v: px.pi_sgld(t, stein=v, step_size=0.1),
            px.diffusions.Langevin,
            px.diffusions.Blob,
            px.diffusions.GFSD,
            px.diffusions.Transport,
        ],
        "gamma": [lambda v: px.diffusions.FixedScale(gamma=v)],
        "friction": [lambda v: px.sghmc(t, step_size=0.1, friction=v)],
    }


@pytest.mark.parametrize("value", WRONG, ids=lambda v: "schedule" if callable(v) else str(v))
@pytest.mark.parametrize("what", ["step_size", "weight", "gamma", "friction"])
def test_steps_and_weights_out_of_range(target, what, value):
    if callable(value) and what in ("gamma", "friction"):
        words = [what, "expected a number", "no schedule"]
    else:
        number = float(value(0)) if callable(value) else float(value)
        words = [what, str(number), "expected a finite number"]
        words += ["schedule"] if callable(value) else []
    for make in makers(target)[what]:
        with raises(E.OptionError, *words):
            make(value)


@pytest.mark.parametrize(
    "value",
    ["fast", "0.1", [1, 2], jnp.ones(2), lambda step: "x"],
    ids=lambda v: "schedule" if callable(v) else repr(v),
)
@pytest.mark.parametrize("what", ["step_size", "weight"])
def test_steps_and_weights_that_are_no_numbers(target, what, value):
    for make in makers(target)[what]:
        with raises(E.OptionError, what, "expected a number or an optax schedule"):
            make(value)


def test_zero_weights_and_steps_are_fine(target):
    """They move nothing (pi-SGLD without Stein's part is moved by the others)."""
    start = jnp.arange(6.0).reshape(3, 2)
    for what in ("weight", "step_size"):
        for maker in makers(target)[what]:
            made = maker(0.0)
            if isinstance(made, px.integrators.RMS):
                made = px.Flow(target, (px.Drift(),), made)
            elif not isinstance(made, px.Flow):
                made = px.Flow(target, (made,), px.integrators.Euler(0.1))
            state, _ = made.step(jax.random.key(0), made.init(start))
            moves = what == "weight" and len(made.terms) > 1
            assert np.array_equal(state.particles, start) != moves


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
@pytest.mark.parametrize("place", ["RBF", "IMQ", "Laplace", "Mixture", "FixedScale", "Sinkhorn"])
def test_bandwidths_out_of_range(place, value):
    with raises(E.OptionError, "bandwidth", str(value), "> 0"):
        if place in px.kernels.__all__:
            getattr(px.kernels, place)(bandwidth=value)
        else:
            getattr(px.diffusions, place)(lam=value)


@pytest.mark.parametrize("value", ["median", None, (1.0,)])
def test_bandwidths_of_wrong_type(value):
    with raises(E.OptionError, "bandwidth", repr(value), "positive number", "px.kernels.Median()"):
        px.kernels.RBF(bandwidth=value)


@pytest.mark.parametrize("value", [np.float32(0.5), jnp.array(0.5)], ids=repr)
def test_bandwidths_of_other_number_types(value):
    """They are positive numbers: to refuse them as no positive number would be puzzling."""
    assert float(px.kernels.RBF(bandwidth=value).bandwidth(some())) == 0.5


def test_unknown_options(target, flow):
    with raises(E.OptionError, "svgd", "'kernal'", "did you mean 'kernel'", "optimizer"):
        px.svgd(target, kernal=px.kernels.RBF())
    with raises(E.OptionError, "run", "'step'", "did you mean 'steps'", "observe_every"):
        px.run(flow, some(), step=3, key=KEY)
    with raises(E.OptionError, "sgld", "'optimizer'", "step_size"):
        px.sgld(target, optimizer=optax.adam(0.1))
    with raises(E.OptionError, "w_sgld", "'zzz'", "coupling", absent=("did you mean",)):
        px.w_sgld(target, zzz=1)


def test_unknown_options_of_constructors_name_the_class(target):
    with raises(E.OptionError, "Flow", "'integrater'", "'integrator'", absent=("self",)):
        px.Flow(target, (px.Drift(),), integrater=px.integrators.Euler(0.1))
    with raises(E.OptionError, "Target", "'log_prob'", "log_density", absent=("self",)):
        px.Target(log_prob=bell)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: px.diffusions.Blob(kernal=px.kernels.RBF()), ("Blob", "'kernal'", "kernel")),
        (lambda: px.kernels.RBF(bandwith=1.0), ("RBF", "'bandwith'", "bandwidth")),
        (lambda: px.integrators.Euler(stepsize=1.0), ("Euler", "'stepsize'", "step_size")),
        (lambda: px.diffusions.FixedScale(lamda=1.0), ("FixedScale", "'lamda'", "lam")),
        (lambda: px.Minibatches(DATA, batchsize=2), ("Minibatches", "'batchsize'", "batch_size")),
    ],
    ids=["Blob", "RBF", "Euler", "FixedScale", "Minibatches"],
)
def test_unknown_options_of_parts(make, words):
    with raises(E.OptionError, *words):
        make()


def test_bad_string_option():
    with raises(E.OptionError, "derivative", "'x'", "'fixed'", "'envelope'"):
        px.diffusions.Sinkhorn(derivative="x")


def test_no_way_or_two_ways_to_step(target):
    words = ("exactly one of", "step_size", "optimizer", "integrator")
    for name in ("svgd", "w_sgld", "w_sgld_b", "pi_sgld"):
        sampler = getattr(px, name)
        with raises(E.OptionError, "no way to step", *words):
            sampler(target)
        with raises(E.OptionError, "step_size and optimizer", *words):
            sampler(target, step_size=0.1, optimizer=optax.adam(0.1))
    with raises(E.OptionError, "no way to step", *words):
        px.sgld(target)
    with raises(E.OptionError, "step_size and integrator", *words):
        px.sgld(target, step_size=0.1, integrator=px.integrators.Euler(0.1))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda t: px.svgd(bell, step_size=0.1), ("target", "Target", "px.Target(log_density)")),
        (lambda t: px.Flow(t, (), px.integrators.Euler(0.1)), ("no terms", "px.Stein()")),
        (lambda t: px.Flow(t, (bell,), px.integrators.Euler(0.1)), ("terms", "Term", "px.Drift()")),
        (lambda t: px.Flow(t, px.Drift, px.integrators.Euler(0.1)), ("terms", "px.Drift()")),
        (lambda t: px.Flow(t, (px.Drift(),), 0.1), ("integrator", "0.1", "Euler(1e-2)")),
        (lambda t: px.sgld(t, integrator=optax.sgd(0.1)), ("integrator", "Euler(1e-2)")),
        (lambda t: px.sgld(t, step_size=0.1, metric="x"), ("metric", "'x'", "px.metrics")),
        (lambda t: px.sgld(t, step_size=0.1, metric=px.metrics.Ensemble), ("metric", "Metric")),
        (lambda t: px.svgd(t, optimizer=0.1), ("optimizer is 0.1", "optax.adam(0.05)")),
        (lambda t: px.svgd(t, optimizer=optax.adam), ("optimizer", "optax.adam(0.05)")),
        (lambda t: px.svgd(t, step_size=0.1, kernel="rbf"), ("kernel", "'rbf'", "RBF")),
        (lambda t: px.Stein(kernel=px.kernels.RBF), ("kernel", "RBF()")),
        (lambda t: px.w_sgld(t, step_size=0.1, coupling="x"), ("coupling", "'x'", "FixedScale")),
        (lambda t: px.pi_sgld(t, step_size=0.1, diffusion="x"), ("diffusion", "'x'", "Blob")),
        (lambda t: px.run(t, some(), steps=1, key=KEY), ("flow", "Target", "Flow")),
        (
            lambda t: px.run(px.sgld(t, step_size=0.1), some(), steps=1, key=0, progress=False),
            ("key is 0", "jax.random.key"),
        ),
    ],
    ids=[
        "target",
        "no-terms",
        "term",
        "term-class",
        "integrator",
        "integrator-optax",
        "metric",
        "metric-class",
        "optimizer",
        "optimizer-function",
        "kernel",
        "kernel-class",
        "coupling",
        "diffusion",
        "flow",
        "key",
    ],
)
def test_wrong_types(target, make, words):
    with raises(E.OptionError, "expected", *words):
        make(target)


@pytest.mark.parametrize("value", [-1, 1.5, True, None, "10"])
def test_bad_steps(flow, value):
    with raises(E.OptionError, f"steps is {value!r}", "whole number >= 0"):
        go(flow, some(), steps=value)


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
@pytest.mark.parametrize("name", ["thin", "observe_every"])
def test_bad_thin_and_observe_every(flow, name, value):
    with raises(E.OptionError, f"{name} is {value!r}", "whole number >= 1"):
        go(flow, some(), **{name: value})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: px.diffusions.Sinkhorn(iterations=0), ("iterations is 0", ">= 1")),
        (lambda: px.diffusions.Transport(inner=0), ("inner is 0", ">= 1")),
        (lambda: px.kernels.Mixture(scales=()), ("no scales", "at least one")),
        (lambda: px.kernels.Mixture(scales=(1.0, -1.0)), ("scale", "-1.0", "> 0")),
        (lambda: px.kernels.IMQ(power=0.0), ("power", "0.0", "> 0")),
        (lambda: px.kernels.HeatEquation(candidates=1), ("candidates=1", "at least 2")),
        (lambda: px.integrators.RMS(0.1, decay=1.0), ("decay is 1.0", "[0, 1)")),
        (lambda: px.schedules.polynomial(0.1, gamma=2.0), ("gamma is 2.0", "[0.5, 1]")),
        (lambda: px.schedules.cyclical(0.1, period=0), ("period is 0", "at least 1")),
        (lambda: px.zoo.Gaussian([0.0], np.eye(2)), ("(2, 2)", "1 coordinates", "(1, 1)")),
    ],
)
def test_other_options_out_of_range(make, words):
    with raises(E.OptionError, "expected", *words):
        make()


# Non-finite values during a run


class Cliff(eqx.Module):
    """The gradient (not the value) turns NaN once the first coordinate passes `edge`."""

    edge: float

    def __call__(self, x):
        return x[0] - jnp.where(x[0] < self.edge, jnp.sqrt(self.edge - x[0]), 0.0)


def fails_at(flow, state, most=200):
    """By hand: the first step whose value or move is not finite, and where: by value, score, move."""
    step = jax.jit(flow.step)
    for _ in range(most):
        before = int(state.step)
        state, info = step(KEY, state)
        value = np.asarray(info.log_density)
        values = ~np.isfinite(value)
        scores = ~np.isfinite(np.asarray(info.score)).all(1)
        moves = ~np.isfinite(np.asarray(state.particles)).all(1)
        if (values | moves).any():
            first = next(bad for bad in (values, scores, moves) if bad.any())
            return before, np.flatnonzero(first).tolist()
    raise AssertionError("no failure")


def check_failure(flow, cloud, error):
    assert int(error.state.step) == error.step
    for leaf in jax.tree.leaves(error.state):
        assert np.isfinite(np.asarray(leaf)).all()
    assert f"step {error.step}" in str(error)
    assert f"{len(error.particles)} of {len(cloud)} particles" in str(error)
    assert ".state" in str(error)
    assert fails_at(flow, flow.init(cloud)) == (error.step, error.particles)
    assert fails_at(flow, error.state, most=1) == (error.step, error.particles)
    with raises(E.NonFiniteError) as again:
        go(flow, error.state, steps=5)
    assert (again.value.step, again.value.particles) == (error.step, error.particles)


def test_gradient_becomes_nan():
    flow = px.sgld(px.Target(Cliff(3.0)), step_size=0.01)
    cloud = some(8) * 0.3
    with raises(E.NonFiniteError, "the score is not finite", "smaller step") as it:
        go(flow, cloud, steps=2000)
    assert 0 < it.value.step < 1000
    assert len(it.value.particles) == 1
    check_failure(flow, cloud, it.value)


def test_value_becomes_nan():
    density = px.Target(lambda x: jnp.where(x[0] > 2.0, jnp.nan, x[0]))
    flow = px.Flow(density, (px.Drift(),), px.integrators.Euler(0.125))
    cloud = jnp.array([[0.0], [-1.0], [0.0]])
    words = ("step 17", "NaN or infinite", "2 of 3", "(0, 2)", "Check the log density")
    with raises(E.NonFiniteError, *words) as it:
        go(flow, cloud, steps=100)
    check_failure(flow, cloud, it.value)


@pytest.mark.parametrize("thin", [None, 7])
def test_too_large_a_step_overflows(thin):
    flow = px.sgld(px.Target(lambda x: -jnp.sum(x**4)), step_size=0.6)
    cloud = some(12)
    with raises(E.NonFiniteError, "step ", "of 12 particles") as it:
        go(flow, cloud, steps=500, thin=thin)
    assert it.value.step > 0
    check_failure(flow, cloud, it.value)


def test_one_bad_particle_spoils_an_interacting_flow():
    flow = px.svgd(px.Target(Cliff(3.0)), optimizer=optax.adam(0.1))
    cloud = some(8) * 0.3
    with raises(E.NonFiniteError, "not finite") as it:
        go(flow, cloud, steps=500)
    check_failure(flow, cloud, it.value)


def test_failure_with_minibatches_keeps_the_state():
    def explosive(params, batch):
        return likelihood(params, batch) * jnp.exp(4 * jnp.sum(params**2))

    flow = regression(explosive)
    with raises(E.NonFiniteError, "step", "particles") as it:
        go(flow, some(), steps=1000, data=px.Minibatches(DATA, 5))
    assert np.isfinite(np.asarray(it.value.state.particles)).all()
    assert int(it.value.state.step) == it.value.step


def test_many_bad_particles_are_cut_in_the_message():
    flow = px.sgld(px.Target(lambda x: jnp.nan * jnp.sum(x)), step_size=0.1)
    with raises(E.NonFiniteError, "50 of 50", "9, ...", absent=("10, ",)) as it:
        go(flow, some(50))
    assert it.value.particles == list(range(50))


def test_a_particle_that_leaves_the_support_stops_the_run():
    density = px.Target(lambda x: jnp.where(x[0] > 2, -jnp.inf, x[0]))
    flow = px.Flow(density, (px.Drift(),), px.integrators.Euler(0.1))
    with raises(E.NonFiniteError, "the log density is NaN or infinite", "1 of 2 particles") as it:
        go(flow, jnp.array([[0.0], [-9.0]]), steps=100)
    assert it.value.particles == [0]


def test_a_schedule_that_turns_negative_stops_the_run(target):
    flow = px.sgld(target, step_size=optax.linear_schedule(0.1, -0.1, 10))
    with raises(E.NonFiniteError, "the move is not finite", "schedule") as it:
        go(flow, some(), steps=100)
    assert it.value.step == 6


def test_a_state_of_another_flow_is_refused(target):
    rms = px.sgld(target, integrator=px.integrators.RMS(0.01))
    state = go(rms, some(), steps=3).state
    with raises(E.OptionError, "another integrator", "state.particles"):
        go(px.sghmc(target, step_size=0.1), state, steps=3)


def test_an_optimizer_that_needs_the_loss_is_refused(target):
    with raises(E.OptionError, "more than gradients", "optax.adam"):
        go(px.svgd(target, optimizer=optax.lbfgs()), some(), steps=3)


@pytest.mark.parametrize("metric", [px.metrics.Diagonal(), px.metrics.Ensemble()])
def test_a_coordinate_without_spread_in_a_metric_of_the_cloud(metric):
    cloud = {"a": some(8), "b": some(8).at[:, 1].set(5.0)}
    density = px.Target(lambda p: -0.5 * jnp.sum(p["a"] ** 2) - 0.5 * jnp.sum(p["b"] ** 2))
    with raises(E.ParticleError, "['b']", "equal in all 8", "px.particles.normal"):
        px.sgld(density, step_size=0.1, metric=metric).init(cloud)


def test_errors_leave_no_progress_bar_behind(capsys):
    """The bar ends with the error, and the next run has its own."""
    flow = px.sgld(px.Target(lambda x: jnp.nan * jnp.sum(x)), step_size=0.1)
    for _ in range(2):
        with raises(E.NonFiniteError):
            px.run(flow, some(), steps=3, key=KEY)
    capsys.readouterr()


# ---------------------------------------------------------------------------------------------- networks


def net():
    return px.networks.Network(lambda key: jax.random.normal(key, (3, 2)), lambda w, x: x @ w)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((KEY, -1), "num is -1; expected a whole number >= 1"),
        ((KEY, 0), "num is 0; expected a whole number >= 1"),
        ((KEY, 2.0), r"num is 2\.0; expected a whole number"),
        ((0, 3), "key is 0; expected one JAX key"),
        ((3, KEY), r"num is [\s\S]*expected a whole number"),
    ],
)
def test_arguments_of_a_networks_init(args, words):
    with pytest.raises(E.OptionError, match=words):
        net().init(*args)


def test_what_networks_need():
    with pytest.raises(E.OptionError, match="classifier needs 'num_data', which did not come"):
        px.networks.classifier(net())
    with pytest.raises(E.OptionError, match="names is None; expected a list of names"):
        px.networks.split({"a": jnp.ones((2, 3)), "b": jnp.ones((2, 3))}, None)
    for noise in (None, "a", np.array([1.0, 2.0])):
        for refused in (
            lambda noise=noise: px.networks.regressor(net(), num_data=4, noise=noise),
            lambda noise=noise: px.predictive.normal(
                lambda w, x: w * x, jnp.ones(2), np.ones(3), noise=noise
            ),
        ):
            with pytest.raises(
                E.OptionError,
                match="expected a number or a function of the parameters or 'network'",
            ):
                refused()


def test_keywords_of_a_linen_module_are_mappings():
    linen = pytest.importorskip("flax.linen", reason="px.modules.linen needs flax")
    words = r"train is 'fit'; expected keywords of its call: train=\{'mode': 'fit'\}"
    with pytest.raises(E.OptionError, match=words):
        px.modules.linen(linen.Dense(3), jnp.ones((1, 2)), train="fit")


def line_data(**more):
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(20, 4)).astype(np.float32), "y": rng.integers(0, 3, 20)} | more


def trained(data, apply=lambda w, x: x @ w, **options):
    """Networks of one layer, on whatever data come."""
    flow = px.svgd(px.networks.classifier(apply, num_data=20), step_size=0.01)
    particles = jax.random.normal(KEY, (5, 4, 3))
    return px.run(flow, particles, steps=4, key=KEY, data=data, progress=False, **options)


def forever(step):
    while True:
        yield line_data()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (line_data(y=None), r"data\['y'\] is None; expected numbers"),
        (line_data(x=()), r"data\['x'\] is \(\); expected numbers"),
        (line_data(mask=np.zeros(20, bool)), "mask is false everywhere"),
        (np.ones((20, 5)), r"the data are a float32 array of shape \(20, 5\); expected a dict with inputs 'x'"),
        ({"x": np.ones((20, 4)), "labels": np.ones(20)}, r"the data are a dict of \['labels', 'x'\]"),
        (forever(0), "the data are a generator; .*What yields batches goes into px.Stream"),
        (lambda step: line_data(), "the data are a function; .*What yields batches goes into px.Stream"),
        (line_data(x=np.ma.array(np.ones((20, 4)), mask=False)), r"data\['x'\] is a masked array.*filled"),
        (line_data(x=np.ones((20, 4), object)), r"dtype object; expected numbers: .astype\(np.float32\)"),
        (line_data(y=np.array(["a"] * 20)), "np.unique"),
        (line_data(x=np.zeros(20, [("a", float), ("b", float)])), "structured_to_unstructured"),
    ],
    ids=range(11),
)  # fmt: skip
def test_data_that_are_no_batch(data, words):
    with pytest.raises(E.DataError, match=words):
        trained(data)


def test_sparse_matrices():
    sparse = pytest.importorskip("scipy.sparse").csr_matrix(line_data()["x"])
    with pytest.raises(E.DataError, match=r"data\['x'\] is a sparse matrix.*toarray"):
        px.Minibatches(line_data(x=sparse), 5)
    with pytest.raises(E.DataError, match=r"data is a sparse matrix.*toarray"):
        px.predictive.categorical(lambda w, x: x @ w, jnp.ones((2, 4, 3)), sparse)


def test_minibatches_by_position_and_transforms_without_a_key():
    data = line_data()
    with pytest.raises(E.DataError, match=r"int64 array of shape \(20,\).*Minibatches\({'x': x"):
        px.Minibatches(data["x"], data["y"])
    with pytest.raises(
        E.DataError, match=r"transform takes \(batch\); expected transform\(key, batch\)"
    ):
        px.Minibatches(data, 5, transform=lambda batch: batch)
    px.Minibatches(data, 5, transform=lambda key, batch, scale=1: batch)
    px.Minibatches(data, 5, transform=lambda *args: args[1])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (lambda: forever(0), r"source takes \(\); expected a function of the step number"),
        (lambda step: line_data(), r"returned a dict for step 0.*itertools.count\(step\)"),
        (lambda step: np.ones((20, 4)), r"returned a float64 array of shape \(20, 4\) for step 0"),
        (lambda step: None, "returned None for step 0"),
        (forever(0), "a function of the step number that returns an iterator of batches"),
    ],
    ids=range(5),
)
def test_sources_of_streams_that_yield_no_batches(source, words):
    with pytest.raises(E.DataError, match=words):
        trained(px.Stream(source, num_data=20))


def test_a_stream_of_a_function_that_is_not_a_generator():
    result = trained(px.Stream(lambda step: (line_data() for _ in range(100)), num_data=20))
    assert int(result.state.step) == 4


def test_what_is_given_to_predictions():
    data, apply = line_data(), lambda w, x: x @ w
    result = trained(data)
    predict = px.predictive.categorical
    with pytest.raises(E.OptionError, match=r"within jax\.jit.*jax\.vmap"):
        jax.jit(lambda x: predict(apply, result, x).probs)(data["x"])
    for wrong in (
        px.networks.classifier(apply, num_data=20),
        px.svgd(px.Target(bell), step_size=0.1),
    ):
        with pytest.raises(E.OptionError, match=f"apply is {type(wrong).__name__}; expected"):
            predict(wrong, result, data["x"])
    with pytest.raises(E.TargetError, match=r"float32 of shape \(3,\).*x of shape \(4,\).*x\[None\]"):  # fmt: skip
        predict(apply, result, data["x"][0])
    with pytest.raises(E.OptionError, match=r"pred is a float64 array of shape \(20, 3\)"):
        px.predictive.temperature(np.ones((20, 3)), data["y"])


def test_histories_without_clouds_and_parts_of_them():
    apply, data = lambda w, x: x @ w, line_data()
    empty = trained(data, thin=10).history
    for use in (lambda: empty.last(1), lambda: px.predictive.categorical(apply, empty, data["x"])):
        with pytest.raises((E.OptionError, E.ParticleError), match=r"no clouds.*thin <= steps"):
            use()
    history = trained(data, thin=1).history
    assert len(history) == 4
    np.testing.assert_array_equal(history[1::2].steps, [2, 4])
    np.testing.assert_array_equal(history[1::2].particles, history.particles[1::2])
    with pytest.raises(E.OptionError, match="index is 0; expected a slice"):
        history[0]


def test_a_result_in_place_of_its_state():
    flow = px.svgd(px.Target(bell), step_size=0.1)
    result = px.run(flow, some(), steps=1, key=KEY, progress=False)
    with pytest.raises(E.ParticleError, match=r"the particles are a Result; .*its \.state"):
        px.run(flow, result, steps=1, key=KEY, progress=False)


def test_values_in_messages_are_short():
    told = E.told
    assert told(np.ones((200, 3))) == "a float64 array of shape (200, 3)"
    assert told(jnp.ones(2, jnp.int32)) == "an int32 array of shape (2,)"
    assert told(list(range(1000))) == "a list" and told(3.5) == "3.5" and told("mean") == "'mean'"
    assert told(bell) == "the function bell" and told(lambda: 0) == "a function"
    assert told(dict) == "the class dict" and told(object()) == "an object"


class Rates(NamedTuple):
    """A user's own particles, with a name that results have too."""

    state: jax.Array
    rate: jax.Array


def test_particles_with_a_field_named_state(key):
    target = px.Target(lambda p: -0.5 * (jnp.sum(p.state**2) + p.rate**2))
    start = Rates(jnp.ones((5, 3)), jnp.arange(5.0))
    flow = px.svgd(target, optimizer=optax.adam(0.1))
    result = px.run(flow, start, steps=2, key=key, progress=False)
    assert result.particles.state.shape == (5, 3)
    with pytest.raises(px.errors.ParticleError, match="a Result; expected a cloud"):
        px.run(flow, result, steps=2, key=key, progress=False)


@pytest.mark.parametrize("transformed", [jax.jit, jax.vmap])
def test_runs_within_transformations(transformed, key):
    target = px.Target(lambda p: -0.5 * jnp.sum(p**2))
    go = lambda key: px.run(px.sgld(target, step_size=0.1), jnp.ones((5, 3)), steps=2, key=key).particles  # fmt: skip
    keys = key if transformed is jax.jit else jax.random.split(key)
    with pytest.raises(px.errors.OptionError, match=r"px.run works on the host.*flow.step"):
        transformed(go)(keys)


def test_debugging_of_nans(key):
    target = px.Target(lambda p: -0.5 * jnp.sum(p**2))
    flow, start = px.svgd(target, optimizer=optax.adam(0.1)), jnp.arange(15.0).reshape(5, 3)
    with jax.debug_nans(True):
        watched = px.run(flow, start, steps=3, key=key, progress=False)
    alone = px.run(flow, start, steps=3, key=key, progress=False)
    np.testing.assert_allclose(watched.particles, alone.particles, rtol=1e-6)


@pytest.mark.parametrize("wrong", [["a", "b"], np.array([1j, 2j])])
def test_scores_that_are_no_real_numbers(wrong):
    with pytest.raises(px.errors.DataError, match=r"inside has dtype.*real number"):
        px.predictive.auroc(wrong, [1.0])


STRICT = {"jax_numpy_dtype_promotion": "strict", "jax_numpy_rank_promotion": "raise"}


@pytest.mark.parametrize("wide", [False, True])
def test_strict_settings_hold_for_histories_replacements_and_samples(wide, key):
    settings = STRICT | {"jax_enable_x64": wide}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        target = px.Target(lambda p: -0.5 * jnp.sum(p**2))
        bad = px.Target(lambda p: -0.5 * jnp.sum(p**2) + jnp.where(jnp.sum(p) > 0.4, jnp.nan, 0.0))
        start = px.particles.normal(key, 60, like=jnp.zeros(3))
        go = lambda flow, start, **more: px.run(flow, start, steps=6, key=key, progress=False, **more)  # fmt: skip
        kept = go(px.svgd(target, optimizer=optax.sgd(0.1)), start, thin=2)
        assert kept.history.particles.shape == (3, 60, 3)
        mended = go(px.sgld(bad, step_size=0.1), 0.1 * start, on_nonfinite="replace")
        assert mended.replaced
        assert px.sample(lambda p: -0.5 * jnp.sum(p**2), jnp.zeros(2), key=key).converged
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_names_of_split_that_are_no_names():
    with pytest.raises(px.errors.OptionError, match="names is 5; expected a list"):
        px.networks.split(({"w": jnp.zeros((2, 3))}, ()), 5)


def test_scores_of_short_types():
    inside, outside = (jnp.array(a, jnp.bfloat16) for a in ([0.0, 1.0], [1.0, 2.0]))
    assert px.predictive.auroc(inside, outside) == 0.875


def test_frames_of_numbers_that_would_wrap():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [2**40, 1, 2]})
    with pytest.raises(px.errors.DataError, match=r"data\['x'\] is int64 with numbers from 1 to"):
        px.Minibatches({"x": frame}, 2)
