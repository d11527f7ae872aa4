"""Faults: kills, signals, full disks, damaged files, folders in use, particles that are lost. Nothing saved is lost."""

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import particlax as px
from experiments import crash
from particlax import engine, folder, programs, store
from particlax.processes import Team

COMPILE_FAST = True

CheckpointError = px.errors.CheckpointError
ROOT = Path(px.__file__).parent.parent
FLOW = px.sgld(px.Target(lambda x: -0.5 * jnp.sum(x**2)), step_size=0.05)


def cloud(num=6, dim=2):
    return jax.random.normal(jax.random.key(9), (num, dim))


def go(flow=FLOW, start=None, steps=9, **options):
    start = cloud() if start is None else start
    return px.run(flow, start, steps=steps, key=jax.random.key(0), progress=False, **options)


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


def at_step(step, work):
    """An observer of every step that does something at one."""
    watch = lambda s: work() if int(s.state.step) == step else None
    return {"observers": watch, "observe_every": 1}


class Crash(BaseException):
    """What no run can answer."""


def fail():
    raise Crash


# --------------------------------------------------------------------------------------------------- kills


def test_killed_again_and_again():
    """The short version of `python -m experiments run crash`."""
    c = crash.Config(kills=4, steps=120, inputs=5, width=4, rows=50, batch=10)
    (seen,) = crash.work(c, 0)
    assert seen.metrics["kills"] == 4
    assert seen.metrics["while_writing"] >= 1
    assert seen.metrics["lost_checkpoints"] == 0
    assert seen.metrics["damaged_checkpoints"] == 0
    assert seen.metrics["most_steps_done_again"] <= 3 * c.every
    assert seen.metrics["equal"]


@pytest.mark.parametrize("on_nonfinite", ["stop", "replace"])
def test_a_gpu_has_the_same_program_in_every_process(tmp_path, monkeypatch, capsys, on_nonfinite):
    """If the run has checkpoints, unless they say otherwise. XLA knows what it is told: it refuses options that do not exist."""
    used = []
    noting = lambda name, run: lambda *args: used.append(name) or run(*args)
    monkeypatch.setattr(engine, "_chunk", {n: noting(n, run) for n, run in engine._chunk.items()})
    table = jnp.array([0, 1, 1])
    looked_up = px.sgld(px.Target(lambda x: -0.5 * jnp.sum(x[table] ** 2)), step_size=0.05)

    def program(flow=FLOW, **options):
        used.clear()
        found = go(flow, on_nonfinite=on_nonfinite, **options)
        assert same(found.state, expected[flow].state)
        (kind,) = set(used)
        return kind

    expected = {flow: go(flow) for flow in (FLOW, looked_up)}
    assert program(checkpoint=tmp_path / "cpu") == "fast"
    monkeypatch.setattr(programs, "chooses", lambda state: True)
    assert program() == "fast"
    assert program(checkpoint=px.Checkpoints(tmp_path / "fast", repeatable=False)) == "fast"
    assert program(checkpoint=tmp_path / "alike") == "alike"
    assert "repeatable" not in capsys.readouterr().err
    assert program(looked_up, checkpoint=tmp_path / "ordered") == "ordered"
    assert "sums in one order, so that the run repeats bit for bit" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A folder with the checkpoints of steps 3 and 6 of 9, and how the run ends."""
    path = tmp_path_factory.mktemp("faults") / "run"
    with pytest.raises(Crash):
        go(checkpoint=path, every=3, **at_step(7, fail))
    assert folder.Folder(path).steps() == [3, 6]
    return path, go()


DAMAGE = {
    "truncated": lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]),
    "emptied": lambda p: p.write_bytes(b""),
    "flipped": lambda p: p.write_bytes(flip(p.read_bytes())),
    "removed": lambda p: p.unlink(),
}


def flip(content):
    """One bit, in the middle."""
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def test_every_kind_of_damage_is_noticed(interrupted, tmp_path):
    """Also a file that grew, one more file, and a folder in a file's place."""
    path, _ = interrupted
    more = {
        "longer": lambda p: p.write_bytes(p.read_bytes() + b"0"),
        "one more": lambda p: p.with_name("more").write_bytes(b""),
        "a folder": lambda p: (p.unlink(), p.mkdir()),
        "unreadable": lambda p: (p.unlink(), p.symlink_to("nowhere")),
    }
    for name in files_of(path):
        for label, damage in (DAMAGE | more).items():
            copy = shutil.copytree(path, tmp_path / "run")
            damage(copy / name)
            with pytest.raises(folder.DamagedError):
                folder.Folder(copy).verify(6)
                pytest.fail(f"{name}: {label}")
            shutil.rmtree(copy)


def test_files_that_others_leave_behind_are_no_damage(interrupted, tmp_path):
    """A file manager has looked in."""
    path, whole = interrupted
    copy = shutil.copytree(path, tmp_path / "run")
    for place in [p for p in (copy / "00000006").rglob("*") if p.is_dir()]:
        for name in (".DS_Store", "._x", "Thumbs.db", ".nfs0001"):
            (place / name).write_bytes(b"icons")
    assert folder.Folder(copy).verify(6)["step"] == 6
    assert same(whole.state, go(checkpoint=copy, every=3).state)


def files_of(path):
    files = sorted(p.relative_to(path) for p in (path / "00000006").rglob("*") if p.is_file())
    assert len(files) > 5
    return files


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_run_falls_back_from_every_damaged_file(damage, interrupted, tmp_path, capsys):
    """Whatever file it is, the run falls back to step 3, says so, and ends as it should."""
    path, whole = interrupted
    for name in files_of(path):
        copy = tmp_path / str(name).replace("/", "-")
        shutil.copytree(path, copy)
        DAMAGE[damage](copy / name)
        assert same(whole.state, go(checkpoint=copy, every=3).state)
        said = capsys.readouterr().err
        assert f"{copy / '00000006'} is damaged: " in said
        assert "Falling back to step 3\n" in said
        assert "resuming at step 3 of 9" in said
        assert folder.Folder(copy).steps() == [3, 6, 9]
        shutil.rmtree(copy)


def test_every_bit_of_the_manifest_counts(interrupted, tmp_path):
    """Each byte flipped in turn: damaged, or the very same content."""
    path, _ = interrupted
    copy = shutil.copytree(path, tmp_path / "run")
    manifest = copy / "00000006" / "manifest.json"
    content, place = manifest.read_bytes(), folder.Folder(copy)
    wanted = place.manifest(6)
    for byte in range(0, len(content), 7):
        manifest.write_bytes(content[:byte] + bytes([content[byte] ^ 4]) + content[byte + 1 :])
        with contextlib.suppress(folder.DamagedError):
            assert place.manifest(6) == wanted


def test_nothing_good_is_left(interrupted, tmp_path):
    path, _ = interrupted
    copy = shutil.copytree(path, tmp_path / "run")
    for step in ("00000003", "00000006"):
        (copy / step / "arrays" / "_METADATA").write_bytes(b"")
    with pytest.raises(CheckpointError) as error:
        go(checkpoint=copy, every=3)
    for words in ("no good checkpoint is left", "00000003 is damaged", "has 0 bytes, not"):
        assert words in str(error.value)
    assert folder.Folder(copy).steps() == [3, 6]
    with pytest.raises(CheckpointError, match="no good checkpoint is left"):
        px.checkpoints.load(copy)
    with pytest.raises(CheckpointError, match="00000006 is damaged"):
        px.checkpoints.load(copy, 6)


def test_reading_falls_back_and_changes_nothing(interrupted, tmp_path, capsys):
    path, _ = interrupted
    copy = shutil.copytree(path, tmp_path / "run")
    (copy / "00000006" / "manifest.json").write_bytes(b"{}")
    assert px.checkpoints.load(copy).step == 3
    assert "Falling back to step 3" in capsys.readouterr().err
    assert folder.Folder(copy).steps() == [3, 6]


def test_leftovers_are_swept_away(interrupted, tmp_path):
    path, whole = interrupted
    copy = shutil.copytree(path, tmp_path / "run")
    shutil.copytree(copy / "00000003", copy / "unfinished-00000007")
    assert same(whole.state, go(checkpoint=copy, every=3).state)
    assert not list(copy.glob("unfinished-*"))


# ---------------------------------------------------------------------------------------------- full disks

BIG = np.random.default_rng(0).normal(size=(6, 20_000)).astype(np.float32)


def written(path, step):
    """Wait for a checkpoint that is being written in the background."""
    while step not in folder.Folder(path).steps():
        time.sleep(0.01)


def check_full(error, path, step, last):
    assert f"the checkpoint of step {step} could not be written to {path}" in str(error)
    assert f"The last good one is {path / last}" in str(error)
    assert "Make room, and run the same command again" in str(error)
    assert int(error.state.step) >= step
    assert not list(path.glob("unfinished-*"))


# TensorStore reports to an event loop that Orbax has closed after the error.
ignores_closed_loops = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@ignores_closed_loops
def test_files_that_cannot_grow(tmp_path, capfd):
    """The third checkpoint hits the limit on the size of files, as on a full disk."""
    path, limits = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)

    def squeeze():
        written(path, 4)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))

    try:
        with pytest.raises(CheckpointError) as error:
            go(start=BIG, checkpoint=path, every=2, **at_step(5, squeeze))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    check_full(error.value, path, 6, "00000004")
    assert "Traceback" not in capfd.readouterr().err
    assert same(go(start=BIG).state, go(start=BIG, checkpoint=path, every=2).state)


@ignores_closed_loops
@pytest.mark.parametrize("place", ["mkdir", "seal", "save"])
def test_no_space_at_any_stage(place, tmp_path, monkeypatch):
    path = tmp_path / "run"

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    def squeeze():
        written(path, 2)
        if place == "mkdir":
            monkeypatch.setattr(folder.Folder, "begin", full)
        elif place == "seal":
            monkeypatch.setattr(folder, "_stamp", full)
        else:
            monkeypatch.setattr(store._orbax().AsyncCheckpointer, "save", full)

    with pytest.raises(CheckpointError, match="No space left on device") as error:
        go(checkpoint=path, every=2, **at_step(3, squeeze))
    check_full(error.value, path, 4, "00000002")
    monkeypatch.undo()
    assert same(go().state, go(checkpoint=path, every=2).state)


FULL = """
import sys, numpy as np, jax, particlax as px, jax.numpy as jnp
flow = px.sgld(px.Target(lambda x: -0.5 * jnp.sum(x**2)), step_size=0.05)
start = np.random.default_rng(0).normal(size=(6, 20_000)).astype(np.float32)
try:
    saved = px.Checkpoints(sys.argv[1] + "/run", every=1, keep=99)
    px.run(flow, start, steps=20, key=jax.random.key(0), checkpoint=saved, progress=False)
except px.errors.CheckpointError as error:
    seen = px.checkpoints.load(sys.argv[1] + "/run")
    print("stopped:", error.state.step, seen.step, "No space left" in str(error))
"""


def test_a_disk_that_is_really_full(tmp_path):
    """A disk of 2 MB in memory, in a namespace of its own, where the system allows one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    run = f'mount -t tmpfs -o size=2m tmpfs {disk} && "$@"'
    command = ["unshare", "-Urm", "sh", "-c", run, "sh", sys.executable, "-c", FULL, str(disk)]
    if (
        not shutil.which("unshare")
        or subprocess.run([*command[:5], "sh", "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no file system can be mounted here")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    word, at, saved, reason = done.stdout.split()
    assert word == "stopped:"
    assert 1 <= int(saved) < int(at) <= int(saved) + 2
    assert reason == "True"


# -------------------------------------------------------------------------------------------------- locks


def test_two_runs_in_one_folder(tmp_path):
    second = lambda: go(checkpoint=tmp_path / "run")
    with pytest.raises(CheckpointError) as error:
        go(checkpoint=tmp_path / "run", every=2, **at_step(3, second))
    for words in ("another run writes", f"process {os.getpid()} on ", "use another folder"):
        assert words in str(error.value)
    go(checkpoint=tmp_path / "run")  # free again


def test_the_lock_of_a_killed_run_is_free(tmp_path):
    program = (
        "import sys, time; from particlax.folder import Folder; f = Folder(sys.argv[1]); f.lock(); "
        "print('locked', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(CheckpointError, match=f"process {holder.pid} on "):
            go(checkpoint=tmp_path / "run")
    finally:
        holder.kill()
        holder.communicate()
    assert same(go().state, go(checkpoint=tmp_path / "run").state)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        go(checkpoint=tmp_path / "file" / "run")


# ------------------------------------------------------------------------------------------------ signals


def test_a_signal_that_is_ignored_stays_ignored(tmp_path, handlers):
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        press = lambda: signal.raise_signal(signal.SIGINT)
        result = go(checkpoint=tmp_path / "run", every=100, **at_step(5, press))
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, old)
    assert same(go().state, result.state)


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, handlers):
    path = tmp_path / "run"
    press = lambda: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as error:
        go(checkpoint=path, every=100, **at_step(5, press))
    assert isinstance(error.value, px.checkpoints.Interrupted)
    place = path / "00000005"
    said = f"interrupted: saved step 5 to {place}; run the same command again to go on"
    assert str(error.value) == said
    assert error.value.checkpoint == str(place)
    assert int(error.value.state.step) == 5
    assert same(go().state, go(checkpoint=path, every=100).state)


def test_the_second_ctrl_c_stops_at_once(tmp_path, handlers):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as error:
        go(checkpoint=tmp_path / "run", every=2, **at_step(5, twice))
    assert not isinstance(error.value, px.checkpoints.Interrupted)
    assert folder.Folder(tmp_path / "run").steps() == [2, 4]


def test_sigterm_saves_and_exits_with_its_code(tmp_path, handlers, capsys):
    path = tmp_path / "run"
    tell = lambda: os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as error:
        go(checkpoint=path, every=100, **at_step(5, tell))
    assert error.value.code == px.checkpoints.EXIT_SAVED == 75
    assert f"told to end (SIGTERM): saved step 5 to {path / '00000005'}" in capsys.readouterr().err
    assert same(go().state, go(checkpoint=path, every=100).state)


def test_a_signal_at_the_end_is_heard_after_it(tmp_path, handlers):
    press = lambda: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as error:
        go(checkpoint=tmp_path / "run", **at_step(9, press))
    assert not isinstance(error.value, px.checkpoints.Interrupted)
    assert folder.Folder(tmp_path / "run").steps() == [9]


@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGTERM, signal.SIGINT)])
def test_sigterm_at_the_end_has_its_code_too(numbers, tmp_path, handlers, capsys):
    """A scheduler that sees it calls again, and finds the run finished."""
    tell = lambda: [signal.raise_signal(number) for number in numbers] and None
    with pytest.raises(SystemExit) as error:
        go(checkpoint=tmp_path / "run", **at_step(9, tell))
    assert error.value.code == 75
    assert "the run is finished and saved" in capsys.readouterr().err
    assert same(go(checkpoint=tmp_path / "run").state, go().state)


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_forked_child_does_not_hold_the_lock(tmp_path):
    """Or a folder would be in use for as long as any worker of a run that was killed lives."""
    held = folder.Folder(tmp_path)
    held.lock()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        with pytest.raises(CheckpointError, match="another run writes"):
            folder.Folder(tmp_path).lock()  # the parent holds it still
        held.unlock()
        other = folder.Folder(tmp_path)
        other.lock()
        other.unlock()
    finally:
        os.close(write)
        os.waitpid(child, 0)


def test_the_working_directory_may_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    go(checkpoint="run", every=2, **at_step(3, lambda: os.chdir("elsewhere")))
    assert px.checkpoints.load(tmp_path / "run").step == 9


def test_the_best_one_stays_whatever_processes_tell_each_other(tmp_path, monkeypatch):
    """What the first tells the others goes through JSON, which knows no whole numbers as keys."""
    told = lambda self, work: json.loads(json.dumps(work()))
    monkeypatch.setattr(Team, "by_first", told)
    saved = lambda: px.Checkpoints(tmp_path, every=2, keep=1, best=lambda s: -float(s.state.step))
    go(steps=4, checkpoint=saved())
    go(steps=8, checkpoint=saved())
    assert folder.Folder(tmp_path).steps() == [2, 8]


def test_a_damaged_best_one_is_replaced_by_the_next(tmp_path, capsys):
    best = lambda s: -float(s.state.step)  # the earliest
    saved = lambda: px.Checkpoints(tmp_path / "run", every=2, keep=1, best=best)
    go(steps=4, checkpoint=saved())
    assert folder.Folder(tmp_path / "run").steps() == [2, 4]
    victim = next(p for p in (tmp_path / "run/00000002/arrays").rglob("*") if p.is_file())
    victim.write_bytes(b"")
    go(steps=8, checkpoint=saved())
    assert "00000002, the best so far, is damaged" in capsys.readouterr().err
    assert folder.Folder(tmp_path / "run").steps() == [4, 8]
    assert px.checkpoints.load(tmp_path / "run", step="best").step == 4


def test_loads_are_tried_again_while_a_run_removes_checkpoints(tmp_path, monkeypatch):
    go(checkpoint=px.Checkpoints(tmp_path, every=3))
    real, calls = px.checkpoints.read, []

    def removed(place, step, *args):
        calls.append(step)
        if len(calls) == 1:
            shutil.rmtree(place.home(step))
        return real(place, step, *args)

    monkeypatch.setattr(px.checkpoints, "read", removed)
    assert px.checkpoints.load(tmp_path).step == 6
    assert calls == [9, 6]


def test_files_in_the_place_of_folders_are_removed(tmp_path):
    (tmp_path / "unfinished-00000004").write_text("what is this")
    go(checkpoint=tmp_path, every=4)
    assert folder.Folder(tmp_path).steps() == [4, 8, 9]


def test_sigterm_from_outside(tmp_path):
    """A whole process, told to end while it steps: code 75, and nothing but one line."""
    program = textwrap.dedent("""
        import sys, time, jax, jax.numpy as jnp, particlax as px
        flow = px.sgld(px.Target(lambda x: -0.5 * jnp.sum(x**2)), step_size=0.05)
        tell = lambda s: (print(int(s.state.step), flush=True), time.sleep(0.01))[1]
        px.run(flow, jnp.ones((6, 2)), steps=10_000, key=jax.random.key(0), checkpoint=sys.argv[1],
               observers=tell, observe_every=1, progress=False)
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "1\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75
    (saved,) = folder.Folder(tmp_path / "run").steps()
    assert saved == int(out.split()[-1])
    assert err.startswith("told to end (SIGTERM): saved step")
    assert err.count("\n") == 1


def test_other_threads_leave_signals_alone(tmp_path, handlers):
    before, seen = signal.getsignal(signal.SIGINT), []
    watch = lambda s: seen.append(signal.getsignal(signal.SIGINT) == before)
    work = lambda: go(checkpoint=tmp_path / "run", observers=watch, observe_every=3)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True] * 3
    assert folder.Folder(tmp_path / "run").steps() == [9]


def test_without_a_checkpoint_ctrl_c_is_as_ever(handlers):
    with pytest.raises(KeyboardInterrupt) as error:
        go(**at_step(5, lambda: signal.raise_signal(signal.SIGINT)))
    assert not isinstance(error.value, px.checkpoints.Interrupted)


# ------------------------------------------------------------------------------------------ others' errors


def stumble():
    raise ZeroDivisionError("in an observer")


def test_an_error_of_an_observer_costs_no_step(tmp_path):
    path = tmp_path / "run"
    with pytest.raises(ZeroDivisionError) as error:
        go(checkpoint=path, every=100, **at_step(7, stumble))
    assert folder.Folder(path).steps() == [7]
    assert [note for note in error.value.__notes__ if str(path / "00000007") in note]
    assert same(go().state, go(checkpoint=path, every=100).state)


def test_an_error_of_an_observer_at_a_save(tmp_path):
    """That step is saved already, or is not, and then without asking for its value."""
    path = tmp_path / "run"
    kept = px.Checkpoints(path, every=3, best=lambda snapshot: 1.0)
    for step in (6, 7):
        with pytest.raises(ZeroDivisionError):
            go(checkpoint=kept, **at_step(step, stumble))
        assert folder.Folder(path).steps()[-1] == step
    assert same(go().state, go(checkpoint=kept).state)


def test_a_full_disk_does_not_hide_the_error(tmp_path, monkeypatch):
    def full(self, step):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder.Folder, "begin", full)
    with pytest.raises(ZeroDivisionError) as error:
        go(checkpoint=tmp_path / "run", every=100, **at_step(7, stumble))
    assert ["No space left on device" in note for note in error.value.__notes__] == [True]
    assert same(go(steps=7).state, error.value.state)


def test_a_save_that_failed_before_does_not_keep_a_rescue_from_saving(
    tmp_path, monkeypatch, capsys
):
    seal, failures = folder.Folder.seal, [OSError(5, "Input/output error")]

    def once(self, step, content):
        if failures:
            raise failures.pop()
        seal(self, step, content)

    monkeypatch.setattr(folder.Folder, "seal", once)
    with pytest.raises(ZeroDivisionError) as error:
        go(checkpoint=tmp_path / "run", every=5, **at_step(6, stumble))
    assert "the checkpoint of step 5 could not be written" in capsys.readouterr().err
    assert folder.Folder(tmp_path / "run").steps() == [6]
    assert "00000006" in error.value.__notes__[0]


def test_the_step_at_which_an_observer_raised_is_observed_again(tmp_path):
    """At the end of a run, too; and then no more."""
    seen = []
    note = lambda snapshot: seen.append(int(snapshot.state.step))
    path = tmp_path / "run"
    for step in (3, 9):
        with pytest.raises(ZeroDivisionError):
            go(checkpoint=path, **at_step(step, stumble))
    for _ in range(2):
        go(checkpoint=path, observers=note, observe_every=3)
    assert seen == [9]
    assert folder.Folder(path).verify(9)["observed"]


def test_observers_that_end_a_run_where_another_raised(tmp_path):
    stop = lambda snapshot: int(snapshot.state.step) >= 4
    path, watch = tmp_path / "run", {"observers": stop, "observe_every": 1}
    with pytest.raises(ZeroDivisionError):
        go(checkpoint=path, **at_step(4, stumble))
    for _ in range(2):
        found = go(checkpoint=path, **watch)
        assert (found.stopped, int(found.state.step)) == (True, 4)


def test_the_best_one_may_be_where_an_observer_raised(tmp_path):
    best = px.Checkpoints(tmp_path / "run", every=2, keep=1, best=lambda s: -abs(int(s.state.step) - 4))  # fmt: skip
    with pytest.raises(ZeroDivisionError):
        go(checkpoint=best, **at_step(4, stumble))
    assert px.checkpoints.load(tmp_path / "run").value is None
    go(checkpoint=best, observers=lambda snapshot: None, observe_every=1)
    assert px.checkpoints.load(tmp_path / "run", "best").step == 4


def test_a_value_that_cannot_be_had_costs_no_step(tmp_path):
    value = lambda s: 1 / (int(s.state.step) - 6)
    saved = px.Checkpoints(tmp_path / "run", every=3, best=value)
    with pytest.raises(ZeroDivisionError) as error:
        go(checkpoint=saved)
    assert folder.Folder(tmp_path / "run").steps() == [3, 6]
    assert "00000006" in error.value.__notes__[0]


def test_a_signal_beside_an_error_is_heard(tmp_path, handlers, capsys):
    def both():
        signal.raise_signal(signal.SIGTERM)
        stumble()

    with pytest.raises(SystemExit) as end:
        go(checkpoint=tmp_path / "run", **at_step(4, both))
    assert end.value.code == 75
    assert isinstance(end.value.__context__, ZeroDivisionError)
    assert "ended by ZeroDivisionError (in an observer) and saved" in capsys.readouterr().err


def test_an_error_before_the_first_step_leaves_no_checkpoint(tmp_path):
    data = px.Stream(lambda step: iter([]), num_data=10)
    target = px.Target(
        log_prior=lambda x: -0.5 * jnp.sum(x**2),
        log_likelihood=lambda x, y: -0.5 * (y - x[0]) ** 2,
        num_data=10,
    )
    with pytest.raises(px.errors.DataError, match="batch of step 0"):
        go(px.sgld(target, step_size=0.01), checkpoint=tmp_path / "run", data=data)
    assert not folder.Folder(tmp_path / "run").steps()


# ------------------------------------------------------------------------------------------ lost particles

CLIFF = px.Target(lambda x: jnp.where(x[0] > 1.6, jnp.nan, -0.5 * jnp.sum(x**2)))
ROUGH = px.sgld(CLIFF, step_size=0.05)
LOW = 0.1 * cloud(8)


def test_the_error_names_step_particle_and_checkpoint(tmp_path):
    with pytest.raises(px.errors.NonFiniteError) as plain:
        go(ROUGH, LOW, 300)
    with pytest.raises(px.errors.NonFiniteError) as error:
        go(ROUGH, LOW, 300, checkpoint=tmp_path / "run", every=2)
    assert error.value.step == plain.value.step > 2
    assert error.value.particles == plain.value.particles
    assert error.value.checkpoint == str(tmp_path / "run" / f"{error.value.step // 2 * 2:08d}")
    assert f"The last good checkpoint is {error.value.checkpoint}" in str(error.value)
    assert f"at step {error.value.step}, " in str(error.value)
    with pytest.raises(px.errors.NonFiniteError, match="There is no checkpoint yet"):
        go(ROUGH, LOW, 300, checkpoint=tmp_path / "other")


@pytest.mark.parametrize("lost", [0, 3])
def test_a_particle_lost_so_far_away_that_distances_overflow(lost):
    """All healthy ones are infinitely far then, and still the lost one is none of them."""
    density = lambda p: jnp.where(jnp.sum(p**2) > 1e30, jnp.nan, -0.25 * jnp.sum(p**4))
    flow = px.Flow(px.Target(density), (px.Drift(),), px.integrators.Euler(0.01))
    x = jax.random.normal(jax.random.key(0), (5, 2)).at[lost].set(60.0)
    result = px.run(
        flow, x, steps=30, key=jax.random.key(0), on_nonfinite="replace", progress=False
    )
    assert [one.particle for one in result.replaced] == [lost]
    assert result.replaced[0].neighbour != lost
    assert np.all(np.isfinite(result.particles))


def test_lost_particles_are_replaced_and_counted():
    result = go(ROUGH, LOW, 90, on_nonfinite="replace")
    assert int(result.state.step) == 90
    assert np.isfinite(result.particles).all()
    assert np.isfinite(result.log_density).all()
    assert result.replaced
    with pytest.raises(px.errors.NonFiniteError) as error:
        go(ROUGH, LOW, 90)
    first = result.replaced[0]
    assert (first.step, first.particle) == (error.value.step, error.value.particles[0])
    before = np.asarray(error.value.state.particles)
    healthy = [i for i in range(8) if i not in error.value.particles]
    apart = np.sum((before[healthy] - before[first.particle]) ** 2, 1)
    assert first.neighbour == healthy[int(np.argmin(apart))]
    assert go(FLOW, LOW, 20, on_nonfinite="replace").replaced == ()


def test_a_copy_is_near_its_neighbour_and_has_its_memory():
    flow = px.sghmc(CLIFF, step_size=0.05)
    state = flow.init(LOW)
    momentum = {"momentum": jnp.arange(16.0).reshape(8, 2)}
    state = type(state)(LOW, state.step, momentum, state.terms)
    mended, sources = engine._mend(jax.random.key(1), state, [2, 5])
    healthy = [i for i in range(8) if i not in (2, 5)]
    spread = np.std(np.asarray(LOW)[healthy], 0)
    for lost, source in zip([2, 5], sources, strict=True):
        assert source in healthy
        moved = np.abs(np.asarray(mended.particles[lost] - LOW[source]))
        assert np.all(moved > 0)
        assert np.all(moved < 5 * engine.NOISE * spread)
        assert np.array_equal(mended.integrator["momentum"][lost], momentum["momentum"][source])
    assert np.array_equal(mended.particles[jnp.array(healthy)], LOW[jnp.array(healthy)])


def test_replacing_does_not_depend_on_chunks_or_crashes(tmp_path, monkeypatch):
    whole = go(ROUGH, LOW, 90, on_nonfinite="replace")
    monkeypatch.setattr(sys.modules["particlax.run"], "CHUNK_SECONDS", 0.0)
    cut = go(ROUGH, LOW, 90, on_nonfinite="replace")
    assert same(whole.state, cut.state)
    assert whole.replaced == cut.replaced
    monkeypatch.undo()
    saved = {"checkpoint": tmp_path / "run", "every": 10, "on_nonfinite": "replace"}
    late = whole.replaced[-1].step + 1
    with pytest.raises(Crash):
        go(ROUGH, LOW, 90, **saved, **at_step(late, fail))
    resumed = go(ROUGH, LOW, 90, **saved)
    assert same(whole.state, resumed.state)
    assert whole.replaced == resumed.replaced


def test_particles_are_mended_by_programs_that_repeat(tmp_path, monkeypatch):
    """On a GPU the search for a failure and the copies are compiled as the steps are."""
    used, parts = set(), ("_chunk", "_replay", "_mended")
    noting = lambda what, kind, run: lambda *args: used.add((what, kind)) or run(*args)
    for what in parts:
        kinds = getattr(engine, what).items()
        monkeypatch.setattr(engine, what, {kind: noting(what, kind, run) for kind, run in kinds})
    monkeypatch.setattr(programs, "chooses", lambda state: True)
    result = go(ROUGH, LOW, 90, on_nonfinite="replace", checkpoint=tmp_path / "run")
    assert result.replaced
    assert used == {(what, "alike") for what in parts}


def test_a_cloud_that_is_lost_altogether_stops_the_run():
    hopeless = px.sgld(px.Target(lambda x: jnp.nan * jnp.sum(x)), step_size=0.1)
    with pytest.raises(px.errors.NonFiniteError, match="8 of 8 particles"):
        go(hopeless, LOW, 5, on_nonfinite="replace")


def test_a_particle_that_cannot_be_mended_stops_the_run():
    """A log density that is NaN wherever one looks, for the particle that carries a flag."""
    like = lambda x, b, flag, key: (jnp.where(flag > 0, jnp.nan, b * x[0]), jnp.ones(()) * flag)
    target = px.Target(log_prior=lambda x: 0.0, log_likelihood=like, num_data=3, stateful=True)
    flow = px.sgld(target, step_size=0.1)
    start = flow.init(LOW, jnp.zeros(8).at[3].set(1.0))
    data = jnp.ones(3)
    result = go(flow, start, 5, data=data, on_nonfinite="replace")  # its flag is replaced too
    assert [entry.particle for entry in result.replaced] == [3]
    tight = px.sgld(px.Target(lambda x: jnp.where(x[0] > 0, jnp.nan, x[0])), step_size=0.1)
    edge = jnp.array([[-1e-9], [1.0]])
    with pytest.raises(px.errors.NonFiniteError):
        go(tight, edge, 50, on_nonfinite="replace")
