"""Memory that the threads of a save are done with goes back to the system, wherever glibc is the C library.

glibc has a heap for each of many threads, and those of a save come and go: in time each heap has been as large as the largest save's
made it. `malloc_trim` gives free pages of all heaps back, except at the top of a thread's heap, which is cut only when something
there is freed, and only beyond a threshold that glibc raises to 64 MiB for programs that free large arrays. So that threshold is low
while a save goes on.
"""

import ctypes
import functools
import os
from typing import Any

__all__ = ["lean", "settle"]

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Names of settings in malloc.h."""
LOW = 1 << 17
"""Bytes at the top of a heap that are kept while a save goes on: the threshold that glibc starts with."""
TOP, APART = 1 << 26, 1 << 25
"""Bytes that are kept at other times, and from which on an array has pages of its own: to these glibc raises both at most."""


@functools.cache
def _glibc() -> Any:
    """The C library if it is glibc, which is looked up once: each look makes a class, and cycles that outlive a save."""
    try:
        library = ctypes.CDLL(None)
        return library if library.malloc_trim and library.mallopt else None
    except (
        AttributeError,
        OSError,
        TypeError,
    ):  # others have no such functions, and no need of them
        return None


@functools.cache
def _tuned() -> bool:
    """Whether whoever started the program has chosen thresholds: they stay."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return (
        any(f"MALLOC_{name}_THRESHOLD_" in os.environ for name in ("TRIM", "MMAP"))
        or "trim_threshold" in tunables
        or "mmap_threshold" in tunables
    )


def lean() -> None:
    """From here on what is freed at the top of a heap goes back to the system."""
    library = _glibc()
    if library is not None and not _tuned():
        library.mallopt(TRIM_THRESHOLD, LOW)


def settle() -> None:
    """Give back what is free in all heaps, and let them keep what they free from here on, for speed."""
    library = _glibc()
    if library is None:
        return
    library.malloc_trim(0)
    if not _tuned():
        library.mallopt(TRIM_THRESHOLD, TOP)
        library.mallopt(MMAP_THRESHOLD, APART)
