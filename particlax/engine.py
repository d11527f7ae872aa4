"""The compiled part of a run: chunks of steps, the search for a step that failed, and the mending of lost particles."""

import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from particlax import placement, programs, sharding
from particlax.blocks import wide
from particlax.data import Minibatches
from particlax.errors import NonFiniteError
from particlax.flow import Flow, Info, State
from particlax.particles import num_particles, random_like
from particlax.streams import Block

Axes: TypeAlias = tuple[tuple[int, ...], ...]
NOISE = 0.01
"""Noise on a copy that replaces a lost particle, in units of the cloud's spread."""
ATTEMPTS = 10
"""How often particles are replaced at one and the same step before the run gives up."""
TOGETHER = (5, 4, 3, 2)
"""How many steps an inner loop may have, the best first: few, since nobody is heard within it."""


class Fixed(NamedTuple):
    """What stays as it is within a chunk."""

    flow: Flow
    data: Any
    noise_key: Array
    data_key: Array
    layout: placement.Layout | None = None
    program: str = programs.FAST


class Clock(NamedTuple):
    """Which clouds to keep: of every `thin` steps one, in a buffer for `rows` of them; none without rows.

    `together` steps make an inner loop.
    """

    thin: Array
    rows: int
    together: int = 1


class Taken(NamedTuple):
    """A number of steps that were taken: where they led, and the clouds kept on the way."""

    state: State
    log_density: Array
    kept: PyTree
    steps: int


class Replaced(NamedTuple):
    """A particle that was not finite, and the neighbour whose copy took its place before that step."""

    step: int
    particle: int
    neighbour: int


def together(*counts: int) -> int:
    """How many steps can always be taken together if chunks end at multiples of these counts."""
    common = math.gcd(*counts)
    return next((size for size in TOGETHER if common % size == 0), 1)


def copy(tree: Any) -> Any:
    """Arrays of one's own, safe from donation."""
    return jax.tree.map(jnp.copy, tree)


def advance(fixed: Fixed, state: State, size: int, clock: Clock) -> Taken:
    """Take `size` steps; `NonFiniteError` where one of them fails."""
    before = copy(state)  # the chunk donates its input; from this copy a failure is replayed
    turns = jnp.int32(size // clock.together)
    state, log_density, ok, kept = _chunk[fixed.program](fixed, state, turns, clock)
    if not bool(ok):
        raise _failure(fixed, before, size)
    return Taken(state, log_density, kept, size)


def advance_mending(
    fixed: Fixed, state: State, size: int, clock: Clock, replaced: list[Replaced]
) -> Taken:
    """As `advance`; where a step fails, stop before it with its lost particles replaced, and note them in `replaced`."""
    before = copy(state)
    try:
        return advance(fixed, state, size, clock)
    except NonFiniteError as error:
        here = [old.particle for old in replaced if old.step == error.step]
        healthy = num_particles(before.particles) - len(error.particles)
        if not healthy or any(here.count(i) >= ATTEMPTS for i in error.particles):
            raise
        # Replayed by the program that took the steps, so that the result does not depend on where chunks begin.
        steps = error.step - int(before.step)
        turns = jnp.int32(steps)
        state, log_density, _, kept = _chunk[fixed.program](fixed, before, turns, clock)
        key = jax.random.fold_in(fixed.noise_key, 2**31 - 2)  # the stream of a step never reached
        key = jax.random.fold_in(jax.random.fold_in(key, error.step), len(here))
        axes = _particle_axes(fixed.flow, state)
        state, sources = _mend(key, state, error.particles, fixed.program, axes)
        state = placement.put(fixed.layout, state)
        pairs = zip(error.particles, sources, strict=True)
        replaced += [Replaced(error.step, lost, source) for lost, source in pairs]
        return Taken(state, log_density, kept, steps)


def _step(fixed: Fixed, state: State) -> tuple[State, Info]:
    batch = fixed.data
    if isinstance(batch, (Minibatches, Block)):
        batch = batch.batch(fixed.data_key, state.step)
    with sharding.using(fixed.layout):
        state, info = fixed.flow.step(fixed.noise_key, state, sharding.spread(batch))
    return placement.put(fixed.layout, state), info


def _one(fixed: Fixed, state: State) -> tuple[State, Array]:
    state, info = _step(fixed, state)
    return state, info.log_density.astype(jnp.result_type(float))


def repeatable(fixed: Fixed, state: State) -> Fixed:
    """With the kind of program that repeats bit for bit in another process."""
    return fixed._replace(program=programs.repeatable(_step, fixed, state))


def kept(state: State) -> tuple[PyTree, PyTree]:
    """What history keeps of a state: the cloud, and what its particles carry."""
    return state.particles, state.carried


def _steps(fixed: Fixed, state: State, turns: Array, clock: Clock) -> Any:
    """`turns` times `together` steps; with `rows`, the clouds of steps that `thin` divides, in a buffer."""
    thin, rows, together = clock

    def body(_: Any, carry: Any) -> Any:
        state, _, ok, buffer, row = carry
        state, log_density = _one(fixed, state)
        ok = ok & ~jnp.any(_bad_value(log_density))
        if rows:
            # Every cloud is written, only the wanted ones are left behind: no branch, no copy.
            buffer = jax.tree.map(lambda b, p: b.at[row].set(p), buffer, kept(state))
            row = row + (state.step % thin == 0).astype(row.dtype)
        return state, log_density, ok, buffer, row

    blank = jnp.zeros(num_particles(state.particles), jnp.result_type(float))
    empty = jax.tree.map(lambda p: jnp.zeros((rows + 1, *p.shape), p.dtype), kept(state))
    carry = (state, blank, jnp.array(True), empty if rows else None, jnp.int32(0))
    turn = lambda _, carry: lax.fori_loop(0, together, body, carry)
    end = lax.fori_loop(0, turns, turn if together > 1 else body, carry)
    state, log_density, ok, buffer, _ = end
    return state, log_density, ok & ~jnp.any(_bad_move(state)), buffer


_chunk = programs.compiled(_steps, "all-except-first")


def _bad_value(log_density: Array) -> Array:
    return ~jnp.isfinite(log_density)


def _bad_particles(tree: PyTree) -> Array:
    flags = [
        jnp.any(~jnp.isfinite(leaf.reshape(len(leaf), -1)), axis=1)
        for leaf in jax.tree.leaves(tree)
    ]
    return jnp.any(jnp.stack(flags), axis=0)


def _bad_move(state: State) -> Array:
    """Which particles are not finite: all of them where a leaf that they share is not."""
    shared = () if state.shared is None else state.shared.values
    lost = [jnp.any(~jnp.isfinite(leaf)) for leaf in jax.tree.leaves(shared)]
    return _bad_particles(state.particles) | jnp.any(jnp.array([False, *lost]))


def _until_bad(fixed: Fixed, state: State, size: Array) -> tuple[State, Array]:
    """Step until something is not finite: the state before, and which particles are bad, by value,
    score and move."""

    def going(carry: Any) -> Array:
        return (carry[0] < size) & ~jnp.any(carry[2][jnp.array([0, 2])])  # as _chunk sees it

    def body(carry: Any) -> Any:
        count, state, _ = carry
        moved, info = _step(fixed, state)
        bad = (
            _bad_value(info.log_density),
            _bad_particles(info.score),
            _bad_move(moved),
        )
        good = ~jnp.any(bad[0] | bad[2])
        state = jax.tree.map(lambda new, old: jnp.where(good, new, old), moved, state)
        return count + 1, state, jnp.stack(bad)

    fine = jnp.zeros((3, num_particles(state.particles)), bool)
    _, state, bad = lax.while_loop(going, body, (jnp.int32(0), state, fine))
    return state, bad


_replay = programs.compiled(_until_bad, "none")


def _failure(fixed: Fixed, before: State, size: int) -> NonFiniteError:
    """The error for a chunk that met NaN, by replaying it step by step from its start."""
    state, flags = _replay[fixed.program](fixed, before, jnp.int32(size))
    step, num, flags = int(state.step), num_particles(state.particles), placement.on_host(flags)
    cause = int(np.argmax(flags.any(1)))
    bad = np.flatnonzero(flags[cause]).tolist()
    listed = ", ".join(map(str, bad[:10])) + (", ..." if len(bad) > 10 else "")
    what, remedy = (
        (
            "the log density is NaN or infinite",
            "Check the log density there (of a network: labels that are no class, an sd that is not positive)",
        ),
        ("the score is not finite", "Check the gradient of the log density there"),
        (
            "the move is not finite",
            "Try a smaller step size, and check that no schedule turns negative",
        ),
    )[cause]
    if cause < 2 and step > 0:
        remedy += ", or try a smaller step size if the particles have run away"
    start = " (the starting points)" if step == 0 else ""
    return NonFiniteError(
        f"at step {step}{start}, {what} at {len(bad)} of {num} particles ({listed}). {remedy}. "
        "The last good state, before this step, is in this error's .state",
        step=step,
        particles=bad,
        state=state,
    )


def _mend(
    key: Array,
    state: State,
    lost: list[int],
    program: str = programs.FAST,
    axes: Axes | None = None,
) -> tuple[State, list[int]]:
    """Every lost particle as a copy of its nearest healthy one, with noise; everything kept for it is copied too."""
    mended, found = _mended[program](key, state, np.array(lost), axes)
    return mended, placement.on_host(found).tolist()


def _particle_axes(flow: Any, state: State) -> Axes | None:
    """By array of the memories of integrator and terms, the axes that grow with the number of particles; None if that cannot be told."""
    num = num_particles(state.particles)
    one = jax.eval_shape(lambda cloud: jax.tree.map(lambda leaf: leaf[0], cloud), state.particles)

    def made(count: int) -> Any:
        more = lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype)
        init = lambda cloud: (flow.integrator.init(cloud), tuple(t.init(cloud) for t in flow.terms))
        return jax.eval_shape(init, jax.tree.map(more, one))

    try:
        now, grown = made(num), made(num + 1)
    except Exception:  # an `init` of one's own may look at numbers
        return None
    if jax.tree.structure(now) != jax.tree.structure((state.integrator, state.terms)):
        return None
    pairs = zip(jax.tree.leaves(now), jax.tree.leaves(grown), strict=True)
    differ = lambda a, b: tuple(i for i, (p, q) in enumerate(zip(a, b, strict=True)) if p != q)
    return tuple(differ(a.shape, b.shape) for a, b in pairs)


def _copies(key: Array, state: State, lost: Any, axes: Axes | None = None) -> tuple[State, Array]:
    cloud, num = state.particles, num_particles(state.particles)
    flags = jnp.zeros(num, bool).at[lost].set(True)

    def nearest(i: Array) -> Array:
        square = lambda leaf: jnp.sum(jnp.square(wide(leaf - leaf[i][None])).reshape(num, -1), 1)
        apart = jnp.sum(jnp.stack([square(leaf) for leaf in jax.tree.leaves(cloud)]), 0)
        # Squares may overflow where a particle was lost: healthy ones come before lost ones all the same.
        return jnp.argmin(jnp.where(flags, jnp.inf, jnp.minimum(apart, jnp.finfo(apart.dtype).max)))

    found = lax.map(nearest, lost)  # one by one: a cloud's worth of memory
    source = jnp.arange(num).at[lost].set(found)
    own = lambda leaf: leaf.ndim > 0 and leaf.shape[0] == num
    copied = lambda tree: jax.tree.map(lambda leaf: leaf[source] if own(leaf) else leaf, tree)
    memories, structure = jax.tree.flatten((state.integrator, state.terms))
    if axes is None:
        axes = tuple((0,) * own(leaf) for leaf in memories)
    for i, places in enumerate(axes):
        for axis in places:
            memories[i] = jnp.take(memories[i], source, axis)
    noise = random_like(key, cloud, jax.random.normal)
    moved = jax.tree.map(lambda leaf, unit: _jittered(leaf, unit, flags, source), cloud, noise)
    integrator, terms = jax.tree.unflatten(structure, memories)
    mended = State(moved, state.step, integrator, terms, copied(state.carried), state.shared)
    return mended, found


_mended = programs.compiled(_copies, "none")


def _jittered(leaf: Array, unit: Array, lost: Array, source: Array) -> Array:
    flags = lost.reshape(-1, *(1,) * (leaf.ndim - 1))
    healthy = jnp.where(flags, jnp.nan, wide(leaf))
    spread = jnp.nanstd(healthy, 0)
    spread = jnp.where(
        spread > 0, spread, jnp.abs(healthy[source])
    )  # one healthy particle has no spread
    return jnp.where(flags, leaf[source] + (NOISE * spread * unit).astype(leaf.dtype), leaf)
