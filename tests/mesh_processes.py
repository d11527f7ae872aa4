"""Run twice by tests/test_mesh.py, with a port and a rank: prints how far a run over both is from one of its own."""

import json
import sys

import jax

port, rank = int(sys.argv[1]), int(sys.argv[2])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import particlax as px  # noqa: E402
from particlax.placement import on_host  # noqa: E402

rows = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
target = px.Target(
    log_prior=lambda w: -0.5 * w @ w,
    log_likelihood=lambda w, batch: -((batch @ w) ** 2),
    num_data=40,
)
mesh = jax.make_mesh((2,), ("particles",))
gaps = []
for flow in (px.svgd(target, step_size=0.01), px.sgld(target, step_size=0.001)):
    runs = [
        px.run(
            flow,
            jax.random.normal(jax.random.key(0), (8, 3)),
            steps=4,
            key=jax.random.key(1),
            data=px.Minibatches(jnp.asarray(rows), 10),
            mesh=where,
            thin=4,
            progress=rank == 0 and where is not None,
        )
        for where in (None, mesh)
    ]
    one, many = (on_host(run.particles) for run in runs)
    kept, seen = (run.history.particles[-1] for run in runs)
    gaps += [float(np.max(np.abs(one - many))), float(np.max(np.abs(kept - seen)))]
print()
print(json.dumps(gaps))
