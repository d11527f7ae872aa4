"""Steps that treat every number alone are taken within the pass that mixes rows: the same step, whoever takes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import particlax as px
from particlax import direct, gpu, pairwise, updates
from particlax.integrators import RMS, Euler, Momentum, Optax
from particlax.terms import Velocity

COMPILE_FAST = True
STEPS = {
    "rmsprop": lambda: Optax(optax.rmsprop(0.03, decay=0.9)),
    "adam, schedule": lambda: Optax(optax.adam(optax.cosine_decay_schedule(0.1, 50))),
    "adamw": lambda: Optax(optax.adamw(0.05, weight_decay=0.1)),
    "momentum": lambda: Optax(optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "adagrad": lambda: Optax(optax.adagrad(0.1)),
    "lion": lambda: Optax(optax.lion(0.05)),
    "clipped": lambda: Optax(optax.chain(optax.clip(0.5), optax.adam(0.05))),
    "RMS": lambda: RMS(0.05),
    "Euler": lambda: Euler(optax.linear_schedule(0.3, 0.1, 10)),
    "Momentum": lambda: Momentum(0.2),
}
WHOLE = {
    "global norm": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.05)),
    "lamb": optax.lamb(0.05),
    "adafactor": optax.adafactor(0.05, min_dim_size_to_factor=32),
    "rows": optax.chain(optax.centralize(), optax.sgd(0.1)),
}


@pytest.fixture(params=["kernel", "twin"], autouse=True)
def mode(request, monkeypatch):
    """The kernel, interpreted, and the plain path that gives its derivatives."""
    monkeypatch.setattr(gpu, "MODE", "interpret")
    if request.param == "twin":
        monkeypatch.setattr(gpu, "choose", lambda fits, fused, plain, *args: plain(*args))
    return request.param


def cloud(num, seed=0):
    """Two leaves of one shape, a third one, and a small one."""
    rng = np.random.default_rng(seed)
    shapes = {"a": (77, 119), "b": (77, 119), "c": (8300,), "d": (10,)}
    draw = lambda shape: jnp.asarray(2 + rng.normal(size=(num, *shape)).astype(np.float32))
    return {name: draw(shape) for name, shape in shapes.items()}


def relative(found, truth):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True)
    gap = lambda a, b: np.abs(np.asarray(a, float) - np.asarray(b, float)).max()
    return max(gap(a, b) / max(np.abs(np.asarray(b, float)).max(), 1e-30) for a, b in pairs)


def mixing(num):
    rng = np.random.default_rng(1)
    left, right = rng.normal(size=(2, num, num)).astype(np.float32) / num
    return pairwise.Mixing(jnp.asarray(left), jnp.asarray(right))


def closed(integrator, x, memory, rest=None, noise=None):
    def step(drift):
        drift = drift if rest is None else jax.tree.map(jnp.add, drift, rest)
        return integrator.step(x, Velocity(drift, noise), memory, jnp.int32(3))

    return step


@pytest.fixture
def fused(monkeypatch):
    """Whether a step was taken apart, call by call."""
    seen, apart = [], updates.apart
    noted = lambda *args: seen.append(apart(*args)) or seen[-1]
    monkeypatch.setattr(updates, "apart", noted)
    return seen


@pytest.mark.parametrize("name", STEPS)
def test_the_step_is_the_same(name, fused):
    """Two steps, so that the memory is not zero; with scores and without, jitted and not."""
    integrator, x, score = STEPS[name](), cloud(5), cloud(5, seed=2)
    both = mixing(5)
    for how, values, rest in (
        (both, score, None),
        (both, pairwise.Pulled(score, 0.3), None),
        (both._replace(right=None), None, score),
    ):
        memory = integrator.init(x)
        for _ in range(2):
            step = closed(integrator, x, memory, rest)
            truth = step(pairwise.mixed(x, values, how))
            found = pairwise.moved(x, values, how, step, (x, memory))
            assert jax.tree.structure(found) == jax.tree.structure(truth)
            assert relative(found, truth) < 2e-5
            memory = truth[1]
    assert len(fused) == 6 and all(fused)


def test_a_step_by_the_formulas():
    """SVGD with RMSprop on a Gaussian, in NumPy's float64."""
    num, dim, rate, decay = 6, 9001, 0.02, 0.9
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num, dim)).astype(np.float32)
    target = px.Target(lambda x: -0.5 * jnp.sum(x**2))
    flow = px.svgd(target, kernel=px.kernels.RBF(bandwidth=2e4), optimizer=optax.rmsprop(rate, decay=decay))  # fmt: skip
    state = flow.init(jnp.asarray(x))
    z, square = x.astype(float), np.zeros((num, dim))
    for _ in range(3):
        state, _ = flow.step(jax.random.key(0), state)
        apart = z[:, None] - z[None]
        kernel = np.exp(-np.sum(apart**2, -1) / 2e4)
        phi = (kernel @ -z + 2 / 2e4 * np.einsum("ij,ijd->id", kernel, apart)) / num
        square = decay * square + (1 - decay) * phi**2
        z = z + rate * phi / np.sqrt(square + 1e-8)
    assert relative(state.particles, z) < 1e-5


@pytest.mark.parametrize("name", WHOLE)
def test_steps_that_look_at_several_numbers_are_not_taken_apart(name, fused):
    x, score, how = cloud(5), cloud(5, seed=2), mixing(5)
    integrator = Optax(WHOLE[name])
    memory = integrator.init(x)
    step = closed(integrator, x, memory)
    found = pairwise.moved(x, score, how, step, (x, memory))
    assert relative(found, step(pairwise.mixed(x, score, how))) < 1e-6
    assert fused == [None]


def test_noise_goes_with_the_step(fused):
    x, score, how = cloud(4), cloud(4, seed=2), mixing(4)
    integrator = RMS(0.05)
    memory = integrator.init(x)
    step = closed(integrator, x, memory, noise=cloud(4, seed=3))
    found = pairwise.moved(x, score, how, step, (x, memory))
    assert relative(found, step(pairwise.mixed(x, score, how))) < 1e-5
    assert all(fused)


def test_steps_that_join_leaves_are_not_taken_apart(fused):
    """Two leaves of one shape: what happens to one depends on the other."""
    x, score, how = cloud(4), cloud(4, seed=2), mixing(4)
    step = lambda drift: {**x, "a": x["a"] + drift["b"] * drift["a"]}
    found = pairwise.moved(x, score, how, step, x)
    assert relative(found, step(pairwise.mixed(x, score, how))) < 1e-6
    assert fused == [None]


def test_results_that_know_nothing_of_the_drift(fused):
    """Constants, what stays as it was, and what changes on its own."""
    x, score, how = cloud(4), cloud(4, seed=2), mixing(4)
    old = (x, cloud(4, seed=5), {"count": jnp.int32(7), "kept": jnp.arange(3.0)})

    def step(drift):
        blank = {**jax.tree.map(jnp.zeros_like, x), "a": 0.5 * old[1]["a"], "b": drift["b"]}
        return x | {"c": drift["c"]}, blank, {"count": old[2]["count"] + 1, "kept": old[2]["kept"]}

    found = pairwise.moved(x, score, how, step, old)
    assert relative(found, step(pairwise.mixed(x, score, how))) < 1e-5
    assert all(fused)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_dtypes_take_the_whole_step(dtype, fused, x64):
    x = jax.tree.map(lambda leaf: leaf.astype(dtype), cloud(4))
    step = lambda drift: jax.tree.map(lambda x, d: x + 0.1 * d, x, drift)
    how = pairwise.Mixing(jnp.eye(4), jnp.eye(4))
    found = pairwise.moved(x, x, how, step, x)
    assert relative(found, step(pairwise.mixed(x, x, how))) == 0
    assert fused == []


def test_vmap_and_derivatives():
    x, score, how = cloud(3), cloud(3, seed=2), mixing(3)
    integrator = Optax(optax.rmsprop(0.03, decay=0.9))
    memory = integrator.init(x)

    def moved(factor, by):
        values = jax.tree.map(lambda leaf: factor * leaf, score)
        return by(values)[0]["a"]

    step = closed(integrator, x, memory)
    fast = functools.partial(moved, by=lambda v: pairwise.moved(x, v, how, step, (x, memory)))
    slow = functools.partial(moved, by=lambda v: step(pairwise.mixed(x, v, how)))
    factors = jnp.array([0.5, 2.0])
    assert relative(jax.vmap(fast)(factors), jax.vmap(slow)(factors)) < 2e-5
    slope = lambda of: jax.grad(lambda f: jnp.sum(of(f)))(1.5)
    np.testing.assert_allclose(slope(fast), slope(slow), rtol=1e-3)


def test_the_kernel_lowers_for_a_gpu(monkeypatch):
    """Triton's own errors show here, without a GPU; what is replaced is written over."""
    monkeypatch.setattr(gpu, "MODE", None)
    x = {"a": jnp.zeros((20, 10_000)), "b": jnp.zeros((20, 7))}
    for make in STEPS.values():
        integrator = make()
        memory = integrator.init(x)
        step = closed(integrator, x, memory)
        plan = updates.apart(step, x, (x, memory))
        assert plan is not None
        assert all(None not in leaf.over for leaf in plan.leaves)
        leaves = [leaf.among([one, one + 1]) for leaf, one in zip(plan.leaves, x.values(), strict=True)]  # fmt: skip
        weights = jnp.zeros((20, 20))
        given = [(leaf.arrays, list(leaf.scalars)) for leaf in leaves]
        go = functools.partial(direct.move, leaves)
        try:
            program = jax.jit(go).trace(weights, given, weights, None).lower(lowering_platforms=("cuda",))  # fmt: skip
        except RuntimeError as error:
            pytest.skip(f"this JAX lowers for GPUs only where one is: {error}")
        assert "triton" in program.as_text()
