"""One family of exceptions: each message says what came, what was expected and what to do."""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

__all__ = [
    "DataError",
    "NonFiniteError",
    "OptionError",
    "ParticlaxError",
    "ParticleError",
    "TargetError",
]


class ParticlaxError(Exception):
    """Base of every error that particlax raises on purpose."""


class ParticleError(ParticlaxError, ValueError):
    """The particles are not a cloud: wrong leading sizes, dtypes, too few or all equal."""


class TargetError(ParticlaxError, ValueError):
    """The log density, the prior or the likelihood does not return what it must."""


class DataError(ParticlaxError, ValueError):
    """A batch is missing or has the wrong shape."""


class OptionError(ParticlaxError, ValueError, TypeError):
    """An option is unknown, out of range, or does not fit the others."""


class NonFiniteError(ParticlaxError, FloatingPointError):
    """A run met NaN or infinity; `step`, `particles` say where, `state` is the last good state."""

    def __init__(self, message: str, *, step: int, particles: list[int], state: Any):
        super().__init__(message)
        self.step = step
        self.particles = particles
        self.state = state


P = ParamSpec("P")
R = TypeVar("R")


def known_options(function: Callable[P, R]) -> Callable[P, R]:
    """Make an unknown keyword an `OptionError` that lists the options and the nearest name."""
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise OptionError(
                    f"{function.__name__} has no option {name!r}: {hint}"
                    f"its options are {', '.join(names)}"
                )
        return function(*args, **kwargs)

    return checked


def one_of(what: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a string option that is none of `choices`."""
    if value not in choices:
        options = ", ".join(map(repr, choices))
        raise OptionError(f"{what} is {value!r}; expected one of {options}")
