"""One JSON record per evaluation: settings, seed, revision, versions, device, metrics, seconds.

A run (one setting, one seed) leaves one or several records; each says which of how many it is, so that a run cut
short by a crash is seen to be unfinished and done again.
"""

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jax
import numpy as np

import particlax

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
STUDY = "study"
"""Records whose name begins so are committed; the tables and figures of README and docs come from them."""


def record(
    experiment: str,
    config: dict,
    seed: int,
    *,
    metrics: dict,
    seconds: float,
    place: tuple[int, int] = (1, 1),
) -> dict:
    """The record of evaluation `place` = (which, of how many) of a run, ready for JSON."""
    device = jax.devices()[0]
    return {
        "experiment": experiment,
        "config": config,
        "seed": seed,
        "metrics": _plain(metrics),
        "seconds": float(f"{seconds:.4g}"),
        "revision": REVISION,
        "versions": {"particlax": particlax.__version__, "jax": jax.__version__},
        "device": f"{device.platform}: {device.device_kind}",
        "evaluation": list(place),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, str):
        return value
    if np.ndim(value):
        return [_plain(item) for item in np.asarray(value)]
    return float(f"{float(value):.6g}")


def pack(points: Any) -> dict:
    """Points to draw, as half-precision numbers in base64."""
    half = np.asarray(points, np.float16)
    return {"shape": list(half.shape), "float16": base64.b64encode(half.tobytes()).decode()}


def unpack(packed: dict) -> np.ndarray:
    """The points of `pack`."""
    flat = np.frombuffer(base64.b64decode(packed["float16"]), np.float16)
    return flat.reshape(packed["shape"]).astype(np.float32)


def revision() -> str:
    """The commit the code was run at, marked when the tree had changes; a copy may be told it."""
    if told := os.environ.get("PARTICLAX_REVISION"):
        return told
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


REVISION = revision()  # once, at the start: the tree may change while an experiment runs


class Ledger:
    """The records of one experiment in one file, which only ever grows by whole runs."""

    def __init__(self, path: Path):
        self.path = path
        found = _lines(path) if path.exists() else []
        finished = {key for key, count in _counts(found).items() if count[0] == count[1]}
        self.records = [entry for entry in found if _key(entry) in finished]
        self.finished = finished
        self.dropped = len(found) - len(self.records)
        text = path.read_text() if path.exists() else ""
        if text and (len(text.splitlines()) > len(self.records) or not text.endswith("\n")):
            self._rewrite()

    def has(self, config: dict, seed: int) -> bool:
        """Whether this run is finished."""
        return _key({"config": config, "seed": seed}) in self.finished

    def add(self, entries: list[dict]) -> None:
        """Append the records of one finished run and see them onto the disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as out:
            out.write("".join(json.dumps(entry) + "\n" for entry in entries))
            out.flush()
            os.fsync(out.fileno())
        self.records += entries
        self.finished |= {_key(entry) for entry in entries}

    def _rewrite(self) -> None:
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text("".join(json.dumps(entry) + "\n" for entry in self.records))
        fresh.replace(self.path)


def _key(entry: dict) -> str:
    return json.dumps([entry["config"], entry["seed"]], sort_keys=True)


def _counts(found: list[dict]) -> dict[str, tuple[int, int]]:
    """By run: how many of its evaluations there are, and how many there should be."""
    counts: dict[str, tuple[int, int]] = {}
    for entry in found:
        have = counts.get(_key(entry), (0, 0))[0]
        counts[_key(entry)] = (have + 1, entry["evaluation"][1])
    return counts


def _lines(path: Path) -> list[dict]:
    """The records in a file; only its last line may be torn."""
    lines = path.read_text().splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise SystemExit(
                    f"{path}, line {number} is not a record: {line[:60]!r}. Only the last line may be cut "
                    "short; delete the damaged line (its run will be done again)"
                ) from None
    return found


def home(experiment: str, name: str) -> Path:
    """Where the records `name` of an experiment are kept."""
    return RESULTS / experiment / f"{name}.jsonl"


def read(experiment: str, name: str = STUDY) -> list[dict]:
    """The records of an experiment: `name.jsonl`, and for the study every file that begins so."""
    pattern = f"{name}*.jsonl" if name == STUDY else f"{name}.jsonl"
    return [
        entry for path in sorted((RESULTS / experiment).glob(pattern)) for entry in _lines(path)
    ]
