"""One pass of SVGD beside other packages: every entrant in a process of its own, in turns, ratios taken within a round."""

import contextlib
import difflib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import particlax as px
from benchmarks import machine, rounds
from benchmarks.entrants import ENTRANTS, OURS, Work
from benchmarks.timing import times
from experiments import report
from experiments.config import ConfigError
from experiments.study import Evaluation

SMALL = 1000
"""Up to so many particles NumPy's products are faster on one thread."""


def known(names: Sequence[str]) -> None:
    """Refuse a list of entrants that has unknown ones, or not ours."""
    for name in names:
        if name not in ENTRANTS:
            near = difflib.get_close_matches(name, ENTRANTS, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise ConfigError(f"no entrant {name!r}{hint} There are: {', '.join(ENTRANTS)}")
    if OURS not in names:
        raise ConfigError(f"--entrants= is without {OURS}, to which the others are compared")


def one_pass(
    c: Any, work: Work, need: machine.Need, judge: Callable[[np.ndarray], dict] | None = None
) -> Iterator[Evaluation]:
    """All of `c.entrants`, in turns; an evaluation for each, with what `judge` says of its particles."""
    device = jax.default_backend()
    limits = machine.measured(small=c.turn < 0.1)
    least = need.seconds(limits)
    failed = {n: "runs on a CPU alone" for n in c.entrants if device != "cpu" and not ENTRANTS[n].anywhere}  # fmt: skip
    paces: dict[str, rounds.Pace] = {}
    workers: dict[str, rounds.Worker] = {}
    with contextlib.ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "work.npz"
        work.save(path)
        threads, first = (1, 10) if len(work.start) <= SMALL else (0, 1)
        for name in (name for name in c.entrants if name not in failed):
            worker = stack.enter_context(rounds.started(name, path, device, threads))
            try:
                paces[name] = rounds.warm(worker, c.turn, first)
                workers[name] = worker
            except rounds.WorkerError as error:
                if name == OURS:
                    raise
                failed[name] = str(error)
        seconds = rounds.timed(list(workers.values()), list(paces.values()), c.rounds)
        steps = dict(zip(workers, seconds.T, strict=True))
        for name in c.entrants:
            if name in failed:
                yield Evaluation({"entrant": name}, 0.0, {"notes": failed[name], **where()})
                continue
            particles, taken = workers[name].particles()
            metrics = {"entrant": name, **times(steps[name], steps[OURS])}
            metrics |= {"limit": least / np.median(steps[name]), "mib": taken / 2**20}
            metrics |= {"startup": paces[name].startup, "steps": workers[name].steps}
            metrics |= judge(particles) if judge else {}
            spent = float(steps[name].sum() * paces[name].steps)
            yield Evaluation(metrics, spent, about(name, paces[name].versions, limits))


def about(name: str, versions: dict[str, str], limits: machine.Limits) -> dict:
    """What a record says beside the numbers; its own package's version first."""
    return {
        "notes": ENTRANTS[name].notes,
        "versions": {**versions, "particlax": px.__version__, "jax": jax.__version__},
        "machine": limits.rounded(),
        **where(),
    }


def where() -> dict[str, str]:
    """A CPU by its cores; other devices are named by JAX."""
    return {"device": f"cpu: {rounds.cores()} cores"} if jax.default_backend() == "cpu" else {}


HEAD = ["package", "used as", "ms a step", "time over particlax's (deciles)", "of the machine's limit", "memory, MiB", "start-up, s"]  # fmt: skip


def rows(found: list[dict], keys: dict[str, str] | None = None) -> report.Rows:
    """A row per entrant, over several passes medians; `keys` are further metrics and their formats."""
    lines, keys = [], keys or {}
    for name in dict.fromkeys(r["metrics"]["entrant"] for r in found):
        here = [r for r in found if r["metrics"]["entrant"] == name]
        done = [r["metrics"] for r in here if "ms" in r["metrics"]]
        if not done:
            lines.append([name, here[-1]["notes"], *"-" * (len(HEAD) - 2 + len(keys))])
            continue

        def show(key: str, kind: str, done: list[dict] = done) -> str:
            values = [m[key] for m in done if key in m]
            return f"{np.median(values):{kind}}" if values else "-"

        ratio = (
            f"{show('ratio', '.2f')} ({show('ratio_low', '.2f')} to {show('ratio_high', '.2f')})"
        )
        last = [r for r in here if "ms" in r["metrics"]][-1]
        lines.append([
            named(name, last["versions"]), last["notes"], show("ms", ".3f"), ratio,
            show("limit", ".2%"), show("mib", ".0f"), show("startup", ".1f"),
            *(show(key, kind) for key, kind in keys.items()),
        ])  # fmt: skip
    return lines


def named(name: str, versions: dict[str, str]) -> str:
    """An entrant with the version of its package."""
    return f"{name} {next(iter(versions.values())).partition('+')[0]}"


def by_device(found: list[dict]) -> dict[str, list[dict]]:
    """The records of each device."""
    devices = dict.fromkeys(entry["device"] for entry in found)
    return {device: [r for r in found if r["device"] == device] for device in devices}
