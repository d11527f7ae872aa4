"""Modules of Equinox, Flax Linen and Flax NNX as a `Network`.

Parameters are the module's float arrays, named by their paths. What else it updates as it trains, such as batch-norm
statistics, is `carried`; a module that carries something or draws random numbers (dropout) makes a stateful network. It
trains in the module's training mode and predicts outside it. Flax is imported when used.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from particlax import errors
from particlax.errors import OptionError, TargetError, known_options
from particlax.networks import Network, leaf_names
from particlax.signatures import SWITCH, SWITCHES, called_with, check_call, maker
from particlax.tracing import computed_alike, depends, uses_last

__all__ = ["equinox", "linen", "nnx"]

HINTS = {
    "InvalidRngError": f"It draws random numbers there too: {SWITCH}",
    "ModifyScopeVariableError": f"It updates its statistics there too: {SWITCH}",
    "must be passed to the constructor": f"A layer does not know which it is: {SWITCH}",
    "ndim 0": "Where a module takes one example, as those of Equinox, it is vmapped over the batch: it must not be so itself",
    "": "Check that the module takes such inputs, of that type too",
}


@known_options
def equinox(make: Callable[..., Any], *, random: bool | None = None) -> Network:
    """The network of `make(key)`, an Equinox module that takes one example: it is vmapped over the batch.

    The module may take `key`, and `state` if it returns (outputs, state). It predicts in `eqx.nn.inference_mode`. The batch axis has the
    name that `eqx.nn.BatchNorm` was given, or "batch". Arrays that are not floats, and NumPy's, are the same in all networks and stay as
    they are: hold constants and weights that are not to move as NumPy arrays. An active `eqx.nn.Dropout`,
    or a `key` without default, tells that it draws random numbers; `random` says so, or not, where that misleads.

    >>> net = equinox(lambda key: eqx.nn.MLP(4, 3, 8, 1, key=key))
    >>> leaf_names(net.init(jax.random.key(0), 5))
    ['layers/0/weight', 'layers/0/bias', 'layers/1/weight', 'layers/1/bias']
    """
    called, shape = maker(make, "key"), "key: eqx.nn.MLP(4, 3, 8, 1, key=key)"
    build = lambda key: _with_state(called(key))
    model, state = _made(make, lambda: build(jax.random.key(0)), eqx.Module, shape)
    (takes, needs, words), name, keeps = called_with(model), type(model).__name__, state != ()
    drops, norms = _layers(model, eqx.nn.Dropout), _layers(model, eqx.nn.BatchNorm)
    axis = norms[0].axis_name if norms else "batch"
    draws = "key" in needs or any(d.p != 0 and not d.inference for d in drops)
    needs_key = draws and random is not False
    check_call(model, ["state"] * keeps + ["key"] * needs_key, ["state", "key"])
    is_parameter = lambda leaf: isinstance(leaf, jax.Array) and eqx.is_inexact_array(leaf)
    split: Any = lambda model: eqx.partition(model, is_parameter)
    like, trains = split(model)
    modes = (split(eqx.nn.inference_mode(model))[1], trains)

    def start(key: Any) -> tuple[PyTree, PyTree]:
        model, state = build(key)
        return split(model)[0], state

    def run(params: PyTree, carried: PyTree, x: Any, keys: Any) -> Any:
        module = eqx.combine(_filled(like, params), modes[bool(keys)])

        def one(row: Any, own: Any, state: Any) -> Any:
            given = words[bool(keys)] | ({"key": own} if "key" in takes else {})
            if not keeps:
                return module(row, **given), ()
            result = module(row, state=state, **given)
            if not isinstance(result, tuple) or len(result) != 2:
                raise TargetError(f"{name} gave {type(result).__name__}; expected (outputs, state)")
            return result

        def every(base: Any) -> Any:
            own = None if base is None else jax.random.split(base, len(jax.tree.leaves(x)[0]))
            return jax.vmap(one, (0, 0, None), (0, None), axis_name=axis)(x, own, carried)

        if keys:
            return every(keys[0])
        try:
            return every(None)
        except Exception:
            # It may split a key that no layer uses in prediction.
            if "key" not in takes or depends(lambda key: every(key)[0]):
                raise
            return every(jax.random.key(0))

    switches = bool(words[0]) or eqx.tree_equal(*modes) is not True
    options = _ways(draws, random, switches=switches)
    return _network(name, start, run, (like, state), **options)


@known_options
def linen(
    module: Any, example: PyTree, *, train: Mapping | None = None, predict: Mapping | None = None
) -> Network:
    """The network of a Flax Linen module; `example` is a batch of inputs, of which the shapes and types count.

    The collection "params" are the parameters, all others are carried; every random stream is served. The switch between training
    and prediction is the keyword of the module's call, or the field of the module, that is called `train`, `training`, `is_training`,
    `deterministic`, `inference` or `use_running_average`; for others give the call's keywords, as in
    `train={"mode": "fit"}, predict={"mode": "use"}`.

    >>> from flax import linen as nn
    >>> net = linen(nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(3)]), jnp.zeros((1, 4)))
    >>> leaf_names(net.init(jax.random.key(0), 5))
    ['layers_0/bias', 'layers_0/kernel', 'layers_2/bias', 'layers_2/kernel']
    """
    lib = _flax("linen")
    if not isinstance(module, lib.Module):
        came = f"the class {module.__name__}" if isinstance(module, type) else repr(module)
        raise OptionError(f"module is {came}; expected a flax.linen module, as nn.Dense(3)")
    for option, given in (("train", train), ("predict", predict)):
        if not isinstance(given, Mapping | None):
            wish = f"expected keywords of its call: {option}={{'mode': {given!r}}}"
            raise OptionError(f"{option} is {given!r}; {wish}")
    takes, _, words = called_with(module)
    words = [known | dict(more or {}) for known, more in zip(words, (predict, train), strict=True)]
    both, either = set(words[0]) & set(words[1]), set(words[0]) | set(words[1])
    check_call(module, [], both, either)
    fields = {f.name for f in dataclasses.fields(module)} & set(SWITCHES) - set(takes)
    modes = tuple(module.clone(**{n: SWITCHES[n] == on for n in fields}) for on in (False, True))
    streams = lambda keys: dict(zip(("params", "dropout"), keys, strict=True))

    def initial(key: Any, x: Any) -> tuple[PyTree, PyTree]:
        variables = modes[False].init(streams(jax.random.split(key)), x, **words[False])
        variables = dict(lib.meta.unbox(variables))
        return variables.pop("params", {}), variables or ()

    def run(params: PyTree, carried: PyTree, x: Any, keys: Any) -> Any:
        given = {"params": params, **dict(carried)}
        if not keys:
            return modes[False].apply(given, x, **words[False]), carried
        options = {"rngs": streams(keys), "mutable": list(dict(carried))} | words[True]
        out, new = modes[True].apply(given, x, **options)
        old = dict(carried)
        if jax.tree.structure(new) == jax.tree.structure(old):
            # In the types they came in: Linen makes statistics of what the data are.
            new = jax.tree.map(lambda made, was: made.astype(was.dtype), new, old)
        return out, new or ()

    name, example = type(module).__name__, jax.tree.map(jnp.asarray, example)
    like, random = _examined(name, initial, run, example)
    begin = jax.jit(lambda key: initial(key, example))  # which leaves the outputs out
    return _network(name, begin, run, like, random=random)


@known_options
def nnx(make: Callable[..., Any], *, random: bool | None = None) -> Network:
    """The network of `make(rngs)`, a Flax NNX module that takes a batch.

    `nnx.Param`s are the parameters, other Variables are carried, arrays outside Variables are the same in all networks. It trains after
    `.train()` and predicts after `.eval()`; a keyword of its call with a name that `linen` knows is set too. Its random streams, and
    the `rngs` of its call if it takes them, are new in every step. Streams that it stores, or `rngs` without default, tell that it
    draws random numbers; `random` says so, or not, where that misleads.

    >>> from flax import nnx as flax_nnx
    >>> net = nnx(lambda rngs: flax_nnx.Linear(4, 3, rngs=rngs))
    >>> leaf_names(net.init(jax.random.key(0), 5))
    ['bias', 'kernel']
    """
    lib = _flax("nnx")
    called, shape = maker(make, "rngs"), "rngs: nnx.Linear(4, 3, rngs=rngs)"
    build = lambda key: called(lib.Rngs(key))
    model, _ = _made(make, lambda: (build(jax.random.key(0)), ()), lib.Module, shape)
    (takes, needs, words), name = called_with(model), type(model).__name__
    kept = lib.All(lib.Variable, lib.Not(lib.Any(lib.Param, lib.RngState, lib.Intermediate)))
    split = lambda module: lib.split(module, lib.Param, kept, lib.RngState, ...)
    pure = lambda state: lib.to_pure_dict(state) or ()
    modes = tuple((change(), split(model)[0])[1] for change in (model.eval, model.train))
    likes = split(model)[1:]
    dropout = [m for _, m in lib.iter_modules(model) if isinstance(m, lib.Dropout)]
    idle = sum(layer.rate == 0 and layer.rngs is not None for layer in dropout)
    draws = len(jax.tree.leaves(likes[2])) > 2 * idle  # a stream has a key and a count
    dry = any(layer.rate > 0 and layer.rngs is None for layer in dropout)
    check_call(model, ["rngs"] * (dry and not draws), ["rngs"])

    def start(key: Any) -> tuple[PyTree, PyTree]:
        _, params, carried, *_ = split(build(key))
        return pure(params), pure(carried)

    def run(params: PyTree, carried: PyTree, x: Any, keys: Any) -> Any:
        given = dict(words[bool(keys)])
        # NNX writes into NumPy arrays.
        params, carried = jax.tree.map(jnp.asarray, (params, carried))
        if "rngs" in takes:
            given["rngs"] = lib.Rngs(keys[1]) if keys else None

        def outcome(base: Any) -> Any:
            streams = _reseeded(likes[2], base)
            parts = map(_filled, likes, (params, carried, streams, likes[3]))
            module = lib.merge(modes[bool(keys)], *parts)
            out = module(x, **given)
            after = jax.tree.leaves(lib.state(module, lib.RngState))
            drew = any(a is not b for a, b in zip(streams, after, strict=True))
            return out, pure(lib.state(module, kept)), drew

        out, carried, drew = outcome(keys[0] if keys else jax.random.key(0))
        # Cells of recurrent networks take a number to make zeros of.
        if not keys and drew and depends(lambda base: outcome(base)[0]):
            raise TargetError(f"{name} draws random numbers in prediction too; {SWITCH}")
        return out, carried

    like = (pure(likes[0]), pure(likes[1]))
    switches = bool(words[0]) or modes[0] != modes[1]
    options = _ways(draws or dry or "rngs" in needs, random, switches=switches)
    return _network(name, start, run, like, **options)


def _ways(draws: bool, asked: bool | None, *, switches: bool) -> dict[str, bool]:
    """Whether a network is trained with random numbers, and whether training may differ from prediction without it."""
    random = draws if asked is None else asked
    return {"random": random, "switches": switches and asked is not False}


def _examined(name: str, initial: Any, run: Any, x: Any) -> tuple[Any, bool]:
    """What a Linen module has, as shapes, and whether it uses its keys in training, or trains otherwise than it predicts."""
    key, shapes, predict = jax.random.key(0), _shapes(x), lambda p, c: run(p, c, x, None)[0]
    like = _tried(name, "initialisation", x, jax.eval_shape, initial, key, x)
    out = _shapes(_tried(name, "prediction", x, jax.eval_shape, predict, *like))
    if () in shapes or len({shape[:1] for shape in shapes + out}) != 1:
        batch = "expected a batch, with the data on axis 0 of both, as x[:1]"
        raise errors.DataError(f"{name} makes {out} of the example's {shapes}; {batch}")
    trace = jax.make_jaxpr(lambda p, c, *keys: run(p, c, x, keys), return_shape=True)
    made, (_, new) = _tried(name, "training", x, trace, *like, *jax.random.split(key))
    if _shapes(new) != _shapes(like[1]):
        came = f"arrays of shapes {_shapes(like[1])}, and {_shapes(new)} after a step"
        raise OptionError(f"{name} carries {came}; expected no change: leave out what it sows")
    # What carries something is stateful anyway.
    return like, bool(like[1]) or uses_last(made, 2) or not computed_alike(run, like, x)


def _reseeded(streams: Any, base: Any) -> list[Any]:
    """Leaves for NNX streams: a key of its own for each, counts of 0."""
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    own = lambda place, leaf: jax.random.split(jax.random.fold_in(base, place), leaf.shape)
    leaves = enumerate(jax.tree.leaves(streams))
    return [own(i, leaf) if is_key(leaf) else jnp.zeros_like(leaf) for i, leaf in leaves]


def _network(
    name: str, start: Any, run: Any, like: Any, *, random: bool, switches: bool = False
) -> Network:
    """From start(key) -> (params, carried) and run(params, carried, x, keys) -> (outputs, carried).

    `switches` says that training may differ from prediction, though nothing is drawn or carried.
    """
    wanted, stateful = [_shapes(part) for part in like], random or bool(_shapes(like[1]))
    names, structure = leaf_names(like[0]), jax.tree.structure(like[0])
    if not wanted[0]:
        raise OptionError(
            f"{name} has no float parameters; expected at least one float array. NumPy arrays stay as they are: jnp.asarray makes a parameter of one"
        )
    for path, leaf in zip(names, jax.tree.leaves(like[0]), strict=True):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            wish = "expected real floats: hold a complex one as two, whole numbers elsewhere"
            raise OptionError(f"the parameter {path!r} of {name} is {leaf.dtype}; {wish}")
    usage = "flow.init(*net.init(key, M)), net.apply(params, x, carried)" if stateful else "init"

    def forward(params: PyTree, x: Any, carried: PyTree, key: Any = None) -> Any:
        if type(params) is tuple and [_shapes(part) for part in params] == wanted:
            raise errors.ParticleError(
                f"{name} came as the pair (particles, carried) in place of particles; expected flow.init(*net.init(key, M))"
            )
        found = dict(zip(leaf_names(params), jax.tree.leaves(params), strict=True))
        if [*found] != names:  # as a checkpoint has them, or an nnx.State
            if found.keys() != set(names):
                found = {path.removesuffix("/value"): leaf for path, leaf in found.items()}
            if found.keys() == set(names):
                params = jax.tree.unflatten(structure, [found[path] for path in names])
        for what, part, shapes in zip(("", "carried "), (params, carried), wanted, strict=True):
            if _shapes(part) != shapes:
                came = f"{what}arrays of shapes {shapes}, but {_shapes(part)} came"
                some = "; of a partly Bayesian network, shared=trunk too, and for predictions the run's result"
                some *= not what and len(_shapes(part)) < len(shapes)
                raise errors.ParticleError(f"{name} has {came}; expected those of {usage}{some}")
        if (came := leaf_names(params)) != names:
            wish = f"expected those of {usage}, in their structure"
            raise errors.ParticleError(f"{name} has parameters {names}, but {came} came; {wish}")
        carried = _filled(like[1], carried)
        keys = key if key is None else tuple(jax.random.split(key))
        return _tried(name, "training" if keys else "prediction", x, run, params, carried, x, keys)

    known = _Known()

    def plain(params: PyTree, x: Any) -> Any:
        """A network that nothing is drawn or carried for has one way to be called."""
        out = forward(params, x, ())[0]
        if not switches:
            return out
        as_shape = lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a))
        shapes = jax.tree.map(as_shape, (params, x))
        args = (computed_alike, run, (shapes[0], ()), shapes[1])
        ask = lambda: _tried(name, "training", x, *args)
        if not known.answer(shapes, ask):
            raise TargetError(
                f"{name} computes something else in training than in prediction, but draws nothing and carries nothing, which would "
                f"tell that it has to be trained so; expected one or the other: make it with random=True, or random=False to train it as it predicts"
            )
        return out

    if not stateful:
        return Network(lambda key: start(key)[0], plain)
    apply = lambda params, x, carried=(): forward(params, x, carried)[0]
    return Network(start, apply, forward, stateful=True)


class _Known:
    """Answers that were given once, by shapes. No dict: it is no part of a run's description, and is pickled empty."""

    def __init__(self) -> None:
        self.answers: dict[Any, bool] = {}

    def __reduce__(self) -> Any:
        return type(self), ()

    def answer(self, shapes: PyTree, ask: Callable[[], bool]) -> bool:
        """What was answered for these shapes, or is now."""
        leaves, structure = jax.tree.flatten(shapes)
        place = structure, tuple(leaves)
        if place not in self.answers:
            self.answers[place] = ask()
        return self.answers[place]


def _tried(name: str, doing: str, x: Any, function: Any, *args: Any) -> Any:
    """function(*args); what goes wrong inside a module as one error that says what it was given."""
    try:
        return function(*args)
    except errors.ParticlaxError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}".split(" (http")[0].splitlines()[0]
        hint = next(text for sign, text in HINTS.items() if sign in said)
        kinds = sorted({str(jnp.result_type(leaf)) for leaf in jax.tree.leaves(x)})
        came = f"{name} failed in {doing} on {' and '.join(kinds)} inputs of shape {_shapes(x)}"
        raise TargetError(f"{came}: {said.rstrip('.')}. {hint}") from error


def _made(make: Any, build: Any, base: type, shape: str) -> tuple[Any, Any]:
    wanted = f"expected a function that makes a module, as lambda {shape}"
    if isinstance(make, base):
        raise OptionError(f"make is a {type(make).__name__}; {wanted}")
    try:
        model, state = build()
    except Exception as error:
        raise OptionError(f"make failed, {type(error).__name__}: {error}; {wanted}") from error
    if not isinstance(model, base) or not callable(model):
        raise OptionError(f"make returned a {type(model).__name__}; {wanted}")
    return model, state


def _with_state(made: Any) -> tuple[Any, Any]:
    """A module and its state, () if there is none; `make` may have used eqx.nn.make_with_state."""
    model, state = made if isinstance(made, tuple) else eqx.nn.make_with_state(lambda: made)()
    return model, state if jax.tree.leaves(state) else ()


def _layers(model: Any, kind: type) -> list[Any]:
    found = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in found if isinstance(node, kind)]


def _filled(like: PyTree, values: PyTree) -> PyTree:
    """The structure of `like`, made anew, with the leaves of `values`."""
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(values))


def _shapes(tree: PyTree) -> list[tuple[int, ...]]:
    return [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]


def _flax(part: str) -> Any:
    try:
        return importlib.import_module(f"flax.{part}")
    except ImportError:
        raise OptionError(f"modules.{part} needs flax, not installed; pip install flax") from None
