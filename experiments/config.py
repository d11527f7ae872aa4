"""Typed settings from the command line: `--key=value`, or `--flag` for a boolean."""

import dataclasses
import difflib
import sys
from typing import Any, TypeVar

C = TypeVar("C")


class ConfigError(SystemExit):
    """A setting that is unknown or of the wrong type; ends the program with its message."""


def parse(kind: type[C], arguments: list[str] | None = None) -> C:
    """A config of dataclass `kind` with the overrides given on the command line."""
    fields = {field.name: field for field in dataclasses.fields(kind)}  # pyright: ignore
    values: dict[str, Any] = {}
    for argument in sys.argv[1:] if arguments is None else arguments:
        if argument in ("-h", "--help"):
            lines = [f"  --{name}={field.default!r}" for name, field in fields.items()]
            raise ConfigError("settings and their defaults:\n" + "\n".join(lines))
        name, sign, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"; did you mean --{near[0]}?" if near else ""
            raise ConfigError(
                f"unknown setting {argument!r}{hint} Expected one of "
                + ", ".join(f"--{known}=" for known in fields)
            )
        values[name] = _convert(name, text if sign else "true", type(fields[name].default))
    return kind(**values)


def _convert(name: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ConfigError(f"--{name}={text}: expected true or false")
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"--{name}={text}: expected {kind.__name__}") from None
