"""Runs on several devices: 8 virtual ones in one subprocess, and two processes over loopback, killed and run again."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import particlax as px
from tests.mesh_runs import ROWS, STEPS, regression
from tests.mesh_runs import start as start_of_regression

COMPILE_FAST = True

ROOT = Path(__file__).parent.parent
EXPECTED = {
    "sgld": [],
    "sghmc": [],
    "svgd": ["all-gather", "all-reduce"],
    "w_sgld": ["all-gather", "all-reduce"],
    "w_sgld_b": ["all-gather", "all-reduce"],
    "pi_sgld": ["all-gather", "all-reduce"],
    "calibrated": ["all-gather", "all-reduce"],
}
"""The collectives of a step of 1024 particles in 4 dimensions."""


def start(*arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )


@pytest.fixture(scope="module")
def found():
    process = start("tests/mesh_devices.py")
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    return json.loads(out)


@pytest.mark.parametrize("name", px.algorithms.__all__)
def test_eight_devices_give_the_result_of_one(found, name):
    assert found["single"][name] < 1e-5
    assert found["double"][name] < 1e-12


def test_other_clouds_and_data_too(found):
    assert {name for name, gap in found["others"].items() if not gap < 1e-5} == set()
    assert {name for name, gap in found["special"].items() if not gap < 1e-5} == set()
    assert found["stateful"] < 1e-5
    assert found["shared"] < 1e-5


@pytest.mark.parametrize("name", px.algorithms.__all__)
def test_collectives_are_the_expected_ones(found, name):
    assert found["gather"][name]["kinds"] == EXPECTED[name]
    if "all-gather" in EXPECTED[name]:
        assert "collective-permute" in found["ring"][name]["kinds"]


@pytest.mark.parametrize("way, num", [("gather", 1024), ("turned", 16), ("ring", 1024)])
def test_bytes_agree_with_the_formula(found, way, num):
    for name, seen in found[way].items():
        np.testing.assert_allclose(
            seen["bytes"], seen["formula"], rtol=0.01, atol=512, err_msg=name
        )
        most = 16 * 16 if way == "turned" else 4 * num
        pieces = [np.prod(shape) for shape in seen["shapes"]]
        if way != "turned":  # no matrix of pairs
            assert max(pieces, default=0) <= most


def test_few_networks_are_never_gathered(found):
    sent = found["turned"]["svgd"]
    assert sent["kinds"] == ["all-reduce", "all-to-all"]


def test_leaves_keep_their_own_sharding(found):
    spec, gap, read_where_it_was = found["own"]
    assert "model" in spec
    assert gap < 1e-5
    assert read_where_it_was


def test_particles_are_read_where_they_were(found):
    assert found["elsewhere"] == {name: [0.0, True] for name in ("alone", "everywhere", "apart")}


def test_many_gpus_use_the_kernels_of_one(found):
    """Where JAX notes where numbers lie, the kernels still understand the weights; their sums are those of one device."""
    kernels, gaps = found["gpus"]
    assert len(kernels) == 8
    assert max(gaps.values()) < 1e-5
    if any(isinstance(names, str) for names in kernels.values()):
        pytest.skip(f"this JAX lowers for GPUs only where one is: {kernels}")
    assert all("_direct_body" in names for names in kernels.values()), kernels


def test_a_checkpoint_goes_on_with_other_devices(found):
    devices, gap = found["checkpoint"]
    assert devices == 4
    assert gap < 1e-5


def test_errors_say_what_to_do(found):
    uneven, nameless, nonsense = found["refused"]
    assert "10 particles came for 8 devices" in uneven
    assert "8 or 16 particles" in uneven
    assert "with 5 along" in uneven
    assert "'particles'" in nameless
    assert "jax.make_mesh" in nonsense


def go(folder, steps=STEPS, **options):
    """The run of tests/mesh_processes in this process alone."""
    return px.run(
        px.svgd(regression(), step_size=0.01),
        start_of_regression(),
        steps=steps,
        key=jax.random.key(1),
        data=px.Minibatches(ROWS, 10),
        progress=False,
        checkpoint=px.Checkpoints(folder, every=2),
        **options,
    )


def in_two_processes(*arguments):
    """Exit code, the JSON of the last line, and what was said, of both."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [start("tests/mesh_processes.py", port, rank, *arguments) for rank in range(2)]
    try:
        done = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    last = [
        json.loads(out.splitlines()[-1]) if "{" in out or '"' in out else None for out, _ in done
    ]
    codes = [process.returncode for process in processes]
    return codes, last, [err for _, err in done]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def lost(folder):
    return in_two_processes(folder, "lost")


@pytest.fixture(scope="module")
def pair(folder, lost):
    """What two processes found, after a run that lost one of them, and after a damaged checkpoint of one process."""
    go(folder / "one", steps=4)
    written = folder / "one" / "00000004" / "manifest.json"
    written.write_text(written.read_text().replace("4", "5"))
    codes, found, said = in_two_processes(folder, "whole")
    assert codes == [0, 0], said
    return [*found, said[0]]


@pytest.mark.parametrize("name", px.algorithms.__all__)
def test_two_processes_give_the_result_of_one(pair, name):
    for found in pair[:2]:
        assert found["single"][name] < 1e-5
        assert found["double"][name] < 1e-12


def test_lost_particles_and_functions_in_two_processes(pair):
    for found in pair[:2]:
        assert set(found["special"]) == {"functions", "mended"}
        assert max(found["special"].values()) < 1e-5


def test_each_process_reads_its_own_rows_of_a_stream(pair):
    for place, found in enumerate(pair[:2]):
        gaps, read = found["streams"]
        assert ("in process 1 of 2" in gaps["refused"]) == (place == 0)
        assert "is not finite in the data" in gaps.pop("refused")
        assert max(gaps.values()) < 1e-5
        assert read == {"same rows": 40, "own rows": 20}


def test_data_that_end_a_run_cost_no_step_in_any_process(pair):
    for place, found in enumerate(pair[:2]):
        line, steps, last = found["rescued"]
        assert "the batch of step 3 is not finite" in line
        assert ("in process 1 of 2" in line) == (place == 0)
        assert (steps, last) == ([3], 3)


def test_a_lost_process_ends_the_other_with_one_clear_line(folder, lost):
    (survivor, killed), (line, _), said = lost
    assert (survivor != 0, killed) == (True, -signal.SIGKILL)
    assert "process 0 of 2 cannot go on" in line
    assert f"go on from the last good checkpoint in {folder / 'lost'}" in line
    assert "LostError" in said[0]


def test_after_it_both_go_on_bit_for_bit(pair):
    for found in pair[:2]:
        assert found["lost"] == found["whole"]
        assert found["loaded"] == found["whole"]
        assert found["placed"] == [found["whole"], "P('particles',)"]


def test_checkpoints_of_two_processes_and_of_one_are_exchangeable(folder, pair, tmp_path):
    here = np.asarray(go(tmp_path / "here").particles)
    for found in pair[:2]:
        np.testing.assert_allclose(found["from one"], here, atol=1e-5)
        np.testing.assert_allclose(found["alone"], here, atol=1e-5)
    later = go(folder / "whole", steps=STEPS + 2).particles
    np.testing.assert_allclose(later, go(tmp_path / "here", STEPS + 2).particles, atol=1e-5)


def test_every_process_writes_its_part(folder, pair):
    files = {path.name for path in (folder / "whole" / f"{STEPS:08d}" / "arrays").glob("*/*")}
    assert {"0.0", "1.0"} <= files  # the two halves of the particles


def test_a_damaged_checkpoint_is_left_out_by_all(pair):
    assert "00000004 is damaged: the content of manifest.json has changed" in pair[2]
    assert "Falling back to step 2" in pair[2]
    assert "resuming at step 2 of 8" in pair[2]


def test_a_signal_to_one_process_is_one_to_all(pair):
    for found in pair[:2]:
        assert found["signals"]["code"] == px.checkpoints.EXIT_SAVED
        assert "interrupted: saved step 5" in found["signals"]["line"]
        assert found["signals"]["end"] == found["whole"]
    assert pair[2].count("told to end (SIGTERM)") == 1


def test_an_error_in_one_process_is_one_in_all(pair):
    for place, found in enumerate(pair[:2]):
        apart, other, differing = found["refused"]
        assert "on a disk that all machines share" in apart
        assert "step_size: 0.01 there, 0.02 here" in other
        assert ("in process 1 of 2: " in other) == (place == 0)
        assert "the particles of process 1 are not those of process 0" in differing
