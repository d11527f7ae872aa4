"""Modules as networks: agreement with the modules themselves, what particles carry, randomness, names, bad input."""

import functools
import pickle
import sys
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import particlax as px
from particlax import modules, networks
from particlax.errors import DataError, OptionError, ParticleError, TargetError

COMPILE_FAST = True

flax = pytest.importorskip("flax", reason="px.modules.linen and nnx need flax")
nn, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 3)) * 2 + 1, RNG.integers(0, 4, 40)
KINDS = ("equinox", "linen", "nnx")


class Eqx(eqx.Module):
    """A network with batch norm and dropout, either of which may be missing."""

    dense: eqx.nn.Linear
    norm: eqx.nn.BatchNorm | None
    drop: eqx.nn.Dropout
    out: eqx.nn.Linear
    order: jax.Array

    def __init__(self, norm, rate, key):
        keys = jax.random.split(key)
        self.dense = eqx.nn.Linear(3, 5, key=keys[0])
        self.norm = eqx.nn.BatchNorm(5, "batch", momentum=0.8, mode="batch") if norm else None
        self.drop = eqx.nn.Dropout(rate)
        self.out = eqx.nn.Linear(5, 4, key=keys[1])
        self.order = jnp.array([2, 0, 1])

    def __call__(self, x, state=None, *, key=None):
        x = self.dense(x[self.order])
        if self.norm is not None:
            x, state = self.norm(x, state)
        x = self.out(self.drop(jnp.tanh(x), key=key))
        return x if self.norm is None else (x, state)


class Linen(nn.Module):
    norm: bool
    rate: float
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dense(5, param_dtype=self.dtype)(x)
        if self.norm:
            x = nn.BatchNorm(use_running_average=not train, momentum=0.8)(x)
        x = nn.Dropout(self.rate, deterministic=not train)(jnp.tanh(x))
        return nn.Dense(4, param_dtype=self.dtype)(x)


class Nnx(nnx.Module):
    def __init__(self, norm, rate, rngs, dtype=jnp.float32):
        self.hidden = nnx.List([nnx.Linear(3, 5, param_dtype=dtype, rngs=rngs)])
        self.norm = nnx.BatchNorm(5, momentum=0.8, rngs=rngs) if norm else None
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.out = nnx.Linear(5, 4, param_dtype=dtype, rngs=rngs)
        self.order = jnp.array([2, 0, 1])

    def __call__(self, x):
        x = self.hidden[0](x[:, self.order])
        x = x if self.norm is None else self.norm(x)
        return self.out(self.drop(jnp.tanh(x)))


@functools.cache
def network(kind, *, norm=False, rate=0.0, dtype=jnp.float32):
    if kind == "equinox":
        return modules.equinox(lambda key: Eqx(norm, rate, key))
    if kind == "linen":
        return modules.linen(Linen(norm, rate, dtype), jnp.asarray(X[:2]))
    return modules.nnx(lambda rngs: Nnx(norm, rate, rngs, dtype))


def own_apply(kind, params, x, dtype=jnp.float32):
    """The module's own answer, without norm or dropout."""
    if kind == "equinox":
        rest = eqx.partition(Eqx(False, 0.0, jax.random.key(9)), eqx.is_inexact_array)[1]
        return jax.vmap(eqx.combine(params, rest))(x)
    if kind == "linen":
        return Linen(False, 0.0, dtype).apply({"params": params}, x, train=False)
    model = Nnx(False, 0.0, nnx.Rngs(9), dtype)
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, params)
    nnx.update(model, state)
    return model(x)


@functools.cache
def compiled(net):
    return jax.jit(net.init, static_argnums=1)


def init(net, key, num):
    """net.init, compiled once."""
    return compiled(net)(key, num)


def one(tree, place=0):
    return jax.tree.map(lambda leaf: leaf[place], tree)


def data(size=10):
    x, y = jnp.asarray(X, jnp.float32), jnp.asarray(Y)
    return px.Minibatches({"x": x, "y": y}, size)


# ------------------------------------------------------------------------------- the module's own answers


@pytest.mark.parametrize("kind", KINDS)
def test_apply_and_gradient_are_the_modules_own(x64, key, kind):
    net, x = network(kind, dtype=jnp.float64), jnp.asarray(X)
    cloud = init(net, key, 3)
    assert not net.stateful
    assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(cloud))
    together = jax.jit(jax.vmap(net.apply, (0, None)))(cloud, x)
    assert together.shape == (3, 40, 4)
    loss = lambda logits: jnp.sum(jnp.sin(logits))
    own = lambda p: own_apply(kind, p, x, jnp.float64)
    for place in range(3):
        params = one(cloud, place)
        np.testing.assert_allclose(together[place], own(params), rtol=1e-12)
    ours = jax.jit(jax.grad(lambda p: loss(net.apply(p, x))))(params)
    theirs = jax.jit(jax.grad(lambda p: loss(own(p))))(params)
    assert jax.tree.structure(ours) == jax.tree.structure(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), ours, theirs)


def test_parameters_start_as_the_modules_own(key):
    own = Nnx(False, 0.0, nnx.Rngs(jax.random.key(3)))
    made = network("nnx").start(jax.random.key(3))
    np.testing.assert_array_equal(made["out"]["kernel"], own.out.kernel[...])
    np.testing.assert_array_equal(
        network("equinox").start(jax.random.key(3)).out.weight,
        Eqx(False, 0.0, jax.random.key(3)).out.weight,
    )
    for kind in KINDS:  # and differ between networks
        first = jax.tree.leaves(init(network(kind), key, 4))[-1]
        assert len(np.unique(np.asarray(first).reshape(4, -1)[:, 0])) == 4


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("equinox", ["dense/weight", "dense/bias", "out/weight", "out/bias"]),
        ("linen", ["Dense_0/bias", "Dense_0/kernel", "Dense_1/bias", "Dense_1/kernel"]),
        ("nnx", ["hidden/0/bias", "hidden/0/kernel", "out/bias", "out/kernel"]),
    ],
)
def test_names_and_priors_by_layer(key, kind, names):
    net = network(kind)
    cloud = init(net, key, 2)
    assert networks.leaf_names(cloud) == names
    layer, rest = names[-1].split("/")[0], names[:2]
    target = networks.classifier(net, num_data=40, prior={"": 2.0, layer: 0.5})
    batch = {"x": jnp.asarray(X, jnp.float32), "y": jnp.asarray(Y)}
    params = one(cloud)
    squares = [float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(params)]
    prior = sum(-0.5 * s / (2.0 if n in rest else 0.5) for n, s in zip(names, squares, strict=True))
    logits = np.asarray(own_apply(kind, params, batch["x"]), float)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(
        jax.jit(target.score)(cloud, batch)[0][0], log_p[np.arange(40), Y].sum() + prior, rtol=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
def test_runs_and_predicts(key, kind):
    net = network(kind)
    flow = px.w_sgld_b(networks.classifier(net, num_data=40), optimizer=optax.adam(0.05))
    done = px.run(flow, init(net, key, 4), steps=150, key=key, data=data(), progress=False)
    pred = px.predictive.categorical(net.apply, done.particles, X.astype(np.float32), batch_size=16)
    assert pred.probs.shape == (40, 4)
    assert pred.score(Y).accuracy > 0.35  # of labels that are noise: it has learnt some by heart
    out = jax.vmap(net.apply, (0, None))(done.particles, jnp.asarray(X, jnp.float32))
    np.testing.assert_allclose(pred.log_probs, jax.nn.log_softmax(out), rtol=1e-4, atol=1e-5)


def test_inputs_may_be_a_pytree(key):
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(x["a"]) + nn.Dense(2)(x["b"])

    class EqxTwo(eqx.Module):
        a: eqx.nn.Linear

        def __call__(self, x):
            return self.a(x["a"]) + x["b"][:2]

    x = {"a": jnp.ones((4, 3)), "b": jnp.ones((4, 5))}
    for net in (
        modules.linen(Two(), x),
        modules.equinox(lambda key: EqxTwo(eqx.nn.Linear(3, 2, key=key))),
    ):
        pred = px.predictive.categorical(net.apply, init(net, key, 3), x)
        assert pred.probs.shape == (4, 2)


# ------------------------------------------------- training that is not prediction, without randomness


class LinenScaled(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        z = nn.Dense(3)(x)
        return z / 10 if train else z


class NnxScaled(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.deterministic = nnx.Linear(3, 3, rngs=rngs), True

    def __call__(self, x):
        return self.dense(x) if self.deterministic else self.dense(x) / 10


class EqxScaled(eqx.Module):
    dense: eqx.nn.Linear
    inference: bool = False

    def __call__(self, x):
        return self.dense(x) if self.inference else self.dense(x) / 10


@pytest.mark.parametrize("kind", ["linen", "nnx", "equinox"])
def test_training_that_is_not_prediction(key, kind):
    """It is trained as it trains, though nothing is drawn or carried; or refused where that cannot be known beforehand."""
    x, y = jnp.asarray(X[:6, :3]), jnp.array([0, 1, 2, 2, 1, 0])
    scaled = lambda key: EqxScaled(eqx.nn.Linear(3, 3, key=key))
    if kind == "linen":
        net = modules.linen(LinenScaled(), x[:1])
    else:
        make, module = (modules.nnx, NnxScaled) if kind == "nnx" else (modules.equinox, scaled)
        plain = make(module)
        with pytest.raises(
            TargetError, match=r"something else in training.*make it with random=True"
        ):
            px.networks.classifier(plain, num_data=6).score(plain.init(key, 2), {"x": x, "y": y})
        net = make(module, random=True)
    particles, carried = net.init(key, 2)
    assert carried == ()
    target = px.networks.classifier(net, num_data=6, prior=1e12)
    found = px.Flow(target, (px.Drift(),), px.integrators.Euler(1.0)).init(particles, carried)
    values = target.evaluate(found.particles, {"x": x, "y": y}, found.carried, key).log_density
    for m in range(2):
        leaves = {p.rpartition("/")[2]: a[m] for p, a in zip(px.networks.leaf_names(particles), jax.tree.leaves(particles), strict=True)}  # fmt: skip
        weight = leaves["weight"].T if kind == "equinox" else leaves["kernel"]
        logits = np.asarray(x, float) @ np.asarray(weight, float) + np.asarray(
            leaves["bias"], float
        )
        shown = net.apply(jax.tree.map(lambda a, m=m: a[m], particles), x, ())
        np.testing.assert_allclose(shown, logits, rtol=1e-5, atol=1e-6)
        log_p = logits / 10 - np.log(np.exp(logits / 10).sum(1, keepdims=True))
        truth = log_p[np.arange(6), y].sum()
        size = sum(a[m].size for a in jax.tree.leaves(particles))
        constant = -0.5 * size * np.log(2 * np.pi * 1e12)
        assert min(abs(float(values[m]) - truth), abs(float(values[m]) - truth - constant)) < 1e-3


def test_layers_that_only_could_differ_stay_plain(key):
    """Dropout of rate 0, attention without dropout: nothing to draw, and one way to be called."""
    net = modules.equinox(lambda key: Eqx(False, 0.0, key))
    attention = modules.nnx(lambda rngs: nnx.MultiHeadAttention(2, 4, 8, decode=False, rngs=rngs))
    for one, x in ((net, jnp.asarray(X[:2])), (attention, jnp.ones((2, 3, 4)))):
        assert not one.stateful
        first = jax.tree.map(lambda leaf: leaf[0], one.init(key, 2))
        assert np.all(np.isfinite(one.apply(first, x)))


@pytest.mark.parametrize("kind", ["nnx", "equinox"])
def test_parameters_in_another_structure_are_refused(key, kind):
    net = network(kind)
    leaves = jax.tree.leaves(init(net, key, 2))
    with pytest.raises(ParticleError, match=r"has parameters \[.*but \['0', '1', '2', '3'\] came"):
        px.predictive.categorical(net.apply, leaves, X)


# ----------------------------------------------------------------------------------- batch norm


def numpy_norm(x, weight, bias, mean, var):
    return weight * (x - mean) / np.sqrt(var + 1e-5) + bias


def layer(kind, params):
    """The first layer and the norm of a network as NumPy arrays: W [3, 5], b, norm's scale and bias."""
    array = lambda leaf: np.asarray(leaf, float)
    if kind == "equinox":
        w = array(params.dense.weight).T
        return w, array(params.dense.bias), array(params.norm.weight), array(params.norm.bias)
    if kind == "linen":
        dense, norm = params["Dense_0"], params["BatchNorm_0"]
    else:
        dense, norm = params["hidden"][0], params["norm"]
    return (*(array(dense[n]) for n in ("kernel", "bias")), array(norm["scale"]), array(norm["bias"]))  # fmt: skip


def statistics(kind, carried):
    """Running mean and variance as they are used in prediction."""
    if kind == "linen":
        norm = carried["batch_stats"]["BatchNorm_0"]
        return np.asarray(norm["mean"], float), np.asarray(norm["var"], float)
    if kind == "nnx":
        return tuple(np.asarray(carried["norm"][n], float) for n in ("mean", "var"))
    count, mean, var = (np.asarray(leaf, float) for leaf in jax.tree.leaves(carried))
    scale = (1 - 0.8**count)[..., None]
    return mean / scale, var / scale


@pytest.mark.parametrize("kind", KINDS)
def test_batch_norm_statistics_are_carried_by_each_particle(key, kind):
    net, batches = network(kind, norm=True), data()
    assert net.stateful
    particles, carried = init(net, key, 3)
    target = networks.classifier(net, num_data=40)
    flow = px.sgld(target, step_size=1e-12)  # the particles stay, only statistics move
    state = flow.init(particles, carried)
    done = px.run(flow, state, steps=5, key=key, data=batches, progress=False)
    mean, var = statistics(kind, done.state.carried)
    assert len(np.unique(mean[:, 0].round(6))) == 3
    order = np.arange(3) if kind == "linen" else [2, 0, 1]
    draw = jax.jit(lambda step: batches.batch(jax.random.fold_in(key, 2**31 - 1), step)["x"])
    seen = [np.asarray(draw(jnp.array(step)), float) for step in range(5)]
    for place in range(3):
        w, b, *_ = layer(kind, one(particles, place))
        running = [np.zeros(5), np.ones(5)]
        for rows in seen:
            hidden = rows[:, order] @ w + b
            new = (hidden.mean(0), hidden.var(0))
            running = [0.8 * old + 0.2 * now for old, now in zip(running, new, strict=True)]
        scale = 1 - 0.8**5 if kind == "equinox" else 1.0
        np.testing.assert_allclose(mean[place], running[0] / scale, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(var[place], running[1] / scale, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_those_of_prediction_and_batches_those_of_training(key, kind):
    net = network(kind, norm=True)
    x = np.asarray(X[:6], np.float32)
    params, carried = one(init(net, key, 2))
    for _ in range(3):
        trained, carried = net.forward(params, jnp.asarray(X[10:30], jnp.float32), carried, key)
    w, b, *affine = layer(kind, params)
    hidden = x[:, np.arange(3) if kind == "linen" else [2, 0, 1]] @ w + b
    predicted = net.apply(params, x, carried)
    trained, _ = net.forward(params, x, carried, key)
    for outputs, (mean, var) in (
        (predicted, statistics(kind, carried)),
        (trained, (hidden.mean(0), hidden.var(0))),
    ):
        last = params.out if kind == "equinox" else params["Dense_1" if kind == "linen" else "out"]
        last_w, last_b = (
            (last.weight.T, last.bias) if kind == "equinox" else (last["kernel"], last["bias"])
        )
        wanted = np.tanh(numpy_norm(hidden, *affine, mean, var)) @ np.asarray(last_w, float)
        np.testing.assert_allclose(outputs, wanted + np.asarray(last_b), rtol=1e-3, atol=1e-4)


def test_prediction_with_what_particles_carry(key):
    """Floats that are carried can ride along in `predictive`, as part of the cloud."""
    net = network("linen", norm=True)
    particles, carried = init(net, key, 3)
    both = lambda pair, x: net.apply(pair[0], x, pair[1])
    pred = px.predictive.categorical(both, (particles, carried), X.astype(np.float32))
    out = jax.vmap(net.apply, (0, None, 0))(particles, jnp.asarray(X, jnp.float32), carried)
    np.testing.assert_allclose(pred.log_probs, jax.nn.log_softmax(out), rtol=1e-4, atol=1e-5)


def test_equinox_state_made_by_the_user(key):
    make = lambda key: Eqx(True, 0.0, key)
    ours, theirs = modules.equinox(make), modules.equinox(eqx.nn.make_with_state(make))
    for a, b in zip(*(jax.tree.leaves(init(n, key, 2)) for n in (ours, theirs)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_equinox_state_survives_and_axis_names_are_found(key):
    class Other(eqx.Module):
        norm: eqx.nn.BatchNorm

        def __call__(self, x, state):
            return self.norm(x, state)

    net = modules.equinox(lambda key: Other(eqx.nn.BatchNorm(3, "rows", mode="ema")))
    params, carried = one(init(net, key, 1))
    for _ in range(2):  # Equinox marks a used state as old; ours can be used again
        outputs, _ = net.forward(params, jnp.asarray(X, jnp.float32), carried, key)
    np.testing.assert_allclose(outputs.mean(0), 0, atol=1e-5)


# ----------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_in_training_only(key, kind):
    net, plain = network(kind, rate=0.5), network(kind)
    assert net.stateful
    (params, carried), x = init(net, key, 3), jnp.asarray(X, jnp.float32)
    assert carried == ()
    first = one(params)
    np.testing.assert_allclose(net.apply(first, x), plain.apply(first, x), rtol=1e-6)
    forward = jax.jit(lambda seed: net.forward(first, x, (), jax.random.key(seed))[0])
    outputs = [forward(seed) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert not np.allclose(outputs[0], outputs[2])
    many = jax.jit(jax.vmap(lambda k: net.forward(first, x, (), k)[0]))(jax.random.split(key, 4000))
    np.testing.assert_allclose(many.mean(0), net.apply(first, x), atol=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_dropped_on_its_own(key, kind):
    net = network(kind, rate=0.5)
    same = jnp.ones((20, 3))
    outputs, _ = net.forward(one(init(net, key, 1)[0]), same, (), key)
    assert len(np.unique(np.asarray(outputs)[:, 0].round(6))) > 5


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_differs_between_particles_and_steps(key, kind):
    net = network(kind, rate=0.5)
    particles, carried = init(net, key, 1)
    equal = jax.tree.map(lambda leaf: jnp.repeat(leaf, 4, 0), particles)
    flow = px.sgld(networks.classifier(net, num_data=40), step_size=1e-14)
    batch, seen = {"x": jnp.asarray(X, jnp.float32), "y": jnp.asarray(Y)}, []
    state = flow.init(equal, carried)
    step = jax.jit(flow.step)
    for _ in range(3):
        state, info = step(key, state, batch)
        seen.append(np.asarray(info.log_density))
    assert len(np.unique(np.concatenate(seen))) == 12
    again, state = [], flow.init(equal, carried)
    for _ in range(3):
        state, info = step(key, state, batch)
        again.append(np.asarray(info.log_density))
    np.testing.assert_array_equal(seen, again)


def test_two_dropout_layers_have_two_masks(key):
    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = (nnx.Dropout(0.5, rngs=rngs) for _ in range(2))
            self.w = nnx.Param(jnp.ones(1))

        def __call__(self, x):
            return jnp.stack([self.a(x), self.b(x)], -1) * self.w[...]

    net = modules.nnx(Twice)
    outputs, _ = net.forward(one(init(net, key, 1)[0]), jnp.ones((9, 9)), (), key)
    assert not np.array_equal(outputs[..., 0], outputs[..., 1])


def test_rngs_in_the_call_of_nnx(key):
    class Called(nnx.Module):
        def __init__(self, rngs):
            self.out = nnx.Linear(3, 4, rngs=rngs)
            self.drop = nnx.Dropout(0.5)

        def __call__(self, x, *, rngs=None):
            return self.drop(self.out(x), rngs=rngs)

    net, x = modules.nnx(Called), jnp.ones((5, 3))
    assert net.stateful
    params = one(init(net, key, 1)[0])
    np.testing.assert_allclose(net.apply(params, x)[0], net.apply(params, x)[1])
    outputs = [net.forward(params, x, (), jax.random.key(seed))[0] for seed in (1, 1, 2)]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert not np.array_equal(outputs[0], outputs[2])


def test_other_streams_of_linen_are_served(key):
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x, deterministic):
            x = nn.Dense(2)(x)
            if deterministic:
                return x
            noise = [jax.random.normal(self.make_rng(n), x.shape) for n in ("dropout", "other")]
            return jnp.concatenate([x, *noise], -1)

    net = modules.linen(Noisy(), jnp.ones((1, 3)))
    outputs, _ = net.forward(one(init(net, key, 1)[0]), jnp.ones((4, 3)), (), key)
    assert net.stateful
    assert not np.array_equal(outputs[:, 2:4], outputs[:, 4:])


@pytest.mark.parametrize("kind", KINDS)
def test_stateful_exactly_if_it_carries_or_draws(kind):
    assert not network(kind).stateful  # with a dropout of rate 0
    assert network(kind, rate=0.1).stateful
    assert network(kind, norm=True).stateful


def test_random_says_so_where_it_cannot_be_seen(key):
    class Noise(eqx.Module):
        w: jax.Array

        def __call__(self, x, key=None):
            return self.w * x + (0 if key is None else jax.random.normal(key, x.shape))

    make = lambda key: Noise(jnp.ones(3))
    assert not modules.equinox(make).stateful
    net = modules.equinox(make, random=True)
    assert net.stateful
    outputs, _ = net.forward(one(init(net, key, 1)[0]), jnp.ones((4, 3)), (), key)
    assert len(np.unique(outputs)) == 12


class Dropping(eqx.Module):
    """Without a key, an Equinox module that drops can only predict."""

    line: eqx.nn.Linear
    drop: eqx.nn.Dropout

    def __init__(self, key):
        self.line, self.drop = eqx.nn.Linear(3, 2, key=key), eqx.nn.Dropout(0.5)

    def __call__(self, x):
        return self.drop(self.line(x))


class DroppingByKey(Dropping):
    def __call__(self, x, key=None):
        return self.drop(self.line(x), key=key)


@pytest.mark.parametrize("kind", ["equinox", "equinox with a key", "nnx"])
def test_a_network_that_is_not_to_drop_is_trained_as_it_predicts(key, kind):
    if kind == "nnx":
        net = modules.nnx(lambda rngs: Nnx(False, 0.5, rngs), random=False)
    else:
        net = modules.equinox(Dropping if kind == "equinox" else DroppingByKey, random=False)
    assert not net.stateful
    params, x = net.init(key, 3), RNG.normal(size=(5, 3)).astype(np.float32)
    outputs = net.apply(one(params), x)
    np.testing.assert_array_equal(outputs, net.apply(one(params), x))
    flow = px.svgd(networks.classifier(net, num_data=5), step_size=1e-3)
    data = {"x": x, "y": np.array([0, 1, 1, 0, 1])}
    result = px.run(flow, params, steps=2, key=key, data=data, progress=False)
    assert px.predictive.categorical(net, result, x).probs.shape[0] == 5


@pytest.mark.parametrize("kind", [np.array, jnp.array])
def test_training_that_differs_in_an_array_alone(key, kind):
    """Arrays are not printed with what is computed from them."""
    scales = kind([0.1, 0.1]), kind([1.0, 1.0])

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            return nn.Dense(2)(x) * (scales[0] if train else scales[1])

    class Both(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            return nn.Dense(2)(x) * (scales[0] if train else kind([0.1, 0.1]))

    class Equinox(eqx.Module):
        line: eqx.nn.Linear
        inference: bool = False

        def __call__(self, x):
            return self.line(x) * scales[1 if self.inference else 0]

    assert modules.linen(Linen(), jnp.ones((1, 3))).stateful
    assert not modules.linen(Both(), jnp.ones((1, 3))).stateful
    net = modules.equinox(lambda key: Equinox(eqx.nn.Linear(3, 2, key=key)))
    with pytest.raises(
        TargetError, match=r"something else in training.*random=True, or random=False"
    ):
        net.apply(one(net.init(key, 1)), jnp.ones((4, 3)))
    counted = []

    class Counting(Equinox):
        def __call__(self, x):
            counted.append(1)
            return self.line(x)

    net = modules.equinox(lambda key: Counting(eqx.nn.Linear(3, 2, key=key)))
    params = one(net.init(key, 1))
    calls = [len(counted)]
    for _ in range(3):
        net.apply(params, jnp.ones((4, 3)))
        calls.append(len(counted))
    assert np.diff(calls).tolist() == [5, 1, 1]  # looked at once for each shape


# ----------------------------------------------------------------------------------- the switch


@pytest.mark.parametrize(
    "name",
    ["train", "training", "is_training", "deterministic", "inference", "use_running_average"],
)
def test_switches_are_found_in_calls_and_fields(key, name):
    on = name.startswith(("train", "is_"))
    scope = {"nn": nn}
    exec(
        f"class Call(nn.Module):\n @nn.compact\n def __call__(self, x, {name}):\n"
        f"  return nn.Dropout(0.5, deterministic={name} != {on})(nn.Dense(2)(x))\n"
        f"class Field(nn.Module):\n {name}: bool = False\n @nn.compact\n def __call__(self, x):\n"
        f"  return nn.Dropout(0.5, deterministic=self.{name} != {on})(nn.Dense(2)(x))\n",
        scope,
    )
    for kind in ("Call", "Field"):
        net = modules.linen(scope[kind](), jnp.ones((1, 3)))
        assert net.stateful, (kind, name)
        params, _ = one(init(net, key, 1))
        outputs = net.apply(params, jnp.ones((5, 3)))
        np.testing.assert_array_equal(outputs[0], outputs[1])


def test_other_switches_are_given(key):
    class Mode(nn.Module):
        @nn.compact
        def __call__(self, x, mode, train=False):
            return nn.Dropout(0.5, deterministic=mode == "use" and not train)(nn.Dense(2)(x))

    net = modules.linen(
        Mode(), jnp.ones((1, 3)), train={"mode": "fit"}, predict={"mode": "use", "train": False}
    )
    assert net.stateful
    with pytest.raises(OptionError, match="nothing gives 'mode'; expected x alone"):
        modules.linen(Mode(), jnp.ones((1, 3)))


def test_switch_of_an_nnx_call(key):
    class Call(nnx.Module):
        def __init__(self, rngs):
            self.out = nnx.Linear(3, 2, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x, train: bool):
            return self.drop(self.out(x), deterministic=not train)

    net = modules.nnx(Call)
    params = one(init(net, key, 1)[0])
    outputs = net.apply(params, jnp.ones((5, 3)))
    np.testing.assert_array_equal(outputs[0], outputs[1])
    trained, _ = net.forward(params, jnp.ones((5, 3)), (), key)
    assert len(np.unique(trained)) > 2


# ----------------------------------------------------------------------------------- bad input


class NoKey(eqx.Module):
    drop: eqx.nn.Dropout = eqx.nn.Dropout(0.5)
    w: jax.Array = eqx.field(default_factory=lambda: jnp.ones(3))

    def __call__(self, x):
        return self.drop(self.w * x)


class NoState(eqx.Module):
    norm: eqx.nn.BatchNorm = eqx.field(
        default_factory=lambda: eqx.nn.BatchNorm(3, "batch", mode="batch")
    )

    def __call__(self, x):
        return self.norm(x)


class LosesState(NoState):
    def __call__(self, x, state):
        return self.norm(x, state)[0]


class Masked(eqx.Module):
    w: jax.Array

    def __call__(self, x, mask):
        return self.w * x * mask


class Complex(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones(3, jnp.complex64))

    def __call__(self, x):
        return x * self.w[...]


class Whole(Complex):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones(3, int))


class Dry(nnx.Module):
    def __init__(self, rngs):
        self.out, self.drop = nnx.Linear(3, 2, rngs=rngs), nnx.Dropout(0.5)

    def __call__(self, x):
        return self.drop(self.out(x))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda key: 3, "make returned a int; expected a function that makes a module, as lambda key"),
        (lambda key: (3, 4), "make returned a int"),
        (lambda: 3, r"make failed, TypeError.* as lambda key: eqx\.nn\.MLP"),
        (Masked(jnp.ones(3)), "make is a Masked; expected a function that makes a module"),
        (lambda key: eqx.nn.StateIndex(jnp.ones(3)), "make returned a StateIndex"),
        (lambda key: NoKey(), r"takes \['x'\], but its layers need 'key'; expected that in it too"),
        (lambda key: NoState(), r"takes \['x'\], but its layers need 'state'"),
        (lambda key: Masked(jnp.ones(3)), r"takes \['x', 'mask'\], but nothing gives 'mask'; expected x"),
        (lambda key: Masked(jnp.ones(3, jnp.complex64)), r"'mask'"),
        (lambda key: eqx.nn.Lambda(jnp.tanh), "Lambda has no float parameters; expected at least one"),
        (lambda key: eqx.nn.Linear(3, 2, dtype=jnp.complex64, key=key), "'weight' of Linear is complex64; expected real"),
    ],
)  # fmt: skip
def test_equinox_says_what_is_wrong(make, words):
    with pytest.raises(OptionError, match=words):
        modules.equinox(make)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda rngs: 3, "make returned a int; expected a function that makes a module, as lambda rngs"),
        (lambda rngs: (Complex(rngs), 1), "make returned a tuple"),
        (lambda: 3, r"make failed, TypeError.* as lambda rngs: nnx\.Linear"),
        (Complex(None), "make is a Complex; expected a function that makes a module"),
        (Complex, "parameter 'w' of Complex is complex64; expected real floats: hold a complex one as two"),
        (Whole, "parameter 'w' of Whole is int32; expected real floats"),
        (Dry, r"takes \['x'\], but its layers need 'rngs'"),
        (lambda rngs: nnx.Dropout(0.5, rngs=rngs), "Dropout has no float parameters"),
    ],
)  # fmt: skip
def test_nnx_says_what_is_wrong(make, words):
    with pytest.raises(OptionError, match=words):
        modules.nnx(make)


def compact(call):
    """A Linen module of the function `call(self, x)`."""
    body = lambda space: space.update(__call__=nn.compact(call), __module__=__name__)
    return types.new_class("Net", (nn.Module,), exec_body=body)()


def sows(self, x):
    self.sow("losses", "l2", jnp.sum(x))
    return nn.Dense(2)(x)


ROW = jnp.ones((2, 3))


@pytest.mark.parametrize(
    ("module", "example", "error", "words"),
    [
        (3, ROW, OptionError, r"module is 3; expected a flax\.linen module"),
        (nn.Dense, ROW, OptionError, "module is the class Dense; expected"),
        (nn.Dense(2), jnp.ones(3), DataError, r"Dense makes \[\(2,\)\] of the example's \[\(3,\)\]; expected a batch"),
        (nn.Dense(2), jnp.ones(()), TargetError, r"Dense failed in initialisation on float32 inputs of shape \[\(\)\]"),
        (nn.Conv(2, (3, 3)), ROW, TargetError, r"Conv failed in initialisation on float32 inputs of shape \[\(2, 3\)\]"),
        (nn.Dense(2, param_dtype=jnp.complex64), ROW, OptionError, "parameter 'bias' of Dense is complex64"),
        (nn.Dropout(0.0), ROW, OptionError, "Dropout has no float parameters"),
        (compact(lambda self, x: nn.Dropout(0.5)(nn.Dense(2)(x))), ROW, TargetError,
         r"Net failed in initialisation.*deterministic.*A layer does not know which it is: let its call take a switch"),
        (compact(lambda self, x: nn.BatchNorm()(nn.Dense(2)(x))), ROW, TargetError, "use_running_average.*take a switch"),
        (compact(lambda self, x: nn.Dropout(0.5, deterministic=False)(nn.Dense(2)(x))), ROW, TargetError,
         "Net failed in prediction.*InvalidRngError.*It draws random numbers there too: let its call take a switch"),
        (compact(lambda self, x: nn.BatchNorm(use_running_average=False)(nn.Dense(2)(x))), ROW, TargetError,
         "Net failed in prediction.*ModifyScopeVariableError.*It updates its statistics there too: let"),
        (compact(sows), ROW, OptionError, r"Net carries arrays of shapes \[\(\)\], and \[\(\), \(\)\] after a step; expected no"),
    ],
)  # fmt: skip
def test_linen_says_what_is_wrong(module, example, error, words):
    with pytest.raises(error, match=words):
        modules.linen(module, example)


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_inputs_are_told_when_the_target_is_evaluated(key, kind):
    net = {
        "equinox": lambda: modules.equinox(lambda key: eqx.nn.Linear(3, 2, key=key)),
        "linen": lambda: modules.linen(nn.Dense(2), ROW),
        "nnx": lambda: modules.nnx(lambda rngs: nnx.Linear(3, 2, rngs=rngs)),
    }[kind]()
    target = networks.classifier(net, num_data=2)
    with pytest.raises(
        TargetError, match=r"failed in prediction on float32 inputs of shape \[\(2, 7\)\]"
    ):
        target.score(init(net, key, 2), {"x": jnp.ones((2, 7)), "y": jnp.zeros(2, int)})


def test_what_the_network_lacks_is_told_when_the_target_is_evaluated(key):
    for kind in KINDS:
        net = network(kind, norm=True)
        flow = px.svgd(networks.classifier(net, num_data=40), optimizer=optax.adam(0.1))
        words = r"but .* came; expected those of flow\.init\("
        pair = r"flow\.init\(\*net\.init\(key, M\)\)"
        for start, told in ((init(net, key, 2)[0], words), (init(net, key, 2), pair)):
            with pytest.raises(ParticleError, match=told):
                px.run(flow, start, steps=1, key=key, data=data(), progress=False)
        with pytest.raises(ParticleError, match=r"carried arrays .* but \[\] came"):
            px.predictive.categorical(net.apply, init(net, key, 2)[0], X.astype(np.float32))
    plain = network("linen")
    with pytest.raises(
        ParticleError, match=r"Linen has arrays of shapes .* expected those of init"
    ):
        plain.apply({"kernel": jnp.ones((3, 4))}, ROW)


def test_modules_that_keep_drawing_or_forget_what_they_get(key):
    class Always(nnx.Module):
        def __init__(self, rngs):
            self.w, self.rngs = nnx.Param(jnp.ones(3)), rngs.fork()

        def __call__(self, x):
            return x * self.w[...] + jax.random.normal(self.rngs.noise(), x.shape)

    class Forgets(eqx.Module):
        drop: eqx.nn.Dropout
        w: jax.Array

        def __call__(self, x, key):
            return self.drop(self.w * x)

    net = modules.nnx(Always)
    assert net.forward(one(init(net, key, 1)[0]), ROW, (), key)[0].shape == (2, 3)
    with pytest.raises(TargetError, match="Always draws random numbers in prediction too; let"):
        net.apply(one(init(net, key, 1)[0]), ROW)
    net = modules.equinox(lambda key: Forgets(eqx.nn.Dropout(0.5), jnp.ones(3)))
    with pytest.raises(TargetError, match=r"Forgets failed in training.*Dropout requires a key"):
        net.forward(one(init(net, key, 1)[0]), ROW, (), key)
    net = modules.equinox(lambda key: LosesState())
    params, carried = one(init(net, key, 1))
    with pytest.raises(TargetError, match=r"LosesState gave .*; expected \(outputs, state\)"):
        net.forward(params, ROW, carried, key)


@pytest.mark.parametrize("part", ["linen", "nnx"])
def test_without_flax(monkeypatch, part):
    for name in [n for n in sys.modules if n.split(".")[0] == "flax"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(OptionError, match=f"modules.{part} needs flax.*pip install flax"):
        getattr(modules, part)(*([lambda rngs: None] * (1 + (part == "linen"))))


def test_options_are_checked():
    with pytest.raises(OptionError, match="has no option 'axis'"):
        modules.equinox(lambda key: None, axis="batch")


def test_linen_statistics_keep_their_type(x64, key):
    """Made in float32, they are updated from float64 data."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.Dense(3)(nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x)))

    x, y = np.random.default_rng(0).normal(size=(20, 4)), np.arange(20) % 3
    net = px.modules.linen(Net(), x[:1])
    flow = px.w_sgld_b(px.networks.classifier(net, num_data=20), optimizer=optax.adam(0.01))
    before = net.init(key, 3)
    result = px.run(flow, flow.init(*before), steps=2, key=key, data={"x": x, "y": y}, progress=False)  # fmt: skip
    types = lambda tree: [leaf.dtype for leaf in jax.tree.leaves(tree)]
    assert types(result.state.carried) == types(before[1])
    assert not np.allclose(jax.tree.leaves(result.state.carried)[0], jax.tree.leaves(before[1])[0])


def test_nnx_leaves_the_callers_arrays_alone(key):
    net = network("nnx", norm=True)
    params, carried = jax.tree.map(np.array, net.start(key))
    before = jax.tree.map(np.copy, carried)
    _, after = net.forward(
        params, np.ones((5, 4), np.float32) * np.arange(5)[:, None], carried, key
    )
    jax.tree.map(np.testing.assert_array_equal, carried, before)
    assert not all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True))  # fmt: skip


def test_what_networks_carry_must_be_finite(key):
    net = network("linen", norm=True)
    particles, carried = net.init(key, 3)
    flow = px.w_sgld_b(px.networks.classifier(net, num_data=20), optimizer=optax.adam(0.01))
    with pytest.raises(px.errors.ParticleError, match=r"row 1 of carried.* is not finite"):
        flow.init(particles, jax.tree.map(lambda leaf: leaf.at[1].set(jnp.nan), carried))


def rows(num=20):
    x = np.random.default_rng(0).normal(size=(num, 4)).astype(np.float32)
    return {"x": x, "y": np.arange(num) % 3}


def trained(net, key, steps=2):
    flow = px.svgd(px.networks.classifier(net, num_data=20), optimizer=optax.adam(0.01))
    start = flow.init(*net.init(key, 3))
    return px.run(flow, start, steps=steps, key=key, data=rows(), progress=False)


@pytest.mark.parametrize("cell", ["GRUCell", "LSTMCell"])
def test_recurrent_cells_of_nnx_predict(cell, key):
    """They take a number from their stream to make a carry of zeros: nothing depends on it."""

    class Recurrent(nnx.Module):
        def __init__(self, rngs):
            self.cells = nnx.RNN(getattr(nnx, cell)(1, 5, rngs=rngs))
            self.out = nnx.Linear(5, 3, rngs=rngs)

        def __call__(self, x):
            return self.out(self.cells(x[..., None])[:, -1])

    net = modules.nnx(Recurrent)
    result, x = trained(net, key), rows()["x"]
    found = px.predictive.categorical(net, result, x)
    own = lambda place: net.apply(jax.tree.map(lambda a: a[place], result.particles), x, ())
    wanted = np.mean([jax.nn.softmax(own(i)) for i in range(3)], axis=0)
    np.testing.assert_allclose(found.probs, wanted, rtol=1e-5)


@pytest.mark.parametrize("default", [True, False])
def test_equinox_modules_that_split_their_key_predict(default, key):
    class Splits(eqx.Module):
        dense: eqx.nn.Linear
        drop: eqx.nn.Dropout

        def __init__(self, key):
            self.dense, self.drop = eqx.nn.Linear(4, 3, key=key), eqx.nn.Dropout(0.2)

        def apply(self, x, key):
            one, two = jax.random.split(key)
            return self.drop(self.dense(self.drop(x, key=one)), key=two)

        if default:

            def __call__(self, x, *, key=None):
                return self.apply(x, key)
        else:

            def __call__(self, x, key):
                return self.apply(x, key)

    net, x = modules.equinox(Splits), rows()["x"]
    result = trained(net, key)
    found = px.predictive.categorical(net, result, x)
    dense = result.particles.dense
    logits = np.einsum("ni,mji->mnj", x, dense.weight) + np.asarray(dense.bias)[:, None]
    np.testing.assert_allclose(found.probs, jax.nn.softmax(logits).mean(0), rtol=1e-5)


def test_modules_that_draw_in_prediction_are_refused_before_they_train(key):
    class Noisy(eqx.Module):
        dense: eqx.nn.Linear

        def __init__(self, key):
            self.dense = eqx.nn.Linear(4, 3, key=key)

        def __call__(self, x, key):
            return self.dense(x) + jax.random.normal(jax.random.split(key)[0], (3,))

    class Draws(nnx.Module):
        def __init__(self, rngs):
            self.dense, self.rngs = nnx.Linear(4, 3, rngs=rngs), rngs

        def __call__(self, x):
            return self.dense(x) + jax.random.normal(self.rngs.params(), (3,))

    for net in (modules.equinox(Noisy), modules.nnx(Draws)):
        with pytest.raises(
            TargetError, match=r"Noisy failed in prediction|draws random numbers in"
        ):
            trained(net, key)


def test_names_of_the_pair_that_a_stateful_network_starts_from(key):
    with pytest.raises(OptionError, match="split got the pair"):
        networks.split(network("linen", norm=True).init(key, 3), ["Dense_1"])


def test_only_the_particles_of_a_partly_bayesian_module(key):
    net = modules.equinox(lambda key: eqx.nn.MLP(4, 3, 8, 1, key=key))
    head, _ = networks.split(net.init(key, 3), ["layers/1"])
    flow = px.svgd(px.networks.classifier(net, num_data=20), optimizer=optax.adam(0.01))
    with pytest.raises(ParticleError, match="shared=trunk too, and for predictions the run's"):
        px.run(flow, head, steps=1, key=key, data=rows(), progress=False)


@pytest.mark.parametrize("kind", ["equinox", "linen", "nnx", "stateful linen", "stateful equinox"])
def test_modules_that_return_means_and_sds(kind):
    """A noise of each datum, from the module to the prediction."""
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    y, key = x[:, 0], jax.random.key(0)
    both = lambda h: (h[..., 0], jax.nn.softplus(h[..., 1]) + 1e-3)

    if "equinox" in kind:

        class Net(eqx.Module):
            line: eqx.nn.Linear
            drop: eqx.Module | None = None

            def __call__(self, x, key=None):
                return both(self.line(self.drop(x, key=key) if self.drop else x))

        drop = eqx.nn.Dropout(0.1) if "stateful" in kind else None
        net = px.modules.equinox(lambda key: Net(eqx.nn.Linear(3, 2, key=key), drop))
    elif "linen" in kind:
        linen = pytest.importorskip("flax.linen", reason="needs flax")

        class Net(linen.Module):
            @linen.compact
            def __call__(self, x, train=False):
                if "stateful" in kind:
                    x = linen.BatchNorm(use_running_average=not train)(x)
                return both(linen.Dense(2)(x))

        net = px.modules.linen(Net(), x[:1])
    else:
        nnx = pytest.importorskip("flax.nnx", reason="needs flax")

        class Net(nnx.Module):
            def __init__(self, rngs):
                self.line = nnx.Linear(3, 2, rngs=rngs)

            def __call__(self, x):
                return both(self.line(x))

        net = px.modules.nnx(Net)

    target = px.networks.regressor(net, num_data=40, noise="network")
    flow, start = px.w_sgld_b(target, optimizer=optax.adam(0.05)), net.init(key, 4)
    state = flow.init(*start) if net.stateful else start
    result = px.run(flow, state, steps=300, key=key, data={"x": x, "y": y}, progress=False)
    pred = px.predictive.normal(net, result, x, noise="network")
    assert pred.sds.shape == (4, 40)
    assert pred.score(y).rmse < 0.3
    assert pred.sd.mean() < 0.5


def test_derivatives_that_differ_between_training_and_prediction():
    """Straight through in training and a step in prediction: values are the same."""

    def sign(slope):
        @jax.custom_jvp
        def function(x):
            return jnp.sign(x)

        function.defjvp(lambda x, t: (jnp.sign(x[0]), slope * t[0]))
        return function

    soft, hard = sign(1.0), sign(0.0)

    class Net(eqx.Module):
        line: eqx.nn.Linear
        inference: bool = False

        def __call__(self, x):
            return (hard if self.inference else soft)(self.line(x))

    class Same(Net):
        def __call__(self, x):
            return soft(jax.nn.relu(self.line(x)))

    make = lambda kind: modules.equinox(lambda key: kind(eqx.nn.Linear(3, 2, key=key)))
    net = make(Net)
    with pytest.raises(TargetError, match="something else in training than in prediction"):
        net.apply(one(net.init(jax.random.key(0), 1)), jnp.ones((4, 3)))
    net = make(Same)
    assert net.apply(one(net.init(jax.random.key(0), 1)), jnp.ones((4, 3))).shape == (4, 2)


def test_what_cannot_be_differentiated_in_prediction_alone():
    class Net(eqx.Module):
        line: eqx.nn.Linear
        inference: bool = False

        def __call__(self, x):
            out = self.line(x)
            if self.inference:
                out = jax.lax.while_loop(lambda a: jnp.sum(a**2) > 1, lambda a: a / 2, out)
            return out

    net = modules.equinox(lambda key: Net(eqx.nn.Linear(3, 2, key=key)), random=True)
    particles, _ = net.init(jax.random.key(0), 2)
    assert net.apply(one(particles), jnp.ones((4, 3)), ()).shape == (4, 2)


@pytest.mark.parametrize("lift", ["remat", "jit", "vmap", "scan"])
def test_lifted_layers_carry_and_draw_nothing(lift):
    class Cell(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            x = nn.tanh(nn.Dense(3)(x))
            return x, x

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            shared = {"split_rngs": {"params": False}}
            if lift == "scan":
                return nn.scan(Cell, variable_broadcast="params", length=3, **shared)()(x, None)[0]
            if lift == "vmap":
                return nn.vmap(nn.Dense, variable_axes={"params": None}, **shared)(2)(x)
            return getattr(nn, lift)(nn.Dense)(2)(x)

    assert not modules.linen(Net(), jnp.ones((1, 3))).stateful


def test_numpy_arrays_are_not_sampled(key):
    class Net(eqx.Module):
        line: eqx.nn.Linear
        trunk: np.ndarray

        def __init__(self, key):
            self.line, self.trunk = eqx.nn.Linear(4, 3, key=key), np.full(4, 5.0, np.float32)

        def __call__(self, x):
            return self.line(x - self.trunk)

    net = modules.equinox(Net)
    particles = net.init(key, 3)
    assert networks.leaf_names(particles) == ["line/weight", "line/bias"]
    x = RNG.normal(size=(6, 4)).astype(np.float32)
    weight, bias = (np.asarray(a, float) for a in jax.tree.leaves(one(particles)))
    np.testing.assert_allclose(net.apply(one(particles), x), (x - 5) @ weight.T + bias, rtol=1e-4)

    class Fixed(eqx.Module):
        weight: np.ndarray

        def __call__(self, x):
            return self.weight @ x

    with pytest.raises(OptionError, match=r"NumPy arrays stay as they are.*jnp\.asarray"):
        modules.equinox(lambda key: Fixed(np.ones((2, 4), np.float32)))


def test_modules_that_are_made_by_keyword(key):
    class ByKey(eqx.Module):
        line: eqx.nn.Linear

        def __init__(self, *, key):
            self.line = eqx.nn.Linear(4, 3, key=key)

        def __call__(self, x):
            return self.line(x)

    class ByRngs(nnx.Module):
        def __init__(self, *, rngs):
            self.line = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            return self.line(x)

    for net in (modules.equinox(ByKey), modules.nnx(ByRngs)):
        assert len(jax.tree.leaves(net.init(key, 5))[0]) == 5


def test_calls_that_take_more_than_inputs():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.line = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, a, b):
            return self.line(a + b)

    with pytest.raises(
        OptionError,
        match=r"takes \['a', 'b'\], but nothing gives 'b'.*one pytree x.*is called train",
    ):
        modules.nnx(Two)  # fmt: skip


# ------------------------------------------------------------------- what reviews and a try-out found


def test_switches_in_the_call_alone_are_refused_or_trained(key):
    """Where nothing is drawn or carried, training that differs is noticed also if the call's own keyword makes it differ."""

    class Doubling(nnx.Module):
        def __init__(self, rngs):
            self.line = nnx.Linear(3, 2, rngs=rngs)

        def __call__(self, x, train):
            return self.line(x) * (2.0 if train else 1.0)

    class Eq(eqx.Module):
        line: eqx.nn.Linear

        def __call__(self, x, train):
            return self.line(x) * (2.0 if train else 1.0)

    for net in (modules.nnx(Doubling), modules.equinox(lambda key: Eq(eqx.nn.Linear(3, 2, key=key)))):  # fmt: skip
        with pytest.raises(TargetError, match="something else in training"):
            net.apply(one(net.init(key, 1)), jnp.ones((4, 3)))
    net = modules.nnx(Doubling, random=True)
    params, carried = (one(part) for part in net.init(key, 1))
    x = jnp.ones((4, 3))
    trained, _ = net.forward(params, x, carried, key)
    np.testing.assert_allclose(trained, 2 * net.apply(params, x, carried), rtol=1e-6)


def test_switches_by_other_names_are_refused(key):
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x, is_eval=True):
            return nn.BatchNorm(use_running_average=is_eval)(nn.Dense(2)(x))

    class Nnx(nnx.Module):
        def __init__(self, rngs):
            self.line = nnx.Linear(3, 2, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x, enable_dropout=False):
            return self.drop(self.line(x), deterministic=not enable_dropout)

    with pytest.raises(OptionError, match=r"'is_eval', which looks like a switch.*would be True in both.*train=\{'is_eval': False\}, predict=\{'is_eval': True\}"):  # fmt: skip
        modules.linen(Linen(), jnp.ones((2, 3)))
    assert modules.linen(Linen(), jnp.ones((2, 3)), train={"is_eval": False}).stateful
    with pytest.raises(OptionError, match="'enable_dropout', which looks like a switch"):
        modules.nnx(Nnx)


def test_networks_remember_nothing_that_a_checkpoint_would_see(key, tmp_path):
    class Attends(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
            self.out = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            return self.out(self.a(x).mean(1))

    net = modules.nnx(Attends)
    assert not net.stateful
    flow = px.w_sgld_b(networks.classifier(net, num_data=8), step_size=1e-3)
    data = {"x": np.ones((8, 2, 4), np.float32), "y": np.arange(8) % 3}
    start = net.init(key, 3)
    go = lambda steps: px.run(flow, start, steps=steps, key=key, data=data, progress=False, checkpoint=tmp_path)  # fmt: skip
    first = go(2)
    px.predictive.categorical(net, first, data["x"])
    assert int(go(4).state.step) == 4


def test_parameters_in_another_order_are_known_by_their_names(key, tmp_path):
    net = modules.equinox(lambda key: eqx.nn.MLP(3, 4, 4, 2, key=key))
    flow = px.w_sgld_b(networks.classifier(net, num_data=40), step_size=1e-3)
    data = {"x": X.astype(np.float32), "y": Y}
    result = px.run(flow, net.init(key, 3), steps=2, key=key, data=data, progress=False, checkpoint=tmp_path)  # fmt: skip
    read = px.checkpoints.load(tmp_path)  # as dicts, in the order of their names
    found = px.predictive.categorical(net, read, data["x"]).probs
    np.testing.assert_array_equal(found, px.predictive.categorical(net, result, data["x"]).probs)
    with pytest.raises(ParticleError, match="expected those of init"):
        px.predictive.categorical(net, {"other": jnp.zeros((3, 2))}, data["x"])


def test_an_nnx_state_is_taken_for_parameters():
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    net = modules.nnx(lambda rngs: nnx.Linear(3, 4, rngs=rngs))
    x = X.astype(np.float32)
    found = net.apply(nnx.state(model, nnx.Param), x)
    np.testing.assert_allclose(found, model(x), rtol=1e-6)


def test_functions_that_flax_compiled_are_no_modules(key):
    net = modules.nnx(lambda rngs: nnx.Linear(3, 4, rngs=rngs))
    cloud, x = net.init(key, 3), X.astype(np.float32)
    found = px.predictive.categorical(nnx.jit(net.apply), cloud, x)
    wanted = px.predictive.categorical(net, cloud, x)
    np.testing.assert_allclose(found.probs, wanted.probs, rtol=1e-5)
    for module in (nn.Dense(3), nnx.Linear(3, 4, rngs=nnx.Rngs(0))):
        with pytest.raises(OptionError, match="a module"):
            px.predictive.categorical(module, cloud, x)


def test_loops_over_keys_that_no_layer_uses_stay_plain(key):
    class Loop(eqx.Module):
        line: eqx.nn.Linear
        drop: eqx.nn.Dropout

        def __call__(self, x, key=None):
            keys = None if key is None else jax.random.split(key, 3)
            turn = lambda h, k: (jax.nn.gelu(self.drop(self.line(h), key=k)), None)
            return jax.lax.scan(turn, x, keys, length=3)[0]

    net = modules.equinox(lambda key: Loop(eqx.nn.Linear(3, 3, key=key), eqx.nn.Dropout(0.0)))
    assert not net.stateful
    assert net.apply(one(net.init(key, 1)), jnp.ones((4, 3))).shape == (4, 3)


def test_results_of_other_networks_are_refused(key):
    norm = modules.equinox(functools.partial(Eqx, True, 0.0))
    flow = px.w_sgld_b(networks.classifier(norm, num_data=40), step_size=1e-3)
    data = {"x": X.astype(np.float32), "y": Y}
    result = px.run(flow, flow.init(*norm.init(key, 3)), steps=1, key=key, data=data, progress=False)  # fmt: skip
    plain = modules.equinox(functools.partial(Eqx, False, 0.0))
    with pytest.raises(OptionError, match="the network that came carries nothing"):
        px.predictive.categorical(plain, result, data["x"])


def test_modules_that_ask_for_random_streams_are_trained_with_them(key):
    class Asks(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x) * (2.0 if self.has_rng("dropout") else 1.0)

    assert modules.linen(Asks(), jnp.ones((2, 3))).stateful


def test_what_networks_know_is_pickled_empty(key):
    """As by tools that send networks to other processes, which write functions by value."""
    known = modules._Known()
    assert known.answer(jnp.ones(3).shape, lambda: True)
    assert known.answer(jnp.ones(3).shape, lambda: False)  # asked once
    assert pickle.loads(pickle.dumps(known)).answers == {}


def test_what_networks_carry_is_read_from_checkpoints_too(key, tmp_path):
    net = modules.equinox(functools.partial(Eqx, True, 0.0))
    flow = px.w_sgld_b(networks.classifier(net, num_data=40), step_size=1e-3)
    data = {"x": X.astype(np.float32), "y": Y}
    result = px.run(flow, flow.init(*net.init(key, 3)), steps=2, key=key, data=data, progress=False, checkpoint=tmp_path)  # fmt: skip
    found = px.predictive.categorical(net, px.checkpoints.load(tmp_path), data["x"]).probs
    np.testing.assert_array_equal(found, px.predictive.categorical(net, result, data["x"]).probs)


def test_options_that_are_no_switches(key):
    class Returns(eqx.Module):
        line: eqx.nn.Linear

        def __call__(self, x, return_test_stats=False):
            return self.line(x)

    net = modules.equinox(lambda key: Returns(eqx.nn.Linear(3, 2, key=key)))
    assert net.apply(one(net.init(key, 1)), jnp.ones((4, 3))).shape == (4, 2)
