"""From networks to targets: likelihoods and priors against NumPy, stateful networks, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import particlax as px
from particlax import networks
from particlax.errors import DataError, OptionError, ParticleError, TargetError

COMPILE_FAST = True

RNG = np.random.default_rng(0)
SIZES = (4, 6, 3)


def start(key):
    keys = jax.random.split(key, 2)
    return {
        f"layer{i}": {
            "w": jax.random.normal(keys[i], SIZES[i : i + 2]) / 2,
            "b": jnp.full(SIZES[i + 1], 0.1),
        }
        for i in range(2)
    }


def apply(params, x):
    x = jnp.tanh(x @ params["layer0"]["w"] + params["layer0"]["b"])
    return x @ params["layer1"]["w"] + params["layer1"]["b"]


def numpy_apply(params, x):
    p = jax.tree.map(lambda a: np.asarray(a, float), params)
    x = np.tanh(x @ p["layer0"]["w"] + p["layer0"]["b"])
    return x @ p["layer1"]["w"] + p["layer1"]["b"]


@pytest.fixture
def net():
    return networks.Network(start, apply)


def one(cloud, place):
    return jax.tree.map(lambda a: a[place], cloud)


def prior(params, variance):
    return sum(
        -0.5 * np.sum(np.asarray(leaf, float) ** 2) / variance(jax.tree_util.keystr(path))
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    )


# ---------------------------------------------------------------------------------------------- formulas


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_classifier_is_the_formula(net, key, temperature):
    cloud = net.init(key, 5)
    x, y = RNG.normal(size=(7, 4)), RNG.integers(0, 3, 7)
    target = networks.classifier(net, num_data=70, prior=0.5, temperature=temperature)
    values, _ = target.score(cloud, {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(y)})
    for place in range(5):
        logits = numpy_apply(one(cloud, place), x)
        likely = sum(
            row[label] - np.log(np.sum(np.exp(row))) for row, label in zip(logits, y, strict=True)
        )
        whole = 10 * likely + prior(one(cloud, place), lambda name: 0.5)
        np.testing.assert_allclose(values[place], whole / temperature, rtol=1e-4)


def test_sequences_count_as_one_datum_each(key):
    """Logits [n, L, C], labels [n, L]: the N / n scaling counts sequences."""
    logits, labels = RNG.normal(size=(4, 5, 3)), RNG.integers(0, 3, (4, 5))
    target = networks.classifier(lambda p, x: x + p, num_data=8, prior=1e30)
    batch = {"x": jnp.asarray(logits, jnp.float32), "y": jnp.asarray(labels)}
    value = target.score(jnp.zeros((1, 3)), batch)[0][0]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    total = sum(log_p[n, t, labels[n, t]] for n in range(4) for t in range(5))
    np.testing.assert_allclose(value, 2 * total, rtol=1e-5)


def test_labels_under_a_mask_do_not_count(key):
    """As if they were not there; what fills them up may be no class at all."""
    target = networks.classifier(lambda w, x: x @ w, num_data=2)
    x = jax.random.normal(key, (2, 3, 4))
    y, mask = jnp.array([[0, 1, -1], [2, -1, -1]]), jnp.array([[1, 1, 0], [1, 0, 0]], bool)
    cloud = jax.random.normal(jax.random.key(1), (5, 4, 3))
    got = target.score(cloud, {"x": x, "y": y, "mask": mask})
    logits = np.einsum("nlf,mfc->mnlc", np.asarray(x, float), np.asarray(cloud, float))
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    each = log_p[:, 0, 0, 0] + log_p[:, 0, 1, 1] + log_p[:, 1, 0, 2]
    np.testing.assert_allclose(got[0], each - 0.5 * np.sum(np.asarray(cloud, float) ** 2, (1, 2)), rtol=1e-5)  # fmt: skip
    assert np.isfinite(got[1]).all()
    flow = px.svgd(target, step_size=1e-3)
    run = lambda **more: px.run(flow, cloud, steps=1, key=key, data={"x": x, "y": y, **more}, progress=False)  # fmt: skip
    run(mask=mask)
    with pytest.raises(DataError, match="from -1 to 2"):
        run()
    with pytest.raises(DataError, match=r"mask.*int32\[2, 3\].*true or false"):
        run(mask=mask.astype(jnp.int32))


@pytest.mark.parametrize("label", [-1, 3])
def test_labels_of_no_class_are_not_passed_over(label):
    """Where nobody looked at them before: the log density says so."""
    target = networks.classifier(lambda w, x: x @ w, num_data=2)
    batch = {"x": jnp.ones((2, 4)), "y": jnp.array([0, label])}
    values, _ = target.score(jnp.ones((5, 4, 3)), batch)
    assert np.isnan(values).all()


@pytest.mark.parametrize("learned", [False, True])
def test_regressor_is_the_formula(key, learned):
    x, y = RNG.normal(size=(6, 4)), RNG.normal(size=6)
    cloud = {"w": jax.random.normal(key, (3, 4)), "log_sd": jnp.array([-1.0, 0.0, 0.5])}
    noise = (lambda p: jnp.exp(p["log_sd"])) if learned else 0.3
    target = networks.regressor(lambda p, x: x @ p["w"], num_data=12, noise=noise, prior=2.0)
    values, _ = target.score(
        cloud, {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(y, jnp.float32)}
    )
    for place in range(3):
        w, log_sd = np.asarray(cloud["w"][place], float), float(cloud["log_sd"][place])
        sd = np.exp(log_sd) if learned else 0.3
        error = (y - x @ w) / sd
        likely = np.sum(-0.5 * error**2 - np.log(sd) - 0.5 * np.log(2 * np.pi))
        whole = 2 * likely - (w @ w + log_sd**2) / 4
        np.testing.assert_allclose(values[place], whole, rtol=1e-4)


def varied(params, x):
    """Means and sds of two outputs."""
    h = x @ params["w"]
    return h[:, :2], jnp.exp(h[:, 2:])


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_noise_of_each_datum_is_the_formula(key, stateful, masked):
    x, y = RNG.normal(size=(6, 4)), RNG.normal(size=(6, 2))
    mask = RNG.random((6, 2)) < 0.6 if masked else np.ones((6, 2), bool)
    cloud = {"w": jax.random.normal(key, (3, 4, 4)) / 2}
    forward = lambda p, x, carried, key: (varied(p, x), carried)
    begin = lambda key: ({"w": jnp.zeros((4, 4))}, ())
    net = networks.Network(begin, lambda p, x, c: varied(p, x), forward, stateful=True) if stateful else varied  # fmt: skip
    target = networks.regressor(net, num_data=12, noise="network", prior=2.0, temperature=0.5)
    batch = {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(y, jnp.float32)}
    batch |= {"mask": jnp.asarray(mask)} if masked else {}
    values = target.evaluate(cloud, batch, key=key).log_density
    for place in range(3):
        w = np.asarray(cloud["w"][place], float)
        means, sds = (x @ w)[:, :2], np.exp((x @ w)[:, 2:])
        each = -0.5 * ((y - means) / sds) ** 2 - np.log(sds) - 0.5 * np.log(2 * np.pi)
        whole = (2 * each[mask].sum() - np.sum(w**2) / 4) / 0.5
        np.testing.assert_allclose(values[place], whole, rtol=1e-4)


@pytest.mark.parametrize(
    ("apply", "noise", "words"),
    [
        (lambda w, x: x @ w, "network", r"one array of shape \(6,\) and the noise is 'network'; expected the pair \(means, sds\)"),
        (lambda w, x: (x @ w, jnp.ones(3)), "network", r"means of shape \(6,\) and sds of shape \(3,\)"),
        (lambda w, x: (x @ w, jnp.arange(6)), "network", "int32 outputs; expected real numbers"),
        (lambda w, x: (x @ w, jnp.ones(6)), 1.0, "returned tuple as outputs.*noise='network'"),
        (lambda w, x: (x[:, :2], x[:, 2:]), "network", r"shape \(6, 2\) for targets of shape \(6,\)"),
    ],
)  # fmt: skip
def test_pairs_that_do_not_fit(key, apply, noise, words):
    target = networks.regressor(apply, num_data=6, noise=noise)
    data = {"x": np.ones((6, 4), np.float32), "y": np.ones(6, np.float32)}
    with pytest.raises(TargetError, match=words):
        px.run(px.svgd(target, step_size=0.1), jax.random.normal(key, (3, 4)), steps=1, key=key, data=data, progress=False)  # fmt: skip


def test_a_network_learns_where_data_are_noisy(key):
    """From data to predictions: sds that grow with |x|, coverage as it should be, and a better density than with one sd for all."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (600, 1)).astype(np.float32)
    sd = 0.1 + 0.4 * np.abs(x[:, 0])
    y = (np.sin(2 * x[:, 0]) + sd * rng.normal(size=600)).astype(np.float32)
    begin = lambda key: {"in": 2 * jax.random.normal(key, (2, 30)), "out": jnp.zeros((30, 2))}

    def both(p, x):
        h = jnp.tanh(jnp.concatenate([x, jnp.ones_like(x)], 1) @ p["in"]) @ p["out"]
        return h[:, 0], jax.nn.softplus(h[:, 1]) + 1e-3

    data = px.Minibatches({"x": x[:400], "y": y[:400]}, 50)

    def learned(apply, noise):
        net = networks.Network(begin, apply)
        target = networks.regressor(net, num_data=400, noise=noise)
        flow = px.w_sgld_b(target, optimizer=optax.adam(0.02))
        result = px.run(flow, net.init(key, 8), steps=600, key=key, data=data, progress=False)
        return px.predictive.normal(net, result, x[400:], noise=noise)

    pred, plain = learned(both, "network"), learned(lambda p, x: both(p, x)[0], 0.45)
    assert np.corrcoef(pred.sd, sd[400:])[0, 1] > 0.8
    score = pred.score(y[400:])
    assert 0.82 < score.coverage < 0.97
    assert score.log_density > plain.score(y[400:]).log_density + 0.05


@pytest.mark.parametrize("names", [{"layer0"}, np.array(["layer0"]), (n for n in ["layer0"])])
def test_names_in_any_collection(net, key, names):
    head, trunk = networks.split(net.init(key, 3), names)
    assert head["layer1"]["w"] is None and trunk["layer0"]["w"] is None


def test_prior_by_layer(net, key):
    params = one(net.init(key, 1), 0)
    given = networks.GaussianPrior({"": 2.0, "layer1": 0.5, "layer1/b": 0.1})
    rule = lambda name: 2.0 if "layer0" in name else 0.1 if "'b'" in name else 0.5
    np.testing.assert_allclose(given(params), prior(params, rule), rtol=1e-5)


@pytest.mark.parametrize("stateful", [False, True])
def test_the_slope_of_a_plain_prior_is_added_apart(key, stateful):
    """The same scores, for particles and for leaves they share, as those of a prior that does not tell its precision."""
    net = networks.Network(lambda key: (start(key), ()), apply, stateful=True, forward=lambda p, x, c, k: (apply(p, x), c)) if stateful else networks.Network(start, apply)  # fmt: skip
    known = networks.classifier(net, num_data=50, prior=0.5, temperature=0.25)
    assert known.precision == 8.0
    silent = px.Target(log_prior=lambda p: 4 * networks.GaussianPrior(0.5)(p), log_likelihood=known.log_likelihood, num_data=50, stateful=stateful)  # fmt: skip
    assert silent.precision is None
    cloud = jax.vmap(start)(jax.random.split(key, 3))
    batch = {"x": RNG.normal(size=(5, 4)).astype(np.float32), "y": np.array([0, 1, 2, 1, 0])}
    own, shared = networks.split(cloud, ["layer1"])
    for args in ((cloud, batch, (), key), (own, batch, (), key, shared)):
        a, b = known.evaluate(*args), silent.evaluate(*args)
        assert a.pulled is not None and b.pulled is None
        for one, other in zip(
            jax.tree.leaves((a.log_density, a.score, a.shared)),
            jax.tree.leaves((b.log_density, b.score, b.shared)),
            strict=True,
        ):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)
        values, pull = a.pulled
        together = jax.tree.map(lambda v, x, pull=pull: v - pull * x, values, args[0])
        jax.tree.map(np.testing.assert_array_equal, together, a.score)


def test_priors_with_several_variances_tell_no_precision():
    assert networks.GaussianPrior(0.25).precision == 4
    assert networks.GaussianPrior({"": 1.0, "out": 1.0}).precision is None


def test_leaf_names(net, key):
    names = networks.leaf_names(net.init(key, 1))
    assert names == ["layer0/b", "layer0/w", "layer1/b", "layer1/w"]


def test_networks_start_differently(net, key):
    cloud = net.init(key, 4)
    assert cloud["layer0"]["w"].shape == (4, 4, 6)
    assert len(np.unique(np.asarray(cloud["layer0"]["w"][:, 0, 0]))) == 4


# ------------------------------------------------------------------------------------- stateful networks


def running(decay):
    """A network that divides by a running mean of |x| and adds noise: state and randomness."""

    def forward(params, x, carried, key):
        scale = decay * carried["scale"] + (1 - decay) * jnp.mean(jnp.abs(x))
        noise = 0.1 * jax.random.normal(key, (len(x), 3))
        return apply(params, x / scale) + noise, {"scale": scale}

    return networks.Network(
        lambda key: (start(key), {"scale": jnp.ones(())}),
        lambda params, x, carried: apply(params, x / carried["scale"]),
        forward,
        stateful=True,
    )


def batches():
    x, y = RNG.normal(size=(60, 4)) * 3, RNG.integers(0, 3, 60)
    return px.Minibatches({"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(y)}, 10)


def test_what_particles_carry_is_updated_by_each_step(key):
    net, data = running(0.9), batches()
    particles, carried = net.init(key, 5)
    flow = px.svgd(networks.classifier(net, num_data=60), optimizer=optax.adam(0.01))
    state = flow.init(particles, carried)
    result = px.run(flow, state, steps=7, key=key, data=data, progress=False)
    scale = 1.0
    for step in range(7):
        rows = data.batch(jax.random.fold_in(key, 2**31 - 1), jnp.array(step))["x"]
        scale = 0.9 * scale + 0.1 * float(np.mean(np.abs(np.asarray(rows, float))))
    np.testing.assert_allclose(result.state.carried["scale"], np.full(5, scale), rtol=1e-5)


def test_stateful_runs_repeat_and_resume_bit_for_bit(key):
    net, data = running(0.9), batches()
    flow = px.sgld(networks.classifier(net, num_data=60), step_size=1e-4)
    begin = flow.init(*net.init(key, 3))
    go = lambda state, steps: (
        px.run(flow, state, steps=steps, key=key, data=data, progress=False).state
    )
    whole, cut = go(begin, 9), go(go(begin, 4), 5)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=True):
        np.testing.assert_array_equal(a, b)


def test_every_particle_and_step_has_its_own_randomness(key):
    """Equal networks with a random likelihood see different values."""
    like = lambda p, b, carried, own: (jnp.full(len(b), jax.random.normal(own)), carried)
    target = px.Target(log_prior=lambda p: 0.0 * p, log_likelihood=like, num_data=1, stateful=True)
    flow = px.sgld(target, step_size=1e-9)
    state, seen = flow.init(jnp.zeros(4)), []
    for _ in range(3):
        state, info = flow.step(key, state, jnp.zeros(1))
        seen.append(np.asarray(info.log_density))
    assert len(np.unique(np.concatenate(seen))) == 12


def test_noise_of_terms_is_not_that_of_the_target(key):
    """A stateful target leaves the Langevin noise as it was."""
    plain = px.Target(
        log_prior=lambda p: -0.5 * p**2, log_likelihood=lambda p, b: 0 * b, num_data=1
    )
    stateful = px.Target(
        log_prior=lambda p: -0.5 * p**2,
        log_likelihood=lambda p, b, c, k: (0 * b, c),
        num_data=1,
        stateful=True,
    )
    ends = [
        px.run(
            px.sgld(t, step_size=0.1),
            jnp.zeros(4),
            steps=5,
            key=key,
            data=jnp.zeros(1),
            progress=False,
        )
        for t in (plain, stateful)
    ]
    np.testing.assert_array_equal(ends[0].particles, ends[1].particles)


# ------------------------------------------------------------------------------------------- bad input


def small(x=None, y=None):
    return {
        "x": jnp.zeros((2, 4)) if x is None else x,
        "y": jnp.zeros(2, int) if y is None else y,
    }


def test_outputs_of_the_wrong_shape(net, key):
    target = networks.classifier(net, num_data=2)
    with pytest.raises(TargetError, match=r"returned shape \(2, 3\) for labels of shape \(2, 3\)"):
        target.score(net.init(key, 1), small(y=jnp.zeros((2, 3), int)))
    regression = networks.regressor(net, num_data=2)
    with pytest.raises(TargetError, match="squeeze a last axis"):
        regression.score(net.init(key, 1), small(y=jnp.zeros(2)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: networks.GaussianPrior({"layer0": -1.0}), "finite number > 0"),
        (lambda: networks.classifier(apply, num_data=5, temperature=0.0), "temperature is 0"),
        (lambda: networks.classifier(apply, num_data=5, prior=0.0), "prior variance"),
        (lambda: networks.regressor(apply, num_data=5, noise=0.0), "noise is 0"),
        (lambda: networks.classifier(apply, num_data=5, tau=1.0), "has no option 'tau'"),
        (lambda: networks.Network(start, apply, stateful=True), "expected forward exactly when"),
        (lambda: px.Target(lambda x: x, stateful=True), "stateful=True without log_likelihood"),
    ],
)
def test_options_are_checked(make, words):
    with pytest.raises(OptionError, match=words):
        make()


def test_priors_name_leaves_that_exist(net, key):
    for variance, words in (
        ({"layer0": 1.0}, "no variance for 'layer1/b'"),
        ({"": 1.0, "layr": 1.0}, "names 'layr'"),
    ):
        target = networks.classifier(net, num_data=2, prior=variance)
        with pytest.raises(OptionError, match=words):
            target.score(net.init(key, 1), small())


def test_what_is_carried_is_checked(net, key):
    plain = px.svgd(networks.classifier(net, num_data=60), optimizer=optax.adam(0.1))
    with pytest.raises(OptionError, match="the target carries nothing"):
        plain.init(net.init(key, 3), {"scale": jnp.ones(3)})
    stateful = px.svgd(networks.classifier(running(0.9), num_data=60), optimizer=optax.adam(0.1))
    with pytest.raises(ParticleError, match="expected a leading axis of 3"):
        stateful.init(net.init(key, 3), {"scale": jnp.ones(2)})
    with pytest.raises(OptionError, match="give what the particles carry"):
        stateful.target.score(net.init(key, 3), small())


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"masks": np.zeros(30, bool)}, r"the data have \['masks'\].*did you mean 'mask'\?"),
        (
            {"weights": np.ones(30)},
            r"the data have \['weights'\], which neither.*Leave the others out",
        ),
    ],
)
def test_parts_of_the_data_that_nothing_reads(net, key, part, words):
    """A misspelt mask would silently do nothing."""
    target = px.networks.classifier(net, num_data=30)
    data = {"x": np.ones((30, SIZES[0]), np.float32), "y": np.zeros(30, int)} | part
    flow = px.svgd(target, step_size=0.1)
    with pytest.raises(DataError, match=words):
        px.run(flow, net.init(key, 3), steps=1, key=key, data=data, progress=False)


def test_one_logit_of_two_classes(key):
    one = px.networks.Network(lambda key: jax.random.normal(key, (3, 1)), lambda w, x: x @ w)
    data = {"x": np.ones((4, 3), np.float32), "y": np.array([0, 1, 0, 1])}
    flow = px.svgd(px.networks.classifier(one, num_data=4), step_size=0.1)
    with pytest.raises(
        DataError, match=r"one logit for labels from 0 to 1.*jnp.stack\(\[0 \* z, z\], -1\)"
    ):
        px.run(flow, one.init(key, 3), steps=1, key=key, data=data, progress=False)


def test_a_noise_that_is_none(key):
    line = px.networks.Network(lambda key: jax.random.normal(key, (3,)), lambda w, x: x @ w)
    target = px.networks.regressor(line, num_data=4, noise=lambda params: None)
    data = {"x": np.ones((4, 3), np.float32), "y": np.ones(4, np.float32)}
    with pytest.raises(TargetError, match=r"noise\(params\) failed.*returns an sd"):
        target.score(line.init(key, 2), data)


def test_inputs_of_a_function_space_that_do_not_fit(net, key):
    target = px.networks.classifier(net, num_data=30)
    apart = px.networks.FunctionSpace(net, np.ones((7, 29), np.float32))
    flow = px.Flow(target, (px.Drift(), apart), px.integrators.Euler(0.1))
    data = {"x": np.ones((30, SIZES[0]), np.float32), "y": np.zeros(30, int)}
    with pytest.raises(TargetError, match=r"apply\(params, x\) failed"):
        px.run(flow, net.init(key, 3), steps=1, key=key, data=data, progress=False)


def test_apply_alone_cannot_be_initialised(key):
    target = networks.classifier(apply, num_data=2)
    assert target.num_data == 2
    like = lambda p, b, c, k: jnp.zeros(len(b))
    broken = px.Target(log_prior=lambda p: 0.0 * p, log_likelihood=like, num_data=1, stateful=True)
    with pytest.raises(TargetError, match="expected the pair"):
        px.sgld(broken, step_size=0.1).step(
            key, px.sgld(broken, step_size=0.1).init(jnp.zeros(2)), jnp.zeros(1)
        )


FEW = {"x": np.ones((6, 4), np.float32), "y": np.array([0, 1, 2, 0, 1, 2])}


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda w, x: (x @ w, 1), "returned tuple as outputs; expected one array"),
        (lambda w, x: None, "returned NoneType as outputs"),
        (lambda w, x: jnp.round(x @ w).astype(int), "returned int32 outputs; expected real"),
    ],
)
def test_outputs_that_are_no_real_array(function, words, key):
    flow = px.svgd(networks.classifier(function, num_data=6), step_size=0.1)
    with pytest.raises(TargetError, match=words):
        px.run(flow, jax.random.normal(key, (3, 4, 3)), steps=1, key=key, data=FEW, progress=False)


@pytest.mark.parametrize(
    ("y", "error", "words"),
    [
        (np.eye(3, dtype=int)[FEW["y"]], TargetError, r"y.argmax\(-1\)"),
        (FEW["y"][:, None], TargetError, r"y\[..., 0\]"),
        (np.array(["cat", "dog", "owl"])[FEW["y"]], DataError, "expected numbers.*np.unique"),
        (
            FEW["y"].tolist(),
            DataError,
            r"\['y'\]\[0\] of the batch is a scalar.*turn it into an array",
        ),
    ],
)
def test_labels_of_another_form(y, error, words, key):
    flow = px.svgd(networks.classifier(lambda w, x: x @ w, num_data=6), step_size=0.1)
    cloud = jax.random.normal(key, (3, 4, 3))
    with pytest.raises(error, match=words):
        px.run(flow, cloud, steps=1, key=key, data={**FEW, "y": y}, progress=False)


def test_noise_of_the_wrong_shape(key):
    target = networks.regressor(lambda w, x: x @ w, num_data=6, noise=lambda w: jnp.ones(7))
    with pytest.raises(TargetError, match=r"noise returned shape \(7,\).*one for each output"):
        target.score(jnp.ones((3, 4)), {"x": FEW["x"], "y": jnp.ones(6)})


def test_what_is_carried_keeps_its_shape(key):
    grow = lambda p, x, carried, key: (x @ p, jnp.concatenate([carried, carried]))
    begin = lambda key: (jax.random.normal(key, (4, 3)), jnp.zeros(2))
    net = networks.Network(begin, lambda p, x, carried: x @ p, grow, stateful=True)
    flow = px.svgd(networks.classifier(net, num_data=6), step_size=0.1)
    with pytest.raises(TargetError, match=r"float32\[2\].*returned.*float32\[4\]"):
        px.run(flow, flow.init(*net.init(key, 3)), steps=1, key=key, data=FEW, progress=False)


@pytest.mark.parametrize("module", ["linen", "nnx"])
def test_modules_are_made_networks_first(module, key):
    from flax import linen, nnx

    given = {"linen": linen.Dense(3), "nnx": nnx.Linear(4, 3, rngs=nnx.Rngs(0))}
    with pytest.raises(OptionError, match=r"expected apply\(params, x\).*px.modules"):
        networks.classifier(given[module], num_data=6)


def test_the_pair_of_a_stateful_network_is_not_particles(key):
    import equinox as eqx
    from flax import linen

    class Drops(linen.Module):
        @linen.compact
        def __call__(self, x, train=False):
            return linen.Dropout(0.5, deterministic=not train)(linen.Dense(3)(x))

    class Norms(eqx.Module):
        layer: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __init__(self, key):
            self.layer = eqx.nn.Linear(4, 3, key=key)
            self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")

        def __call__(self, x, state):
            return self.norm(self.layer(x), state)

    for net in (px.modules.linen(Drops(), FEW["x"]), px.modules.equinox(Norms)):
        flow = px.svgd(networks.classifier(net, num_data=6), step_size=0.1)
        with pytest.raises(ParticleError, match=r"flow.init\(\*net.init\(key, M\)\)"):
            px.run(flow, net.init(key, 3), steps=1, key=key, data=FEW, progress=False)
    pair = px.modules.linen(Drops(), FEW["x"]).init(key, 3)
    with pytest.raises(OptionError, match=r"particles, carried = net\.init"):
        networks.split(pair, ["Dense_0/bias"])


# ------------------------------------------------------------------------------------- what newcomers type


def line(classes):
    return networks.Network(lambda key: jax.random.normal(key, (4, classes)), lambda w, x: x @ w)


@pytest.mark.parametrize(("dtype", "classes"), [(np.uint8, 256), (np.uint8, 300), (np.int8, 128), (np.int8, 200), (np.int16, 3), (bool, 2)])  # fmt: skip
def test_labels_of_any_whole_type(dtype, classes, key):
    """A byte cannot hold the number of 256 classes, and need not."""
    x = RNG.normal(size=(12, 4)).astype(np.float32)
    y = RNG.integers(0, min(classes, 100), 12)
    y, net = y.astype(dtype), line(classes)
    target, cloud = networks.classifier(net, num_data=12), net.init(key, 3)
    small = target.score(cloud, {"x": jnp.asarray(x), "y": jnp.asarray(y)})
    usual = target.score(cloud, {"x": jnp.asarray(x), "y": jnp.asarray(y.astype(np.int32))})
    np.testing.assert_array_equal(small[0], usual[0])
    np.testing.assert_array_equal(small[1], usual[1])
    flow = px.w_sgld_b(target, optimizer=optax.adam(0.01))
    px.run(flow, cloud, steps=2, key=key, data={"x": x, "y": y}, progress=False)


@pytest.mark.parametrize("size", [2, 3])
def test_parameters_may_be_a_tuple(size, key):
    start = lambda key: tuple(jax.random.normal(key, (4, 3)) for _ in range(size))
    cloud = networks.Network(start, lambda p, x: x @ p[0]).init(key, 5)
    head, trunk = networks.split(cloud, ["1"])
    assert (head[0], trunk[1]) == (None, None)
    assert head[1].shape == (5, 4, 3) and trunk[0].shape == (4, 3)
    pairs = (cloud[:2], cloud[:2])  # of weights and biases, layer by layer
    assert networks.split(pairs, ["1"])[0][1][0].shape == (5, 4, 3)
    with pytest.raises(OptionError, match="pair that a stateful network's init returns"):
        networks.split((cloud, ()), ["1"])


TRANSFORMS = {
    "names": (lambda x, y: {"img": x, "lab": y}, lambda k, b: {"x": b["img"], "y": b["lab"]}),
    "one-hot": (lambda x, y: {"x": x, "y": np.eye(3, dtype=np.float32)[y]}, lambda k, b: {**b, "y": b["y"].argmax(-1)}),
    "from 1": (lambda x, y: {"x": x, "y": y + 1}, lambda k, b: {**b, "y": b["y"] - 1}),
}  # fmt: skip


@pytest.mark.parametrize("kind", [px.Minibatches, px.Stream])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_labels_may_be_made_by_a_transform(name, kind, key):
    x, y = RNG.normal(size=(30, 4)).astype(np.float32), np.arange(30) % 3
    net, (arrays, transform) = line(3), TRANSFORMS[name]
    flow = px.w_sgld_b(networks.classifier(net, num_data=30), optimizer=optax.adam(0.01))
    go = lambda data: px.run(flow, net.init(key, 3), steps=3, key=key, data=data, progress=False)
    made = go(kind(arrays(x, y), 10, transform=transform))
    np.testing.assert_allclose(made.particles, go(px.Minibatches({"x": x, "y": y}, 10)).particles, rtol=1e-6)  # fmt: skip
    with pytest.raises(DataError, match=r"from [56] to 7"):  # what it makes is looked at
        go(kind({"x": x, "y": y}, 10, transform=lambda k, b: {**b, "y": b["y"] + 5}))


def test_masks_of_targets_and_of_whole_sequences(key):
    """Masked targets do not count, whatever they are; a mask for each datum is one for all of it."""
    x, y = RNG.normal(size=(6, 4)).astype(np.float32), RNG.normal(size=(6, 2)).astype(np.float32)
    net, mask = line(2), np.array([True, False, True, True, False, True])
    target = networks.regressor(net, num_data=6, noise=0.5)
    cloud = net.init(key, 3)
    values = target.score(cloud, {"x": x, "y": jnp.asarray(y), "mask": mask})[0]
    means = x.astype(float) @ np.asarray(cloud, float)
    each = -0.5 * ((y - means) / 0.5) ** 2 - np.log(0.5) - 0.5 * np.log(2 * np.pi)
    expected = each[:, mask].sum((1, 2)) + [prior(one, lambda _: 1.0) for one in cloud]
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    with pytest.raises(DataError, match="for each of them, or for each datum"):
        target.score(cloud, {"x": x, "y": jnp.asarray(y), "mask": np.ones((6, 3), bool)})


def test_function_space_needs_two_particles(key):
    net = line(3)
    apart = networks.FunctionSpace(net, np.ones((5, 4), np.float32))
    flow = px.Flow(networks.classifier(net, num_data=5), (px.Drift(), apart), px.integrators.Euler(1e-3))  # fmt: skip
    with pytest.raises(ParticleError, match="there is 1 particle"):
        flow.init(net.init(key, 1))


def test_pandas(key):
    pandas = pytest.importorskip("pandas")
    x, y = RNG.normal(size=(20, 4)).astype(np.float32), RNG.integers(0, 3, 20)
    net, frame = line(3), pandas.DataFrame(x)
    flow = px.w_sgld_b(networks.classifier(net, num_data=20), optimizer=optax.adam(0.01))
    go = lambda data: px.run(flow, net.init(key, 3), steps=3, key=key, data=data, progress=False)
    result = go({"x": frame, "y": pandas.Series(y)})
    seen = px.predictive.categorical(net.apply, result.particles, frame)
    np.testing.assert_array_equal(seen.probs, px.predictive.categorical(net.apply, result.particles, x).probs)  # fmt: skip
    with pytest.raises(DataError, match="has dtype object"):
        go({"x": frame, "y": pandas.Series(y.astype(str), dtype="category")})


def thirds():
    x = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    return {"x": x, "y": np.arange(12) % 3}


def run(net, start, key, **options):
    flow = px.svgd(networks.classifier(net, num_data=12, **options), optimizer=optax.adam(0.01))
    start = start if not isinstance(start, tuple) else flow.init(*start)
    return px.run(flow, start, steps=1, key=key, data=thirds(), progress=False)


def test_what_apply_raises_says_what_may_be_missing(key):
    def needs(params, x):
        raise RuntimeError("Dropout requires a key\nand a second line")

    cloud = jax.random.normal(key, (3, 4, 3))
    said = r"RuntimeError: Dropout requires a key\. If the network needs state or keys"
    with pytest.raises(TargetError, match=said):
        run(needs, cloud, key)
    with pytest.raises(TargetError, match=said):
        px.predictive.categorical(needs, cloud, thirds()["x"])


def test_particles_without_the_leaves_that_they_share(net, key):
    head, trunk = networks.split(net.init(key, 3), ["layer1"])
    with pytest.raises(TargetError, match="a partly Bayesian network needs its shared leaves too"):
        run(net, head, key)
    flow = px.svgd(networks.classifier(net, num_data=12), optimizer=optax.adam(0.01))
    start = flow.init(head, shared=trunk)
    result = px.run(flow, start, steps=1, key=key, data=thirds(), progress=False)
    assert px.predictive.categorical(net, result, thirds()["x"]).probs.shape == (12, 3)
    with pytest.raises(TargetError, match="for predictions the run's result"):
        px.predictive.categorical(net.apply, result.particles, thirds()["x"])


@pytest.mark.parametrize("before", [{"a": jnp.zeros(())}, ()])
def test_what_is_carried_keeps_its_names(before, key):
    net = networks.Network(
        lambda key: (jax.random.normal(key, (4, 3)), before),
        lambda p, x, c: x @ p,
        lambda p, x, c, key: (x @ p, {"b": jnp.zeros(())}),
        stateful=True,
    )
    with pytest.raises(TargetError, match=r"returned \{'b': 'float32\[\]'\}; expected the same"):
        run(net, net.init(key, 3), key)


def test_a_stateful_start_gives_a_pair(key):
    start = lambda key: {"w": jnp.zeros((4, 3)), "v": jnp.zeros(3)}
    net = networks.Network(start, lambda p, x, c: x, lambda p, x, c, k: (x, c), stateful=True)
    with pytest.raises(OptionError, match="start returned dict; expected the pair"):
        net.init(key, 3)


def test_what_cannot_predict_is_refused_before_it_trains(key):
    net = networks.Network(
        lambda key: (jax.random.normal(key, (4, 3)), ()),
        lambda p, x: x @ p,
        lambda p, x, c, k: (x @ p, c),
        stateful=True,
    )
    with pytest.raises(TargetError, match=r"apply\(params, x, carried\) failed"):
        run(net, net.init(key, 3), key)


def test_masked_targets_do_not_reach_the_gradient(key):
    """Not even where they are NaN, as 0 times NaN would be."""
    target = networks.regressor(lambda w, x: x @ w, num_data=12)
    x, mask = thirds()["x"], np.arange(12) > 0
    cloud = jax.random.normal(key, (3, 4))
    scores = [
        target.score(cloud, {"x": x, "y": np.where(mask, x[:, 0], gap), "mask": mask})
        for gap in (np.nan, 0.0)
    ]
    for found, wanted in zip(*map(jax.tree.leaves, scores), strict=True):
        assert np.isfinite(found).all()
        np.testing.assert_array_equal(found, wanted)
    plain = {"x": x, "y": x[:, 0]}
    for found, wanted in zip(target.score(cloud, plain | {"mask": None}), target.score(cloud, plain), strict=True):  # fmt: skip
        np.testing.assert_array_equal(found, wanted)


def test_noise_of_a_leaf_that_is_not_there(key):
    target = networks.regressor(lambda p, x: x @ p["w"], num_data=12, noise=lambda p: p["log_sd"])
    with pytest.raises(TargetError, match=r"noise\(params\) failed, KeyError\('log_sd'\).*\['w'\]"):
        target.score({"w": jnp.zeros((3, 4))}, {"x": thirds()["x"], "y": np.zeros(12)})
    with pytest.raises(TargetError, match=r"noise\(params\) failed"):
        px.predictive.normal(lambda p, x: x @ p["w"], {"w": jnp.zeros((3, 4))}, thirds()["x"], noise=lambda p, x: 1.0)  # fmt: skip
    with pytest.raises(TargetError, match=r"noise returned shape \(12,\) for one particle"):
        px.predictive.normal(lambda p, x: x @ p["w"], {"w": jnp.zeros((3, 4))}, thirds()["x"], noise=lambda p: jnp.ones(12))  # fmt: skip


def test_modules_are_not_networks(key):
    with pytest.raises(OptionError, match="network is a module, MLP; expected"):
        networks.classifier(px.modules.eqx.nn.MLP(4, 3, 8, 1, key=key), num_data=12)


@pytest.mark.parametrize("noise", [0.0, np.inf, 1e-30, None])
def test_what_a_mask_leaves_out_has_no_noise_either(noise):
    """As if that row were not there, whatever the network says of its mean and sd. (Rows that are there: see the formula above.)"""
    x, y = (RNG.normal(size=size).astype(np.float32) for size in ((4, 2), 4))
    cloud = jnp.asarray(RNG.normal(size=(3, 2)), jnp.float32)

    def made(num):
        def apply(w, x):
            means, sds = jnp.sin(x @ w), jnp.exp(0.1 * x @ w)
            last = jnp.arange(len(x)) == 3
            means = jnp.where(last, 1e30, means)
            return means if noise is None else (means, jnp.where(last, noise, sds))

        return networks.regressor(
            apply, num_data=num, noise=0.5 if noise is None else "network", prior=9.0
        )

    found = made(4).score(cloud, {"x": x, "y": y, "mask": np.arange(4) < 3})
    wanted = made(3).score(cloud, {"x": x[:3], "y": y[:3]})
    for one_found, one_wanted in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one_found, one_wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("setting", ["numpy_rank_promotion", "numpy_dtype_promotion"])
def test_strict_settings_of_jax(setting, key):
    """Programs that forbid promotions of shapes or types use networks and px.sample too."""
    x = RNG.normal(size=(30, 3)).astype(np.float32)
    data = px.Minibatches({"x": x, "y": (x[:, 0] > 0).astype(np.int32)}, 10)
    net = networks.Network(lambda key: jax.random.normal(key, (3, 2)), lambda w, x: x @ w)
    two = {"x": x, "y": x[:, :2], "mask": np.ones(30, bool)}
    both = lambda w, x: (x @ w, jnp.exp(x @ w))
    wave = lambda p: -0.5 * jnp.sum(p**2) + jnp.sin(p[0])
    with getattr(jax, setting)("raise" if "rank" in setting else "strict"):
        flow = px.svgd(networks.classifier(net, num_data=30), step_size=0.1)
        result = px.run(flow, net.init(key, 5), steps=3, key=key, data=data, progress=False)
        assert px.predictive.categorical(net, result, x).probs.shape == (30, 2)
        for noise, apply in ((0.3, net), (lambda w: jnp.exp(w[0]), net), ("network", both)):
            target = networks.regressor(apply, num_data=30, noise=noise)
            assert np.all(np.isfinite(target.score(result.particles, two)[1]))
        found = px.sample(wave, jnp.zeros(2), key=key, num_draws=200, progress=False)
    assert found.draws.shape == (200, 2)


# ------------------------------------------------------------------- what a try-out found


def test_labels_that_are_no_whole_numbers_are_refused_outside_of_runs_too(net, key):
    batch = {"x": jnp.ones((5, 4)), "y": jnp.arange(5) % 3 + 0.5}
    target = networks.classifier(net, num_data=5)
    with pytest.raises(DataError, match="of dtype float32 and the network has 3 logits"):
        target.score(net.init(key, 2), batch)


def test_noise_of_the_last_axes(key):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(6, 4)), rng.normal(size=(1, 4, 2, 3))
    y, sd = rng.normal(size=(6, 2, 3)), np.array([0.5, 1.0, 2.0])
    apply = lambda w, x: jnp.einsum("nd,dlk->nlk", x, w)
    target = networks.regressor(apply, num_data=6, noise=lambda w: jnp.asarray(sd), prior=1e30)
    value = target.score(jnp.asarray(w, jnp.float32), {"x": jnp.asarray(x), "y": jnp.asarray(y)})[0]
    each = -0.5 * ((y - np.einsum("nd,dlk->nlk", x, w[0])) / sd) ** 2 - np.log(sd)
    wanted = np.sum(each - 0.5 * np.log(2 * np.pi))
    np.testing.assert_allclose(value, [wanted], rtol=1e-5)
    pred = px.predictive.normal(apply, w.astype(np.float32), x.astype(np.float32), noise=lambda w: jnp.asarray(sd))  # fmt: skip
    np.testing.assert_allclose(pred.log_density(y).sum(), wanted, rtol=1e-5)


def test_functions_that_are_pairs_are_compared_by_both(key):
    both = lambda w, x: (x @ w[..., 0], jax.nn.softplus(x @ w[..., 1]))
    joined = lambda w, x: jnp.stack(both(w, x), 0).T
    x, w = jax.random.normal(key, (7, 3)), jax.random.normal(key, (5, 3, 2))
    cloud = px.terms.Cloud(w, w, jnp.int32(0), px.terms.Frame(), w)
    force = lambda apply: networks.FunctionSpace(apply, x)(cloud, None, ())[0].drift
    np.testing.assert_allclose(force(both), force(joined), rtol=1e-5, atol=1e-6)
    assert float(jnp.abs(force(both)).max()) > 1e-3


def test_forward_that_fails_says_what_was_expected(key):
    two = networks.Network(
        lambda k: (jnp.zeros((4, 3)), {"n": jnp.zeros(())}),
        lambda w, x, c: x @ w,
        lambda w, x, c: (x @ w, c),
        stateful=True,
    )
    flow = px.w_sgld_b(networks.classifier(two, num_data=5), step_size=0.1)
    data = {"x": np.ones((5, 4), np.float32), "y": np.zeros(5, int)}
    start = px.particles.normal(key, 3, like=jnp.zeros((4, 3)))
    with pytest.raises(TargetError, match=r"forward\(params, x, carried, key\) failed, TypeError.*expected a function of these four"):  # fmt: skip
        px.run(flow, flow.init(start, {"n": jnp.zeros(3)}), steps=1, key=key, data=data)


def test_starts_that_draw_by_numpy_from_their_key_are_refused(key):
    net = networks.Network(lambda k: jnp.asarray(np.asarray(jax.random.normal(k, (3,)))), apply)
    with pytest.raises(OptionError, match="NumPy array of what it draws from its key"):
        net.init(key, 3)


def test_one_logit_for_two_classes_has_its_hint_in_runs(key):
    flow = px.w_sgld_b(networks.classifier(lambda w, x: x @ w, num_data=5), step_size=0.1)
    data = {"x": np.ones((5, 4), np.float32), "y": np.zeros(5, int)}
    start = px.particles.normal(key, 3, like=jnp.zeros(4))
    with pytest.raises(TargetError, match=r"jnp.stack\(\[0 \* z, z\], -1\)"):
        px.run(flow, start, steps=1, key=key, data=data)
