"""Runtime shape checks on the whole package, strict numerics, float64 on request."""

import jax
import pytest
from jaxtyping import install_import_hook

with install_import_hook("particlax", "beartype.beartype"):
    import particlax  # noqa: F401


@pytest.fixture
def x64():
    """Run a test in float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def key():
    return jax.random.key(0)


@pytest.fixture(autouse=True, scope="module")
def forget_compiled_programs():
    """Compiled programs are mapped into memory, and a process has a limited number of mappings: thousands of tests reach it."""
    yield
    jax.clear_caches()
