"""Checkpoints of a run: where, when and which to keep, and how to read them."""

import os
import re
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from particlax import placement
from particlax.checks import Part, whole
from particlax.errors import CheckpointError, OptionError, expect, known_options
from particlax.fingerprint import SHOWN
from particlax.flow import Flow, State
from particlax.folder import DamagedError, Folder
from particlax.processes import team_of
from particlax.store import read

__all__ = ["Checkpoint", "Checkpoints", "Interrupted", "load"]

EXIT_SAVED = 75
"""Exit code of a run that was told to end (SIGTERM) and has saved its state: run the same command again."""
UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended a run after its state was saved; `state` is that state, `checkpoint` the path."""

    def __init__(self, message: str, *, state: State, checkpoint: str):
        super().__init__(message)
        self.state = state
        self.checkpoint = checkpoint


class Checkpoints(Part):
    """Where a run saves its state, how often, and which it keeps: `px.run(..., checkpoint=Checkpoints("runs/one"))`.

    `every` is a number of steps or a time ("30s", "5min", "2h"). The last `keep` are kept, and the best, if `best(snapshot)` gives a
    number, the larger the better. With `strict=False` a run goes on from checkpoints of another config or version, as long as
    the arrays fit. With `repeatable=False` a GPU may run a program that is somewhat faster, but then a run that goes on in another
    process goes on with other roundings.

    >>> Checkpoints("runs/one", every=100, keep=2).every
    100
    """

    folder: str
    every: int | str = "5min"
    keep: int = 3
    best: Callable[[Any], Any] | None = None
    strict: bool = True
    repeatable: bool = True

    def __init__(
        self,
        folder: str | os.PathLike,
        every: int | str = "5min",
        keep: int = 3,
        best: Callable[[Any], Any] | None = None,
        strict: bool = True,
        *,
        repeatable: bool = True,
    ):
        if not isinstance(folder, (str, os.PathLike)) or not str(folder):
            raise OptionError(
                f"checkpoint is {folder!r}; expected the name of a folder, or px.Checkpoints"
            )
        if isinstance(every, str):
            seconds(every)
        else:
            whole("every", every, 1)
        whole("keep", keep, 1)
        if best is not None and not callable(best):
            raise OptionError(
                f"best is {best!r}; expected a function of a snapshot that returns a number"
            )
        self.folder, self.every, self.keep = os.fspath(folder), every, int(keep)
        self.best, self.strict, self.repeatable = best, bool(strict), bool(repeatable)


def seconds(text: str) -> float:
    """A time such as "5min" in seconds.

    >>> seconds("1.5h")
    5400.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|d)", text.strip())
    if found is None or not float(found[1]):
        raise OptionError(
            f"every is {text!r}; expected a number of steps, or a time such as '30s', '5min' or '2h'"
        )
    return float(found[1]) * UNITS[found[2]]


class Checkpoint(eqx.Module):
    """A checkpoint that was read. Without a flow the trees are plain dicts and lists of NumPy arrays, and `state` is None."""

    step: int
    particles: PyTree
    carried: PyTree
    """What each particle carries beside its position; () if nothing."""
    shared: PyTree
    """The leaves that all particles share, or None."""
    log_density: PyTree
    state: State | None
    value: float | None
    """What `best` gave for it."""
    config: dict[str, str]
    versions: dict[str, str]
    path: str


@known_options
def load(
    folder: str | os.PathLike,
    step: int | str | None = None,
    *,
    flow: Flow | None = None,
    particles: PyTree | State = None,
) -> Checkpoint:
    """Read the newest good checkpoint of a folder, that of a `step`, or the `"best"`.

    With the flow, and particles as the run was started from (only their structure counts), `state` is complete: to go on
    from, or for `px.predictive`; if they lie on a mesh with an axis "particles", so does it (several processes call this alike).
    Nothing in the folder is changed, so it may be read while its run goes on.
    """
    expect("folder", folder, (str, os.PathLike), "'runs/first'")
    place = Folder(folder)
    if not place.steps():
        raise CheckpointError(
            f"there are no checkpoints in {place.path}; look at the name of the folder"
        )
    if (flow is None) != (particles is None):
        raise OptionError(
            "load got one of flow and particles; expected both, or neither for plain arrays"
        )
    if flow is not None:
        expect("flow", flow, Flow, "px.svgd(target, step_size=0.1)")
    for _ in range(TRIES):
        there = place.steps()
        try:
            return _loaded(place, step, flow, particles)
        except Exception:
            if place.steps() == there:
                raise
    return _loaded(place, step, flow, particles)


TRIES = 5
"""How often a folder is read again whose run has removed or added a checkpoint meanwhile."""


def _loaded(
    place: Folder, step: int | str | None, flow: Flow | None, particles: PyTree | State
) -> Checkpoint:
    like = None if flow is None else _like(flow, particles)
    places = None if like is None else like["log_density"].sharding
    team = team_of(getattr(places, "mesh", None))
    chosen: int = team.by_first(lambda: _chosen(place, step))  # the same in all processes
    manifest = place.manifest(chosen)
    if like is not None:
        team.each(lambda: refuse_misfit(place.path, manifest, like))
    found = None if like is None else jax.tree.leaves(like)
    leaves = read(place, chosen, manifest["leaves"], found, team)
    tree = None if like is None else jax.tree.unflatten(jax.tree.structure(like), leaves)
    nested = _nested(manifest["leaves"], leaves)
    state = nested["state"]
    return Checkpoint(
        step=chosen,
        particles=state["particles"] if tree is None else tree["state"].particles,
        carried=state.get("carried", ()) if tree is None else tree["state"].carried,
        shared=state.get("shared", {}).get("values") if tree is None else _values(tree["state"]),
        log_density=nested["log_density"],
        state=None if tree is None else jax.tree.map(jnp.copy, tree["state"]),
        value=manifest["value"],
        config=manifest["config"],
        versions=manifest["versions"],
        path=str(place.home(chosen)),
    )


def say(line: str) -> None:
    """One line to the user, whatever else is printed."""
    print(line, file=sys.stderr, flush=True)


def newest_good(folder: Folder) -> tuple[int, dict[str, Any]]:
    """Step and manifest of the last checkpoint that is not damaged; says which ones it left out."""
    reasons = []
    for step in reversed(folder.steps()):
        try:
            manifest = folder.verify(step)
        except DamagedError as damage:
            reasons.append(f"{folder.home(step)} is damaged: {damage}")
            continue
        for reason in reasons:
            say(f"{reason}. Falling back to step {step}")
        return step, manifest
    raise CheckpointError(
        f"no good checkpoint is left in {folder.path}: {'; '.join(reasons)}. Bring one back from a copy; to start anew, use "
        "another folder or remove this one"
    )


def refuse_misfit(path: Any, manifest: dict[str, Any], like: PyTree) -> None:
    """Refuse a checkpoint whose arrays are not those of the tree `like`."""
    leaves = jax.tree_util.tree_leaves_with_path(like)
    name = lambda p: jax.tree_util.keystr(p, simple=True, separator=".")
    shape = lambda leaf: None if _is_key(leaf) else f"{leaf.dtype}{list(leaf.shape)}"
    wanted = [(name(p), shape(leaf)) for p, leaf in leaves]
    found = [
        (".".join(str(part) for _, part in entry["place"]), None if "key" in entry else f"{entry['dtype']}{entry['shape']}")
        for entry in manifest["leaves"]
    ]  # fmt: skip
    # Packages may change how they call what they remember, but particles are called as the user does.
    theirs = lambda label: label if label.startswith("state.particles") else ""
    known = lambda some: [(theirs(label), kind) for label, kind in some]
    if known(wanted) == known(found):
        return
    # Those that differ, if the others can be paired; or all, up to a number.
    if len(wanted) == len(found):
        pairs = zip(wanted, found, known(wanted), known(found), strict=True)
        apart = [(w, f) for w, f, a, b in pairs if a != b]
        wanted, found = [w for w, _ in apart], [f for _, f in apart]
    else:
        wanted, found = [w for w in wanted if w not in found], [f for f in found if f not in wanted]
    said = lambda some: [f"{label} {kind or 'key'}" for label, kind in some[:SHOWN]]
    short = lambda some: ", ".join(said(some)) + (", ..." if len(some) > SHOWN else "") or "no more"
    carried = any(label.startswith("state.carried") for label, _ in [*wanted, *found])
    hint = ". Of a stateful network give particles=flow.init(*net.init(key, M))" * carried
    raise CheckpointError(
        f"the arrays in {path} do not fit this flow: found {short(found)}; expected {short(wanted)}. Use the flow and the number "
        f"of particles of that run (and its setting of jax_enable_x64){hint}"
    )


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _chosen(folder: Folder, step: int | str | None) -> int:
    """The checkpoint that was asked for, which is whole."""
    if step is None:
        return newest_good(folder)[0]
    if step == "best":
        step = _best(folder)
    if isinstance(step, str) or step not in folder.steps():
        raise CheckpointError(
            f"there is no checkpoint of step {step!r} in {folder.path}; there are {folder.steps()}"
        )
    try:
        folder.verify(step)
        return step
    except DamagedError as damage:
        raise CheckpointError(
            f"{folder.home(step)} is damaged: {damage}. Choose another of {folder.steps()}"
        ) from None


def values(folder: Folder) -> dict[int, float]:
    """What `best` gave, by step; without those that cannot be read."""
    found = {}
    for step in folder.steps():
        try:
            value = folder.manifest(step)["value"]
        except DamagedError:
            continue
        if value is not None:
            found[step] = value
    return found


def _best(folder: Folder) -> int:
    known = values(folder)
    if not known:
        raise CheckpointError(
            f"no checkpoint in {folder.path} has a value; save with px.Checkpoints(..., best=function of a snapshot)"
        )
    return max(known, key=lambda step: known[step])


def _values(state: State) -> PyTree:
    return None if state.shared is None else state.shared.values


def _like(flow: Flow, particles: PyTree | State) -> PyTree:
    """What a checkpoint of the flow holds, by shape, and where: on the mesh or the device of the particles."""
    given = placement.loosened(particles)
    state = given if isinstance(given, State) else jax.eval_shape(flow.init, given)
    cloud = jax.tree.leaves(given.particles if isinstance(given, State) else given)
    homes = [getattr(leaf, "sharding", None) for leaf in cloud]
    # What optimizers remember of a leaf is where the leaf is.
    known = dict(reversed([(np.shape(leaf), at) for leaf, at in zip(cloud, homes, strict=True)]))
    own = iter(homes)
    shape = lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)
    moving = jax.tree.map(lambda leaf: shape(leaf, next(own)), state.particles)
    found = lambda leaf: getattr(leaf, "sharding", None) or known.get(leaf.shape)
    state = eqx.tree_at(lambda s: s.particles, jax.tree.map(lambda a: shape(a, found(a)), state), moving)  # fmt: skip
    num, home = np.shape(cloud[0])[0], homes[0]
    tree = {"log_density": jax.ShapeDtypeStruct((num,), jnp.result_type(float)), "state": state}
    if home is None:  # NumPy's
        return tree
    if isinstance(home, jax.sharding.NamedSharding) and home.spec[:1] == (placement.AXIS,):
        return placement.placed(placement.layout_of(home.mesh, tree, num), tree)
    return jax.tree.map(lambda leaf: shape(leaf, placement.beside(leaf.sharding, home)), tree)


def _nested(entries: list[dict[str, Any]], leaves: list[Any]) -> Any:
    """Leaves as nested dicts and lists, by their places alone."""
    tree: dict[Any, Any] = {}
    for entry, leaf in zip(entries, leaves, strict=True):
        node, kinds = tree, entry["place"]
        for kind, name in kinds[:-1]:
            node = node.setdefault((kind, name), {})
        node[tuple(kinds[-1])] = leaf
    return _plain(tree)


def _plain(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    inside = {name: _plain(part) for (_, name), part in node.items()}
    return list(inside.values()) if all(kind == "item" for kind, _ in node) else inside
