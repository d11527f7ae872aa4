"""Checkpoints: a resumed run equals an uninterrupted one bit for bit, and no other run is mistaken for it."""

import gc
import importlib
import json
import os
import pickle
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import particlax as px
from particlax import fingerprint, folder, store

COMPILE_FAST = True

CheckpointError = px.errors.CheckpointError
ROOT = os.path.dirname(os.path.dirname(px.__file__))


def bell(x):
    return -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(x))


TARGET = px.Target(bell)
ALGORITHMS = importlib.import_module("particlax.algorithms")
FLOWS = {
    name: getattr(ALGORITHMS, name)(TARGET, **options)
    for name, options in {
        name: {"step_size": 0.05}
        if name in ("sgld", "sghmc", "calibrated")
        else {"optimizer": optax.adam(0.05)}
        for name in ALGORITHMS.__all__
    }.items()
} | {
    "psgld": px.sgld(TARGET, integrator=px.integrators.RMS(0.05)),
    "sinkhorn": px.w_sgld(
        TARGET,
        coupling=px.diffusions.Sinkhorn(iterations=5),
        inner=3,
        optimizer=optax.adagrad(0.1),
    ),
    "schedule": px.sgld(TARGET, step_size=px.schedules.polynomial(0.1)),
}


def cloud(num=8):
    keys = jax.random.split(jax.random.key(8))
    return {"w": jax.random.normal(keys[0], (num, 2, 2)), "b": jax.random.normal(keys[1], (num,))}


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        x.dtype == y.dtype and np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs
    )


def go(flow, start=None, steps=11, seed=0, **options):
    start = cloud() if start is None else start
    key = jax.random.key(seed)
    return px.run(flow, start, steps=steps, key=key, progress=False, **options)


class CrashError(BaseException):
    pass


def crash(flow, start=None, at=8, **options):
    """A run that dies at a step."""

    def watch(snapshot):
        if int(snapshot.state.step) >= at:
            raise CrashError

    with pytest.raises(CrashError):
        go(flow, start, observers=watch, observe_every=1, **options)


# --------------------------------------------------------------------------------------------- bit for bit


@pytest.mark.parametrize("name", FLOWS)
def test_every_sampler_resumes_bit_for_bit(name, tmp_path, capsys):
    flow = FLOWS[name]
    whole = go(flow)
    saved = {"checkpoint": tmp_path / "run", "every": 3}
    crash(flow, **saved)
    resumed = go(flow, **saved)
    assert same(whole.state, resumed.state)
    assert same(whole.log_density, resumed.log_density)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"resuming at step 6 of 11 from {tmp_path / 'run' / '00000006'}"]


def network():
    """Batch-norm-like statistics in `carried`, one layer shared, dropout, minibatches with a transform."""

    def forward(p, x, carried, key):
        scale = 0.9 * carried["scale"] + 0.1 * jnp.mean(jnp.abs(x))
        kept = jax.random.bernoulli(key, 0.8, (4,))
        return (jnp.tanh(x @ p["trunk"] / scale) * kept) @ p["head"], {"scale": scale}

    apply = lambda p, x, carried: jnp.tanh(x @ p["trunk"] / carried["scale"]) @ p["head"]
    net = px.networks.Network(lambda key: None, apply, forward, stateful=True)
    flow = px.svgd(px.networks.classifier(net, num_data=40), optimizer=optax.adam(0.01))
    keys = jax.random.split(jax.random.key(3), 3)
    parts = {
        "trunk": jax.random.normal(keys[0], (5, 3, 4)),
        "head": jax.random.normal(keys[1], (5, 4, 2)),
    }
    own, shared = px.networks.split(parts, ["head"])
    x = np.asarray(jax.random.normal(keys[2], (40, 3)))
    shift = lambda key, batch: {**batch, "x": batch["x"] + 0.1 * jax.random.normal(key)}
    data = px.Minibatches({"x": x, "y": (x[:, 0] > 0).astype(int)}, 7, shift)
    return net, flow, flow.init(own, {"scale": jnp.ones(5)}, shared), data


def test_networks_with_state_and_shared_leaves_resume_bit_for_bit(tmp_path):
    net, flow, start, data = network()
    saved = {"checkpoint": tmp_path / "run", "every": 4, "data": data}
    whole = go(flow, start, data=data)
    crash(flow, start, **saved)
    resumed = go(flow, start, **saved)
    assert same(whole.state, resumed.state)
    assert not np.array_equal(resumed.state.carried["scale"], np.ones(5))
    seen = px.checkpoints.load(tmp_path / "run", flow=flow, particles=start)
    assert same(seen.state, whole.state)
    x = data.arrays["x"]
    wanted = px.predictive.categorical(net, whole, x)
    assert np.array_equal(px.predictive.categorical(net, seen.state, x).probs, wanted.probs)
    plain = px.checkpoints.load(tmp_path / "run")
    assert np.array_equal(plain.carried["scale"], whole.state.carried["scale"])
    assert np.array_equal(plain.shared["trunk"], whole.shared["trunk"])


def test_saved_while_the_run_goes_on(tmp_path):
    """What is written is the cloud of its step, although the run donates its buffers meanwhile."""
    flow = FLOWS["sgld"]
    saved = px.Checkpoints(tmp_path / "run", every=1, keep=99)
    go(flow, steps=30, checkpoint=saved)
    clouds = go(flow, steps=30, thin=1).history.particles
    for step in range(1, 31):
        seen = px.checkpoints.load(tmp_path / "run", step)
        assert np.array_equal(seen.particles["w"], clouds["w"][step - 1])
        assert np.array_equal(seen.particles["b"], clouds["b"][step - 1])


def test_saves_leave_no_cycles(tmp_path):
    """What waits for the garbage collector keeps memory of a save from being given back, and an hour of saves grows."""
    where = folder.Folder(tmp_path)
    where.lock()
    saves = store.Store(where)
    tree = {"w": jnp.ones((4, 3)), "key": jax.random.key(0)}

    def save(step):
        saves.save(step, tree, {"config": {"a": "b"}, "replaced": [[1, 2, 3]]}, lambda: None)
        saves.wait()

    save(1)  # what is made once
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for step in (2, 3):
            save(step)
        gc.collect()
        left = [repr(thing)[:100] for thing in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        saves.close()
        where.unlock()
    assert left == []


def test_checkpoints_do_not_alter_a_run_and_compile_nothing(tmp_path):
    calls = []

    def counted(x):
        calls.append(1)
        return bell(x)

    flow = px.sgld(px.Target(counted), step_size=0.1)
    whole = go(flow)
    assert same(whole.state, go(flow, checkpoint=tmp_path / "run", every=2).state)
    go(flow, steps=20, checkpoint=tmp_path / "run", every=3)
    assert len(calls) == 1


def test_a_finished_run_returns_at_once(tmp_path, capsys):
    flow, saved = FLOWS["sgld"], {"checkpoint": tmp_path / "run", "every": 100}
    first = go(flow, **saved)
    second = go(flow, **saved)
    assert same(first.state, second.state)
    assert same(first.log_density, second.log_density)
    assert (
        capsys.readouterr().err == f"finished at step 11 of 11: {tmp_path / 'run' / '00000011'}\n"
    )
    assert px.checkpoints.load(tmp_path / "run").step == 11  # the end is saved whatever `every` is


def test_more_steps_go_on_and_fewer_are_refused(tmp_path):
    flow, saved = FLOWS["sgld"], {"checkpoint": tmp_path / "run", "every": 4}
    go(flow, steps=5, **saved)
    assert same(go(flow, steps=13, **saved).state, go(flow, steps=13).state)
    with pytest.raises(CheckpointError, match="at step 13, but this run goes from step 0 to 5"):
        go(flow, steps=5, **saved)


def test_runs_that_go_on_from_a_state(tmp_path):
    flow, saved = FLOWS["sgld"], {"checkpoint": tmp_path / "run", "every": 4}
    state = go(flow, steps=5).state
    crash(flow, state, steps=11, at=14, **saved)
    assert same(go(flow, state, steps=11, **saved).state, go(flow, steps=16).state)


def test_stopped_by_an_observer(tmp_path):
    flow, saved = FLOWS["sgld"], {"checkpoint": tmp_path / "run", "every": 100}
    stop = {"observers": lambda s: int(s.state.step) >= 6, "observe_every": 3}
    assert go(flow, **saved, **stop).stopped
    again = go(flow, **saved, **stop)
    assert again.stopped
    assert int(again.state.step) == 6
    assert same(go(flow, **saved).state, go(flow).state)  # without the observer it goes on


def test_more_steps_go_on_after_an_observer_has_stopped(tmp_path, capsys):
    flow, saved = FLOWS["sgld"], {"checkpoint": tmp_path / "run", "every": 100}
    stop, look = (lambda s: int(s.state.step) >= 6), (lambda s: False)
    go(flow, observers=stop, observe_every=3, **saved)
    assert int(go(flow, observers=look, **saved).state.step) == 6  # it was ended, not cut short
    assert "finished at step 6 of 11" in capsys.readouterr().err
    longer = go(flow, steps=14, observers=look, **saved)
    assert "resuming at step 6 of 14" in capsys.readouterr().err
    assert same(longer.state, go(flow, steps=14).state)
    assert not longer.stopped


def test_observers_keep_their_rhythm(tmp_path):
    flow, saved, seen = FLOWS["sgld"], {"checkpoint": tmp_path / "run", "every": 4}, []
    crash(flow, at=5, **saved)
    go(
        flow,
        observers=lambda s: seen.append((int(s.state.step), s.steps)),
        observe_every=3,
        **saved,
    )
    assert seen == [(6, 11), (9, 11), (11, 11)]


# ------------------------------------------------------------------------------------ when, and which to keep


def kept(path):
    return folder.Folder(path).steps()


def test_keeps_the_last(tmp_path):
    go(FLOWS["sgld"], checkpoint=px.Checkpoints(tmp_path / "run", every=2, keep=2))
    assert kept(tmp_path / "run") == [10, 11]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["00000010", "00000011", "lock"]


def test_keeps_the_best(tmp_path):
    """The value is best at step 4, NaN at step 6."""
    value = lambda s: np.nan if int(s.state.step) == 6 else -abs(int(s.state.step) - 4)
    saved = px.Checkpoints(tmp_path / "run", every=2, keep=2, best=value)
    crash(FLOWS["sgld"], at=9, checkpoint=saved)
    assert kept(tmp_path / "run") == [4, 6, 8]
    go(FLOWS["sgld"], checkpoint=saved)
    assert kept(tmp_path / "run") == [4, 10, 11]
    best = px.checkpoints.load(tmp_path / "run", "best")
    assert (best.step, best.value) == (4, 0.0)


def test_by_time(tmp_path):
    slow = {"observers": lambda s: time.sleep(0.02), "observe_every": 1}
    saved = px.Checkpoints(tmp_path / "run", every="0.1s", keep=99)
    began = time.perf_counter()
    go(FLOWS["sgld"], steps=30, checkpoint=saved, **slow)
    spent = time.perf_counter() - began  # at least 0.6 s, and more on a busy machine
    assert 3 <= len(kept(tmp_path / "run")) <= spent / 0.1 + 2
    go(FLOWS["sgld"], steps=30, checkpoint=tmp_path / "other", **slow)  # 5 minutes
    assert kept(tmp_path / "other") == [30]


@pytest.mark.parametrize("every", ["5 minutes", "", "0s", "min", 0, -1, 2.5, True])
def test_every_must_be_steps_or_a_time(every, tmp_path):
    with pytest.raises((px.errors.OptionError, TypeError)):
        go(FLOWS["sgld"], checkpoint=tmp_path / "run", every=every)
    assert not (tmp_path / "run").exists()


def test_bad_options(tmp_path):
    for options, words in (
        ({"every": 3}, "without a checkpoint"),
        ({"checkpoint": px.Checkpoints("x"), "every": 3}, "give it there"),
        ({"checkpoint": "x", "thin": 2}, "thin keeps clouds in memory"),
        ({"checkpoint": ""}, "the name of a folder"),
        ({"on_nonfinite": "ignore"}, "expected one of 'stop', 'replace'"),
    ):
        with pytest.raises(px.errors.OptionError, match=words):
            go(FLOWS["sgld"], **options)
    with pytest.raises(px.errors.OptionError, match="keep is 0"):
        px.Checkpoints("x", keep=0)


# ------------------------------------------------------------------------------------------- other runs


def prior(scale):
    return lambda m: -0.5 * jnp.sum(m**2) / scale**2


def made(scale=1.0, rate=0.1, optimizer=optax.adam, kernel=None):
    target = px.Target(
        log_prior=prior(scale), log_likelihood=lambda m, y: -0.5 * (y - m[0]) ** 2, num_data=12
    )
    return px.svgd(target, optimizer=optimizer(rate), kernel=kernel or px.kernels.RBF())


DATA = np.linspace(-1, 3, 12).astype(np.float32)
START = np.ones((4, 2), np.float32) * np.arange(4, dtype=np.float32)[:, None]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("other") / "run"
    go(made(), START, 4, data=px.Minibatches(DATA, 4), checkpoint=path, every=2)
    return path


CHANGES = {
    "optimizer's number": ({"flow": made(rate=0.2)}, "step_size: -0.1 there, -0.2 here"),
    "optimizer": ({"flow": made(optimizer=optax.sgd)}, "optimizer"),
    "closure": ({"flow": made(scale=2.0)}, "log_prior.scale: 1.0 there, 2.0 here"),
    "kernel": ({"flow": made(kernel=px.kernels.IMQ())}, "kernel: RBF there, IMQ here"),
    "number": ({"start": START[:3]}, "particles: 4 there, 3 here"),
    "shape": ({"start": START[:, :1]}, "state.particles: float32[4,2] there, float32[4,1] here"),
    "dtype": ({"start": START.astype(jnp.bfloat16)}, "float32[4,2] there, bfloat16[4,2] here"),
    "batch size": ({"data": px.Minibatches(DATA, 3)}, "data.batch size: 4 there, 3 here"),
    "data": ({"data": DATA}, "data.batch size: 4 there, nothing here"),
    "key": ({"seed": 1}, "key: threefry2x32 [0, 0] there, threefry2x32 [0, 1] here"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_runs_are_refused(name, written):
    changed, words = CHANGES[name]
    options = {"flow": made(), "start": START, "data": px.Minibatches(DATA, 4)} | changed
    before = kept(written)
    with pytest.raises(CheckpointError) as error:
        go(steps=4, checkpoint=written, **options)
    assert words in str(error.value)
    assert "Use another folder" in str(error.value)
    assert kept(written) == before


@pytest.mark.parametrize("name", ["particlax", "jax"])
def test_other_versions_are_refused(name, written, monkeypatch):
    saver = sys.modules["particlax.saver"]
    other = {**saver._versions(), name: "9.9"}
    monkeypatch.setattr(saver, "_versions", lambda: other)
    run = lambda **options: go(made(), START, 4, data=px.Minibatches(DATA, 4), **options)
    with pytest.raises(CheckpointError, match=rf"version of {name}: .* there, 9.9 here"):
        run(checkpoint=written)
    run(checkpoint=px.Checkpoints(written, strict=False))


def test_other_formats_are_refused(written, monkeypatch):
    monkeypatch.setattr(folder, "FORMAT", 2)
    with pytest.raises(CheckpointError, match=r"has format 1, and this version .* reads format 2"):
        go(made(), START, 4, data=px.Minibatches(DATA, 4), checkpoint=written)


def test_not_strict_still_needs_arrays_that_fit(written, tmp_path):
    loose = px.Checkpoints(written, strict=False)
    go(made(rate=0.2), START, 4, data=px.Minibatches(DATA, 4), checkpoint=loose)
    with pytest.raises(CheckpointError, match=r"do not fit this flow.*float32\[4, 2\]"):
        go(made(), START[:3], 4, data=px.Minibatches(DATA, 4), checkpoint=loose)


def test_numbers_in_functions_are_compared():
    two, four = (lambda x: x**2), (lambda x: x**4)
    assert fingerprint.differences(
        fingerprint.describe("f", two), fingerprint.describe("f", four)
    ) == ["f.numbers[0]: 2 there, 4 here"]
    assert fingerprint.describe("f", two) == fingerprint.describe("f", lambda x: x**2) | {
        "f": two.__qualname__
    }


def changed(before, after):
    return fingerprint.differences(*[fingerprint.describe("f", f) for f in (before, after)])


def test_numbers_in_lists_of_code_are_compared():
    """Python makes tuples of lists of three constants or more."""
    one, two = (lambda x: x / jnp.array([1.0, 1.0, 2.0])), (lambda x: x / jnp.array([9.0, 1.0, 2.0]))  # fmt: skip
    (line,) = changed(one, two)
    assert "1.0 there, 9.0 here" in line


SCALE, CENTRE = 1.0, np.zeros(2)


def helper(x):
    return 2.0 * x


compiled = jax.jit(helper)


def uses_globals(x):
    return jnp.sum(jax.vmap(lambda u: SCALE * compiled(u) + helper(u))(x - CENTRE))


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("SCALE", 4.0, "f.SCALE: 1.0 there, 4.0 here"),
        ("CENTRE", np.ones(2), "f.CENTRE: float32[2] #"),
        ("helper", lambda x: 7.0 * x, "f.helper"),
        ("compiled", jax.jit(lambda x: 7.0 * x), "f.compiled.function"),
    ],
)
def test_what_global_names_stand_for_is_compared(name, value, place, monkeypatch):
    before = fingerprint.describe("f", uses_globals)
    assert not any(
        "vmap" in where or ".jnp" in where for where in before
    )  # of libraries names alone
    monkeypatch.setitem(uses_globals.__globals__, name, value)
    found = fingerprint.differences(before, fingerprint.describe("f", uses_globals))
    assert any(place in line for line in found), found


def test_attributes_are_no_global_names(monkeypatch):
    before = fingerprint.describe("f", lambda x: x.SCALE)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    after = fingerprint.describe("f", lambda x: x.SCALE)
    assert {k: v for k, v in before.items() if k != "f"} == {k: v for k, v in after.items() if k != "f"}  # fmt: skip


@pytest.mark.parametrize("made", ["array", "pandas", "minibatches", "stream", "large"])
def test_other_data_of_the_same_shape_are_refused(made, tmp_path, monkeypatch):
    if made == "large":
        monkeypatch.setattr(fingerprint, "HASHED_BYTES", 16)  # some rows stand for all
    rows = np.linspace(0, 1, 3000)
    of = {
        "array": lambda rows: rows,
        "pandas": lambda rows: pytest.importorskip("pandas").Series(rows),
        "minibatches": lambda rows: px.Minibatches(rows, 10),
        "stream": lambda rows: px.Stream(rows, 10),
        "large": lambda rows: px.Minibatches(rows, 10),
    }[made]
    target = px.Target(log_prior=lambda m: -0.5 * m**2, log_likelihood=lambda m, y: -0.5 * (y - m) ** 2, num_data=3000)  # fmt: skip
    flow = px.sgld(target, step_size=1e-5)
    saved = {"checkpoint": tmp_path / "run", "every": 2}
    run = lambda rows, steps: go(flow, np.zeros(3), steps, data=of(rows), **saved)
    run(rows, 2)
    with pytest.raises(CheckpointError, match=r"data: float32\[3000\] #\w{8} there"):
        run(rows + 100, 4)
    assert int(run(rows.astype(np.float32), 4).state.step) == 4  # the same on the device


def test_names_in_functions_are_compared():
    same, other = (lambda x: 2 * jnp.tanh(x)), (lambda x: 2 * jnp.sin(x))
    found = fingerprint.differences(*[fingerprint.describe("f", f) for f in (same, other)])
    assert found == ["f.names: 'jnp tanh' there, 'jnp sin' here"]


class OneRate(eqx.Module):
    layer: eqx.nn.Linear
    drop: eqx.nn.Dropout
    rates: list

    def __init__(self, key, rate, activation):
        self.layer, self.rates = eqx.nn.Linear(4, 3, key=key), [activation]
        self.drop = eqx.nn.Dropout(rate)

    def __call__(self, x, key=None):
        return self.drop(self.rates[0](self.layer(x)), key=key)


def networks(rate, activation):
    """The same network of three libraries, made by a function that tells nothing."""
    from flax import linen, nnx

    class Linen(linen.Module):
        rate: float
        activation: Any

        @linen.compact
        def __call__(self, x, train=False):
            hidden = self.activation(linen.Dense(3)(x))
            return linen.Dropout(self.rate, deterministic=not train)(hidden)

    class Nnx(nnx.Module):
        def __init__(self, rngs, rate, activation):
            self.layer, self.drop = nnx.Linear(4, 3, rngs=rngs), nnx.Dropout(rate, rngs=rngs)
            self.activation = activation

        def __call__(self, x):
            return self.drop(self.activation(self.layer(x)))

    told = SimpleNamespace(rate=rate, activation=activation)
    return {
        "equinox": px.modules.equinox(lambda key: OneRate(key, told.rate, told.activation)),
        "linen": px.modules.linen(Linen(rate, activation), jnp.zeros((1, 4))),
        "nnx": px.modules.nnx(lambda rngs: Nnx(rngs, told.rate, told.activation)),
    }


@pytest.mark.parametrize("library", ["equinox", "linen", "nnx"])
def test_what_a_module_consists_of_is_compared(library):
    def told(*settings):
        target = px.networks.classifier(networks(*settings)[library], num_data=9)
        return fingerprint.describe("target", target)

    first = told(0.1, jax.nn.relu)
    assert fingerprint.differences(first, told(0.1, jax.nn.relu)) == []
    rates = fingerprint.differences(first, told(0.2, jax.nn.relu))
    assert rates and all("0.1 there, 0.2 here" in line for line in rates)
    assert any("relu there" in line for line in fingerprint.differences(first, told(0.1, jnp.sin)))


def test_methods_of_own_classes_are_compared():
    def made(function):
        class Density(eqx.Module):
            def __call__(self, x):
                return function(x)

        class Other(eqx.Module):
            def __call__(self, x):
                return jnp.sum(x) * 3

        return Density() if function is jnp.sin else Other()

    found = fingerprint.differences(*[fingerprint.describe("d", made(f)) for f in (jnp.sin, None)])
    assert any("'jnp sum' here" in line for line in found)


def test_long_lists_of_differences_are_cut():
    lines = fingerprint.differences({f"x{i}": "1" for i in range(50)}, {})
    assert len(lines) == 13
    assert lines[-1] == "... and 38 more"


DESCRIBE = """
import jax, jax.numpy as jnp, optax, json
import particlax as px
from particlax import fingerprint
import flax, equinox as eqx
from flax import linen, nnx
net = px.modules.linen(linen.Dense(2), jnp.ones((1, 3)))
others = (
    px.modules.nnx(lambda rngs: nnx.Sequential(nnx.Linear(3, 2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))),
    px.modules.equinox(lambda key: eqx.nn.MLP(3, 2, 4, 1, key=key)),
)
target = px.networks.classifier(net, num_data=9, prior={"": 1.0, "kernel": 2.0})
flow = px.svgd(target, optimizer=optax.chain(optax.clip(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 100))))
print(json.dumps(fingerprint.describe("flow", (flow, others))))
"""


def test_descriptions_are_the_same_in_every_process():
    """No addresses, no order of sets: also for Flax modules and chains of optimizers."""
    texts = [
        subprocess.run(
            [sys.executable, "-c", DESCRIBE],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": ROOT},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert texts[0] == texts[1]
    assert " at 0x" not in texts[0]
    assert "0.1" in texts[0]


# ---------------------------------------------------------------------------------------------- reading


def test_load(written):
    seen = px.checkpoints.load(written)
    assert (seen.step, seen.state, seen.value, seen.shared, seen.carried) == (
        4,
        None,
        None,
        None,
        (),
    )
    assert seen.particles.shape == (4, 2)
    assert isinstance(seen.particles, np.ndarray)
    assert seen.versions == {"particlax": px.__version__, "jax": jax.__version__}
    assert seen.config["flow.terms[0]"] == "Stein"
    full = px.checkpoints.load(written, 2, flow=made(), particles=START)
    assert full.step == int(full.state.step) == 2
    wanted = go(made(), START, 2, data=px.Minibatches(DATA, 4)).state
    assert same(full.state, wanted)


def test_bad_loads(written, tmp_path):
    load = px.checkpoints.load
    for work, words in (
        (lambda: load(tmp_path / "none"), "there are no checkpoints"),
        (lambda: load(written, 3), r"no checkpoint of step 3 .* there are \[2, 4\]"),
        (lambda: load(written, "best"), "has a value"),
        (lambda: load(written, flow=made(), particles=START[:3]), "do not fit this flow"),
    ):
        with pytest.raises(CheckpointError, match=words):
            work()
    with pytest.raises(px.errors.OptionError, match="expected both"):
        load(written, flow=made())


def test_nothing_is_pickled(written, monkeypatch):
    """Neither written, nor read: a stranger's file runs no code."""
    for path in (p for p in written.rglob("*") if p.is_file()):
        with pytest.raises(Exception):  # noqa: B017
            pickle.loads(path.read_bytes())
    refuse = lambda *a, **k: pytest.fail("something was unpickled")
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    px.checkpoints.load(written)
    px.checkpoints.load(written, flow=made(), particles=START)


ODD = {
    "bf16": jnp.arange(3, dtype=jnp.bfloat16),
    "f8": jnp.ones(3, jnp.float8_e4m3fn),
    "f16": jnp.array(2.5, jnp.float16),
    "bool": jnp.array([True, False]),
    "int8": jnp.array([[-3]], jnp.int8),
    "complex": jnp.array([1 + 2j]),
    "nothing": jnp.zeros((0, 3)),
    "none": None,
    "deep": [(), {"a/b.c": jnp.array(1.0), "": (jnp.array(7, jnp.uint32),)}],
    "key": jax.random.key(7),
    "keys": jax.random.split(jax.random.key(7, impl="rbg"), 2),
    "bits": jnp.array([jnp.nan, -0.0, jnp.inf]),
}


def bits(leaf):
    plain = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return leaf.dtype, plain.shape, np.asarray(plain).tobytes()


def test_odd_leaves_come_back(tmp_path):
    place = folder.Folder(tmp_path / "run")
    place.lock()
    writer = store.Store(place)
    writer.save(3, ODD, {"x": 1}, lambda: None)
    writer.wait()
    writer.close()
    place.unlock()
    leaves = place.verify(3)["leaves"]
    read = store.read(place, 3, leaves, jax.tree.leaves(ODD))
    assert [bits(leaf) for leaf in read] == [bits(leaf) for leaf in jax.tree.leaves(ODD)]
    assert json.loads((place.home(3) / "manifest.json").read_text())["x"] == 1


def test_without_a_checkpoint_orbax_is_not_imported():
    program = (
        "import sys, jax, jax.numpy as jnp, particlax as px\n"
        "flow = px.sgld(px.Target(lambda x: -jnp.sum(x**2)), step_size=0.1)\n"
        "px.run(flow, jnp.zeros((3, 2)), steps=3, key=jax.random.key(0), progress=False)\n"
        "print([m for m in sys.modules if m.startswith(('orbax', 'tensorstore'))])"
    )
    environment = {**os.environ, "PYTHONPATH": ROOT}
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_orbax_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    monkeypatch.setitem(sys.modules, "orbax", None)
    with pytest.raises(CheckpointError, match=r"pip install 'particlax\[checkpoint\]'"):
        go(FLOWS["sgld"], checkpoint=tmp_path / "run")


def test_arrays_are_known_by_the_names_of_their_leaves(tmp_path):
    """Not by their order: another name may come at another place."""
    flow = px.sgld(px.Target(lambda p: -jnp.sum(p[next(iter(p))] ** 2)), step_size=0.01)
    go(flow, {"mean": jnp.zeros((4, 2)), "scale": jnp.ones((4, 2))}, checkpoint=tmp_path / "run")
    other = {"mu": jnp.zeros((4, 2)), "alpha": jnp.ones((4, 2))}
    fits = r"found state.particles.mean float32\[4, 2\], .*expected state.particles.alpha"
    with pytest.raises(CheckpointError, match=fits):
        px.checkpoints.load(tmp_path / "run", flow=flow, particles=other)
    with pytest.raises(CheckpointError, match=fits):
        go(flow, other, checkpoint=px.Checkpoints(tmp_path / "run", strict=False))


def normed():
    """A network of NNX with batch norm, and a run of two steps."""
    from flax import nnx

    parts = lambda rngs: [nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)]  # fmt: skip
    net = px.modules.nnx(lambda rngs: nnx.Sequential(*parts(rngs)))
    flow = px.svgd(px.networks.classifier(net, num_data=20), step_size=0.01)
    x = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    return net, flow, {"x": x, "y": np.arange(20) % 3}


def test_a_checkpoint_predicts(tmp_path):
    net, flow, data = normed()
    pair = net.init(jax.random.key(0), 3)
    result = px.run(flow, flow.init(*pair), steps=2, key=jax.random.key(1), data=data, progress=False, checkpoint=tmp_path / "a", every=2)  # fmt: skip
    wanted = px.predictive.categorical(net, result, data["x"]).log_probs
    for options in ({}, {"flow": flow, "particles": flow.init(*pair)}):
        read = px.checkpoints.load(tmp_path / "a", **options)
        np.testing.assert_array_equal(
            px.predictive.categorical(net, read, data["x"]).log_probs, wanted
        )
    words = r"found state\.carried\.layers\.1\.mean[^;]*layers\.1\.var[^;]*; expected no more.*flow\.init\(\*net\.init"
    with pytest.raises(CheckpointError, match=words):
        px.checkpoints.load(tmp_path / "a", flow=flow, particles=pair[0])


def test_a_partly_bayesian_checkpoint_predicts_with_its_flow(tmp_path):
    net, flow, start, data = network()
    result = px.run(flow, start, steps=2, key=jax.random.key(1), data=data, progress=False, checkpoint=tmp_path / "a", every=2)  # fmt: skip
    read = px.checkpoints.load(tmp_path / "a", flow=flow, particles=start)
    x = data.arrays["x"]
    np.testing.assert_array_equal(
        px.predictive.categorical(net, read, x).probs,
        px.predictive.categorical(net, result, x).probs,
    )
    with pytest.raises(px.errors.ParticleError, match=r"expected px\.checkpoints\.load\(folder, flow=flow"):  # fmt: skip
        px.predictive.categorical(net, px.checkpoints.load(tmp_path / "a"), x)


def test_numpy_arrays_of_a_module_are_compared():
    class Net(eqx.Module):
        line: eqx.nn.Linear
        fixed: np.ndarray

        def __call__(self, x):
            return self.line(x - self.fixed)

    def told(value):
        net = px.modules.equinox(
            lambda key: Net(eqx.nn.Linear(4, 3, key=key), np.full(4, value, np.float32))
        )
        return fingerprint.describe("target", px.networks.classifier(net, num_data=9))

    assert fingerprint.differences(told(5.0), told(5.0)) == []
    assert fingerprint.differences(told(5.0), told(6.0))


# --------------------------------------------------------------------------------------- terms of one's own


def _pulling(place, gain):
    """A term whose strength stands somewhere in its class, or in the one that it is made from."""

    class Base(px.terms.Term):
        weight: float = 1.0

        def __call__(self, cloud, key, memory):
            return px.terms.Velocity(-self.strength() * cloud.x), memory

    if place == "base":
        rate = gain

        class Middle(Base):
            def strength(self):
                return rate

        class Mine(Middle):
            pass
    elif place == "number":

        class Mine(Base):
            RATE: ClassVar[float] = gain

            def strength(self):
                return self.RATE
    else:
        rate = gain

        class Mine(Base):
            @staticmethod
            def fixed():
                return rate

            @property
            def own(self):
                return rate

            def strength(self):
                return self.fixed() if place == "static" else self.own

    return Mine()


@pytest.mark.parametrize("place", ["base", "number", "static", "property"])
def test_a_term_that_was_changed_is_another_run(place, tmp_path):
    target, start = px.Target(lambda x: -0.5 * jnp.sum(x**2)), jnp.ones((3, 2))
    euler, key = px.integrators.Euler(0.1), jax.random.key(0)

    def go(gain, steps):
        flow = px.Flow(target, (_pulling(place, gain),), euler)
        kept = {"checkpoint": tmp_path / "run", "every": 5, "progress": False}
        return px.run(flow, start, steps=steps, key=key, **kept)

    go(1.0, 5)
    go(1.0, 10)
    with pytest.raises(CheckpointError, match=r"1\.0 there, 3\.0 here"):
        go(3.0, 15)
