"""An integrator's step taken apart: what it does to every number on its own, and what it does once for all.

Most optimizers treat each coordinate of each particle alone. Such a step need not wait until all velocities are written to memory:
whoever computes a velocity can go on with it at once (`pairwise.moved`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, DropVar, Literal, jaxpr_as_fun
from jaxtyping import Array, PyTree

from particlax.formula import CALLS, ELEMENTWISE, SAME

__all__ = ["Apart", "Leaf", "Rule", "Todo", "apart"]


class Rule(NamedTuple):
    """What becomes of the numbers of one leaf, as a function of their drift, of arrays of the leaf's shape and of scalars."""

    drift: Any
    fields: tuple[Any, ...]
    scalars: tuple[Any, ...]
    results: tuple[Any, ...]
    eqns: tuple[Any, ...]

    def __call__(
        self, drift: Any, fields: Sequence[Array], scalars: Sequence[Array]
    ) -> list[Array]:
        """The results on tiles of any shape."""
        known = dict(zip((*self.fields, *self.scalars), (*fields, *scalars), strict=True))
        known[self.drift] = drift
        return [jnp.broadcast_to(r, drift.shape) for r in _run(self.eqns, known, self.results)]


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
    jaxpr, wide = closed.jaxpr, {leaf.shape for leaf in jax.tree.leaves(drift)}
    field = lambda var: var.aval.shape in wide
    inner, outer = [], []
    for eqn in _needed(jaxpr):
        (inner if any(map(field, (*eqn.invars, *eqn.outvars))) else outer).append(eqn)
    if not all(map(_alone, inner)):
        return None
    groups = _groups([[v for v in (*e.invars, *e.outvars) if field(v)] for e in inner], jaxpr)
    roots = [groups[var] for var in jaxpr.invars]
    values = _outside(closed, outer)
    if len(set(roots)) < len(roots) or not _single(jaxpr.invars, inner, values):
        return None
    rules = [_rule(var, root, inner, groups, jaxpr) for var, root in zip(jaxpr.invars, roots, strict=True)]  # fmt: skip
    rest = [eqn for eqn in inner if groups[eqn.outvars[0]] not in roots]

    def finish(found: Sequence[Sequence[Array]]) -> PyTree:
        known = dict(values)
        for rule, results in zip(rules, found, strict=True):
            known.update(zip(rule.results, results, strict=True))
        leaves, structure = jax.tree.flatten(outline)
        pairs = zip(_run(rest, known, jaxpr.outvars), leaves, strict=True)
        whole = [jnp.broadcast_to(jnp.asarray(one, leaf.dtype), leaf.shape) for one, leaf in pairs]
        return jax.tree.unflatten(structure, whole)

    replaced = dict(zip(map(id, jaxpr.outvars), jax.tree.leaves(old), strict=True))
    return Apart([_leaf(rule, values, replaced) for rule in rules], finish)


def _leaf(rule: Rule, values: dict[Any, Any], replaced: dict[int, Any]) -> Leaf:
    fields, scalars = ([values[var] for var in some] for some in (rule.fields, rule.scalars))
    place = {id(field): i for i, field in enumerate(fields)}
    over = tuple(place.get(id(replaced[id(var)])) for var in rule.results)
    return Leaf(rule, fields, scalars, over)


def _needed(jaxpr: Any) -> list[Any]:
    """The operations that some result depends on."""
    wanted, found = {var for var in jaxpr.outvars if not isinstance(var, Literal)}, []
    for eqn in reversed(jaxpr.eqns):
        if wanted.intersection(eqn.outvars):
            wanted.update(var for var in eqn.invars if not isinstance(var, Literal))
            found.append(eqn)
    return found[::-1]


def _alone(eqn: Any) -> bool:
    """Whether a kernel knows the operation, and it acts on every number alone."""
    name = eqn.primitive.name
    if name in CALLS:
        inner = eqn.params[CALLS[name]]
        plain = getattr(inner, "jaxpr", inner)
        return not getattr(inner, "consts", ()) and all(map(_alone, plain.eqns))
    (out,) = (var.aval for var in eqn.outvars) if len(eqn.outvars) == 1 else (None,)
    if out is None or any(var.aval.shape not in ((), out.shape) for var in eqn.invars):
        return False
    if name in SAME:
        return all(var.aval.dtype == jnp.float32 for var in (*eqn.invars, *eqn.outvars))
    return name in ELEMENTWISE


def _single(drifts: Any, inner: Any, values: Any) -> bool:
    """Whether all numbers are float32: the drifts, and what comes from outside."""
    given = [v for e in inner for v in e.invars if not isinstance(v, Literal) and v in values]
    return all(var.aval.dtype == jnp.float32 for var in (*drifts, *given))


def _groups(together: list[list[Any]], jaxpr: Any) -> dict[Any, Any]:
    """By variable: the first of those that it is connected with."""
    found = {var: var for var in (*jaxpr.constvars, *jaxpr.invars)}

    def root(var: Any) -> Any:
        while found.setdefault(var, var) is not var:
            var = found[var]
        return var

    for some in together:
        for var in some:
            found[root(var)] = root(some[0])
    return {var: root(var) for var in list(found)}


def _outside(closed: ClosedJaxpr, eqns: list[Any]) -> dict[Any, Any]:
    """What comes from outside or is computed once for all, by variable."""
    jaxpr = closed.jaxpr
    made = [*jaxpr.constvars, *[v for e in eqns for v in e.outvars if not isinstance(v, DropVar)]]
    once = ClosedJaxpr(jaxpr.replace(eqns=eqns, invars=[], outvars=made), closed.consts)
    return dict(zip(made, jaxpr_as_fun(once)(), strict=True))


def _rule(drift: Any, root: Any, inner: list[Any], groups: Any, jaxpr: Any) -> Rule:
    eqns = tuple(e for e in inner if groups[e.outvars[0]] is root)
    used = dict.fromkeys(v for e in eqns for v in e.invars if not isinstance(v, Literal))
    made = {var for eqn in eqns for var in eqn.outvars}
    fields = tuple(v for v in used if v in jaxpr.constvars and v.aval.shape == drift.aval.shape)
    scalars = tuple(v for v in used if v not in made and v is not drift and v not in fields)
    own = lambda var: var in made or var is drift
    results = tuple(dict.fromkeys(v for v in jaxpr.outvars if not isinstance(v, Literal) and own(v)))  # fmt: skip
    return Rule(drift, fields, scalars, results, eqns)


def _run(eqns: Sequence[Any], known: dict[Any, Any], wanted: Sequence[Any]) -> list[Any]:
    """Each operation on whatever shapes come, which go together."""
    known = dict(known)
    read = lambda var: var.val if isinstance(var, Literal) else known[var]
    for eqn in eqns:
        values, name = [read(var) for var in eqn.invars], eqn.primitive.name
        if name in CALLS:
            inner = eqn.params[CALLS[name]]
            plain = getattr(inner, "jaxpr", inner)
            results = _run(plain.eqns, dict(zip(plain.invars, values, strict=True)), plain.outvars)
        elif name in SAME:
            results = values
        else:
            results = [_bound(eqn, values)]
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(var) for var in wanted]


def _bound(eqn: Any, values: list[Any]) -> Array:
    arrays = [jnp.asarray(v, var.aval.dtype) for v, var in zip(values, eqn.invars, strict=True)]
    shape = jnp.broadcast_shapes(*[a.shape for a in arrays])
    return eqn.primitive.bind(*[jnp.broadcast_to(a, shape) for a in arrays], **eqn.params)
