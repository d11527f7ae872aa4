"""Runtime shape checks on the whole package, strict numerics, float64 on request; compiled programs are kept.

Most of the time of the tests is compilation. Programs are found again by both workers, by processes that tests start, and the next time:
in build/jax, unless JAX_COMPILATION_CACHE_DIR names another place. It is begun anew when it has grown too large.
"""

import os
import shutil
import signal
from pathlib import Path

import jax
import pytest
from jaxtyping import install_import_hook

with install_import_hook("particlax", "beartype.beartype"):
    import particlax  # noqa: F401

FOLDER, MOST = Path(__file__).parent.parent / "build" / "jax", 2**30
KEPT = {
    "jax_compilation_cache_dir": str(FOLDER),
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    for name, value in KEPT.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # for processes that tests start


def pytest_configure(config):
    first = not hasattr(config, "workerinput")  # before there are workers
    if first and FOLDER.exists() and sum(f.stat().st_size for f in FOLDER.iterdir()) > MOST:
        shutil.rmtree(FOLDER)


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


@pytest.fixture
def handlers():
    """The handlers before and after are the same: Python's own, even where tests run in the background."""
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    yield
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == before
    signal.signal(signal.SIGINT, found)
