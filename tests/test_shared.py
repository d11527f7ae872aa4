"""Partly Bayesian networks: some leaves are particles, the others single values trained with the mean gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import particlax as px
from particlax import networks
from particlax.errors import NonFiniteError, OptionError, ParticleError
from particlax.particles import join

COMPILE_FAST = True

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 12)
DATA = {"x": jnp.asarray(X), "y": jnp.asarray(Y)}


def start(key):
    one, two = jax.random.split(key)
    return {
        "trunk": {"w": jax.random.normal(one, (4, 5)), "b": jnp.zeros(5)},
        "head": {"w": jax.random.normal(two, (5, 3)), "b": jnp.zeros(3)},
    }


def apply(p, x):
    x = jnp.tanh(x @ p["trunk"]["w"] + p["trunk"]["b"])
    return x @ p["head"]["w"] + p["head"]["b"]


NET = networks.Network(start, apply)
TARGET = networks.classifier(NET, num_data=12, prior={"": 1.0, "head": 0.5})


@pytest.fixture
def parts(key):
    return networks.split(NET.init(key, 6), ["head"])


def test_split_and_join(key):
    cloud = NET.init(key, 6)
    head, trunk = networks.split(cloud, ["head/w", "trunk/b"])
    assert networks.leaf_names(head) == ["head/w", "trunk/b"]
    assert networks.leaf_names(trunk) == ["head/b", "trunk/w"]
    assert trunk["trunk"]["w"].shape == (4, 5)
    whole = join(head, jax.tree.map(lambda leaf: jnp.stack([leaf] * 6), trunk))
    assert jax.tree.structure(whole) == jax.tree.structure(cloud)
    np.testing.assert_array_equal(whole["trunk"]["w"][3], cloud["trunk"]["w"][0])
    np.testing.assert_array_equal(whole["head"]["w"], cloud["head"]["w"])


def test_scores_are_those_of_whole_networks(parts):
    """A particle's score is its own; the shared one is the mean over all networks with these values."""
    head, trunk = parts
    seen = TARGET.evaluate(head, DATA, shared=trunk)
    whole = join(head, jax.tree.map(lambda leaf: jnp.stack([leaf] * 6), trunk))
    values, scores = TARGET.score(whole, DATA)
    np.testing.assert_allclose(seen.log_density, values, rtol=1e-5)
    np.testing.assert_allclose(seen.score["head"]["w"], scores["head"]["w"], rtol=2e-4, atol=1e-4)
    assert seen.score["trunk"]["w"] is None
    mean = scores["trunk"]["w"].mean(0)
    np.testing.assert_allclose(seen.shared["trunk"]["w"], mean, rtol=2e-4, atol=1e-4)


def test_a_step_by_hand(parts, key):
    """Euler: shared += eps * mean score, particles as the same flow on heads alone would move them."""
    head, trunk = parts
    flow = px.svgd(TARGET, step_size=1e-2)
    state, _ = flow.step(key, flow.init(head, shared=trunk), DATA)
    seen = TARGET.evaluate(head, DATA, shared=trunk)
    np.testing.assert_allclose(
        state.shared.values["trunk"]["w"],
        trunk["trunk"]["w"] + 1e-2 * seen.shared["trunk"]["w"],
        rtol=1e-5,
    )
    fixed = px.Target(
        log_prior=lambda p: -np.float32(1.0) * sum(jnp.sum(q**2) for q in jax.tree.leaves(p)),
        log_likelihood=lambda p, b: jnp.take_along_axis(
            jax.nn.log_softmax(apply({"head": p, "trunk": trunk["trunk"]}, b["x"])),
            b["y"][:, None],
            1,
        )[:, 0],
        num_data=12,
    )
    alone = px.svgd(fixed, step_size=1e-2)
    moved, _ = alone.step(key, alone.init(head["head"]), DATA)
    np.testing.assert_allclose(state.particles["head"]["w"], moved.particles["w"], rtol=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: px.svgd(TARGET, optimizer=optax.adam(0.02)),
        lambda: px.w_sgld_b(TARGET, optimizer=optax.rmsprop(0.02)),
        lambda: px.sgld(TARGET, step_size=1e-3),
        lambda: px.sgld(TARGET, integrator=px.integrators.RMS(1e-3)),
        lambda: px.sghmc(TARGET, step_size=1e-2),
    ],
)
def test_runs_learn_and_resume(make, parts, key):
    head, trunk = parts
    flow = make()
    opts = {"key": key, "data": px.Minibatches(DATA, 6), "progress": False}
    state = flow.init(head, shared=trunk)
    half = px.run(flow, state, steps=40, **opts)
    rest = px.run(flow, half.state, steps=40, **opts)
    once = px.run(flow, state, steps=80, **opts)
    for a, b in zip(jax.tree.leaves(rest.state), jax.tree.leaves(once.state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert once.shared["trunk"]["w"].shape == (4, 5)
    assert not np.allclose(once.shared["trunk"]["w"], trunk["trunk"]["w"])
    before = TARGET.evaluate(head, DATA, shared=trunk).log_density.mean()
    after = TARGET.evaluate(once.particles, DATA, shared=once.shared).log_density.mean()
    assert after > before


def test_trunk_is_computed_once(parts):
    """No array of the program has both the particle axis and the trunk's hidden units: 5 hidden, 6 particles."""
    head, trunk = parts
    flow = px.svgd(TARGET, step_size=1e-2)
    state = flow.init(head, shared=trunk)
    program = str(jax.make_jaxpr(lambda s: flow.step(jax.random.key(0), s, DATA))(state))
    activations = [f"f32[{shape}]" for shape in ("6,12,5", "12,6,5")]
    tanhs = [line for line in program.splitlines() if " tanh " in line]
    assert tanhs
    assert not any(shape in line for line in tanhs for shape in activations)


def test_stateful_networks_share_the_key(parts, key):
    """One dropout mask for all particles, so that the trunk stays one; statistics are carried by each."""

    def forward(p, x, carried, key):
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return apply(p, jnp.where(kept, x, 0)), {"seen": carried["seen"] + jnp.sum(kept)}

    net = networks.Network(
        lambda k: (start(k), {"seen": jnp.zeros(())}), lambda p, x, c: apply(p, x), forward, True
    )
    target = networks.classifier(net, num_data=12)
    flow = px.svgd(target, step_size=1e-3)
    head, trunk = parts
    state, _ = flow.step(key, flow.init(head, {"seen": jnp.zeros(6)}, trunk), DATA)
    counts = np.asarray(state.carried["seen"])
    assert 0 < counts[0] < 48
    assert np.all(counts == counts[0])


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["heads"], "split names 'heads', which no leaf's path begins with"),
        (["trunk", "head"], "split names every leaf as particles"),
        ([], "split names no leaf as particles"),
        ("head", r"names is 'head'; expected a list of names: \['head'\]"),
    ],
)
def test_names_that_do_not_fit(names, words, key):
    with pytest.raises(OptionError, match=words):
        networks.split(NET.init(key, 2), names)


def test_parts_that_do_not_fit(parts, key):
    head, trunk = parts
    flow = px.svgd(TARGET, step_size=1e-2)
    with pytest.raises(ParticleError, match="is both a particle and shared"):
        flow.init(NET.init(key, 6), shared=trunk)
    with pytest.raises(ParticleError, match=r"in other structures.*px.networks.split"):
        flow.init(head, shared={"trunk": trunk["trunk"]})
    bad = jax.tree.map(lambda leaf: leaf.at[0].set(jnp.nan), trunk)
    with pytest.raises(ParticleError, match=r"shared\['trunk'\]\['b'\] is not finite"):
        flow.init(head, shared=bad)
    whole = jax.tree.map(lambda leaf: leaf.astype(jnp.int32), trunk)
    with pytest.raises(ParticleError, match="of shared has dtype int32"):
        flow.init(head, shared=whole)


def test_history_needs_whole_particles(parts, key):
    head, trunk = parts
    flow = px.svgd(TARGET, step_size=1e-2)
    with pytest.raises(OptionError, match="not the leaves that they share"):
        px.run(flow, flow.init(head, shared=trunk), steps=4, key=key, data=DATA, thin=2)


def test_shared_values_that_run_away_stop_the_run(parts, key):
    head, trunk = parts
    flow = px.Flow(TARGET, (px.Drift(0.0),), px.integrators.Euler(3e38))
    with pytest.raises(NonFiniteError, match=r"at step 0.*the move is not finite") as error:
        px.run(flow, flow.init(head, shared=trunk), steps=5, key=key, data=DATA, progress=False)
    assert np.all(np.isfinite(error.value.state.shared.values["trunk"]["w"]))


# ---------------------------------------------------------------------------------------------- predictions


def test_predictions_of_a_result_join_what_is_shared(parts, key):
    head, trunk = parts
    flow = px.svgd(TARGET, optimizer=optax.adam(0.01))
    result = px.run(
        flow, flow.init(head, shared=trunk), steps=5, key=key, data=DATA, progress=False
    )
    whole = join(result.particles, jax.tree.map(lambda a: jnp.stack([a] * 6), result.shared))
    truth = px.predictive.categorical(apply, whole, X)
    for network, source in ((NET, result), (NET, result.state), (apply, result)):
        pred = px.predictive.categorical(network, source, X)
        np.testing.assert_allclose(pred.log_probs, truth.log_probs, rtol=1e-5, atol=1e-6)
    sd = lambda p: jnp.exp(p["trunk"]["b"][0] + p["head"]["b"][0])
    pred = px.predictive.normal(lambda p, x: apply(p, x)[:, 0], result, X, noise=sd)
    np.testing.assert_allclose(pred.sds[:, 0], jax.vmap(sd)(whole), rtol=1e-6)


def test_predictions_of_a_result_use_what_is_carried(key):
    """Each particle predicts with its own statistics; integers may be among them."""
    net = networks.Network(
        lambda k: (start(k), {"mean": jnp.zeros(4), "count": jnp.zeros((), jnp.int32)}),
        lambda p, x, c: apply(p, x - c["mean"] / jnp.maximum(c["count"], 1)),
        lambda p, x, c, k: (apply(p, x), {"mean": c["mean"] + x.mean(0), "count": c["count"] + 1}),
        stateful=True,
    )
    flow = px.svgd(networks.classifier(net, num_data=12), optimizer=optax.adam(0.01))
    state = flow.init(*net.init(key, 6))
    result = px.run(flow, state, steps=4, key=key, data=DATA, progress=False)
    pred = px.predictive.categorical(net, result, X)
    shifted = px.predictive.categorical(apply, result.particles, X - X.mean(0))
    np.testing.assert_allclose(pred.log_probs, shifted.log_probs, rtol=1e-4, atol=1e-5)
    with pytest.raises(OptionError, match="stateful but plain particles came"):
        px.predictive.categorical(net, result.particles, X)


# ---------------------------------------------------------------------------------------------- data before compilation


def started(network=NET, num=12, **options):
    flow = px.svgd(networks.classifier(network, num_data=num, **options), step_size=1e-3)
    return lambda data, state=None: px.run(
        flow, NET.init(jax.random.key(0), 3), steps=1, key=jax.random.key(0), data=data
    )


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (Y + 1, "from 1 to 3 and the network has 3 logits; expected whole numbers from 0 to 2"),
        (Y - 1, "from -1 to 1"),
        (Y.astype(float), "of dtype float32.*convert floats"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: px.Minibatches(d, 5)])
def test_labels_out_of_range_are_refused(labels, words, wrap):
    with pytest.raises(px.errors.DataError, match=words):
        started()(wrap({"x": X, "y": labels}))


def test_other_bad_data_are_refused():
    bad = X.copy()
    bad[3, 2] = np.inf
    with pytest.raises(px.errors.DataError, match=r"row 3 of the data\['x'\] is not finite"):
        started()({"x": bad, "y": Y})
    with pytest.raises(
        px.errors.DataError, match=r"the data are a dict of \['inputs', 'y'\]; expected a dict"
    ):
        started()({"inputs": X, "y": Y})
    with pytest.raises(px.errors.DataError, match="the data are a tuple; expected a dict"):
        started()((X, Y))


def test_networks_that_do_not_fit_are_refused():
    with pytest.raises(px.errors.TargetError, match=r"returned shape \(12,\) for labels"):
        started(lambda p, x: apply(p, x)[:, 0])({"x": X, "y": Y})
    with pytest.raises(
        px.errors.TargetError, match=r"missing 1 required positional.*stateful=True"
    ):
        started(lambda p, x, carried: apply(p, x))({"x": X, "y": Y})
    keeps = networks.Network(
        lambda k: (start(k), {"mean": jnp.zeros(4)}),
        lambda p, x, c: apply(p, x),
        lambda p, x, c, k: (apply(p, x - c["mean"]), c),
        stateful=True,
    )
    with pytest.raises(px.errors.TargetError, match=r"nothing carried.*net.init"):
        started(keeps)({"x": X, "y": Y})
    forgets = networks.Network(
        lambda k: (start(k), ()), apply, lambda p, x, c, k: apply(p, x), stateful=True
    )
    with pytest.raises(px.errors.TargetError, match=r"expected the pair \(outputs"):
        started(forgets)({"x": X, "y": Y})
