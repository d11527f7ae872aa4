"""Results for ArviZ."""

import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import particlax as px
from particlax.export import to_arviz

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # arviz 0.23 announces its refactoring at import
    arviz = pytest.importorskip("arviz")


def bell(x):
    return -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(x))


FLOW = px.sgld(px.Target(bell), step_size=0.1)


def tree(num=4):
    return {"net": {"w": jnp.arange(num * 6.0).reshape(num, 2, 3)}, "b": jnp.arange(float(num))}


def run(key, thin=None, steps=40):
    start = jax.tree.map(lambda leaf: leaf / 10, tree())
    return px.run(FLOW, start, steps=steps, key=key, thin=thin, progress=False)


def test_particles_are_one_chain(key):
    result = run(key)
    posterior = result.to_arviz().posterior
    assert set(posterior.data_vars) == {"net.w", "b"}
    assert posterior.sizes["chain"] == 1
    assert posterior.sizes["draw"] == 4
    assert posterior["net.w"].shape == (1, 4, 2, 3)
    np.testing.assert_array_equal(posterior["net.w"].values[0], result.particles["net"]["w"])
    np.testing.assert_array_equal(posterior["b"].values[0], result.particles["b"])


def test_history_is_one_chain_per_particle(key):
    result = run(key, thin=4)
    posterior = result.to_arviz().posterior
    assert posterior["b"].shape == (4, 10)
    assert posterior["net.w"].shape == (4, 10, 2, 3)
    for particle in range(4):
        np.testing.assert_array_equal(
            posterior["net.w"].values[particle], result.history.particles["net"]["w"][:, particle]
        )


def test_fewer_clouds_than_particles_give_no_warning(key):
    """The usual case with particles: many of them, and few clouds kept."""
    assert run(key, thin=20).to_arviz().posterior["b"].shape == (4, 2)


def test_single_array_is_called_x():
    posterior = to_arviz(jnp.arange(6.0).reshape(3, 2)).posterior
    assert list(posterior.data_vars) == ["x"]
    assert posterior["x"].shape == (1, 3, 2)


def test_tuples_are_named_by_place():
    posterior = to_arviz((jnp.zeros(3), [jnp.ones((3, 2))])).posterior
    assert set(posterior.data_vars) == {"0", "1.0"}


def test_low_precision_leaves():
    posterior = to_arviz({"x": jnp.arange(3.0).astype(jnp.bfloat16)}).posterior
    np.testing.assert_array_equal(np.asarray(posterior["x"].values, float)[0], [0.0, 1.0, 2.0])


def test_summary_reads_it(key):
    summary = arviz.summary(run(key, thin=1).to_arviz(), var_names=["b"])
    assert "b" in summary.index
    assert np.isfinite(float(summary.loc["b", "mean"]))


def test_without_arviz(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(px.errors.OptionError, match=r"arviz.*not installed.*particlax\[arviz\]"):
        to_arviz(jnp.zeros((3, 2)))
