"""Steps that treat every number alone are taken within the pass that mixes rows: the same step, whoever takes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import particlax as px
from particlax import blocks, gpu, pairwise, skinny, updates
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
    """Two leaves of one shape, and a small one."""
    rng = np.random.default_rng(seed)
    shapes = {"a": (47, 119), "b": (47, 119), "c": (10,)}
    draw = lambda shape: jnp.asarray(2 + rng.normal(size=(num, *shape)).astype(np.float32))
    return {name: draw(shape) for name, shape in shapes.items()}


def mixture(x, how, values=None, pull=0.0):
    """left @ (x - m) + right @ (v - pull x), in float64."""
    left, right, *_ = (np.zeros(1) if one is None else np.asarray(one, float) for one in how)

    def of(x, v):
        x, v = (np.asarray(one, float).reshape(len(x), -1) for one in (x, v))
        mixed = left @ (x - x.mean(0))
        return mixed if how.right is None else mixed + right @ (v - pull * x)

    one = lambda x, v: jnp.asarray(of(x, v).reshape(x.shape), jnp.float32)
    return jax.tree.map(one, x, x if values is None else values)


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
    integrator, x, score, how = STEPS[name](), cloud(3), cloud(3, seed=2), mixing(3)
    memory = closed(integrator, x, integrator.init(x))(cloud(3, seed=4))[1]
    step = closed(integrator, x, memory)
    truth = step(mixture(x, how, score, pull=0.3))
    found = pairwise.moved(x, pairwise.Pulled(score, 0.3), how, step, (x, memory))
    assert jax.tree.structure(found) == jax.tree.structure(truth)
    assert relative(found, truth) < 2e-5
    assert all(fused) and all(None not in leaf.over for leaf in fused[0].leaves)


def test_what_is_not_mixed_is_added(fused):
    """As in w-SGLD: the drift is no part of the matrices."""
    integrator, x, score = STEPS["rmsprop"](), cloud(3), cloud(3, seed=2)
    how = mixing(3)._replace(right=None)
    memory = integrator.init(x)
    step = closed(integrator, x, memory, rest=score)
    found = pairwise.moved(x, None, how, step, (x, memory))
    assert relative(found, step(mixture(x, how))) < 2e-5
    assert all(fused)


def test_small_leaves_that_are_joined(fused, monkeypatch):
    monkeypatch.setattr(blocks, "APART", 0)
    monkeypatch.setattr(skinny, "LEAST", 1000)
    integrator, x, score, how = STEPS["rmsprop"](), cloud(3), cloud(3, seed=2), mixing(3)
    x["d"], score["d"] = jnp.zeros((3, 0)), jnp.zeros((3, 0))
    memory = integrator.init(x)
    step = closed(integrator, x, memory)
    assert blocks.alone(x) == [0, 1]
    found = pairwise.moved(x, score, how, step, (x, memory))
    truth = step(mixture(x, how, score))
    drop = lambda tree: [leaf for leaf in jax.tree.leaves(tree) if leaf.size]
    assert relative(drop(found), drop(truth)) < 2e-5
    assert all(fused)


def test_functions_that_are_called(fused):
    """Jitted ones, several leaves at a time and twice."""
    x, score, how = cloud(3), cloud(3, seed=2), mixing(3)
    halve = jax.jit(lambda tree, by: jax.tree.map(lambda leaf: leaf / (2 * by), tree))
    step = lambda drift: jax.tree.map(jnp.add, halve(x, 3.0), jax.jit(halve)(drift, jnp.float32(2)))
    found = pairwise.moved(x, score, how, step, x)
    assert relative(found, step(mixture(x, how, score))) < 2e-5
    assert all(fused)


def test_a_step_by_the_formulas():
    """SVGD with RMSprop on a Gaussian, in NumPy's float64; a small eps would blow up roundings where phi is nearly 0."""
    num, dim, rate, decay, eps = 4, 9001, 0.02, 0.9, 1e-4
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num, dim)).astype(np.float32)
    target = px.Target(lambda x: -0.5 * jnp.sum(x**2))
    flow = px.svgd(target, kernel=px.kernels.RBF(bandwidth=2e4), optimizer=optax.rmsprop(rate, decay=decay, eps=eps))  # fmt: skip
    state = flow.init(jnp.asarray(x))
    step = jax.jit(lambda state: flow.step(jax.random.key(0), state)[0])
    z, square = x.astype(float), np.zeros((num, dim))
    for _ in range(3):
        state = step(state)
        apart = z[:, None] - z[None]
        kernel = np.exp(-np.sum(apart**2, -1) / 2e4)
        phi = (kernel @ -z + 2 / 2e4 * np.einsum("ij,ijd->id", kernel, apart)) / num
        square = decay * square + (1 - decay) * phi**2
        z = z + rate * phi / np.sqrt(square + eps)
    assert relative(state.particles, z) < 5e-7


@pytest.mark.parametrize("name", WHOLE)
def test_steps_that_look_at_several_numbers_are_not_taken_apart(name, fused):
    x, score, how = cloud(3), cloud(3, seed=2), mixing(3)
    integrator = Optax(WHOLE[name])
    memory = integrator.init(x)
    step = closed(integrator, x, memory)
    found = pairwise.moved(x, score, how, step, (x, memory))
    assert relative(found, step(mixture(x, how, score))) < 2e-5
    assert fused == [None]


def test_noise_goes_with_the_step(fused):
    x, score, how = cloud(3), cloud(3, seed=2), mixing(3)
    integrator = RMS(0.05)
    memory = closed(integrator, x, integrator.init(x))(cloud(3, seed=4))[1]
    step = closed(integrator, x, memory, noise=cloud(3, seed=3))
    found = pairwise.moved(x, score, how, step, (x, memory))
    assert relative(found, step(mixture(x, how, score))) < 1e-5
    assert all(fused)


def test_steps_that_join_leaves_are_not_taken_apart(fused):
    """Two leaves of one shape: what happens to one depends on the other."""
    x, score, how = cloud(3), cloud(3, seed=2), mixing(3)
    step = lambda drift: {**x, "a": x["a"] + drift["b"] * drift["a"]}
    found = pairwise.moved(x, score, how, step, x)
    assert relative(found, step(mixture(x, how, score))) < 2e-5
    assert fused == [None]


def test_results_that_know_nothing_of_the_drift(fused):
    """Constants, what stays as it was, and what changes on its own."""
    x, score, how = cloud(3), cloud(3, seed=2), mixing(3)
    old = (x, cloud(3, seed=5), {"count": jnp.int32(7), "kept": jnp.arange(3.0)})

    def step(drift):
        blank = {**jax.tree.map(jnp.zeros_like, x), "a": 0.5 * old[1]["a"], "b": drift["b"]}
        return x | {"c": drift["c"]}, blank, {"count": old[2]["count"] + 1, "kept": old[2]["kept"]}

    found = pairwise.moved(x, score, how, step, old)
    assert relative(found, step(mixture(x, how, score))) < 1e-5
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
