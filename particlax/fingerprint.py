"""What a run consists of, as readable text: two runs are the same if their descriptions are.

A description maps places ("flow.integrator.step_size") to texts ("0.05"). Functions are described by name, by the numbers and the
names in their code, by what they close over and by the numbers, arrays and functions of one's own that their global names stand for,
so that `optax.adam(0.1)` and `optax.adam(0.2)` differ; objects of one's own classes by their fields and methods.
"""

import dataclasses
import dis
import functools
import hashlib
import sysconfig
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from particlax.data import Minibatches
from particlax.flow import Flow, State
from particlax.particles import num_particles
from particlax.streams import Stream

DEEPEST = 30
HASHED_BYTES = 1 << 24
"""Larger arrays are described by shape and dtype alone, or as data by some of their rows."""
SAMPLED = 256
"""Rows that stand for data of more bytes."""
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
"""Where functions lie that nobody changes between two runs."""
LIBRARIES = {"equinox", "flax", "jax", "numpy", "optax", "particlax"}
"""Whose functions are known by their name; their versions are compared where it matters."""
SHOWN = 12
"""Differences listed in an error."""


def describe_run(flow: Flow, state: State, data: Any, key: Array) -> dict[str, str]:
    """Flow, shapes, data and key of a run."""
    found = {"particles": str(num_particles(state.particles))}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        found[f"state{jax.tree_util.keystr(path)}"] = shape_of(leaf)
    found |= _describe_data(data)
    found["key"] = f"{jax.random.key_impl(key)} {np.asarray(jax.random.key_data(key)).tolist()}"
    return found | describe("flow", flow)


def differences(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """One line for each place at which two descriptions differ, the first few of them."""
    places = [
        p for p in (*here, *(p for p in there if p not in here)) if there.get(p) != here.get(p)
    ]
    # What contains a difference need not be listed beside it, and a part that is gone not leaf by leaf.
    tops = [
        p
        for p in places
        if not any(_inside(p, other) for other in places if _one_sided(other, there, here))
    ]
    lines = [f"{p}: {there.get(p, 'nothing')} there, {here.get(p, 'nothing')} here" for p in tops]
    more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return lines[:SHOWN] + more


def _one_sided(place: str, there: Mapping[str, str], here: Mapping[str, str]) -> bool:
    return place not in there or place not in here


def _inside(place: str, other: str) -> bool:
    return place != other and place.startswith((f"{other}.", f"{other}["))


def shape_of(leaf: Any) -> str:
    """An array as "float32[6,2]"."""
    return f"{jnp.result_type(leaf)}[{','.join(map(str, jnp.shape(leaf)))}]"


def _describe_data(data: Any) -> dict[str, str]:
    """Minibatches and streams of the same rows are described alike: they are the same run."""
    if data is None:
        return {"data": "none"}
    found: dict[str, str] = {}
    arrays = data
    if isinstance(data, (Minibatches, Stream)):
        ready = isinstance(data, Stream) and data.ready_made
        arrays = None if ready else data.arrays if isinstance(data, Minibatches) else data.source
        size = "as they come" if data.batch_size is None else str(data.batch_size)
        found |= {"data.rows": str(data.num_data), "data.batch size": size}
        found |= describe("data.transform", data.transform)
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        found[f"data{jax.tree_util.keystr(path)}"] = _content(leaf)
    return found


def _content(leaf: Any) -> str:
    """An array of data by shape, dtype on the device and a hash: of all its rows, or of some that are spread over it."""
    leaf = leaf.to_numpy() if hasattr(leaf, "to_numpy") else leaf  # pandas
    shaped = all(hasattr(leaf, name) for name in ("shape", "dtype", "__getitem__"))
    elsewhere = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    if not shaped or not leaf.shape or elsewhere:
        return shape_of(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _array(leaf)
    dtype, num = jax.dtypes.canonicalize_dtype(leaf.dtype), leaf.shape[0]
    size = int(np.prod(leaf.shape)) * dtype.itemsize
    some = np.unique(np.linspace(0, num - 1, SAMPLED).astype(int)) if num else np.zeros(0, int)
    rows = np.asarray(leaf[:] if size <= HASHED_BYTES else leaf[some]).astype(dtype)
    return f"{dtype}[{','.join(map(str, leaf.shape))}] #{_hash(rows)}"


def describe(place: str, value: Any) -> dict[str, str]:
    """A value and everything in it, by place.

    >>> describe("x", {"a": 1.5, "b": (True,)})
    {'x': 'dict', "x['a']": '1.5', "x['b']": 'tuple of 1', "x['b'][0]": 'True'}
    """
    walk = _Walk()
    walk.visit(place, value, 0)
    return walk.found


class _Walk:
    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.seen: dict[int, str] = {}
        self.alive: list[Any] = []  # an id means something only while its object lives

    def visit(self, place: str, value: Any, depth: int) -> None:
        if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
            self.found[place] = repr(value)
        elif isinstance(value, (np.ndarray, np.generic, jax.Array)):
            self.found[place] = _array(value)
        elif isinstance(value, (types.ModuleType, np.dtype)) or _of_a_library(value):
            self.found[place] = getattr(value, "__name__", str(value))
        elif id(value) in self.seen or depth > DEEPEST:
            self.found[place] = f"as {self.seen.get(id(value), 'deep inside')}"
        else:
            self.seen[id(value)] = place
            self.alive.append(value)
            self._open(place, value, depth + 1)

    def _open(self, place: str, value: Any, depth: int) -> None:
        name, inside = _parts(value)
        self.found[place] = name
        for label, part in inside.items():
            self.visit(f"{place}{label}", part, depth)


def _parts(value: Any) -> tuple[str, dict[str, Any]]:
    """A name for a value and what is in it."""
    for kinds, opened in OPENED.items():
        if isinstance(value, kinds):
            return opened(value)
    kind = type(value).__name__
    if callable(getattr(value, "__wrapped__", None)):  # jax.jit, custom_vjp
        return kind, {".function": value.__wrapped__}
    if dataclasses.is_dataclass(value):
        inside = {f.name: _fixed(getattr(value, f.name, None)) for f in dataclasses.fields(value)}
        found = {f".{n}": part for n, part in inside.items() if not n.startswith("_")}
        return kind, found | {".class": type(value)}
    # Lists are often logs that grow with every call; other objects may hold anything. Their kind must do.
    return getattr(value, "__qualname__", kind), {}


def _fixed(value: Any) -> Any:
    """A field of an object: what is a list there is no log."""
    return tuple(map(_fixed, value)) if isinstance(value, list) else value


def _of_a_library(value: Any) -> bool:
    return isinstance(value, type) and _library(value.__module__)


def _library(module: str | None) -> bool:
    return (module or "").split(".")[0] in (*LIBRARIES, "builtins")


def _class(value: type) -> tuple[str, dict[str, Any]]:
    """A class by the methods and numbers that were written for it, or for those of the user's that it is made from."""
    found = {}
    for base in reversed(value.__mro__):
        if _library(base.__module__):
            continue
        for name, member in vars(base).items():
            method = _bare(member)
            function = isinstance(method, types.FunctionType)
            # Those made by dataclasses have no file.
            own = function and method.__code__.co_filename != "<string>"
            plain = isinstance(member, (*GLOBALS, str)) and not name.startswith("_")
            if plain or (own and (base is value or _own_function(method))):
                found[f".{name}"] = method
    return value.__name__, found


def _bare(member: Any) -> Any:
    """The function in a method as Equinox holds it, in a static or class method, or in a property."""
    for name in ("method", "__func__", "fget"):
        member = getattr(member, name, None) or member
    return member


def _tuple(value: tuple) -> tuple[str, dict[str, Any]]:
    if names := getattr(value, "_fields", None):
        return type(value).__name__, {f".{n}": v for n, v in zip(names, value, strict=True)}
    return f"tuple of {len(value)}", {f"[{i}]": part for i, part in enumerate(value)}


def _mapping(value: Mapping) -> tuple[str, dict[str, Any]]:
    return type(value).__name__, {f"[{k!r}]": value[k] for k in sorted(value, key=repr)}


def _set(value: Any) -> tuple[str, dict[str, Any]]:
    return f"{type(value).__name__} {sorted(map(repr, value))}", {}


def _partial(value: functools.partial) -> tuple[str, dict[str, Any]]:
    return "partial", {".func": value.func, ".args": value.args, ".keywords": value.keywords}


def _method(value: types.MethodType) -> tuple[str, dict[str, Any]]:
    return value.__func__.__qualname__, {".self": value.__self__, ".function": value.__func__}


GLOBALS = (bool, int, float, complex, np.ndarray, np.generic, jax.Array)
"""What is compared of the global names that a function uses, beside functions: other objects may hold anything."""


def _own_function(value: Any) -> bool:
    """Whether it is a function of the user's, perhaps compiled by `jax.jit`."""
    function = getattr(value, "__wrapped__", value)
    if not isinstance(function, types.FunctionType) or _library(function.__module__):
        return False
    return not function.__code__.co_filename.startswith(("<frozen", *INSTALLED))


def _function(function: types.FunctionType) -> tuple[str, dict[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    inside: dict[str, Any] = {
        f".{name}": cell.cell_contents for name, cell in cells if _filled(cell)
    }
    for place, default in enumerate(function.__defaults__ or ()):
        inside[f".default {place}"] = default
    for name, default in (function.__kwdefaults__ or {}).items():
        inside[f".default {name}"] = default
    if not _library(function.__module__):
        inside[".numbers"] = _numbers(function.__code__)
        inside[".names"] = " ".join(_names(function.__code__))
        for name in _globals(function.__code__):
            value = function.__globals__.get(name)
            if isinstance(value, GLOBALS) or _own_function(value):
                inside[f".{name}"] = value
    return function.__qualname__, inside


OPENED: dict[Any, Any] = {
    type: _class,
    tuple: _tuple,
    Mapping: _mapping,
    (set, frozenset): _set,
    functools.partial: _partial,
    types.MethodType: _method,
    types.FunctionType: _function,
}


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a function that refers to itself while it is being defined
        return False


def _numbers(code: types.CodeType) -> tuple[Any, ...]:
    """The numbers in a function's code, those of its tuples and of the functions within it."""
    found: list[Any] = []

    def note(constant: Any) -> None:
        if isinstance(constant, (bool, int, float, complex)):
            found.append(constant)
        elif isinstance(constant, tuple):  # [1.0, 2.0, 3.0] is one, too
            for one in constant:
                note(one)
        elif isinstance(constant, types.CodeType):
            found.extend(_numbers(constant))

    for constant in code.co_consts:
        note(constant)
    return tuple(found)


def _inner(code: types.CodeType) -> list[types.CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def _names(code: types.CodeType) -> list[str]:
    """The global names and attributes that a function's code uses, and those of the functions within it."""
    return [*code.co_names, *[name for one in _inner(code) for name in _names(one)]]


def _globals(code: types.CodeType) -> list[str]:
    """The global names alone, in order."""
    own = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    return sorted(own.union(*[_globals(one) for one in _inner(code)]))


def _array(value: Any) -> str:
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return f"{jax.random.key_impl(value)} {np.asarray(jax.random.key_data(value)).tolist()}"
    if isinstance(value, Tracer) or value.nbytes > HASHED_BYTES:
        return shape_of(value)
    plain = np.asarray(value)
    if plain.ndim == 0:
        return f"{plain.dtype} {plain[()]}"
    return f"{shape_of(value)} #{_hash(plain)}"


def _hash(plain: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(plain).tobytes()).hexdigest()[:8]
