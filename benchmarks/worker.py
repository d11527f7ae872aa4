"""One entrant in a process of its own; JSON lines in and out.

python -m benchmarks.worker NAME WORK.npz

It says {"seconds": of preparing, "versions": {...}}, or {"failed": why} and ends. Then {"steps": k} takes k steps and is
answered by {"seconds": s}, {} by {"particles": [[...]]}; the end of its input is its end.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from benchmarks.entrants import ENTRANTS, Entrant, Sampler, Work


def versions(entrant: Entrant) -> dict[str, str]:
    """Import what the entrant needs; the versions of its packages."""
    modules = {name: import_module(name) for name in entrant.packages}
    return {name: module.__version__ for name, module in modules.items() if "." not in name}


def serve(sampler: Sampler, orders: TextIO, say: Callable[[Any], None]) -> None:
    """Do as told until there are no more orders."""
    for line in orders:
        order = json.loads(line)
        if "steps" in order:
            began = time.perf_counter()
            sampler.advance(order["steps"])
            say({"seconds": time.perf_counter() - began})
        else:
            say({"particles": sampler.particles().tolist()})


def main(name: str, path: Path) -> None:
    """Prepare the entrant and serve it."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get among the answers
    say = lambda answer: print(json.dumps(answer), file=channel, flush=True)
    entrant, work = ENTRANTS[name], Work.load(path)
    try:
        found = versions(entrant)
        began = time.perf_counter()
        sampler = entrant.prepare(work)
    except ImportError as error:
        say({"failed": f"{error}: {entrant.install}"})
        return
    say({"seconds": time.perf_counter() - began, "versions": found})
    serve(sampler, sys.stdin, say)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
