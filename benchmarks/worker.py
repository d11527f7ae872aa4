"""One entrant in a process of its own; JSON lines in and out.

python -m benchmarks.worker NAME WORK.npz

It says {"seconds": of preparing, "versions": {...}}, or {"failed": why} and ends. Then {"steps": k} takes k steps and is
answered by {"seconds": s}, {} by {"particles": [[...]], "bytes": b}, the most memory that the work took, compilation included, or on
a GPU the most of the device's; the end of its input is its end.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import jax

from benchmarks.entrants import ENTRANTS, Entrant, Sampler, Work


def versions(entrant: Entrant) -> dict[str, str]:
    """Import what the entrant needs; the versions of its packages."""
    modules = {name: import_module(name) for name in entrant.packages}
    return {name: module.__version__ for name, module in modules.items() if "." not in name}


def resident(kind: str = "VmRSS") -> int:
    """Bytes of memory that this process holds now; as "VmHWM", the most that it has held."""
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in status if line.startswith(kind))
    return 1024 * int(line.split()[1])


def most(before: int) -> int:
    """The most bytes of this process since it held `before`; of the device, where that has a memory of its own."""
    if jax.default_backend() != "cpu":
        return jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    return resident("VmHWM") - before  # getrusage would count the process that started this one


def serve(sampler: Sampler, orders: TextIO, say: Callable[[Any], None], before: int) -> None:
    """Do as told until there are no more orders."""
    for line in orders:
        order = json.loads(line)
        if "steps" in order:
            began = time.perf_counter()
            sampler.advance(order["steps"])
            say({"seconds": time.perf_counter() - began})
        else:
            taken = most(before)
            say({"particles": sampler.particles().tolist(), "bytes": taken})


def main(name: str, path: Path) -> None:
    """Prepare the entrant and serve it."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get among the answers
    say = lambda answer: print(json.dumps(answer), file=channel, flush=True)
    entrant, work = ENTRANTS[name], Work.load(path)
    try:
        found = versions(entrant)
        if entrant.anywhere:  # JAX wakes up: its compiler and threads are not the work's
            jax.block_until_ready(jax.jit(lambda x: x + 1)(0.0))
        began, before = time.perf_counter(), resident()
        sampler = entrant.prepare(work)
    except ImportError as error:
        say({"failed": f"{error}: {entrant.install}"})
        return
    say({"seconds": time.perf_counter() - began, "versions": found})
    serve(sampler, sys.stdin, say, before)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
