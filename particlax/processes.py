"""Several processes that do one run together: who they are, what they tell each other, and what happens when one is gone.

All of them take the same steps, so whatever may differ between them (a clock, a signal, a disk) is told to all before anybody acts
on it. One process alone has nobody to tell, and does nothing here.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from particlax import errors
from particlax.errors import LostError, OptionError, ParticlaxError

__all__ = ["Team", "team_of"]

LETTER = 256
"""Bytes of a message that goes in one round."""
GONE = re.compile(
    r"gloo|nccl|coordination service|heartbeat|UNAVAILABLE|DEADLINE_EXCEEDED|connection (closed|reset|refused)",
    re.IGNORECASE,
)
"""What JAX says when another process does not answer."""


@dataclasses.dataclass(frozen=True)
class Team:
    """The processes of a run: this one alone, or all of them.

    >>> Team().each(lambda: 3)
    [3]
    """

    several: bool = False

    @property
    def first(self) -> bool:
        """Whether this process does what one does for all."""
        return not self.several or jax.process_index() == 0

    def each(self, work: Callable[[], Any]) -> list[Any]:
        """What work() gives in each process, in all of them; an error of particlax in one is an error in all."""
        if not self.several:
            return [work()]
        failure: ParticlaxError | None = None
        note: dict[str, Any] = {}
        try:
            note["found"] = work()
        except ParticlaxError as error:
            failure, note = error, {"kind": type(error).__name__, "text": str(error)}
        notes = [json.loads(text) for text in _exchanged(json.dumps(note).encode())]
        if failure is not None:
            raise failure
        for rank, note in enumerate(notes):
            if "kind" in note:
                kind = getattr(errors, note["kind"], OptionError)
                raise kind(f"in process {rank} of {len(notes)}: {note['text']}")
        return [note["found"] for note in notes]

    def by_first(self, work: Callable[[], Any]) -> Any:
        """What work() gives in the first process, which alone does it."""
        return self.each(lambda: work() if self.first else None)[0]

    @contextlib.contextmanager
    def noticing(self, remedy: Callable[[], str]) -> Iterator[None]:
        """An error of JAX that means that another process is gone becomes one that says so."""
        try:
            yield
        except (RuntimeError, ValueError) as error:  # JAX raises either
            ours = isinstance(error, ParticlaxError)
            if ours or not self.several or not GONE.search(str(error)):
                raise
            reason = " ".join(str(error).split())[:200]
            raise LostError(
                f"process {jax.process_index()} of {jax.process_count()} cannot go on: another one has ended or cannot be reached "
                f"({reason}). {remedy()}"
            ) from error


def team_of(mesh: Mesh | None) -> Team:
    """The processes whose devices a mesh has."""
    if mesh is None or jax.process_count() == 1:
        return Team()
    ranks = {device.process_index for device in mesh.devices.flat}
    if ranks == {jax.process_index()}:
        return Team()
    if len(ranks) < jax.process_count():
        raise OptionError(
            f"the mesh has devices of {len(ranks)} of {jax.process_count()} processes; expected devices of this process alone, or of "
            "all processes, such as jax.make_mesh((jax.device_count(),), ('particles',))"
        )
    return Team(several=True)


def _exchanged(message: bytes) -> list[bytes]:
    """The messages of all processes, by rank."""
    from jax.experimental import multihost_utils

    def round_of(room: int) -> tuple[list[int], list[bytes]]:
        letter = np.zeros(room + 4, np.uint8)
        letter[:4] = np.frombuffer(len(message).to_bytes(4, "little"), np.uint8)
        part = np.frombuffer(message[:room], np.uint8)
        letter[4 : 4 + len(part)] = part
        letters = np.asarray(multihost_utils.process_allgather(letter))
        sizes = [int.from_bytes(one[:4].tobytes(), "little") for one in letters]
        return sizes, [one[4 : 4 + n].tobytes() for one, n in zip(letters, sizes, strict=True)]

    sizes, found = round_of(LETTER)
    if max(sizes) > LETTER:
        found = round_of(1 << (max(sizes) - 1).bit_length())[1]
    return found
