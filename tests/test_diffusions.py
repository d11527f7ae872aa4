"""Realisations of the diffusion: double loops, energies by finite differences, Sinkhorn, calibration."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import particlax as px
from particlax.calibration import calibrated
from particlax.diffusions import GFSD, Blob, FixedScale, Langevin, Sinkhorn, Transport
from particlax.errors import OptionError, ParticleError
from particlax.terms import Cloud, Frame

from . import references as ref

K = px.kernels
LAYOUTS = [(3, "array"), (3, "tree"), (12, "array"), (12, "tree")]
PROFILES = {
    "RBF": (K.RBF, ref.rbf),
    "IMQ": (K.IMQ, ref.imq),
    "Laplace": (K.Laplace, ref.laplace),
    "Mixture": (K.Mixture, ref.mixture),
}
FORCES = {"Blob": (Blob, ref.blob), "GFSD": (GFSD, ref.gfsd)}
EXACT = {"iterations": 20000, "tolerance": 1e-13}


def as_jax(matrix, kind="array"):
    return jax.tree.map(jnp.asarray, ref.layout(matrix, kind))


def make_cloud(x, kind="array", step=0):
    points = as_jax(x, kind)
    zero = jax.tree.map(jnp.zeros_like, points)
    return Cloud(x=points, score=zero, step=jnp.int32(step), frame=Frame(), raw=points)


def force(term, x, kind="array", *, anchor=None, step=0, jit=False):
    """The term's drift on x; `anchor` is where the JKO step began."""
    memory = term.init(as_jax(x if anchor is None else anchor, kind))
    call = lambda cloud, memory: term(cloud, None, memory)[0]
    velocity = (jax.jit(call) if jit else call)(make_cloud(x, kind, step), memory)
    assert velocity.noise is None
    return ref.matrix_of(velocity.drift)


def assert_close(left, right, tolerance=1e-10):
    np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------ Blob and GFSD


@pytest.mark.parametrize(("dim", "kind"), [(3, "array"), (12, "tree")])
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", FORCES)
def test_force_equals_the_double_loop(x64, name, profile, dim, kind):
    term, loop = FORCES[name]
    kernel, formula = PROFILES[profile]
    x, h = ref.cloud(9, dim), 0.8 * dim
    assert_close(force(term(1.3, kernel(bandwidth=h)), x, kind), 1.3 * loop(x, h, formula))


@pytest.mark.parametrize(("dim", "kind"), LAYOUTS)
@pytest.mark.parametrize("name", FORCES)
def test_force_with_the_papers_bandwidth(x64, name, dim, kind):
    term, loop = FORCES[name]
    x = ref.cloud(20, dim)
    assert_close(force(term(), x, kind, jit=True), loop(x, ref.median_bandwidth(x)))


@pytest.mark.parametrize("profile", PROFILES)
def test_blob_descends_its_energy(x64, profile):
    """b = -grad of sum_i log(sum_j K_ij), by central differences of the NumPy energy."""
    kernel, formula = PROFILES[profile]
    x, h = ref.cloud(7, 2), 1.1
    numeric = -ref.gradient(lambda x: ref.blob_energy(x, h, formula), x)
    assert_close(force(Blob(kernel=kernel(bandwidth=h)), x), numeric, 1e-8)


def test_gfsd_is_the_score_of_the_smoothed_density(x64):
    x, h = ref.cloud(7, 2), 1.1
    expected = np.zeros_like(x)
    for i in range(len(x)):
        log_q = lambda p: np.log(np.sum(np.exp(-np.sum((p - x) ** 2, 1) / h)))
        expected[i] = -ref.gradient(log_q, x[i])
    assert_close(force(GFSD(kernel=K.RBF(h)), x), expected, 1e-8)


@pytest.mark.parametrize("name", FORCES)
def test_two_particles_repel(name):
    drift = force(FORCES[name][0](kernel=K.RBF(1.0)), np.array([[0.0], [1.0]]))
    assert drift[0, 0] < 0 < drift[1, 0]


# ----------------------------------------------------------------------------------------------- Transport


@pytest.mark.parametrize(("dim", "kind"), LAYOUTS)
def test_fixed_scale_with_moved_particles(x64, dim, kind):
    """Two steps into a JKO step of three: y is where the step began, lam is of x."""
    y = ref.cloud(20, dim)
    x = y + 0.3 * ref.cloud(20, dim, seed=1)
    term = Transport(0.6, FixedScale(gamma=1.7), inner=3)
    expected = 0.6 * ref.transport(x, y, ref.median_bandwidth(x), 1.7)
    assert_close(force(term, x, kind, anchor=y, step=2, jit=True), expected)


@pytest.mark.parametrize("dim", [3, 12])
@pytest.mark.parametrize("derivative", ["fixed", "envelope"])
@pytest.mark.parametrize("kind", ["array", "tree"])
def test_sinkhorn_with_moved_particles(x64, derivative, dim, kind):
    y = ref.cloud(10, dim)
    x = y + 0.3 * ref.cloud(10, dim, seed=1)
    lam = 1.5 * dim
    term = Transport(0.6, Sinkhorn(lam, derivative, **EXACT), inner=3)
    expected = 0.6 * ref.sinkhorn_force(x, y, lam, derivative)
    assert_close(force(term, x, kind, anchor=y, step=1), expected)


@pytest.mark.parametrize("derivative", ["fixed", "envelope"])
def test_sinkhorn_with_the_papers_lam(x64, derivative):
    x = ref.cloud(15, 3)
    term = Transport(coupling=Sinkhorn(derivative=derivative, **EXACT))
    expected = ref.sinkhorn_force(x, x, ref.median_bandwidth(x), derivative)
    assert_close(force(term, x, jit=True), expected)


@pytest.mark.parametrize("coupling", [FixedScale(0.5, lam=2.0), Sinkhorn(2.0, **EXACT)])
def test_one_inner_step_couples_the_cloud_with_itself(x64, coupling):
    x = ref.cloud(8, 3)
    if isinstance(coupling, FixedScale):
        expected = ref.transport(x, x, 2.0, 0.5)
    else:
        expected = ref.sinkhorn_force(x, x, 2.0, "fixed")
    assert_close(force(Transport(coupling=coupling), x), expected)


@pytest.mark.parametrize("step", [0, 3, 6])
def test_the_anchor_moves_at_the_start_of_every_jko_step(x64, step):
    x, y = ref.cloud(8, 3), ref.cloud(8, 3, seed=1)
    term = Transport(coupling=FixedScale(0.5, lam=2.0), inner=3)
    cloud = make_cloud(x, step=step)
    velocity, (anchor, _) = term(cloud, None, term.init(jnp.asarray(y)))
    assert_close(velocity.drift, ref.transport(x, x, 2.0, 0.5))
    np.testing.assert_array_equal(anchor, x)


@pytest.mark.parametrize("step", [1, 2, 4])
def test_the_anchor_stays_during_a_jko_step(x64, step):
    x, y = ref.cloud(8, 3), ref.cloud(8, 3, seed=1)
    term = Transport(coupling=FixedScale(0.5, lam=2.0), inner=3)
    _, (anchor, _) = term(make_cloud(x, step=step), None, term.init(jnp.asarray(y)))
    np.testing.assert_array_equal(anchor, y)


def test_fixed_scale_is_the_gradient_of_its_energy(x64):
    """t_i is the gradient of + sum_j gamma r2 exp(-r2/lam) with respect to x_i, y held."""
    x, y, lam, gamma = ref.cloud(6, 2), ref.cloud(6, 2, seed=1), 1.4, 0.7

    def energy(x):
        r2 = ref.sqdist(x, y)
        return np.sum(gamma * r2 * np.exp(-r2 / lam))

    term = Transport(coupling=FixedScale(gamma, lam), inner=2)
    assert_close(force(term, x, anchor=y, step=1), ref.gradient(energy, x), 1e-8)


def test_sinkhorn_fixed_is_the_gradient_with_the_scalings_held(x64):
    """The gradient of M sum_ij u_i exp(-r2/lam) v_j r2 with respect to x_i, u and v held."""
    x, y, lam = ref.cloud(6, 2), ref.cloud(6, 2, seed=1), 1.4
    u, v = ref.sinkhorn(x, y, lam)

    def energy(moved):
        r2 = ref.sqdist(moved, y)
        return len(x) * np.sum(u[:, None] * np.exp(-r2 / lam) * v[None, :] * r2)

    term = Transport(coupling=Sinkhorn(lam, "fixed", **EXACT), inner=2)
    assert_close(force(term, x, anchor=y, step=1), ref.gradient(energy, x), 1e-7)


def test_sinkhorn_envelope_descends_the_regularised_cost(x64):
    """Minus the gradient of M min_P { <P, r2> + lam sum P log P } over couplings of marginals 1/M.

    The coupling is solved anew at every displaced cloud: nothing is held here.
    """
    x, y, lam = ref.cloud(6, 2), ref.cloud(6, 2, seed=1), 1.4
    numeric = -len(x) * ref.gradient(lambda x: ref.entropic_cost(x, y, lam), x, step=1e-4)
    term = Transport(coupling=Sinkhorn(lam, "envelope", **EXACT), inner=2)
    assert_close(force(term, x, anchor=y, step=1), numeric, 1e-6)


def test_sinkhorn_envelope_pulls_to_the_barycentric_projection(x64):
    """-2 M P (x_i - y_j) summed over j is 2 (projection of x_i - x_i), as rows of M P sum to 1."""
    x, y, lam = ref.cloud(6, 2), ref.cloud(6, 2, seed=1), 1.4
    term = Transport(coupling=Sinkhorn(lam, "envelope", **EXACT), inner=2)
    projection = len(x) * ref.plan(x, y, lam) @ y
    assert_close(force(term, x, anchor=y, step=1), 2 * (projection - x))


def test_fixed_scale_repels_when_near_and_attracts_when_far():
    term = Transport(coupling=FixedScale(lam=1.0))
    near, far = (force(term, np.array([[0.0], [d]])) for d in (0.5, 1.5))
    assert near[0, 0] < 0 < near[1, 0]
    assert far[1, 0] < 0 < far[0, 0]


# ------------------------------------------------------------------------------------------------ Sinkhorn


def library_plan(coupling, x, y, lam, start=None):
    start = coupling.init(len(x), jnp.float64) if start is None else start
    log_u, log_v = coupling.potentials(jnp.asarray(x), jnp.asarray(y), jnp.asarray(lam), start)
    P = np.exp(np.asarray(log_u)[:, None] + np.asarray(log_v)[None, :] - ref.sqdist(x, y) / lam)
    return P, (log_u, log_v)


def marginal_error(P):
    return max(np.abs(P.sum(axis) * len(P) - 1).max() for axis in (0, 1))


@pytest.mark.parametrize("dim", [3, 12])
@pytest.mark.parametrize("lam", [0.5, 3.0])
def test_rows_and_columns_of_the_coupling_sum_to_one_share(x64, dim, lam):
    x, y = ref.cloud(12, dim), ref.cloud(12, dim, seed=1)
    P, _ = library_plan(Sinkhorn(lam, **EXACT), x, y, lam * dim)
    assert marginal_error(P) < 1e-12
    assert_close(P, ref.plan(x, y, lam * dim), 1e-11)


def test_the_tolerance_bounds_the_marginals(x64):
    x, y = ref.cloud(12, 3), ref.cloud(12, 3, seed=1)
    P, _ = library_plan(Sinkhorn(0.5, iterations=20000, tolerance=1e-3), x, y, 0.5)
    assert 1e-6 < marginal_error(P) <= 1e-3  # no better than asked: it stops early


def test_iterations_bound_the_work(x64):
    x, y = ref.cloud(12, 3), ref.cloud(12, 3, seed=1)
    P, _ = library_plan(Sinkhorn(0.5, iterations=2, tolerance=1e-12), x, y, 0.5)
    assert marginal_error(P) > 1e-3


def test_a_small_lam_stays_finite_in_the_log_domain():
    x, y = (jnp.asarray(ref.cloud(12, 3, seed=s), jnp.float32) for s in (0, 1))
    coupling = Sinkhorn(1e-3, iterations=500)
    log_u, log_v = coupling.potentials(x, y, jnp.float32(1e-3), coupling.init(12, jnp.float32))
    assert np.all(np.isfinite(log_u))
    assert np.all(np.isfinite(log_v))


def test_one_warm_iteration_is_nearly_converged_and_a_cold_one_is_not(x64):
    x, lam = ref.cloud(15, 2), 0.3
    moved = x + 1e-3 * ref.cloud(15, 2, seed=1)
    _, memory = library_plan(Sinkhorn(lam, **EXACT), x, x, lam)
    once = Sinkhorn(lam, iterations=1, tolerance=1e-12)
    warm, _ = library_plan(once, moved, x, lam, start=memory)
    cold, _ = library_plan(once, moved, x, lam)
    truth = ref.plan(moved, x, lam)
    warm_error, cold_error = (np.abs(P - truth).sum() for P in (warm, cold))
    assert warm_error < 2e-3
    assert cold_error > 20 * warm_error


def test_transport_hands_its_potentials_to_the_next_step(x64):
    x, lam = ref.cloud(15, 2), 0.3
    exact = Transport(coupling=Sinkhorn(lam, **EXACT))
    _, memory = exact(make_cloud(x), None, exact.init(jnp.asarray(x)))
    once = Transport(coupling=Sinkhorn(lam, iterations=1, tolerance=1e-12))
    warm = once(make_cloud(x, step=1), None, memory)[0].drift
    assert_close(warm, ref.sinkhorn_force(x, x, lam, "fixed"))
    cold = once(make_cloud(x, step=1), None, once.init(jnp.asarray(x)))[0].drift
    assert np.abs(np.asarray(cold) - np.asarray(warm)).max() > 1e-2


# --------------------------------------------------------------------------------------------- calibration


@pytest.mark.parametrize(("dim", "kind"), LAYOUTS)
def test_calibrated_equals_the_double_loop(x64, dim, kind):
    x, t = ref.cloud(20, dim), ref.cloud(20, dim, seed=1)
    t = t + np.tanh(x)
    assert_close(ref.matrix_of(calibrated(as_jax(t, kind), as_jax(x, kind))), ref.calibrated(t, x))


@pytest.mark.parametrize(("dim", "kind"), LAYOUTS)
@pytest.mark.parametrize("name", [*FORCES, "Transport"])
def test_calibrated_forces(x64, name, dim, kind):
    x, h = ref.cloud(20, dim), 1.5 * dim
    if name == "Transport":
        term = Transport(0.5, FixedScale(2.0, lam=h), calibrate=True)
        plain = ref.transport(x, x, h, 2.0)
    else:
        term = FORCES[name][0](0.5, K.RBF(h), calibrate=True)
        plain = FORCES[name][1](x, h)
    assert_close(force(term, x, kind), 0.5 * ref.calibrated(plain, x), 1e-9)


@pytest.mark.parametrize("name", FORCES)
def test_a_calibrated_force_satisfies_the_identity(x64, name):
    """1/M sum_i t_i (x_i - m)^T = I and mean t = 0, as -grad log mu does for every density."""
    x = ref.cloud(20, 3)
    t = force(FORCES[name][0](calibrate=True), x)
    assert_close(t.T @ (x - x.mean(0)) / 20, np.eye(3))
    assert_close(t.mean(0), np.zeros(3))


@pytest.mark.parametrize("term", [Blob(calibrate=True), GFSD(calibrate=True)])
def test_calibration_gives_the_exact_covariance_of_a_gaussian(x64, term):
    """Measured fact of the notes, at a small size: exact mean and covariance when at rest."""
    precision, mean = np.array([[2.0, 0.6], [0.6, 1.0]]), np.array([1.0, -2.0])

    def log_density(x):
        return -0.5 * (x - mean) @ precision @ (x - mean)

    flow = px.Flow(px.Target(log_density), (px.Drift(), term), px.integrators.Euler(0.1))
    start = flow.init(jnp.asarray(ref.cloud(20, 2)))
    move = lambda state, _: (flow.step(jax.random.key(0), state)[0], None)
    state, _ = jax.jit(lambda s: jax.lax.scan(move, s, None, length=1500))(start)
    x = np.asarray(state.particles)
    np.testing.assert_allclose(x.mean(0), mean, atol=1e-6)
    np.testing.assert_allclose(np.cov(x.T, ddof=0), np.linalg.inv(precision), atol=1e-6)


@pytest.mark.parametrize("term", [Blob, GFSD, Transport])
def test_calibration_needs_more_particles_than_coordinates(term):
    with pytest.raises(ParticleError, match="calibrate"):
        term(calibrate=True).check(jnp.asarray(ref.cloud(3, 3)))
    term(calibrate=True).check(jnp.asarray(ref.cloud(4, 3)))


# ------------------------------------------------------------------------------------- Langevin, options


@pytest.mark.parametrize("kind", ["array", "tree"])
def test_langevin_noise_has_variance_two_weights(kind, key):
    x = ref.cloud(8000, 3).astype(np.float32)
    (drift, noise), _ = Langevin(0.7)(make_cloud(x, kind), key, ())
    noise = ref.matrix_of(noise)
    assert not np.any(ref.matrix_of(drift))
    tolerance = 5 * 1.4 * np.sqrt(2 / 8000)
    np.testing.assert_allclose(np.cov(noise.T), 1.4 * np.eye(3), atol=tolerance)
    np.testing.assert_allclose(noise.mean(0), 0, atol=5 * np.sqrt(1.4 / 8000))


def test_langevin_weight_may_be_a_schedule(key):
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    x = ref.cloud(5, 3).astype(np.float32)
    scheduled = Langevin(schedule)(make_cloud(x, step=4), key, ())[0].noise
    constant = Langevin(1.0)(make_cloud(x), key, ())[0].noise
    np.testing.assert_allclose(scheduled, np.sqrt(0.6) * np.asarray(constant), rtol=1e-5)


@pytest.mark.parametrize("term", [Langevin, Blob, GFSD, Transport])
def test_bad_weights_are_refused(term):
    with pytest.raises(OptionError, match="weight"):
        term(-1.0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Sinkhorn(derivative="true"), "'fixed', 'envelope'"),
        (lambda: Sinkhorn(iterations=0), "iterations"),
        (lambda: Sinkhorn(tolerance=-1.0), "tolerance"),
        (lambda: Transport(inner=0), "inner"),
        (lambda: FixedScale(gamma=-1.0), "gamma"),
        (lambda: FixedScale(lam=0.0), "bandwidth"),
    ],
)
def test_bad_options_are_refused(make, words):
    with pytest.raises(OptionError, match=words):
        make()


@pytest.mark.parametrize("term", [Blob(), GFSD(), Transport(), Transport(coupling=Sinkhorn())])
@pytest.mark.parametrize("num", [1, 3])
def test_forces_refuse_clouds_without_distances(term, num):
    with pytest.raises(ParticleError):
        term.check(jnp.ones((num, 2)))
