"""Runs on several devices: 8 virtual ones in one subprocess, and two processes over loopback."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import particlax as px

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
    spec, gap = found["own"]
    assert "model" in spec
    assert gap < 1e-5


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


def test_two_processes_give_the_result_of_one():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [start("tests/mesh_processes.py", port, rank) for rank in range(2)]
    try:
        done = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, err) in zip(processes, done, strict=True):
        assert process.returncode == 0, err
        assert max(json.loads(out.splitlines()[-1])) < 1e-5
