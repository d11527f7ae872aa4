"""Timing in turns: every entrant lives in a process of its own, and one computes at a time.

Only in its own process has an entrant its own thread pool, memory and compiled code; only in turns do all of them
see the machine in the same moods. Ratios are therefore taken within a round.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from experiments.records import ROOT

PAUSE = 0.1
"""Seconds before a turn, in which the threads of the one before go to sleep."""


class WorkerError(RuntimeError):
    """An entrant that cannot run, or ended before it was told to."""


@dataclasses.dataclass
class Worker:
    """An entrant in its process, from the other side."""

    process: subprocess.Popen[str]
    errors: IO[str]
    """What it and its packages print."""
    steps: int = 0
    """Taken so far."""

    def advance(self, steps: int) -> float:
        """Take so many steps; the seconds they took."""
        self.steps += steps
        return self._ask({"steps": steps})["seconds"]

    def particles(self) -> tuple[np.ndarray, int]:
        """Where they are, and the bytes that the work took at most."""
        answer = self._ask({})
        return np.array(answer["particles"], np.float32), answer["bytes"]

    def answer(self) -> dict:
        """What it says next; once at the start, then once to every order."""
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            self.process.wait()
            self.errors.seek(0)
            said = self.errors.read().strip().splitlines()
            raise WorkerError(f"ended: {said[-1] if said else 'without a word'}")
        said = json.loads(line)
        if "failed" in said:
            raise WorkerError(said["failed"])
        return said

    def _ask(self, order: dict) -> dict:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self.answer()


@contextlib.contextmanager
def started(name: str, path: Path, device: str = "cpu", threads: int = 0) -> Iterator[Worker]:
    """The entrant `name` on the work in `path`; its process ends with the block, when its input does.

    `threads` are NumPy's; 0 leaves them to it.
    """
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(places), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment |= {"JAX_PLATFORMS": "cpu"} if device == "cpu" else {}
    environment |= {"OPENBLAS_NUM_THREADS": str(threads)} if threads else {}
    options: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "text": True,
        "env": {**os.environ, **environment},
    }
    command = [sys.executable, "-m", "benchmarks.worker", name, str(path)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stderr=errors, **options) as process,
    ):
        yield Worker(process, errors)


class Pace(NamedTuple):
    """A warm entrant."""

    startup: float
    """Seconds to build and compile, until the first steps were taken; imports are not counted."""
    steps: int
    """That fill a turn."""
    versions: dict[str, str]


def warm(worker: Worker, turn: float, steps: int) -> Pace:
    """Let an entrant compile, and see how many steps it takes in `turn` seconds; `steps` to begin with.

    Another number of steps may be another program: a call that was long enough is timed once more before it is believed.
    """
    hello = worker.answer()
    startup = hello["seconds"] + worker.advance(steps)
    while (seconds := _again(worker, turn, steps)) < 0.8 * turn:
        wanted = steps * turn / seconds
        steps = int(10 * np.ceil(wanted / 10) if wanted > 100 else np.ceil(wanted))
    return Pace(startup, steps, hello["versions"])


def _again(worker: Worker, turn: float, steps: int) -> float:
    seconds = worker.advance(steps)
    return seconds if seconds < 0.8 * turn else worker.advance(steps)


def timed(workers: Sequence[Worker], paces: Sequence[Pace], rounds: int) -> np.ndarray:
    """Seconds a step [rounds, workers]; every second round goes backwards."""
    seconds = np.empty((rounds, len(workers)))
    for now in range(rounds):
        for place in range(len(workers))[:: -1 if now % 2 else 1]:
            time.sleep(PAUSE)
            steps = paces[place].steps
            seconds[now, place] = workers[place].advance(steps) / steps
    return seconds


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
