"""What a save leaves in glibc's heaps goes back to the system, and the program's own settings stay."""

import os
import subprocess
import sys

import pytest

from particlax import heaps

TOPS = """
import sys, threading
from pathlib import Path
from particlax import heaps

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

def fill(low):
    # As a program that frees large arrays: glibc raises its thresholds.
    big = bytearray(30 << 20)
    del big
    if low:
        heaps.lean()
    gate = threading.Barrier(9)

    def work():
        gate.wait()  # all at a time, so that each has a heap of its own
        pieces = [bytes(100_000) for _ in range(80)]
        gate.wait()
        del pieces
        gate.wait()

    threads = [threading.Thread(target=work) for _ in range(8)]
    [thread.start() for thread in threads]
    [gate.wait() for _ in range(3)]
    [thread.join() for thread in threads]
    heaps.settle()

fill(True)  # stacks and what else is made once
before = resident()
fill(sys.argv[1] == "lean")
print(resident() - before)
"""


def grown(how, **environment):
    """MiB that eight threads, each with 8 MB for a moment, leave behind."""
    done = subprocess.run(
        [sys.executable, "-c", TOPS, how],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    return float(done.stdout)


needs_glibc = pytest.mark.skipif(heaps._glibc() is None, reason="the C library is not glibc")


@needs_glibc
def test_tops_of_heaps_go_back():
    assert grown("lean") < 8
    assert grown("usual") > 30  # what it is for: malloc_trim alone leaves them


@needs_glibc
@pytest.mark.parametrize(
    "name, value",
    [
        ("MALLOC_TRIM_THRESHOLD_", "67108864"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=67108864"),
    ],
)
def test_thresholds_of_whoever_started_the_program_stay(name, value):
    assert grown("lean", **{name: value}) > 30


def test_other_c_libraries_are_left_alone(monkeypatch):
    monkeypatch.setattr(heaps, "_glibc", lambda: None)
    assert heaps.lean() is None
    assert heaps.settle() is None
