"""One hour of steps with checkpoints and observers: memory and open files must not grow.

python -m experiments run soak

Every save starts and ends threads, to which glibc gives heaps of their own, up to eight for each core. particlax has glibc give back what
they leave, but not the gaps within pages. So beside what the process has of memory stands what the program holds of it.
"""

import ctypes
import dataclasses
import functools
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import particlax as px
from experiments import crash, report
from experiments.study import Evaluation, Study, Table, by_seed


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the soak test."""

    seconds: float = 3600.0
    every: str = "0.2s"
    samples: int = 400
    particles: int = 4
    inputs: int = 784
    width: int = 32
    rows: int = 2000
    batch: int = 50
    streamed: bool = True
    seeds: int = 1


class Gauge:
    """An observer that notes memory and open files, and ends the run when its time is over."""

    def __init__(self, seconds: float, samples: int):
        self.seconds, self.pause = seconds, seconds / samples
        self.next, self.end, self.rows, self.saves = 0.0, float("inf"), [], 0

    def __call__(self, snapshot: Any) -> bool:
        """One look: a row of numbers, if it is time for one."""
        now = time.perf_counter()
        # From the first look on: compiling does not count.
        self.end = min(self.end, now + self.seconds)
        if now >= self.next:
            self.next = now + self.pause
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            files = len(os.listdir("/proc/self/fd"))
            self.rows.append((now, pages * resource.getpagesize() / 2**20, held(), files))
        return now >= self.end

    def value(self, snapshot: Any) -> float:
        """What the best checkpoint is chosen by; asked for at every save."""
        self.saves += 1
        return float(snapshot.log_density.mean())


class _Heaps(ctypes.Structure):
    """glibc's account of its heaps, all threads' together (struct mallinfo2)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


@functools.cache
def _account() -> Callable[[], _Heaps] | None:
    try:
        found = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    found.restype = _Heaps
    return found


def held() -> float:
    """MB that the program has asked for and not given back, without the gaps between; NaN where glibc is not there to tell."""
    if (account := _account()) is None:
        return float("nan")
    heaps = account()
    return (heaps.uordblks + heaps.hblkhd) / 2**20


def slope(times: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Least squares: growth per hour, and its standard error from the residuals of ten blocks; NaN of fewer than three looks."""
    count = min(10, len(times))
    if count < 3:
        return float("nan"), float("nan")
    blocks = [
        (t.mean(), v.mean())
        for t, v in zip(np.array_split(times, count), np.array_split(values, count), strict=True)
    ]
    t, v = np.array(blocks).T
    t = (t - t.mean()) / 3600
    found = float(t @ v / (t @ t))
    rest = v - v.mean() - found * t
    return found, float(np.sqrt(rest @ rest / (len(t) - 2) / (t @ t)))


def work(c: Config, seed: int) -> Iterator[Evaluation]:
    """One long run; growth is measured after its first fifth."""
    began = time.perf_counter()
    like = crash.Config(
        particles=c.particles, inputs=c.inputs, width=c.width, rows=c.rows, batch=c.batch
    )
    flow, start, data, key = crash.networks(like, seed)
    arrays = {name: np.asarray(leaf) for name, leaf in data.arrays.items()}
    gauge = Gauge(c.seconds, c.samples)
    with tempfile.TemporaryDirectory() as scratch:
        result = px.run(
            flow,
            start,
            steps=2**30,
            key=key,
            data=px.Stream(arrays, c.batch) if c.streamed else data,
            observers=gauge,
            checkpoint=px.Checkpoints(scratch, every=c.every, best=gauge.value),
            progress=False,
        )
    times, memory, heap, files = np.array(gauge.rows[len(gauge.rows) // 5 :]).T
    (growth, error), (more, less) = slope(times, memory), slope(times, heap)
    metrics = {
        "steps": int(result.state.step),
        "checkpoints": gauge.saves,
        "memory_mb": memory.mean(),
        "growth_mb_per_hour": growth,
        "standard_error": error,
        "held_mb": heap.mean(),
        "held_growth_mb_per_hour": more,
        "held_standard_error": less,
    }
    extra = {
        "arenas": os.environ.get("MALLOC_ARENA_MAX", ""),
        "memory": [round(float(m), 2) for m in memory],
        "held": [round(float(m), 2) for m in heap],
        "files": [int(f) for f in files],
    }
    yield Evaluation(metrics, time.perf_counter() - began, extra)


def table(found: list[dict]) -> report.Rows:
    """One row for each run."""
    rows = [["a save every", "steps", "checkpoints", "memory, MB", "growth, MB/hour", "least in the first and last tenth", "held, MB", "growth, MB/hour", "open files, first and last tenth"]]  # fmt: skip
    for entry in found:
        m = entry["metrics"]
        least = [min(part) for part in np.array_split(entry["memory"], 10)]
        tenths = [np.median(part) for part in np.array_split(entry["files"], 10)]
        rows.append([
            str(entry["config"]["every"]), f"{m['steps']:,.0f}", f"{m['checkpoints']:,.0f}", f"{m['memory_mb']:.0f}",
            f"{m['growth_mb_per_hour']:.1f} ± {m['standard_error']:.1f}", f"{least[0]:.1f}, {least[-1]:.1f}",
            f"{m['held_mb']:.0f}", f"{m['held_growth_mb_per_hour']:.1f} ± {m['held_standard_error']:.1f}", f"{tenths[0]:.0f}, {tenths[-1]:.0f}",
        ])  # fmt: skip
    return rows


STUDY = Study(
    name="soak",
    title="One hour of steps with checkpoints, a stream and observers",
    paper="",
    takes="1 hour",
    config=Config,
    runs=by_seed(work),
    tables={"soak": Table("memory and open files", table)},
    smoke={
        "seconds": 3.0,
        "every": 20,
        "samples": 30,
        "inputs": 5,
        "width": 4,
        "rows": 50,
        "batch": 10,
    },
)
