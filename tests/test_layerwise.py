"""Kernels by layer and repulsion in function space, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import particlax as px
from particlax import networks
from particlax.diffusions import GFSD, Blob
from particlax.errors import DataError, OptionError, TargetError
from particlax.kernels import IMQ, RBF, LayerWise
from particlax.terms import Cloud, Frame

COMPILE_FAST = True

RNG = np.random.default_rng(0)
M = 6


def tree(scale=1.0):
    shapes = {"conv": {"b": (3,), "w": (2, 3)}, "dense": (4,), "out": (2,)}
    draw = lambda shape: jnp.asarray(scale * RNG.normal(size=(M, *shape)), jnp.float32)
    return jax.tree.map(draw, shapes, is_leaf=lambda s: isinstance(s, tuple))


def seen(x, score):
    return Cloud(x, score, jnp.int32(0), Frame(), x)


def flat(part):
    leaves = [np.asarray(leaf, float).reshape(M, -1) for leaf in jax.tree.leaves(part)]
    return np.concatenate(leaves, 1)


GROUPS = {
    None: [["conv/b"], ["conv/w"], ["dense"], ["out"]],
    ("conv", "dense", "out"): [["conv/b", "conv/w"], ["dense"], ["out"]],
    (("dense", "conv/w"), ""): [["conv/w", "dense"], ["conv/b", "out"]],
}


def part(x, names):
    leaves = dict(zip(networks.leaf_names(x), jax.tree.leaves(x), strict=True))
    return np.concatenate([np.asarray(leaves[n], float).reshape(M, -1) for n in names], 1)


@pytest.mark.parametrize("groups", list(GROUPS))
def test_each_group_is_a_cloud_of_its_own(groups):
    """Stein, blob and GFSD of every group by double loops over its coordinates alone."""
    x, score = tree(), tree()
    kernel = LayerWise(RBF(), groups)
    found = {
        "stein": px.Stein(kernel=kernel)(seen(x, score), None, ())[0].drift,
        "blob": Blob(kernel=kernel)(seen(x, score), None, ())[0].drift,
        "gfsd": GFSD(kernel=kernel)(seen(x, score), None, ())[0].drift,
    }
    for names in GROUPS[groups]:
        points, scores = part(x, names), part(score, names)
        r2 = ((points[:, None] - points[None]) ** 2).sum(-1)
        h = np.median(np.sqrt(r2[np.triu_indices(M, 1)])) ** 2 / np.log(M)
        k = np.exp(-r2 / h)
        w = 2 / h * k
        mass = k.sum(1)
        apart = points[:, None] - points[None]
        truth = {
            "stein": (k @ scores + (w[..., None] * apart).sum(1)) / M,
            "blob": ((w * (1 / mass[:, None] + 1 / mass[None]))[..., None] * apart).sum(1),
            "gfsd": (w[..., None] * apart).sum(1) / mass[:, None],
        }
        for name, drift in found.items():
            np.testing.assert_allclose(part(drift, names), truth[name], rtol=2e-4, atol=1e-5)


def test_one_group_of_all_is_the_plain_kernel():
    x, score = tree(), tree()
    whole = px.Stein(kernel=IMQ())(seen(x, score), None, ())[0].drift
    grouped = px.Stein(kernel=LayerWise(IMQ(), ("",)))(seen(x, score), None, ())[0].drift
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(grouped), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_samplers_take_it(key):
    target = px.Target(lambda p: -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p)))
    for flow in (
        px.svgd(target, kernel=LayerWise(), optimizer=optax.adam(0.05)),
        px.w_sgld_b(target, kernel=LayerWise(groups=("conv", "")), optimizer=optax.adam(0.05)),
        px.pi_sgld(target, diffusion=Blob(), kernel=LayerWise(), optimizer=optax.adam(0.05)),
    ):
        result = px.run(flow, tree(3.0), steps=300, key=key, progress=False)
        assert np.abs(flat(result.particles)).max() < 4


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LayerWise(groups="conv"), r"expected a tuple of names: \('conv',\)"),
        (lambda: LayerWise(groups=("a", ("b", "a"))), "groups name 'a' twice"),
        (lambda: LayerWise(groups=(3,)), "a group is 3; expected a name"),
        (lambda: LayerWise(Blob()), "kernel is Blob.*expected a Kernel"),
        (
            lambda: px.errors.expect("kernel", 3, (RBF, LayerWise), "px.kernels.RBF()"),
            "kernel is 3; expected a RBF or LayerWise",
        ),
    ],
)
def test_bad_options(make, words):
    with pytest.raises((OptionError, TypeError), match=words):
        make()


def test_names_must_fit():
    target = px.Target(lambda p: -jnp.sum(p["out"] ** 2))
    with pytest.raises(OptionError, match=r"LayerWise names 'convs'.*did you mean 'conv/"):
        px.svgd(target, kernel=LayerWise(groups=("convs", "")), step_size=1.0).init(tree())
    with pytest.raises(OptionError, match="LayerWise has no group for 'dense'"):
        px.svgd(target, kernel=LayerWise(groups=("conv", "out")), step_size=1.0).init(tree())


def test_leaves_that_start_alike_and_would_stay_so_are_refused(key):
    """Flax's biases start at zero in all networks; by layer they move apart, and a drift of each particle's own parts them."""
    x = {name: {"w": jax.random.normal(key, (M, 3)), "b": jnp.zeros((M, 2))} for name in "uv"}
    target = px.Target(lambda p: -0.5 * sum(jnp.sum((p[n]["w"][:2] - p[n]["b"] - 1) ** 2) for n in "uv"))  # fmt: skip
    stein = lambda groups: px.Stein(kernel=LayerWise(groups=groups))
    flow = lambda *terms: px.Flow(target, terms, px.integrators.Euler(0.1))
    moved = lambda flow: px.run(flow, x, steps=3, key=key, progress=False).particles["u"]["b"]
    with pytest.raises(px.errors.ParticleError) as error:
        flow(stein(None)).init(x)
    for part in ("['u/b', 'v/b']", "same in all 6", "never part", "LayerWise(groups=('u', 'v'))"):
        assert part in str(error.value)
    with pytest.raises(px.errors.ParticleError, match="put each into a group with a leaf that dif"):
        flow(stein(None)).init({"u": x["u"], "v": {"b": x["v"]["b"]}})
    with pytest.raises(px.errors.ParticleError, match=r"leaves \['u/b'\] are the same"):
        flow(stein(None), stein(("u/b", ""))).init(x)
    for terms in ((stein(("u", "v")),), (stein(None), stein(("",))), (px.Drift(), stein(None))):
        assert np.all(np.std(moved(flow(*terms)), 0) > 1e-4)


def test_leaves_that_part_by_way_of_others(key):
    """One kernel parts m from w, the other l from m; leaves without numbers part nothing."""
    x = {"l": jnp.zeros((M, 2)), "m": jnp.zeros((M, 2)), "w": jax.random.normal(key, (M, 2)), "none": jnp.zeros((M, 0))}  # fmt: skip
    target = px.Target(lambda p: -jnp.sum((p["w"] - p["m"]) ** 2 + (p["m"] - p["l"] - 1) ** 2))
    stein = lambda *groups: px.Stein(kernel=LayerWise(groups=(*groups, "none")))
    flow = lambda *terms: px.Flow(target, terms, px.integrators.Euler(0.1))
    both = flow(stein(("l", "m"), "w"), stein("l", ("m", "w")))
    result = px.run(both, x, steps=20, key=key, progress=False)
    assert np.all(np.std(result.particles["l"], 0) > 1e-3)
    with pytest.raises(px.errors.ParticleError, match=r"the leaves \['l', 'm'\] are the same"):
        flow(stein(("l", "m"), "w")).init(x)
    with pytest.raises(px.errors.ParticleError, match=r"the leaves \['l'\] are the same"):
        flow(stein("l", ("m", "w")), stein("l", "m", "w")).init(x)


def test_a_mixing_metric_is_refused():
    target = px.Target(lambda p: -jnp.sum(p["out"] ** 2))
    with pytest.raises(OptionError, match="Ensemble metric mixes coordinates"):
        px.svgd(target, kernel=LayerWise(), step_size=1.0, metric=px.metrics.Ensemble())


# ---------------------------------------------------------------------------------------------- functions

INPUTS = RNG.normal(size=(5, 3)).astype(np.float32)


def apply(w, x):
    return jnp.tanh(x @ w["w"]) + w["b"]


def weights():
    return {
        "w": jnp.asarray(RNG.normal(size=(M, 3, 2)), jnp.float32),
        "b": jnp.asarray(RNG.normal(size=(M, 2)), jnp.float32),
    }


def test_force_is_pulled_back_from_the_outputs():
    """J^T by finite differences of the outputs, times the blob's force by double loops."""
    cloud = weights()
    drift = networks.FunctionSpace(apply, INPUTS)(seen(cloud, cloud), None, ())[0].drift
    f = np.stack([
        (np.tanh(INPUTS.astype(float) @ np.asarray(cloud["w"][m], float)) + np.asarray(cloud["b"][m], float)).ravel()
        for m in range(M)
    ])  # fmt: skip
    r2 = ((f[:, None] - f[None]) ** 2).sum(-1)
    h = np.median(np.sqrt(r2[np.triu_indices(M, 1)])) ** 2 / np.log(M)
    k = np.exp(-r2 / h)
    mass = k.sum(1)
    force = sum(
        ((1 / mass + 1 / mass[j]) * 2 / h * k[:, j])[:, None] * (f - f[j]) for j in range(M)
    ).reshape(M, 5, 2)
    slope = (
        1
        - np.tanh(np.einsum("bi,mio->mbo", INPUTS.astype(float), np.asarray(cloud["w"], float)))
        ** 2
    )
    np.testing.assert_allclose(
        drift["w"], np.einsum("bi,mbo->mio", INPUTS, force * slope), rtol=1e-3, atol=1e-4
    )
    np.testing.assert_allclose(drift["b"], force.sum(1), rtol=1e-3, atol=1e-4)


def test_a_metric_turns_it_like_a_score():
    cloud = weights()
    term = networks.FunctionSpace(apply, INPUTS)
    plain = term(seen(cloud, cloud), None, ())[0].drift
    frame = px.metrics.Diagonal().frame(cloud)
    scaled = term(Cloud(frame.points(cloud), cloud, jnp.int32(0), frame, cloud), None, ())[0].drift
    np.testing.assert_allclose(scaled["b"], plain["b"] * np.std(cloud["b"], 0), rtol=1e-4)


def test_equal_functions_are_not_told_apart_by_parameters():
    """A parameter without influence on the outputs is left alone."""
    cloud = {**weights(), "idle": jnp.asarray(RNG.normal(size=(M, 4)), jnp.float32)}
    drift = networks.FunctionSpace(apply, INPUTS)(seen(cloud, cloud), None, ())[0].drift
    assert np.all(np.asarray(drift["idle"]) == 0)
    assert np.abs(drift["b"]).max() > 0


def test_it_spreads_functions_in_a_run(key):
    """The same drift with and without: functions differ more with it, on inputs drawn anew at every step."""
    x = RNG.normal(size=(40, 3)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int32)
    net = networks.Network(
        lambda k: {"w": 0.1 * jax.random.normal(k, (3, 2)), "b": jnp.zeros(2)}, apply
    )
    target = networks.classifier(net, num_data=40)
    far = px.Minibatches(3 * RNG.normal(size=(100, 3)).astype(np.float32), 20)
    spreads = []
    for extra in ((), (networks.FunctionSpace(net, far),)):
        flow = px.Flow(target, (px.Drift(), *extra), px.integrators.Optax(optax.adam(0.01)))
        particles = net.init(key, M)
        result = px.run(flow, particles, steps=400, key=key, data={"x": x, "y": y}, progress=False)
        outputs = jax.vmap(apply, (0, None))(result.particles, far.arrays)
        spreads.append(float(jnp.std(outputs, 0).mean()))
    assert spreads[1] > 3 * spreads[0]


def test_it_sees_carried_and_shared(key):
    """apply gets the shared leaves joined in and what the particle carries."""
    net = networks.Network(
        lambda k: ({"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}, jnp.zeros(())),
        lambda p, x, c: apply(p, x) * c,
        lambda p, x, c, k: (apply(p, x), c + 1),
        stateful=True,
    )
    cloud = weights()
    part, shared = networks.split(cloud, ["b"])
    carried = jnp.full(M, 2.0)
    term = networks.FunctionSpace(net, INPUTS)
    given = Cloud(part, part, jnp.int32(0), Frame(), part, carried, shared)
    drift = term(given, None, ())[0].drift
    whole = {"w": jnp.stack([cloud["w"][0]] * M), "b": cloud["b"]}
    double = networks.FunctionSpace(lambda p, x: 2 * apply(p, x), INPUTS)
    truth = double(seen(whole, whole), None, ())[0].drift
    np.testing.assert_allclose(drift["b"], truth["b"], rtol=1e-5)
    assert drift["w"] is None


def test_bad_function_spaces():
    with pytest.raises(OptionError, match="expected a Blob or GFSD"):
        networks.FunctionSpace(apply, INPUTS, px.diffusions.Transport())
    with pytest.raises(DataError, match="row 1 of inputs is not finite"):
        networks.FunctionSpace(apply, np.array([[1.0], [np.nan]]))
    with pytest.raises(TargetError, match="expected one array with a row for each input"):
        networks.FunctionSpace(lambda w, x: w["b"], INPUTS)(seen(weights(), weights()), None, ())
