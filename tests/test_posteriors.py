"""The posteriors are written rightly: Stein's identity holds on their reference draws."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import posteriors, reference

SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "posteriordb"


@pytest.fixture
def folder():
    found = posteriors.home() or posteriors.home(str(SHARED))
    if found is None:
        pytest.skip("no posteriordb folder: set PARTICLAX_POSTERIORDB to one")
    return found


@pytest.mark.parametrize("name", posteriors.MODELS)
def test_stein_identity_on_reference_draws(folder, x64, name):
    posterior = posteriors.load(name, folder)
    trees = [posterior.unconstrain(draw) for draw in posterior.draws]
    points = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *trees)
    back = jax.vmap(posterior.constrain)(points)
    np.testing.assert_allclose(back, posterior.draws, rtol=1e-6, atol=1e-6)
    scores = jax.vmap(jax.grad(posterior.log_density))(points)
    for x, s in zip(jax.tree.leaves(points), jax.tree.leaves(scores), strict=True):
        flat, score = (np.asarray(a).reshape(len(a), -1) for a in (x, s))
        centred = flat - flat.mean(0)
        for test in (score, score * centred + 1):  # E[s] = 0 and E[s_i (u_i - m_i)] = -1
            error = test.mean(0) / (test.std(0) / np.sqrt(len(test)))
            assert np.abs(error).max() < 4.5


@pytest.mark.parametrize("name", posteriors.MODELS)
def test_parameters_have_the_names_of_the_reference(folder, name):
    posterior = posteriors.load(name, folder)
    assert posterior.constrain(posterior.point).shape == (len(posterior.names),)
    assert jnp.isfinite(posterior.log_density(posterior.point))


@pytest.mark.parametrize("name", posteriors.MODELS)
def test_px_sample_is_right_with_nothing_set(folder, name):
    """Every mean within 0.1 reference sd, every sd within 10 %, from one point."""
    posterior = posteriors.load(name, folder)
    outcome = reference.ours(posterior, seed=7)
    seen = reference.errors(posterior, outcome)
    assert outcome.notes == "converged"
    assert seen["mean"] < 0.1
    assert 0.9 < seen["sd"] < 1.1
