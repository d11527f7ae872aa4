"""Run twice by tests/test_mesh.py, as two processes over loopback: prints one JSON object of what it found.

python tests/mesh_processes.py PORT RANK FOLDER lost|whole
"""

import json
import os
import signal
import sys

import jax

port, rank, folder, part = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_disable_most_optimizations", True)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, heartbeat_timeout_seconds=10)

import equinox as eqx  # noqa: E402
import numpy as np  # noqa: E402

import particlax as px  # noqa: E402
from particlax.errors import DataError, LostError, ParticlaxError  # noqa: E402
from particlax.folder import Folder  # noqa: E402
from particlax.placement import on_host  # noqa: E402
from tests.mesh_runs import ROWS, STEPS, cloud, gap, regression, sampler, special_runs, start  # noqa: E402
from tests.mesh_runs import go as plain  # noqa: E402

TWO = jax.make_mesh((2,), ("particles",))


def go(name, mesh=TWO, observers=(), step_size=0.01, cloud=None):
    """The run of tests/mesh_runs, with checkpoints in a folder of this name."""
    return px.run(
        px.svgd(regression(), step_size=step_size),
        start() if cloud is None else cloud,
        steps=STEPS,
        key=jax.random.key(1),
        data=px.Minibatches(ROWS, 10),
        progress=False,
        mesh=mesh,
        checkpoint=px.Checkpoints(os.path.join(folder, name), every=2),
        observers=observers,
        observe_every=1,
    )


def at(step, action):
    return lambda snapshot: action() if int(snapshot.state.step) == step else None


def lost():
    """The second process ends without a word after step 5; what the first one sees."""
    kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
    try:
        go("lost", observers=at(5, kill) if rank else ())
    except LostError as error:
        print(json.dumps(str(error)), flush=True)
        raise


def interrupted():
    """A signal to one process: how the run ends in this one, and where it goes on."""
    found = {}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in the background
    term = lambda: os.kill(os.getpid(), signal.SIGTERM)
    stop = lambda: os.kill(os.getpid(), signal.SIGINT)
    try:
        go("signals", observers=at(3, term) if rank else ())
    except SystemExit as end:
        found["code"] = end.code
    try:
        go("signals", observers=() if rank else at(5, stop))
    except px.checkpoints.Interrupted as end:
        found["line"] = str(end)
    found["end"] = on_host(go("signals").particles).tolist()
    return found


def refused():
    """Errors of one process that both must see: another folder, another flow, other particles."""
    lines = []
    cases = (
        {"name": "whole" if rank else "elsewhere"},
        {"name": "whole", "step_size": 0.02 if rank else 0.01},
        {"name": "other", "cloud": start() + rank},
    )
    px.folder.SEEN_SECONDS = 0.5
    for case in cases:
        try:
            go(**case)
        except ParticlaxError as error:
            lines.append(str(error))
    return lines


def apart(number, flow, particles, **options):
    """How far a run over both is from one of its own, in one of the two processes."""
    many = plain(flow, particles, TWO, **options)
    whole = jax.tree.map(on_host, many.state)
    if number % 2 != rank:
        return 0.0
    return gap(plain(flow, particles, **options), eqx.tree_at(lambda run: run.state, many, whole))


def samplers():
    names = px.algorithms.__all__
    return {name: apart(i, sampler(name), cloud(16, 4)) for i, name in enumerate(names)}


def special():
    runs = special_runs()
    del runs["layers"]  # eight devices are enough
    return {name: apart(i, *runs[name][0], **runs[name][1]) for i, name in enumerate(runs)}


class Noting:
    """Rows on a disk that note which of them are read."""

    def __init__(self, rows):
        self.rows, self.shape, self.dtype, self.seen = rows, rows.shape, rows.dtype, set()

    def __getitem__(self, wanted):
        self.seen |= set(np.asarray(wanted).tolist())
        return self.rows[wanted]


def batches(step):
    while True:
        yield np.roll(ROWS, step, axis=0)[:10]
        step += 1


def streams():
    """How far streamed runs are from one in memory, and the share of an epoch's rows that this process reads."""
    flow, halves = (
        px.svgd(regression(), step_size=0.01),
        jax.make_mesh((1, 2), ("particles", "data")),
    )
    one = plain(flow, start(), steps=4, data=px.Minibatches(ROWS, 10))
    found, read = {}, {}
    for name, mesh in (("same rows", TWO), ("own rows", halves)):
        rows = Noting(ROWS)
        many = plain(flow, start(), mesh, steps=4, data=px.Stream(rows, 10))
        found[name] = float(np.max(np.abs(on_host(many.particles) - np.asarray(one.particles))))
        read[name] = len(rows.seen)
    source = px.Stream(batches, num_data=40)
    one, many = (plain(flow, start(), mesh, steps=4, data=source) for mesh in (None, halves))
    found["ready-made"] = float(np.max(np.abs(on_host(many.particles) - np.asarray(one.particles))))
    bad = ROWS.copy()
    bad[:, rank] = np.nan if rank else bad[:, rank]
    try:
        plain(flow, start(), halves, steps=4, data=px.Stream(bad, 10))
    except DataError as error:
        found["refused"] = str(error)
    return found, read


def rescued():
    """Where a run was saved whose fourth batch is not finite in the half of the second process."""
    halves = jax.make_mesh((1, 2), ("particles", "data"))
    where = os.path.join(folder, "rescued")

    key = jax.random.fold_in(jax.random.key(1), 2**31 - 1)  # as px.run draws batches
    bad = ROWS.copy()
    bad[px.Minibatches(ROWS, 10).indices(key, np.int32(3))[9]] = np.nan
    flow, source = px.svgd(regression(), step_size=0.01), px.Stream(bad, 10)
    try:
        plain(flow, start(), halves, steps=6, data=source, checkpoint=where, every=100)
    except DataError as error:
        return str(error), Folder(where).steps(), int(error.state.step)


def whole():
    found = {"lost": on_host(go("lost").particles).tolist()}
    found["whole"] = on_host(go("whole").particles).tolist()
    found["from one"] = on_host(go("one").particles).tolist()
    found["alone"] = np.asarray(go(f"alone{rank}", None).particles).tolist()
    if rank:  # one process saves more often on its own than the other
        go("more", None)
    seen = px.checkpoints.load(os.path.join(folder, "whole"))
    found["loaded"] = seen.particles.tolist()
    flow = px.svgd(regression(), step_size=0.01)
    like = jax.device_put(start(), jax.NamedSharding(TWO, jax.P("particles")))
    if rank:  # which checkpoint it is, one process says for all
        px.checkpoints._chosen = lambda *args: 0 / 0
    seen = px.checkpoints.load(os.path.join(folder, "whole"), flow=flow, particles=like)
    found["placed"] = (
        on_host(seen.state.particles).tolist(),
        str(seen.state.particles.sharding.spec),
    )
    found["signals"] = interrupted()
    found["refused"] = refused()
    found["single"], found["special"] = samplers(), special()
    found["streams"] = streams()
    found["rescued"] = rescued()
    with jax.enable_x64(True):
        found["double"] = samplers()
    print()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    lost() if part == "lost" else whole()
