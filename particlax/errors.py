"""One family of exceptions: each message says what came, what was expected and what to do."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

__all__ = [
    "CheckpointError",
    "DataError",
    "LostError",
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
    """A batch is missing or has the wrong shape; `state` is where a run was that met it on its way."""

    def __init__(self, message: str, *, state: Any = None):
        super().__init__(message)
        self.state = state


class OptionError(ParticlaxError, ValueError, TypeError):
    """An option is unknown, out of range, or does not fit the others."""


class CheckpointError(ParticlaxError, RuntimeError):
    """Checkpoints cannot be written, read, or belong to another run; `state` is where a run that wrote them was."""

    def __init__(self, message: str, *, state: Any = None):
        super().__init__(message)
        self.state = state


class LostError(ParticlaxError, RuntimeError):
    """Another process of a run ended or cannot be reached, and the run with it."""


class NonFiniteError(ParticlaxError, FloatingPointError):
    """A run met NaN or infinity; `step`, `particles` say where, `state` is the last good state.

    `checkpoint` is the path of the last good checkpoint, where the run made some.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int,
        particles: list[int],
        state: Any,
        checkpoint: str | None = None,
    ):
        super().__init__(message)
        self.step = step
        self.particles = particles
        self.state = state
        self.checkpoint = checkpoint


P = ParamSpec("P")
R = TypeVar("R")


def known_options(function: Callable[P, R]) -> Callable[P, R]:
    """Make an unknown keyword, or too many positions, an `OptionError` that lists the options."""
    owner, _, name = function.__qualname__.rpartition(".")
    name = owner if name == "__init__" else function.__name__
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    places = len([p for p in parameters if p.kind is not p.KEYWORD_ONLY]) + (name == owner)
    needed = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        check_options(name, [p.name for p in parameters], places, len(args), kwargs)
        if missing := [key for key in needed if key not in kwargs]:
            raise OptionError(
                f"{name} needs {missing[0]!r}, which did not come; expected {missing[0]}="
            )
        return function(*args, **kwargs)

    return checked


def check_options(
    name: str, options: list[str], places: int, given: int, keywords: Iterable[str]
) -> None:
    """Refuse unknown keywords and more than `places` positional arguments."""
    listed = ", ".join(options)
    for keyword in keywords:
        if keyword not in options:
            near = difflib.get_close_matches(keyword, options, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise OptionError(f"{name} has no option {keyword!r}: {hint}its options are {listed}")
    if given > places:
        raise OptionError(
            f"{name} got {given} arguments without a name; expected at most {places}. Give the others by "
            f"name; its options are {listed}"
        )


LONG = 80
"""Characters of a value's own description that an error shows."""


def told(value: Any) -> str:
    """What a value is, in a few words: an array by type and shape, and what is long by its kind.

    >>> import numpy; told(numpy.ones((3, 2))), told("mean"), told(list(range(1000)))
    ('a float64 array of shape (3, 2)', "'mean'", 'a list')
    """
    kind = type(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and shape and dtype is not None:
        return f"{'an' if str(dtype)[0] in 'iou' else 'a'} {dtype} array of shape {shape}"
    if inspect.isfunction(value):
        return "a function" if value.__name__ == "<lambda>" else f"the function {value.__name__}"
    many = isinstance(value, (list, tuple, dict, set)) and len(value) > LONG
    said = "" if many else repr(value)
    long = many or len(said) > LONG or "\n" in said or " at 0x" in said
    return f"{'an' if kind.__name__[0] in 'AEIOUaeiou' else 'a'} {kind.__name__}" if long else said


def expect(name: str, value: Any, kind: type | tuple[type, ...], example: str) -> Any:
    """Refuse a value that is not an instance of `kind`, or of one of several kinds."""
    if not isinstance(value, kind):
        kinds = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise OptionError(f"{name} is {told(value)}; expected a {kinds}, for instance {example}")
    return value


def one_of(what: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a string option that is none of `choices`."""
    if value not in choices:
        options = ", ".join(map(repr, choices))
        raise OptionError(f"{what} is {value!r}; expected one of {options}")
