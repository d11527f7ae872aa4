"""An integrator's step taken apart: what it does to every number on its own, and what it does once for all.

Most optimizers treat each coordinate of each particle alone. Such a step need not wait until all velocities are written to memory:
whoever computes a velocity can go on with it at once (`pairwise.moved`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jaxtyping import Array, PyTree

from particlax.formula import CALLS, ELEMENTWISE, SAME

__all__ = ["Apart", "Leaf", "Rule", "Todo", "apart"]


class Name:
    """A value that an operation makes or is given."""

    def __init__(self, aval: Any):
        self.aval = aval


class Op(NamedTuple):
    """An operation of a traced function, by the names of what it takes and makes."""

    eqn: Any
    ins: list[Any]
    outs: list[Name]


class Rule(NamedTuple):
    """What becomes of the numbers of one leaf, as a function of their drift, of arrays of the leaf's shape and of scalars."""

    drift: Any
    fields: tuple[Any, ...]
    scalars: tuple[Any, ...]
    results: tuple[Any, ...]
    ops: tuple[Op, ...]

    def __call__(
        self, drift: Any, fields: Sequence[Array], scalars: Sequence[Array]
    ) -> list[Array]:
        """The results on tiles of any shape."""
        known = dict(zip((*self.fields, *self.scalars), (*fields, *scalars), strict=True))
        known[self.drift] = drift
        return [jnp.broadcast_to(r, drift.shape) for r in _run(self.ops, known, self.results)]


class Todo(NamedTuple):
    """Matrices with a row for each particle, the cloud first; and what is done with a row's drift, if anything.

    The rule's fields are the matrices `reads`; its k-th result comes in the place of the matrix over[k], if that is a number.
    """

    arrays: list[Array]
    rule: Rule | None = None
    scalars: Sequence[Array] = ()
    reads: tuple[int, ...] = ()
    over: tuple[int | None, ...] = ()


class Leaf(NamedTuple):
    """The rule of a leaf and what it is given; `over[k]` is the field in whose place the k-th result comes, if any."""

    rule: Rule
    fields: list[Array]
    scalars: list[Array]
    over: tuple[int | None, ...]

    def among(self, leaves: Sequence[Array]) -> Todo:
        """The work on this leaf; those of its fields that are among `leaves` are read with them."""
        every = {id(leaf): leaf for leaf in (*leaves, *self.fields)}
        place = {key: i for i, key in enumerate(every)}
        reads = [place[id(field)] for field in self.fields]
        over = tuple(None if k is None else reads[k] for k in self.over)
        flat = [leaf.reshape(leaf.shape[0], -1) for leaf in every.values()]
        return Todo(flat, self.rule, self.scalars, tuple(reads), over)


class Apart(NamedTuple):
    """A step: what is done to each leaf, and how the results make the step's own."""

    leaves: list[Leaf]
    finish: Callable[[Sequence[Sequence[Array]]], PyTree]


def apart(step: Callable[[PyTree], PyTree], drift: PyTree, old: PyTree) -> Apart | None:
    """step(drift) by leaves of the drift, or None if it does not treat every float32 number alone.

    `old` has the structure of the result, and holds what it replaces. Of `drift` only shapes are looked at.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), drift)
    closed, outline = jax.make_jaxpr(step, return_shape=True)(shapes)
    names = {var: Name(var.aval) for var in (*closed.jaxpr.constvars, *closed.jaxpr.invars)}
    drifts, ops = [names[var] for var in closed.jaxpr.invars], []
    outs = _inlined(closed.jaxpr, names, ops)
    wide = {leaf.shape for leaf in jax.tree.leaves(drift)}
    inner, outer = [], []
    for op in _needed(ops, outs):
        many = any(name.aval.shape in wide for name in (*op.ins, *op.outs))
        (inner if many else outer).append(op)
    if not all(map(_alone, inner)):
        return None
    groups = _groups(inner, wide)
    roots = [groups.get(name, name) for name in drifts]
    given = dict(zip([names[var] for var in closed.jaxpr.constvars], closed.consts, strict=True))
    values = _outside(outer, given)
    if len(set(roots)) < len(roots) or not _single(drifts, inner, values):
        return None
    rules = [_rule(name, [op for op in inner if groups[op.outs[0]] is root], outs) for name, root in zip(drifts, roots, strict=True)]  # fmt: skip
    rest = [op for op in inner if groups[op.outs[0]] not in roots]

    def finish(found: Sequence[Sequence[Array]]) -> PyTree:
        known = dict(values)
        for rule, results in zip(rules, found, strict=True):
            known.update(zip(rule.results, results, strict=True))
        leaves, structure = jax.tree.flatten(outline)
        pairs = zip(_run(rest, known, outs), leaves, strict=True)
        whole = [jnp.broadcast_to(jnp.asarray(one, leaf.dtype), leaf.shape) for one, leaf in pairs]
        return jax.tree.unflatten(structure, whole)

    replaced = dict(zip(map(id, outs), jax.tree.leaves(old), strict=True))
    return Apart([_leaf(rule, values, replaced) for rule in rules], finish)


def _leaf(rule: Rule, values: dict[Any, Any], replaced: dict[int, Any]) -> Leaf:
    fields, scalars = ([values[var] for var in some] for some in (rule.fields, rule.scalars))
    place = {id(field): i for i, field in enumerate(fields)}
    over = tuple(place.get(id(replaced[id(var)])) for var in rule.results)
    return Leaf(rule, fields, scalars, over)


def _inlined(jaxpr: Any, names: dict[Any, Any], ops: list[Op]) -> list[Any]:
    """The names of the results; all operations, those of called functions in their place, are added to `ops`."""
    at = lambda var: var if isinstance(var, Literal) else names[var]
    for eqn in jaxpr.eqns:
        ins = [at(var) for var in eqn.invars]
        inner = eqn.params.get(CALLS.get(eqn.primitive.name))
        if inner is not None and not getattr(inner, "consts", ()):
            plain = getattr(inner, "jaxpr", inner)
            outs = _inlined(plain, dict(zip(plain.invars, ins, strict=True)), ops)
        else:
            outs = [Name(var.aval) for var in eqn.outvars]
            ops.append(Op(eqn, ins, outs))
        names.update(zip(eqn.outvars, outs, strict=True))
    return [at(var) for var in jaxpr.outvars]


def _needed(ops: list[Op], outs: list[Any]) -> list[Op]:
    """The operations that some result depends on."""
    wanted, found = set(map(id, outs)), []
    for op in reversed(ops):
        if wanted.intersection(map(id, op.outs)):
            wanted.update(map(id, op.ins))
            found.append(op)
    return found[::-1]


def _alone(op: Op) -> bool:
    """Whether a kernel knows the operation, and it acts on every number alone."""
    shape, name = op.outs[0].aval.shape, op.eqn.primitive.name
    if any(one.aval.shape not in ((), shape) for one in (*op.ins, *op.outs)):
        return False
    if name in SAME:
        return all(one.aval.dtype == jnp.float32 for one in (*op.ins, *op.outs))
    return name in ELEMENTWISE


def _single(drifts: Sequence[Name], inner: list[Op], values: dict[Any, Any]) -> bool:
    """Whether all numbers are float32; what is compared on the way may be true or false."""
    given = [one for op in inner for one in op.ins if isinstance(one, Name) and one in values]
    seen = [one for op in inner for one in (*op.ins, *op.outs)]
    known = all(one.aval.dtype in (jnp.float32, jnp.bool_) for one in seen)
    return known and all(one.aval.dtype == jnp.float32 for one in (*drifts, *given))


def _groups(inner: list[Op], wide: set[Any]) -> dict[Name, Name]:
    """By name of an array: the first of those that it is connected with."""
    found: dict[Name, Name] = {}

    def root(name: Name) -> Name:
        while found.setdefault(name, name) is not name:
            name = found[name]
        return name

    for op in inner:
        first, *others = [one for one in (*op.ins, *op.outs) if one.aval.shape in wide]
        root(first)
        for one in others:
            found[root(one)] = root(first)
    return {name: root(name) for name in list(found)}


def _outside(outer: list[Op], known: dict[Any, Any]) -> dict[Any, Any]:
    """What comes from outside or is computed once for all, by name."""
    known = dict(known)
    for op in outer:
        made = op.eqn.primitive.bind(*[_read(known, one) for one in op.ins], **op.eqn.params)
        known.update(zip(op.outs, made if op.eqn.primitive.multiple_results else [made], strict=True))  # fmt: skip
    return known


def _rule(drift: Name, ops: list[Op], outs: list[Any]) -> Rule:
    made = {drift, *[one for op in ops for one in op.outs]}
    used = dict.fromkeys(one for op in ops for one in op.ins if isinstance(one, Name))
    given = [one for one in used if one not in made]
    fields = tuple(one for one in given if one.aval.shape == drift.aval.shape)
    scalars = tuple(one for one in given if one.aval.shape != drift.aval.shape)
    results = tuple(dict.fromkeys(one for one in outs if isinstance(one, Name) and one in made))
    return Rule(drift, fields, scalars, results, tuple(ops))


def _run(ops: Sequence[Op], known: dict[Any, Any], wanted: Sequence[Any]) -> list[Any]:
    """Each operation on whatever shapes come, which go together."""
    known = dict(known)
    for op in ops:
        values = [_read(known, one) for one in op.ins]
        same = op.eqn.primitive.name in SAME
        known[op.outs[0]] = values[0] if same else _bound(op, values)
    return [_read(known, one) for one in wanted]


def _read(known: dict[Any, Any], one: Any) -> Any:
    return one.val if isinstance(one, Literal) else known[one]


def _bound(op: Op, values: list[Any]) -> Array:
    arrays = [jnp.asarray(v, one.aval.dtype) for v, one in zip(values, op.ins, strict=True)]
    shape = jnp.broadcast_shapes(*[a.shape for a in arrays])
    return op.eqn.primitive.bind(*[jnp.broadcast_to(a, shape) for a in arrays], **op.eqn.params)
