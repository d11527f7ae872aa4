"""Functions that XLA for CPUs keeps as calls: the same values, derivatives and batches; a call in the program, there alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from particlax import calls

X = jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)


def bent(a, x):
    return a * jnp.sin(x) + x**2


KEPT = calls.kept(bent)


@pytest.mark.parametrize("change", [lambda f: f, jax.jit, jax.grad, jax.vmap])
def test_a_kept_function_is_the_function(change):
    of = lambda f: change(lambda x: jnp.sum(f(2.0, x) * X[0]))(X if change is not jax.grad else X[1])  # fmt: skip
    np.testing.assert_allclose(of(KEPT), of(bent), rtol=1e-6)


def program(f):
    return jax.jit(lambda x: 2 * f(2.0, x + 1)).lower(X)


def test_it_is_a_call_in_the_program():
    assert " call(" in program(KEPT).compile().as_text()
    assert " call(" not in program(bent).compile().as_text()
    assert " call(" not in program(jax.jit(bent)).compile().as_text()  # which XLA takes apart


def test_elsewhere_it_leaves_no_trace(monkeypatch):
    assert "inlineable" in program(KEPT).as_text()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.clear_caches()
    assert "inlineable" not in program(KEPT).as_text()
    assert calls.after(X[0], X) is X


def test_a_value_after_another():
    first, value = jnp.array([jnp.nan, 1.0]), {"a": X}
    found = jax.jit(calls.after)(first, value)
    np.testing.assert_array_equal(found["a"], X)  # what comes first changes nothing
    assert " call(" in jax.jit(calls.after).lower(first, value).compile().as_text()
