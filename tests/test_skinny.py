"""Few particles in many dimensions: fused kernels (interpreted) and plain path against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import particlax as px
from benchmarks import absent
from particlax import direct, gpu, pairwise, skinny, tensor, updates

COMPILE_FAST = True
SHAPES = [(2, 8192), (5, 8193), (20, 12_345), (33, 8200), (64, 8321)]


@pytest.fixture(params=["plain", "pieces", "interpret"])
def mode(request, monkeypatch):
    """The plain path, the same in many small pieces with a rest, and the kernels."""
    monkeypatch.setattr(gpu, "MODE", "interpret" if request.param == "interpret" else None)
    if request.param == "pieces":
        fresh = gpu.differentiable(skinny._by_pairs, skinny._by_products)  # not as traced before
        monkeypatch.setattr(skinny, "_paired", fresh)
        for name, width in (("PAIRED", 300), ("SMALL", 700), ("LARGE", 900), ("COPIED", 0)):
            monkeypatch.setattr(skinny, name, width)
    return request.param


def cloud(num, dim, centre=3.0, spread=0.1, seed=0):
    rng = np.random.default_rng(seed)
    x = (centre + spread * rng.normal(size=(num, dim))).astype(np.float32)
    v = rng.normal(size=(num, dim)).astype(np.float32)
    left, right = rng.normal(size=(2, num, num)).astype(np.float32)
    return x, v, left, right


def relative(found, truth):
    return np.abs(np.asarray(found, float) - truth).max() / np.abs(truth).max()


def parts(x):
    """The coordinates in three matrices, none of them a multiple of a tile."""
    return [jnp.asarray(part) for part in np.split(x, [5, 5 + x.shape[1] // 3], 1)]


def whole(found):
    return np.concatenate([np.asarray(part, float) for part in found], 1)


@pytest.mark.parametrize(("num", "dim"), SHAPES)
def test_distances_are_those_of_all_coordinates(num, dim, mode):
    x = cloud(num, dim)[0]
    r2, square = skinny.distances(parts(x))
    exact = x.astype(float)
    truth = np.array([np.sum((exact - one) ** 2, 1) for one in exact])
    assert relative(r2, truth) < 2e-6
    np.testing.assert_allclose(r2, np.asarray(r2).T, rtol=1e-6, atol=1e-4)
    assert np.all(np.diagonal(r2) <= 1e-4) and float(np.min(r2)) >= 0
    assert relative(square, size_of(exact, mode)) < 2e-6


def size_of(points, mode):
    """The mean of |x_i|^2; up to 20 particles on a CPU, |x_1|^2 and the mean of |x_i - x_1|^2."""
    if mode == "interpret" or len(points) > direct.MOST:
        return np.mean(np.sum(points**2, 1))
    return np.sum(points[0] ** 2) + np.mean(np.sum((points - points[0]) ** 2, 1))


@pytest.mark.parametrize(("dim", "runs"), [(8960, (40, 16)), (6656, (32, 16)), (9504, (33, 16)), (504, (21, 8)), (8000, (25, 16))])  # fmt: skip
@pytest.mark.parametrize("num", [2, 3, 20])
def test_runs_that_fill_a_leaf(num, dim, runs):
    """Many runs side by side, in any number and width that fits, give the sums that a loop over pieces gives."""
    x = jnp.asarray(cloud(num, dim, centre=30.0)[0])
    assert skinny._runs(x.shape, 4) == runs
    exact = np.asarray(x, float)
    i, j = np.triu_indices(num, 1)
    truth = np.sum((exact[i] - exact[j]) ** 2, 1)
    np.testing.assert_allclose(skinny._in_runs(x, *runs), truth, rtol=1e-6)
    np.testing.assert_allclose(skinny._in_turns(x), truth, rtol=1e-6)


def test_runs_leave_no_remainder_and_take_little_memory():
    assert skinny._runs((20, 8191), 4) is None
    # 190 pairs have 16 lanes of 4 bytes for every 40 runs.
    most = skinny.ROOM // (190 * 16 * 4) * 640
    assert skinny._runs((20, most), 4) == (40, 16)
    assert skinny._runs((20, most + 640), 4) is None
    assert skinny._runs((20, most), 8) is None
    assert skinny._runs((3, most + 640), 4) == (40, 16)


@pytest.mark.parametrize("dim", [0, 1, 1023, 8191])
def test_small_leaves_are_filled(dim, monkeypatch):
    x = jnp.asarray(cloud(5, dim)[0])
    exact = np.asarray(x, float)
    i, j = np.triu_indices(5, 1)
    truth = np.sum((exact[i] - exact[j]) ** 2, 1)
    np.testing.assert_allclose(skinny._summed(x), truth, rtol=1e-6)
    monkeypatch.setattr(skinny, "_in_turns", lambda x: pytest.fail("small leaves need no loop"))
    np.testing.assert_allclose(skinny._summed(x), truth, rtol=1e-6)


@pytest.mark.parametrize("centre", [0.0, 1.0, 300.0])
def test_few_particles_far_away_lose_nothing(centre, mode):
    """The differences themselves are squared: exact for whatever place the cloud is at."""
    x = cloud(6, 8200, centre=centre, spread=0.01)[0]
    r2, _ = skinny.distances(parts(x))
    exact = x.astype(float)
    truth = np.array([np.sum((exact - one) ** 2, 1) for one in exact])
    np.testing.assert_allclose(r2, truth, rtol=2e-6)


@pytest.mark.parametrize(("num", "dim"), SHAPES)
def test_mix_is_the_sum_of_products(num, dim, mode):
    x, v, left, right = cloud(num, dim, centre=1.0)
    centred = x - x.astype(float).mean(0)
    both = skinny.mix(jnp.asarray(left), parts(x), jnp.asarray(right), parts(v))
    truth = left.astype(float) @ centred + right.astype(float) @ v
    assert relative(whole(both), truth) < 2e-6
    pulled = skinny.mix(jnp.asarray(left), parts(x), jnp.asarray(right), parts(v), pull=0.7)
    truth = left.astype(float) @ centred + right.astype(float) @ (v - 0.7 * x.astype(float))
    assert relative(whole(pulled), truth) < 2e-6
    alone = skinny.mix(jnp.asarray(left), parts(x))
    # Of a cloud ten times off its size.
    assert relative(whole(alone), left.astype(float) @ centred) < 5e-6


@pytest.mark.parametrize("centre", [0.0, 1.0, 300.0])
def test_mixing_far_away_errs_by_roundings_of_the_cloud(centre, mode):
    """Sums of six products, whose parts have the size of the particles: what storing them has lost before."""
    x, v, left, right = cloud(6, 8200, centre=centre, spread=0.01)
    exact, size = x.astype(float), np.abs(x)
    rounding, weight = 8 * 2**-24, np.abs(left) + np.abs(left).mean(1, keepdims=True)
    truth = left.astype(float) @ (exact - exact.mean(0))
    alone = whole(skinny.mix(jnp.asarray(left), parts(x)))
    assert np.all(np.abs(alone - truth) < rounding * (weight @ size))
    both = whole(skinny.mix(jnp.asarray(left), parts(x), jnp.asarray(right), parts(v), pull=0.7))
    truth += right.astype(float) @ (v - 0.7 * exact)
    assert np.all(np.abs(both - truth) < rounding * (weight @ size + np.abs(right) @ (np.abs(v) + 0.7 * size)))  # fmt: skip


@pytest.mark.parametrize("pull", [None, 0.7])
@pytest.mark.parametrize("centre", [0.0, 300.0])
@pytest.mark.parametrize("bytes_at_once", [0, 1 << 27])
def test_one_product_where_a_ratio_is_known(bytes_at_once, centre, pull, mode, monkeypatch):
    """As an RBF kernel has it: left is -ratio * right beside its diagonal, and its rows add up to 0."""
    monkeypatch.setattr(skinny, "WHOLE", bytes_at_once)
    x, v, _, right = cloud(6, 8200, centre=centre, spread=0.01)
    right, ratio = np.abs(right), 1.3
    left = ratio * (np.diag(right.sum(1, dtype=float)) - right)
    got = whole(skinny.mix(jnp.asarray(left, jnp.float32), parts(x), jnp.asarray(right), parts(v), pull=pull, ratio=jnp.float32(ratio)))  # fmt: skip
    exact = x.astype(float)
    truth = left @ exact + right @ (v - (pull or 0.0) * exact)
    size = np.abs(v) + (ratio + (pull or 0.0)) * np.abs(x)
    bound = 16 * 2**-24 * (right @ size + np.diag(left)[:, None] * np.abs(x))
    assert np.all(np.abs(got - truth) < bound)


@pytest.mark.parametrize("num", [4, 33])
def test_modes_really_differ(num, monkeypatch):
    """The interpreted kernels are what runs: breaking them shows."""
    monkeypatch.setattr(gpu, "MODE", "interpret")
    break_kernels(monkeypatch)
    assert float(jnp.abs(skinny.distances(parts(cloud(num, 8192)[0]))[0]).max()) == 0


def break_kernels(monkeypatch):
    monkeypatch.setattr(gpu, "halves", lambda tile: (0 * tile, 0 * tile))
    monkeypatch.setattr(gpu, "add_square", lambda a, b, c: 0 * a)
    jax.clear_caches()


@pytest.mark.parametrize("num", [20, 33])
def test_kernels_lower_for_a_gpu(num):
    """Triton's own errors show here, without a GPU."""
    cloud = [jax.ShapeDtypeStruct((num, d), jnp.float32) for d in (10_000, 7)]
    weights = jax.ShapeDtypeStruct((num, num), jnp.float32)
    kernels = direct if num <= direct.MOST else tensor
    for launch, args in (
        (kernels.distances, (cloud,)),
        (kernels.mix, (weights, cloud)),
        (kernels.mix, (weights, cloud, weights, cloud)),
        (kernels.mix, (weights, cloud, weights, cloud, jax.ShapeDtypeStruct((), jnp.float32))),
    ):
        with absent.named():
            program = jax.jit(launch).trace(*args).lower(lowering_platforms=("cuda",))
        assert "triton" in program.as_text()


@pytest.mark.parametrize("optimizer", [optax.rmsprop(0.1), optax.adamw(optax.linear_schedule(0.1, 0.0, 9))])  # fmt: skip
def test_a_kernel_with_a_step_lowers_for_a_gpu(optimizer):
    x = {"a": jnp.zeros((20, 10_000)), "b": jnp.zeros((20, 7))}
    integrator = px.integrators.Optax(optimizer)
    memory = integrator.init(x)
    step = lambda drift: integrator.step(x, px.terms.Velocity(drift), memory, jnp.int32(0))
    plan = updates.apart(step, x, (x, memory))
    assert plan is not None
    pairs = zip(plan.leaves, x.values(), strict=True)
    leaves = [leaf.among([one, one + 1]) for leaf, one in pairs]
    weights = jnp.zeros((20, 20))
    given = [(leaf.arrays, list(leaf.scalars)) for leaf in leaves]
    go = jax.jit(functools.partial(direct.move, leaves))
    with absent.named():
        program = go.trace(weights, given, weights, None).lower(lowering_platforms=("cuda",))
    assert "triton" in program.as_text()


def test_vmap_and_derivatives(mode):
    x = jnp.asarray(cloud(3, 8192, spread=1.0)[0])
    of = lambda x: skinny.distances([x])[0]
    two = jax.vmap(of)(jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(two[1], 4 * two[0], rtol=1e-5, atol=1e-2)
    slope = jax.grad(lambda x: of(x)[0, 1])(x)
    truth = np.zeros(x.shape)
    truth[0] = 2 * (np.asarray(x[0], float) - np.asarray(x[1], float))
    truth[1] = -truth[0]
    assert relative(slope, truth) < 1e-5


def test_other_dtypes_and_sizes_take_the_plain_path(monkeypatch):
    monkeypatch.setattr(gpu, "MODE", "interpret")
    break_kernels(monkeypatch)
    with jax.enable_x64(True):
        wide = jnp.asarray(cloud(4, 8192)[0], jnp.float64)
        assert float(skinny.distances([wide])[0].max()) > 0
    for num, dim in ((4, 100), (65, 8192)):
        assert float(skinny.distances(parts(cloud(num, dim)[0]))[0].max()) > 0


def network_cloud(num, spread=0.3):
    rng = np.random.default_rng(1)
    shapes = {"a": (100, 90), "b": (90,), "c": (90, 100), "d": (100, 3), "e": ()}
    draw = lambda shape: jnp.asarray(1 + spread * rng.normal(size=(num, *shape)), jnp.float32)
    return {name: draw(shape) for name, shape in shapes.items()}


def flat(tree):
    leaves = [np.asarray(leaf, float).reshape(len(leaf), -1) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves, 1)


def test_interactions_of_networks(mode):
    """Stein and blob of a cloud with large, small and scalar leaves: the formulas by double loops."""
    x, s = network_cloud(7), network_cloud(7, spread=2.0)
    points, scores = flat(x), flat(s)
    r2 = np.array([[np.sum((a - b) ** 2) for b in points] for a in points])
    h = np.median(np.sqrt(r2[np.triu_indices(7, 1)])) ** 2 / np.log(7)
    kernel = np.exp(-r2 / h)
    phi = np.zeros_like(points)
    blob = np.zeros_like(points)
    mass = kernel.sum(1)
    for i in range(7):
        for j in range(7):
            push = 2 / h * kernel[i, j] * (points[i] - points[j])
            phi[i] += (kernel[i, j] * scores[j] + push) / 7
            blob[i] += (1 / mass[i] + 1 / mass[j]) * push
    cloud = px.terms.Cloud(x, s, jnp.int32(0), px.terms.Frame(), x)
    found = px.Stein()(cloud, None, ())[0].drift
    assert relative(flat(found), phi) < 3e-6
    assert jax.tree.structure(found) == jax.tree.structure(x)
    assert [leaf.shape for leaf in jax.tree.leaves(found)] == [
        leaf.shape for leaf in jax.tree.leaves(x)
    ]
    assert relative(flat(px.diffusions.Blob()(cloud, None, ())[0].drift), blob) < 3e-5
    np.testing.assert_allclose(pairwise.sqdist(x, x), r2, rtol=2e-5, atol=1e-2)
    np.testing.assert_allclose(pairwise.typical_square(x), size_of(points, mode), rtol=1e-6)
    np.testing.assert_allclose(
        pairwise.logsumexp(x, x, lambda r2: -r2 / h), np.log(mass), rtol=1e-4
    )


SAMPLERS = {
    "svgd": lambda target, euler: px.svgd(target, integrator=euler),
    "w_sgld": lambda target, euler: px.w_sgld(target, integrator=euler),
    "w_sgld_b": lambda target, euler: px.w_sgld_b(target, integrator=euler),
    "pi_sgld": lambda target, euler: px.pi_sgld(target, integrator=euler),
    "pi_sgld with gfsd": lambda target, euler: px.pi_sgld(
        target, diffusion=px.diffusions.GFSD(weight=0.3), stein=2.0, integrator=euler
    ),
    "layers": lambda target, euler: px.svgd(
        target, kernel=px.kernels.LayerWise(), integrator=euler
    ),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_terms_of_networks_are_summed_as_matrices(name):
    """A step moves along the sum of what its terms say one by one."""
    target = px.Target(lambda tree: -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))
    flow = SAMPLERS[name](target, px.integrators.Euler(0.5))
    state = flow.init(network_cloud(5))
    moved, info = flow.step(jax.random.key(0), state)
    score = jax.tree.map(jnp.negative, state.particles)
    cloud = px.terms.Cloud(state.particles, score, state.step, px.terms.Frame(), state.particles)
    drifts = [
        flat(term(cloud, None, memory)[0].drift)
        for term, memory in zip(flow.terms, state.terms, strict=True)
    ]
    truth = flat(state.particles) + 0.5 * sum(drifts)
    assert relative(flat(moved.particles), truth) < 1e-6
    for drift, force in zip(drifts, info.forces.values(), strict=True):
        np.testing.assert_allclose(force, np.sqrt(np.sum(drift**2) / 5), rtol=1e-5)


def test_a_term_that_moves_in_its_own_way_is_called():
    """A subclass that overrides how a term moves does not inherit its matrices."""

    class Slower(px.Stein):
        def __call__(self, cloud, key, memory):
            velocity, memory = super().__call__(cloud, key, memory)
            return velocity._replace(drift=jax.tree.map(lambda v: 0 * v, velocity.drift)), memory

    class Still(px.diffusions.Blob):
        def force(self, cloud, memory):
            return jax.tree.map(jnp.zeros_like, cloud.x), memory

    target = px.Target(lambda tree: -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))
    start = network_cloud(4)
    for term in (Slower(), Still()):
        flow = px.Flow(target, (term,), px.integrators.Euler(0.5))
        state, _ = flow.step(jax.random.key(0), flow.init(start))
        assert relative(flat(state.particles), flat(start)) == 0


def test_scores_put_together_on_the_way_are_the_scores(mode):
    """A step of networks is the same whether the prior tells its precision or not."""
    start = lambda key: {"w": jax.random.normal(key, (90, 100)), "b": jnp.zeros(100)}
    loss = lambda p, b: -jnp.sum((b["x"] @ p["w"] + p["b"]) ** 2, 1)
    prior = px.networks.GaussianPrior(2.0)
    batch = {"x": jnp.asarray(np.random.default_rng(0).normal(size=(4, 90)).astype(np.float32))}
    moved = []
    for log_prior in (prior, lambda p: 1.0 * prior(p)):
        target = px.Target(log_prior=log_prior, log_likelihood=loss, num_data=8)
        assert (target.precision is None) == (log_prior is not prior)
        flow = px.pi_sgld(target, step_size=1.0, diffusion=px.diffusions.Blob())
        state = flow.init(jax.vmap(start)(jax.random.split(jax.random.key(0), 4)))
        moved.append(jax.jit(flow.step)(jax.random.key(1), state, batch)[0].particles)
    for one, other in zip(jax.tree.leaves(moved[0]), jax.tree.leaves(moved[1]), strict=True):
        size = float(jnp.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6 * size)


def test_metrics_with_a_frame_of_their_own_get_whole_scores():
    class Twice(px.terms.Frame):
        def points(self, x):
            return jax.tree.map(lambda leaf: leaf / 2, x)

        def scores(self, score):
            return jax.tree.map(lambda leaf: 2 * leaf, score)

        def back(self, velocity):
            return jax.tree.map(lambda leaf: 2 * leaf, velocity)

    class Scaled(px.metrics.Identity):
        def frame(self, particles):
            return Twice()

    prior, moved = px.priors.GaussianPrior(2.0), []
    batch = jnp.ones(2)
    for log_prior in (prior, lambda p: 1.0 * prior(p)):
        target = px.Target(log_prior=log_prior, log_likelihood=lambda p, b: jnp.sum(p) * b, num_data=2)  # fmt: skip
        flow = px.svgd(target, step_size=1.0, metric=Scaled())
        x = jax.random.normal(jax.random.key(0), (4, 5000))
        moved.append(jax.jit(flow.step)(jax.random.key(1), flow.init(x), batch)[0].particles)
    np.testing.assert_allclose(moved[0], moved[1], rtol=1e-5, atol=1e-5)


def test_a_particle_far_away_does_not_blur_the_others(mode):
    """Whichever it is: with no weight on it, it tells only through the mean."""
    x, v, left, right = cloud(16, 8200, centre=0.0, spread=1.0)
    left[1:, 0] = right[1:, 0] = 0
    errors = []
    for far in (0, 15):
        moved = x.copy()
        order = np.r_[far, np.delete(np.arange(16), far)]
        moved[0] += 1e4
        place = np.argsort(order)
        x1, v1, l1, r1 = moved[place], v[place], left[np.ix_(place, place)], right[np.ix_(place, place)]  # fmt: skip
        found = whole(skinny.mix(jnp.asarray(l1), parts(x1), jnp.asarray(r1), parts(v1)))
        exact = x1.astype(float)
        truth = l1.astype(float) @ (exact - exact.mean(0)) + r1.astype(float) @ v1
        others = np.arange(16) != far
        errors.append(relative(found[others], truth[others]))
    assert max(errors) < 1e-4


@pytest.mark.parametrize("x64", [False, True])
def test_leaves_of_several_kinds(mode, x64):
    """Empty ones, and two dtypes at once."""
    with jax.enable_x64(x64):
        wide = jnp.float64 if x64 else jnp.float32
        tree = {
            "a": jax.random.normal(jax.random.key(0), (3, 9000), wide),
            "b": jax.random.normal(jax.random.key(1), (3, 8500), jnp.float32),
            "none": jnp.zeros((3, 0)),
        }
        target = px.Target(lambda p: -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p)))
        flow = px.svgd(target, step_size=0.1)
        moved = flow.step(jax.random.key(2), flow.init(tree))[0].particles
        flat = jnp.concatenate([tree["a"], tree["b"].astype(wide)], 1)
        other = flow.step(jax.random.key(2), flow.init(flat))[0].particles
        joined = np.concatenate([moved["a"], moved["b"], moved["none"]], 1)
        np.testing.assert_allclose(joined, other, rtol=1e-5, atol=1e-5)
        assert moved["a"].dtype == wide and moved["b"].dtype == jnp.float32
