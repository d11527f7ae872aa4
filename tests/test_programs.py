"""Which steps have sums that a GPU takes in any order."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import particlax as px
from particlax import gpu, programs
from particlax.data import Minibatches

COMPILE_FAST = True

TABLE = jnp.array([0, 2, 2])
IMAGE = jnp.ones((1, 5, 5, 2))


def conv(x):
    kernel = x.reshape(1, 2, 2, 1)
    return jnp.sum(jax.lax.conv_general_dilated(IMAGE, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))  # fmt: skip


def scanned(x):
    return jax.lax.scan(lambda total, i: (total + jnp.sum(x[i]), None), 0.0, TABLE[None])[0]


def looped(x):
    return jax.lax.fori_loop(0, 2, lambda i, now: now.at[TABLE].add(1.0), x)


@pytest.mark.parametrize(
    "function",
    [
        jax.grad(lambda x: jnp.sum(x[TABLE])),
        lambda x: x.at[TABLE].add(1.0),
        lambda x: x.at[TABLE].subtract(1.0),
        lambda x: x.at[TABLE].multiply(2.0),
        jax.jit(lambda x: x.at[TABLE].add(1.0)),
        jax.vmap(jnp.zeros(3).at[TABLE].add),
        jax.grad(scanned),
        looped,
        lambda x: jax.lax.cond(x[0] > 0, lambda x: x.at[TABLE].add(1.0), lambda x: x, x),
        jax.checkpoint(lambda x: x.at[TABLE].add(1.0)),
        eqx.filter_jit(lambda x: x.at[TABLE].add(1.0)),
        jax.grad(conv),
        lambda x: jax.ops.segment_sum(x[:3], TABLE, 3),
    ],
)
def test_sums_without_an_order_are_found(function):
    assert programs.repeatable(function, jnp.ones(4)) == programs.ORDERED


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[TABLE],
        lambda x: x.at[0].add(1.0),
        lambda x: x.at[TABLE[0]].add(1.0),
        lambda x: x.at[jnp.array([0, 2])].add(1.0, unique_indices=True),
        lambda x: jnp.zeros(4, int).at[TABLE].add(1),
        lambda x: x.at[TABLE].max(1.0),
        jax.grad(lambda x: x[0] * x[3] + jnp.sum(x[1:3] ** 2)),
        lambda x: jnp.sort(x) @ x,
    ],
)
def test_others_are_not(function):
    assert programs.repeatable(function, jnp.ones(4)) == programs.ALIKE


def step(flow, data=None):
    def one(state):
        batch = data.batch(jax.random.key(1), state.step) if data else None
        return flow.step(jax.random.key(0), state, batch)

    return one


def samplers(target):
    adam = optax.adam(0.1)
    return {
        "sgld": px.sgld(target, step_size=0.1),
        "svgd": px.svgd(target, optimizer=adam),
        "w_sgld": px.w_sgld(target, optimizer=adam),
        "w_sgld_b": px.w_sgld_b(target, optimizer=adam),
        "pi_sgld": px.pi_sgld(target, optimizer=adam),
        "calibrated": px.calibrated(target),
    }


@pytest.mark.parametrize("shape", [(7, 2), (600, 2), (6, 9000)])
@pytest.mark.parametrize("name", sorted(samplers(px.Target(lambda x: -jnp.sum(x**2)))))
def test_samplers_have_none(name, shape, monkeypatch):
    """On a GPU too, so that checkpoints there cost nothing, unless the target has some."""
    if name == "calibrated" and shape[0] <= shape[1] + 1:
        pytest.skip("px.calibrated needs more particles than dimensions")
    start = jax.random.normal(jax.random.key(0), shape)
    plain = samplers(px.Target(lambda x: -0.5 * jnp.sum(x**2)))[name]
    assert programs.repeatable(step(plain), plain.init(start)) == programs.ALIKE
    monkeypatch.setattr(gpu, "possible", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    made, _, _ = eqx.filter_make_jaxpr(step(plain))(plain.init(start))
    kernels = any(one.primitive.name == "pallas_call" for one in programs._equations(made.jaxpr))
    assert kernels == (name != "sgld" and shape != (7, 2))
    assert programs.repeatable(step(plain), plain.init(start)) == programs.ALIKE
    table = samplers(px.Target(lambda x: -0.5 * jnp.sum(x[jnp.array([0, 1, 1])] ** 2)))[name]
    assert programs.repeatable(step(table), table.init(start)) == programs.ORDERED


def test_classifiers_have_none():
    apply = lambda w, x: x @ w
    rng = np.random.default_rng(0)
    data = Minibatches({"x": rng.normal(size=(20, 3)), "y": rng.integers(0, 4, 20)}, 5)
    flow = px.svgd(px.networks.classifier(apply, num_data=20), optimizer=optax.adam(0.1))
    state = flow.init(jax.random.normal(jax.random.key(0), (6, 3, 4)))
    assert programs.repeatable(step(flow, data), state) == programs.ALIKE


def test_xla_knows_the_options():
    x = jnp.arange(6.0)
    square = lambda x, y: x @ y
    found = {name: float(run(x, x)) for name, run in programs.compiled(square, "none").items()}
    assert found == dict.fromkeys(("fast", "alike", "ordered"), 55.0)


def test_devices_are_asked():
    assert programs.chooses({"x": jnp.ones(3), "y": 2.0}) == (jax.default_backend() == "gpu")
