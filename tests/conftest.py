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
def programs(request):
    """Modules that compile much and compute little say `COMPILE_FAST = True`: a third less time without most optimisations.

    Compiled programs are mapped into memory, and a process has a limited number of mappings, which thousands of tests reach: a module's
    programs go with it.
    """
    jax.config.update(
        "jax_disable_most_optimizations", getattr(request.module, "COMPILE_FAST", False)
    )
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
