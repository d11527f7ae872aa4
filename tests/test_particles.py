"""Particle clouds: checks, shapes, initialisers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import particlax as px
from particlax.errors import ParticleError

from . import references as ref


@pytest.mark.parametrize("dim", [3, 12])
def test_flatten_and_back(x64, dim):
    x = ref.cloud(5, dim)
    tree = jax.tree.map(jnp.asarray, ref.layout(x, "tree"))
    matrix, unflatten = px.particles.flatten(tree)
    np.testing.assert_array_equal(matrix, x)
    back = unflatten(matrix)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for key in tree:
        np.testing.assert_array_equal(back[key], tree[key])


def test_unflatten_takes_another_number_of_rows():
    tree = {"w": jnp.zeros((5, 2, 3)), "b": jnp.zeros(5)}
    _, unflatten = px.particles.flatten(tree)
    rows = jnp.arange(14.0).reshape(2, 7)
    np.testing.assert_array_equal(unflatten(rows)["b"], [0.0, 7.0])
    assert unflatten(rows)["w"].shape == (2, 2, 3)


def test_flatten_keeps_the_dtype_of_each_leaf():
    tree = {"a": jnp.ones(4, jnp.bfloat16), "b": jnp.ones((4, 2), jnp.float32)}
    matrix, unflatten = px.particles.flatten(tree)
    assert matrix.dtype == jnp.float32
    back = unflatten(matrix)
    assert back["a"].dtype == jnp.bfloat16
    assert back["b"].dtype == jnp.float32


def test_number_and_dimension():
    tree = {"w": jnp.zeros((5, 2, 3)), "b": jnp.zeros(5)}
    assert px.particles.num_particles(tree) == 5
    assert px.particles.dimension(tree) == 7
    assert px.particles.dimension(jnp.zeros((5, 4))) == 4


@pytest.mark.parametrize(
    ("cloud", "words"),
    [
        ({}, "empty"),
        ({"w": np.zeros((5, 2), int)}, "'w'.*int"),
        ({"w": np.zeros((5, 2)), "b": np.float32(0.0)}, "'b'.*scalar"),
        ({"a": np.zeros((5, 2)), "b": np.zeros(4)}, "'b'.*4.*'a'.*5"),
        (np.zeros((0, 3)), "no particles"),
    ],
)
def test_a_cloud_that_is_none_is_refused_by_name(cloud, words):
    with pytest.raises(ParticleError, match=words):
        px.particles.num_particles(cloud)


def test_as_cloud_copies():
    x = jnp.ones((4, 2))
    y = px.particles.as_cloud(x)
    assert y.unsafe_buffer_pointer() != x.unsafe_buffer_pointer()
    np.testing.assert_array_equal(x, y)


def test_replicate_repeats_a_point():
    cloud = px.particles.replicate({"a": 1, "w": jnp.array([2.0, 3.0])}, 4)
    np.testing.assert_array_equal(cloud["a"], np.ones(4))
    np.testing.assert_array_equal(cloud["w"], np.tile([2.0, 3.0], (4, 1)))
    assert jnp.issubdtype(cloud["a"].dtype, jnp.floating)


def test_normal_has_the_moments_asked_for(key):
    like = {"a": jnp.array(3.0), "w": jnp.array([-1.0, 5.0])}
    x = ref.matrix_of(px.particles.normal(key, 20000, like, scale=0.5))
    np.testing.assert_allclose(x.mean(0), [3, -1, 5], atol=5 * 0.5 / np.sqrt(20000))
    covariance = np.cov(x.T)
    np.testing.assert_allclose(covariance, 0.25 * np.eye(3), atol=5 * 0.25 * np.sqrt(2 / 20000))


def test_leaves_of_one_shape_are_independent(key):
    like = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    cloud = px.particles.normal(key, 5000, like)
    assert abs(np.corrcoef(cloud["a"], cloud["b"])[0, 1]) < 5 / np.sqrt(5000)


def test_uniform_fills_the_box(key):
    x = np.asarray(px.particles.uniform(key, 20000, like=jnp.array([1.0, -2.0]), scale=3.0))
    centred = x - np.array([1.0, -2.0])
    assert np.abs(centred).max() <= 3
    assert np.abs(centred).max(0).min() > 2.99
    np.testing.assert_allclose(centred.var(0), 3.0, rtol=0.05)  # (2 * 3)^2 / 12
    np.testing.assert_allclose(centred.mean(0), 0, atol=5 * np.sqrt(3 / 20000))
