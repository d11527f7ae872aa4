"""Typed settings from the command line: `--key=value`, or `--flag` for a boolean."""

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any, TypeVar

C = TypeVar("C")


class ConfigError(SystemExit):
    """A setting that is unknown or of the wrong type; ends the program with its message."""


def parse(kind: type[C], arguments: list[str]) -> C:
    """A config of dataclass `kind` with the overrides given as `--key=value`."""
    fields = {field.name: field for field in dataclasses.fields(kind)}  # pyright: ignore
    values: dict[str, Any] = {}
    for argument in arguments:
        if argument in ("-h", "--help"):
            lines = [f"  --{name}={shown(field.default)}" for name, field in fields.items()]
            raise ConfigError("settings and their defaults:\n" + "\n".join(lines))
        name, sign, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"; did you mean --{near[0]}?" if near else "."
            raise ConfigError(
                f"unknown setting {argument!r}{hint} Expected one of "
                + ", ".join(f"--{known}=" for known in fields)
            )
        if name in values:
            raise ConfigError(f"--{name} is given twice; expected it once")
        values[name] = _convert(name, text if sign else "true", fields[name].default)
    return kind(**values)


def names(text: str) -> list[str]:
    """Of "SVGD; w-SGLD"."""
    return [name.strip() for name in text.split(";") if name.strip()]


def chosen(what: str, text: str, known: Iterable[str]) -> list[str]:
    """The names in `text`, or all that are known; others end the program."""
    known, wanted = list(known), names(text)
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(f"no {what} {unknown[0]!r}; the {what}s are: {'; '.join(known)}")
    return wanted or known


def shown(value: Any) -> str:
    """A value as it would be typed."""
    if isinstance(value, tuple):
        return ",".join(map(shown, value))
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def _convert(name: str, text: str, default: Any) -> Any:
    """`text` as the type of `default`; a tuple takes values separated by commas."""
    kind = type(default)
    if kind is tuple:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return tuple(_convert(name, part, default[0]) for part in parts)
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ConfigError(f"--{name}={text}: expected true or false")
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"--{name}={text}: expected {kind.__name__}") from None
