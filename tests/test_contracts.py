"""What every kernel, bandwidth, term, metric, integrator and sampler promises, enumerated from `__all__`.

A class added to a module's `__all__` is picked up here. It is built from its defaults; one that has
required arguments needs a line in ARGUMENTS below.
"""

import functools
import importlib
import inspect
import pkgutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import particlax as px
from particlax.terms import Cloud, Frame, Term

MODULES = [
    info.name
    for info in pkgutil.iter_modules(px.__path__)
    if hasattr(importlib.import_module(f"particlax.{info.name}"), "__all__")
]

ARGUMENTS = {
    "Fixed": {"h": 0.7},
    "Euler": {"step_size": 0.01},
    "RMS": {"step_size": 0.01},
    "Momentum": {"step_size": 0.01},
    "Optax": {"optimizer": optax.adam(0.01)},
}
"""Constructor arguments of classes that have no defaults, by class name."""

SAMPLER_ARGUMENTS = {name: {"step_size": 0.01} for name in ("sgld", "sghmc", "calibrated")}
"""Options of samplers for which `optimizer=optax.adam(0.01)` is not the way to step."""


def module(name):
    return importlib.import_module(f"particlax.{name}")


def build(cls):
    try:
        return cls(**ARGUMENTS.get(cls.__name__, {}))
    except TypeError as error:
        pytest.fail(
            f"{cls.__module__}.{cls.__name__} cannot be built from its defaults ({error}); give it "
            "defaults, or add its arguments to ARGUMENTS in tests/test_contracts.py"
        )


def concrete(name, base):
    """The concrete subclasses of `base` among a module's public names."""
    found = [getattr(module(name), public) for public in module(name).__all__]
    return [
        cls
        for cls in found
        if inspect.isclass(cls) and issubclass(cls, base) and not inspect.isabstract(cls)
    ]


KERNELS = concrete("kernels", px.kernels.Kernel)
BANDWIDTHS = concrete("kernels", px.kernels.Bandwidth)
TERMS = concrete("terms", Term) + concrete("diffusions", Term)
FORCES = concrete("diffusions", px.diffusions.Force)
COUPLINGS = concrete("diffusions", px.diffusions.Coupling)
METRICS = concrete("metrics", px.metrics.Metric)
INTEGRATORS = concrete("integrators", px.integrators.Integrator)
SAMPLERS = [getattr(module("algorithms"), name) for name in module("algorithms").__all__]

each = pytest.mark.parametrize


def name_of(value):
    return value.__name__ if hasattr(value, "__name__") else str(value)


def points(num=9, dim=3, seed=21):
    return jax.random.normal(jax.random.key(seed), (num, dim))


def tree(dtype=jnp.float32, num=9):
    """A cloud with D = 4 in two leaves of different rank."""
    keys = jax.random.split(jax.random.key(22))
    return {
        "w": jax.random.normal(keys[0], (num, 1, 3)).astype(dtype),
        "b": jax.random.normal(keys[1], (num,)).astype(dtype),
    }


def seen(x, score=None):
    """A cloud as terms see it in the identity metric."""
    score = jax.tree.map(lambda a: -a, x) if score is None else score
    return Cloud(x, score, jnp.zeros((), jnp.int32), Frame(), x)


def velocity(term, x, score=None, key=None):
    out, memory = term(seen(x, score), key, term.init(x))
    assert jax.tree.structure(memory) == jax.tree.structure(term.init(x))
    return out


# Enumeration and docstrings


def test_enumeration_finds_what_is_known():
    assert {"RBF", "IMQ", "Laplace", "Mixture"} <= {cls.__name__ for cls in KERNELS}
    assert {"Fixed", "Median", "ReferenceMedian", "HeatEquation"} <= {
        cls.__name__ for cls in BANDWIDTHS
    }
    assert {"Drift", "Stein", "Langevin", "Blob", "GFSD", "Transport"} <= {
        cls.__name__ for cls in TERMS
    }
    assert {"FixedScale", "Sinkhorn"} <= {cls.__name__ for cls in COUPLINGS}
    assert {"Identity", "Diagonal", "Ensemble"} <= {cls.__name__ for cls in METRICS}
    assert {"Euler", "Optax", "RMS", "Momentum"} <= {cls.__name__ for cls in INTEGRATORS}
    assert len(SAMPLERS) >= 6


def public_names():
    for name in MODULES:
        for public in module(name).__all__:
            yield pytest.param(name, public, id=f"{name}.{public}")


@each(("name", "public"), list(public_names()))
def test_every_public_name_is_documented(name, public):
    value = getattr(module(name), public)
    doc = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert doc, f"{name}.{public} has no docstring"
    assert not doc.startswith(f"{public}("), f"{name}.{public} has only a generated docstring"
    first = inspect.cleandoc(doc).split("\n\n")[0].strip()
    assert first.endswith((".", ":")), f"{name}.{public}: {first!r}"


@each("name", MODULES)
def test_modules_are_documented_and_sorted(name):
    assert module(name).__doc__
    public = module(name).__all__
    assert len(set(public)) == len(public)
    for other in public:
        assert getattr(module(name), other).__module__ == f"particlax.{name}"


# Kernels


@each("cls", KERNELS, ids=name_of)
class TestKernels:
    def test_profile(self, cls, x64):
        kernel = build(cls)
        a = jnp.concatenate([jnp.zeros(1), jnp.geomspace(1e-6, 100.0, 200)])
        k = np.asarray(kernel.profile(a))
        assert k.shape == a.shape
        np.testing.assert_allclose(k[0], 1.0, rtol=1e-14)
        assert np.all(k > 0)
        assert np.all(np.diff(k) < 0)
        slope = np.asarray(jax.vmap(jax.grad(kernel.profile))(a))
        assert np.all(np.isfinite(slope))
        assert np.all(slope <= 0)
        assert slope[0] < 0  # smooth at zero in x, and repulsive there

    def test_pair(self, cls, x64):
        """K and W against finite differences of K in x_j."""
        kernel = build(cls)
        x, y, h, e = np.array([0.3, -1.0, 0.2]), np.array([1.0, 0.5, 0.0]), 0.8, 1e-6

        def value(y):
            return float(kernel.pair(jnp.sum((x - y) ** 2), jnp.array(h))[0])

        numeric = [(value(y + e * d) - value(y - e * d)) / (2 * e) for d in np.eye(3)]
        weight = float(kernel.pair(jnp.sum((x - y) ** 2), jnp.array(h))[1])
        np.testing.assert_allclose(weight * (x - y), numeric, rtol=1e-6)

    @each("dim", [1, 3, 20])
    def test_positive_semidefinite(self, cls, dim, x64):
        kernel = build(cls)
        for scale in (0.1, 1.0, 10.0):
            x = scale * points(40, dim)
            r2 = jnp.sum((x[:, None] - x[None]) ** 2, -1)
            assert np.linalg.eigvalsh(np.asarray(kernel.profile(r2 / dim))).min() >= -1e-10

    def test_takes_numbers_and_rules(self, cls):
        rule = px.kernels.Median(scale=2.0)
        assert cls(**{**ARGUMENTS.get(cls.__name__, {}), "bandwidth": rule}).bandwidth == rule
        fixed = cls(**{**ARGUMENTS.get(cls.__name__, {}), "bandwidth": 0.5})
        assert float(fixed.bandwidth(points())) == 0.5

    def test_in_a_term(self, cls, x64):
        drift = compiled(px.Stein(kernel=build(cls)))(points(12), jnp.sin(points(12)))
        assert np.all(np.isfinite(drift))
        assert np.any(drift != 0)


@each("cls", BANDWIDTHS, ids=name_of)
class TestBandwidths:
    def test_positive_scalar(self, cls):
        for dtype in (jnp.float32, jnp.bfloat16):
            for x in (points().astype(dtype), tree(dtype)):
                h = jax.jit(build(cls))(x)
                assert h.shape == ()
                assert np.isfinite(float(h))
                assert float(h) > 0

    @each("factor", [1e-3, 3.0, 1e3])
    def test_scale_covariance(self, cls, factor, x64):
        rule, x = jax.jit(build(cls)), points(30)
        want = 1.0 if cls is px.kernels.Fixed else factor**2
        np.testing.assert_allclose(rule(factor * x), want * rule(x), rtol=1e-9)

    def test_translation_invariance(self, cls, x64):
        rule, x = jax.jit(build(cls)), points(30)
        np.testing.assert_allclose(rule(x + jnp.array([5.0, -100.0, 0.1])), rule(x), rtol=1e-9)

    def test_permutation_invariance(self, cls, x64):
        rule, x = jax.jit(build(cls)), points(30)
        order = np.random.default_rng(0).permutation(30)
        np.testing.assert_allclose(rule(x[order]), rule(x), rtol=1e-12)

    def test_rotation_invariance(self, cls, x64):
        rule, x = jax.jit(build(cls)), points(30)
        np.testing.assert_allclose(rule(x @ rotation(3).T), rule(x), rtol=1e-9)

    def test_compiled_or_not(self, cls, x64):
        """The same number, with and without `jax.jit`, for many clouds."""
        rule = build(cls)
        compiled_rule = jax.jit(rule)
        for seed in range(40 if "Median" in cls.__name__ else 1):
            x = points(12, seed=seed) + 5
            np.testing.assert_allclose(rule(x), compiled_rule(x), rtol=1e-9)

    def test_collapsed_cloud_gives_no_nan(self, cls):
        for value in (0.0, 3.0):
            h = float(jax.jit(build(cls))(jnp.full((5, 2), value)))
            assert np.isfinite(h)
            assert h > 0


# Terms


def rotation(dim):
    matrix = np.linalg.qr(np.random.default_rng(1).normal(size=(dim, dim)))[0]
    return matrix * np.sign(np.linalg.det(matrix))


def forces():
    """Every deterministic diffusion, plain and calibrated; Transport with every coupling."""
    for cls in FORCES:
        base = ARGUMENTS.get(cls.__name__, {})
        for calibrate in (False, True, "matched"):
            options = [{}]
            if "coupling" in inspect.signature(cls).parameters:
                options = [{"coupling": build(coupling)} for coupling in COUPLINGS]
            for extra in options:
                inside = "".join(f"-{type(v).__name__}" for v in extra.values())
                how = {False: "", True: "-calibrated"}.get(calibrate, f"-{calibrate}")
                label = f"{cls.__name__}{inside}{how}"
                yield pytest.param(cls(**{**base, **extra}, calibrate=calibrate), id=label)


def interacting():
    yield from forces()
    yield pytest.param(px.Stein(), id="Stein")


@functools.cache
def compiled(term):
    """The term's drift as a function of positions and scores, compiled once for all tests."""
    return jax.jit(lambda x, score: velocity(term, x, score).drift)


@each("term", list(interacting()))
class TestInteraction:
    def test_translation(self, term, x64):
        x = points(12)
        shift = jnp.array([3.0, -20.0, 0.5])
        score = jnp.sin(x)
        moved, still = compiled(term)(x + shift, score), compiled(term)(x, score)
        np.testing.assert_allclose(moved, still, rtol=1e-7, atol=1e-8)

    def test_rotation(self, term, x64):
        x = points(12)
        turn, score = rotation(3), jnp.sin(x)
        turned = compiled(term)(x @ turn.T, score @ turn.T)
        still = compiled(term)(x, score) @ turn.T
        np.testing.assert_allclose(turned, still, rtol=1e-7, atol=1e-8)

    def test_permutation(self, term, x64):
        x = points(12)
        order = np.random.default_rng(2).permutation(12)
        score = jnp.sin(x)
        mixed = compiled(term)(x[order], score[order])
        still = compiled(term)(x, score)[order]
        np.testing.assert_allclose(mixed, still, rtol=1e-7, atol=1e-8)


@each("cls", TERMS, ids=name_of)
def test_weight_scales_drift_and_the_square_of_noise(cls, x64, key):
    one, four = build(cls), eqx.tree_at(lambda t: t.weight, build(cls), 4.0)
    own = key if one.noisy else None
    few, many = velocity(one, points(12), key=own), velocity(four, points(12), key=own)
    np.testing.assert_allclose(many.drift, 4 * few.drift, rtol=1e-10, atol=1e-12)
    if one.noisy:
        np.testing.assert_allclose(many.noise, 2 * few.noise, rtol=1e-10, atol=1e-12)


@each("term", list(forces()))
def test_forces_ignore_the_score(term, x64):
    """A realisation of the diffusion depends on the particles alone."""
    x = points(12)
    one, other = compiled(term)(x, jnp.sin(x)), compiled(term)(x, jnp.cos(x))
    assert np.array_equal(one, other)


@each("term", [case for case in forces() if case.values[0].calibrate])
def test_calibrated_forces_satisfy_the_identity(term, x64):
    x = points(12)
    t = np.asarray(compiled(term)(x, jnp.sin(x)))
    centred = np.asarray(x) - np.asarray(x).mean(0)
    np.testing.assert_allclose(t.T @ centred / 12, np.eye(3), atol=1e-9)
    np.testing.assert_allclose(t.mean(0), 0.0, atol=1e-10)


@each("kernel", KERNELS, ids=name_of)
def test_blob_forces_sum_to_zero(kernel, x64):
    drift = compiled(px.diffusions.Blob(kernel=build(kernel)))(points(12), jnp.sin(points(12)))
    np.testing.assert_allclose(np.sum(drift, 0), 0.0, atol=1e-12)
    assert np.abs(drift).max() > 1e-2


@each("dtype", [jnp.float32, jnp.bfloat16], ids=name_of)
@each("cls", TERMS, ids=name_of)
def test_terms_keep_structure_and_dtype(cls, dtype, key):
    term, x = build(cls), tree(dtype)
    term.check(x)
    out = jax.jit(lambda x: velocity(term, x, key=key if term.noisy else None))(x)
    parts = [out.drift] if out.noise is None else [out.drift, out.noise]
    assert (out.noise is not None) == term.noisy
    for part in parts:
        assert jax.tree.structure(part) == jax.tree.structure(x)
        for got, want in zip(jax.tree.leaves(part), jax.tree.leaves(x), strict=True):
            assert got.shape == want.shape
            assert got.dtype == want.dtype
            assert np.all(np.isfinite(np.asarray(got, np.float32)))
    assert any(np.any(np.asarray(leaf, np.float32)) for leaf in jax.tree.leaves(parts[-1]))


@each("dtype", [jnp.float32, jnp.bfloat16], ids=name_of)
@each("term", [case for case in forces() if case.values[0].calibrate])
def test_options_of_terms_keep_structure_and_dtype(term, dtype):
    x = tree(dtype)
    drift = jax.jit(lambda x: velocity(term, x).drift)(x)
    assert jax.tree.structure(drift) == jax.tree.structure(x)
    for got, want in zip(jax.tree.leaves(drift), jax.tree.leaves(x), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert np.all(np.isfinite(np.asarray(got, np.float32)))


@each("cls", TERMS, ids=name_of)
def test_mixed_dtypes(cls, key):
    x = {"w": tree()["w"], "b": tree(jnp.bfloat16)["b"]}
    flow = px.Flow(px.Target(quartic), (build(cls),), px.integrators.Euler(0.01))
    state, _ = jax.jit(flow.step)(key, flow.init(x))
    assert state.particles["w"].dtype == jnp.float32
    assert state.particles["b"].dtype == jnp.bfloat16


# Metrics


@each("cls", METRICS, ids=name_of)
class TestMetrics:
    def test_back_undoes_points(self, cls, x64):
        """L z = x - m: mapping z back gives the cloud around its mean (or around 0)."""
        x, metric = points(12), build(cls)
        frame = metric.frame(x)
        z = frame.points(x)
        back = np.asarray(frame.back(z))
        offset = np.asarray(x) - back
        np.testing.assert_allclose(offset, np.broadcast_to(offset[0], offset.shape), atol=1e-10)
        other = x + 0.0  # equal, but not the very array the frame was made of
        np.testing.assert_allclose(frame.points(other), z, atol=1e-10)

    def test_scores_are_the_transpose_of_back(self, cls, x64):
        """<s, L v> = <L^T s, v> for every particle."""
        x, metric = points(12), build(cls)
        frame = metric.frame(x)
        s, v = points(12, seed=1), points(12, seed=2)
        inner = np.sum(np.asarray(s) * np.asarray(frame.back(v)), 1)
        np.testing.assert_allclose(inner, np.sum(frame.scores(s) * v, 1), rtol=1e-10)

    def test_structure(self, cls):
        x = tree()
        frame = build(cls).frame(x)
        back = frame.back(frame.points(x))
        assert jax.tree.structure(back) == jax.tree.structure(x)
        for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(x), strict=True):
            assert (got.shape, got.dtype) == (want.shape, want.dtype)

    def test_permutation(self, cls, x64, key):
        """Deterministic flows do not see the order of the particles in any metric."""
        flow = px.w_sgld_b(px.Target(quartic), step_size=0.01, metric=build(cls))
        x, order = points(12), np.random.default_rng(3).permutation(12)
        moved = flow.step(key, flow.init(x))[0].particles
        mixed = flow.step(key, flow.init(x[order]))[0].particles
        np.testing.assert_allclose(mixed, moved[order], atol=1e-10)

    def test_units(self, cls, x64, key):
        """A metric made of the cloud makes the flow invariant to units; the identity does not."""
        scale = jnp.array([1.0, 100.0, 0.01])
        metric = build(cls)
        one = px.w_sgld_b(px.Target(quartic), step_size=0.01, metric=metric)
        other = px.w_sgld_b(px.Target(lambda x: quartic(x / scale)), step_size=0.01, metric=metric)
        x = points(12)
        want = one.step(key, one.init(x))[0].particles * scale
        got = other.step(key, other.init(x * scale))[0].particles
        assert np.allclose(got, want, rtol=1e-8) == (cls is not px.metrics.Identity)


# Integrators


@each("cls", INTEGRATORS, ids=name_of)
def test_integrators_keep_structure(cls, key):
    integrator, x = build(cls), tree()
    terms = (px.Drift(), px.diffusions.Langevin()) if integrator.takes_noise else (px.Drift(),)
    flow = px.Flow(px.Target(quartic), terms, integrator)
    state = flow.init(x)
    for _ in range(2):
        moved, _ = jax.jit(flow.step)(key, state)
        assert jax.tree.structure(moved) == jax.tree.structure(state)
        for got, want in zip(jax.tree.leaves(moved), jax.tree.leaves(state), strict=True):
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
        state = moved


@each("cls", INTEGRATORS, ids=name_of)
def test_integrators_ascend(cls, key):
    """A drift alone climbs the log density."""
    flow = px.Flow(px.Target(quartic), (px.Drift(),), build(cls))
    result = px.run(flow, points(), steps=400, key=key, progress=False)
    target = px.Target(quartic)
    assert np.mean(target.score(result.particles)[0]) > np.mean(target.score(points())[0]) + 0.1


@each("cls", INTEGRATORS, ids=name_of)
def test_integrators_take_noise_or_refuse_it(cls):
    integrator = build(cls)
    terms = (px.Drift(), px.diffusions.Langevin())
    if integrator.takes_noise:
        px.Flow(px.Target(quartic), terms, integrator)
    else:
        with pytest.raises(px.errors.OptionError, match="Langevin"):
            px.Flow(px.Target(quartic), terms, integrator)


# Samplers


def quartic(params):
    return sum(-jnp.sum(0.25 * leaf**4 + 0.5 * leaf**2) for leaf in jax.tree.leaves(params))


def make(sampler, target, **options):
    stepping = SAMPLER_ARGUMENTS.get(sampler.__name__, {"optimizer": optax.adam(0.01)})
    return sampler(target, **stepping, **options)


@each("metric", METRICS, ids=name_of)
@each("sampler", SAMPLERS, ids=name_of)
def test_samplers_run_in_every_metric(sampler, metric, key):
    """Five steps on a dict, deterministic given the key, traced once."""
    calls = []

    def density(params):
        calls.append(1)
        return quartic(params)

    flow = make(sampler, px.Target(density), metric=build(metric))
    step = jax.jit(flow.step)

    def five():
        state = flow.init(tree())
        for _ in range(5):
            state, info = step(key, state)
        return state, info

    state, info = five()
    again, _ = five()
    assert len(calls) == 1
    assert int(state.step) == 5
    assert jax.tree.structure(state.particles) == jax.tree.structure(tree())
    for got, same, start in zip(
        *map(jax.tree.leaves, (state.particles, again.particles, tree())), strict=True
    ):
        assert np.array_equal(got, same)
        assert (got.shape, got.dtype) == (start.shape, start.dtype)
        assert np.all(np.isfinite(got))
        assert not np.array_equal(got, start)
    assert np.all(np.isfinite(info.log_density))
    assert all(np.isfinite(float(force)) for force in info.forces.values())


@each("metric", METRICS, ids=name_of)
@each("sampler", [px.sgld, px.svgd], ids=name_of)
def test_samplers_move_bfloat16(sampler, metric, key):
    flow = make(sampler, px.Target(quartic), metric=build(metric))
    state, _ = jax.jit(flow.step)(key, flow.init(tree(jnp.bfloat16)))
    for leaf in jax.tree.leaves(state.particles):
        assert leaf.dtype == jnp.bfloat16
        assert np.all(np.isfinite(np.asarray(leaf, np.float32)))


@each("sampler", SAMPLERS, ids=name_of)
def test_samplers_take_a_metric_and_refuse_unknown_options(sampler):
    assert "metric" in inspect.signature(sampler).parameters
    with pytest.raises(px.errors.OptionError, match=r"'metrik'.*'metric'"):
        make(sampler, px.Target(quartic), metrik=px.metrics.Identity())


@each("sampler", SAMPLERS, ids=name_of)
def test_samplers_are_at_the_top_level(sampler):
    assert getattr(px, sampler.__name__) is sampler
    assert sampler.__name__ in px.__all__
