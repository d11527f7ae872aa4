"""A folder of checkpoints on the disk: who may write, what is complete, what is damaged. No JAX in here.

A checkpoint is made under a name of its own and renamed when all of it is on the disk. Its `manifest.json` holds a SHA-256 of
every file and of itself; what does not agree with it is damaged, and never used.
"""

import contextlib
import fnmatch
import hashlib
import json
import os
import re
import shutil
import socket
import time
import weakref
from pathlib import Path
from typing import Any

from particlax.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows: runs there are not protected from each other
    fcntl = None

FORMAT = 1
MANIFEST = "manifest.json"
ARRAYS = "arrays"
LEFT_BY_OTHERS = (".DS_Store", "._*", "Thumbs.db", "desktop.ini", ".directory", ".nfs*")
"""Files that file managers and network disks put into folders; nobody reads them as a part of a checkpoint."""
SEEN_SECONDS = 15.0
"""How long another machine may take to see a file: network disks remember what was not there."""


class DamagedError(Exception):
    """Why a checkpoint cannot be used."""


class Folder:
    """Checkpoints by step number in the folder `path`."""

    def __init__(self, path: str | os.PathLike):
        # Absolute: the program may change its working directory.
        self.path = Path(path).expanduser().absolute()
        self._lock: Any = None

    def home(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.path / f"{step:08d}"

    def steps(self) -> list[int]:
        """The steps of all checkpoints, good or damaged, in order."""
        if not self.path.is_dir():
            return []
        return sorted(int(p.name) for p in self.path.iterdir() if re.fullmatch(r"\d{8,}", p.name))

    # Who may write

    def lock(self) -> str:
        """Make this process the only one that writes here, until `unlock` or its end; its name, as in the lock."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "lock").open("a+")
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint folder {self.path} cannot be written: {error}. Choose another one"
            ) from error
        if fcntl is not None:
            try:
                # The system drops this lock when the process ends, also by kill -9: none is ever stale.
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._lock.seek(0)
                holder = self._lock.read().strip() or "another process"
                self._lock.close()
                self._lock = None
                raise CheckpointError(
                    f"another run writes its checkpoints to {self.path}: {holder}. Wait for it, stop it, or use another folder"
                ) from None
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        self._lock.truncate(0)
        self._lock.write(f"{holder}\n")
        self._lock.flush()
        _LOCKED.add(self)
        self._sweep()
        return holder

    def unlock(self) -> None:
        """Let others write."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._lock.truncate(0)
                if fcntl is not None:  # for a child, too, that was forked a moment ago
                    fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._lock.close()
            self._lock = None

    def find(self, holder: str) -> None:
        """See that the lock of the first process is here too: that all processes mean the same folder."""
        until = time.monotonic() + SEEN_SECONDS
        while True:
            with contextlib.suppress(OSError):
                if (self.path / "lock").read_text().strip() == holder:
                    return
            if time.monotonic() > until:
                raise CheckpointError(
                    f"the first process ({holder}) has locked the checkpoint folder {self.path}, but its lock is not in "
                    f"{self.path.absolute()} on {socket.gethostname()}; expected one folder, on a disk that all machines share. Give its "
                    "whole path"
                )
            time.sleep(0.1)

    def _sweep(self) -> None:
        """Remove what was never completed."""
        for path in self.path.glob("unfinished-*"):
            _remove(path)

    # What is complete

    def unfinished(self, step: int) -> Path:
        """Where the checkpoint of a step is made."""
        return self.path / f"unfinished-{step:08d}"

    def begin(self, step: int) -> Path:
        """A fresh place to write the checkpoint of a step to."""
        place = self.unfinished(step)
        _remove(place)
        place.mkdir()
        return place

    def seal(self, step: int, content: dict[str, Any]) -> None:
        """See every file of a checkpoint onto the disk, write its manifest, and give it its name."""
        place = self.unfinished(step)
        files = {str(f.relative_to(place)): _stamp(f, sync=True) for f in _files(place)}
        _write(place / MANIFEST, {"format": FORMAT, "step": step, **content, "files": files})
        for folder in (p for p in (place, *place.rglob("*")) if p.is_dir()):
            _sync(folder)
        place.rename(self.home(step))
        _sync(self.path)

    def amend(self, step: int, changes: dict[str, Any]) -> None:
        """Change what is written about a checkpoint, all at once."""
        new = self.path / f"unfinished-{MANIFEST}"
        try:
            _write(new, {**self.manifest(step), **changes})
            new.replace(self.home(step) / MANIFEST)
            _sync(self.home(step))
        except OSError as error:
            raise CheckpointError(
                f"{self.home(step) / MANIFEST} cannot be written: {error}. Mend that, and run the same command again"
            ) from error

    def abandon(self, step: int) -> None:
        """Give up a checkpoint that could not be written, and its room on the disk."""
        shutil.rmtree(self.unfinished(step), ignore_errors=True)

    def prune(self, keep: set[int]) -> None:
        """Remove all checkpoints but those of the given steps."""
        for step in self.steps():
            if step not in keep:
                # Renamed first: a half-removed one must not look damaged.
                gone = self.unfinished(step)
                _remove(gone)
                self.home(step).rename(gone)
                _remove(gone)

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint, so that its step can be saved again."""
        aside = self.path / f"damaged-{step:08d}"
        shutil.rmtree(aside, ignore_errors=True)
        self.home(step).rename(aside)
        return aside

    # What is damaged

    def verify(self, step: int) -> dict[str, Any]:
        """The manifest of a checkpoint whose every file is as it was written; `DamagedError` otherwise."""
        place = self.home(step)
        body = self.manifest(step)
        there = {str(f.relative_to(place)) for f in _files(place)} - {MANIFEST}
        for name in sorted(there ^ set(body["files"])):
            raise DamagedError(
                f"{name} {'is missing' if name not in there else 'does not belong there'}"
            )
        for name, stamp in body["files"].items():
            found = _stamp(place / name)
            if found["bytes"] != stamp["bytes"]:
                raise DamagedError(f"{name} has {found['bytes']} bytes, not {stamp['bytes']}")
            if found != stamp:
                raise DamagedError(f"the content of {name} has changed")
        return body

    def manifest(self, step: int) -> dict[str, Any]:
        """What is written about a checkpoint, its arrays not yet looked at."""
        try:
            body = json.loads((self.home(step) / MANIFEST).read_bytes())
            stamp = body.pop("sha256")
            if stamp != _digest(body) or body["step"] != step:
                raise DamagedError(f"the content of {MANIFEST} has changed")
        except FileNotFoundError:
            raise DamagedError(f"{MANIFEST} is missing") from None
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise DamagedError(f"{MANIFEST} cannot be read ({error})") from None
        if body["format"] != FORMAT:
            raise CheckpointError(
                f"{self.home(step)} has format {body['format']}, and this version of particlax reads format {FORMAT}. It was written "
                f"by particlax {body.get('versions', {}).get('particlax', '?')}; use that one, or another folder"
            )
        return body


def _remove(path: Path) -> None:
    """Remove a folder or a file, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


_LOCKED: weakref.WeakSet[Folder] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child: a lock lives as long as any process has it open."""
    for folder in _LOCKED:
        if folder._lock is not None:
            folder._lock.close()
            folder._lock = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def _files(place: Path) -> list[Path]:
    left = lambda p: any(fnmatch.fnmatch(p.name, pattern) for pattern in LEFT_BY_OTHERS)
    return sorted(p for p in place.rglob("*") if not p.is_dir() and not left(p))


def _stamp(path: Path, sync: bool = False) -> dict[str, Any]:
    try:
        with path.open("rb") as content:
            if sync:
                os.fsync(content.fileno())
            digest = hashlib.file_digest(content, "sha256").hexdigest()
            return {"bytes": content.tell(), "sha256": digest}
    except OSError as error:
        if sync:
            raise
        raise DamagedError(f"{path.name} cannot be read ({error})") from None


def _write(path: Path, body: dict[str, Any]) -> None:
    """A manifest, with its own hash; a line for each entry."""
    # Without json's `indent`, whose encoder leaves cycles behind at every save.
    entries = {**body, "sha256": _digest(body)}.items()
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in entries]
    with path.open("w") as out:
        out.write("{\n" + ",\n".join(lines) + "\n}\n")
        out.flush()
        os.fsync(out.fileno())


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
