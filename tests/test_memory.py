"""SVGD with many particles holds no M x M array."""

import subprocess
import sys

SCRIPT = """
import resource
import jax, jax.numpy as jnp, optax
import particlax as px

target = px.Target(lambda x: -0.5 * jnp.sum(x**2))
flow = px.svgd(target, optimizer=optax.adam(0.05))
small = px.particles.normal(jax.random.key(0), 64, jnp.zeros(2))
px.run(flow, small, steps=1, key=jax.random.key(1), progress=False)  # start-up: compiler, threads
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
large = px.particles.normal(jax.random.key(0), 20000, jnp.zeros(2))
result = px.run(flow, large, steps=2, key=jax.random.key(1), progress=False)
assert bool(jnp.all(jnp.isfinite(result.particles)))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_svgd_with_twenty_thousand_particles_fits_in_500_mib():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    mebibytes = float(done.stdout)
    assert mebibytes < 500, f"{mebibytes:.0f} MiB above start-up; the full matrix would be 1526"
