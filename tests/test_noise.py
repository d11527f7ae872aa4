"""Our normals are JAX's own, whatever the shape, type, key and transformation, and are not made in a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import particlax as px
from particlax import noise
from particlax.particles import random_like
from particlax.terms import Frame


def same(key, shape, dtype):
    """The same bits go in; fused in another way, the last bit of a float may come out differently."""
    found, expected = noise.normal(key, shape, dtype), jax.random.normal(key, shape, dtype)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    size = float(jnp.finfo(found.dtype).eps)
    np.testing.assert_allclose(
        np.asarray(found, float), np.asarray(expected, float), rtol=4 * size, atol=size
    )


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (2, 0), (1, 100_003)])
def test_numbers_are_jax_s(shape):
    for seed in (0, 2**31 - 1):
        same(jax.random.key(seed), shape, jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64])
def test_types(dtype, x64):
    same(jax.random.key(3), (4, 50), dtype)


def test_bits_are_exactly_jax_s(x64):
    key = jax.random.key(5)
    for width in (8, 16, 32, 64):
        found = noise._bits(jax.random.key_data(key), width, (3, 40))
        np.testing.assert_array_equal(found, jax.random.bits(key, (3, 40), f"uint{width}"))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("compiled", [False, True])
def test_keys_and_bits_are_exactly_jax_s(impl, compiled):
    key = jax.random.key(2**31 + 7, impl=impl)
    make = jax.jit if compiled else lambda f: f
    for data in (0, 1, 2**31 - 1, jnp.int32(-5), jnp.uint32(2**32 - 1)):
        found, expected = make(noise.fold_in)(key, data), jax.random.fold_in(key, data)
        assert found.dtype == expected.dtype and found.shape == ()
        words = [jax.random.key_data(some) for some in (found, expected)]
        np.testing.assert_array_equal(*words)
    found = make(lambda key: noise.bits(key, (2, 46)))(key)
    np.testing.assert_array_equal(found, jax.random.bits(key, (2, 46), jnp.uint32))
    with jax.threefry_partitionable(False):
        np.testing.assert_array_equal(noise.bits(key, (3,)), jax.random.bits(key, (3,), jnp.uint32))


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_other_generators_stay_as_they_are(impl):
    key = jax.random.key(0, impl=impl)
    np.testing.assert_array_equal(noise.normal(key, (9,)), jax.random.normal(key, (9,)))


def test_the_older_order_of_bits():
    with jax.threefry_partitionable(False):
        same(jax.random.key(4), (5, 3), jnp.float32)


def test_keys_may_be_many():
    keys = jax.random.split(jax.random.key(1), 6)
    found = jax.jit(jax.vmap(lambda key: noise.normal(key, (8,))))(keys)
    np.testing.assert_allclose(found, jax.vmap(lambda k: jax.random.normal(k, (8,)))(keys), 1e-6)


def test_parts_do_not_depend_on_the_rest():
    """Rows of a leaf in any order of computation, and leaves by their place, have their own numbers."""
    key = jax.random.key(2)
    whole = noise.normal(key, (40, 6))
    np.testing.assert_array_equal(
        jax.jit(lambda: noise.normal(key, (40, 6))[13:15])(), whole[13:15]
    )
    cloud = {"a": jnp.zeros((40, 3)), "b": jnp.zeros((40, 3))}
    found = random_like(key, cloud, noise.normal)
    assert abs(np.corrcoef(found["a"].ravel(), found["b"].ravel())[0, 1]) < 0.3
    np.testing.assert_array_equal(Frame().normal(key, cloud)["b"], found["b"])


def test_noise_of_a_step_is_one_expression():
    """No loop over rounds, which would write every number to memory at each of its turns; no numbers kept beside the cloud."""
    target = px.Target(lambda x: -0.5 * jnp.sum(x**2))
    flow = px.sgld(target, step_size=0.1)
    state = flow.init(jax.random.normal(jax.random.key(0), (50, 1000)))
    compiled = (
        jax.jit(lambda key, s: flow.step(key, s)[0]).lower(jax.random.key(0), state).compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < 50 * 1000 * 4
