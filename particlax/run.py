"""Running a flow: thousands of steps inside one compiled loop, Python only between chunks."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key, PyTree
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from particlax.checks import as_key, refuse_not_finite, whole
from particlax.data import Minibatches
from particlax.errors import DataError, NonFiniteError, OptionError, expect, known_options
from particlax.flow import Flow, Info, State
from particlax.particles import num_particles
from particlax.target import num_rows

__all__ = ["History", "Result", "Snapshot", "run"]

CHUNK_SECONDS = 0.5
"""Time between two looks from Python, unless observers or history ask for more."""
HISTORY_BYTES = 1 << 26
"""Size of the device buffer that collects history between two looks."""


class History(eqx.Module):
    """Clouds kept along the way; axis 0 is time."""

    steps: Int[np.ndarray, " T"]
    particles: PyTree[Float[np.ndarray, "T M ..."]]


class Snapshot(eqx.Module):
    """What observers see between chunks."""

    state: State
    log_density: Float[Array, " M"]
    steps: int
    """Steps of the whole run."""
    seconds: float


class Result(eqx.Module):
    """The outcome of `px.run`."""

    state: State
    log_density: Float[Array, " M"]
    """Log densities that the last step saw, at the particles it started from."""
    history: History | None
    seconds: float
    stopped: bool
    """Whether an observer ended the run early."""

    @property
    def particles(self) -> PyTree[Float[Array, "M ..."]]:
        """The final cloud."""
        return self.state.particles

    @property
    def shared(self) -> PyTree[Float[Array, "..."]]:
        """In partly Bayesian networks, the leaves that the particles share."""
        return None if self.state.shared is None else self.state.shared.values

    def to_arviz(self) -> Any:
        """The draws as ArviZ data: one chain of M draws, or with history M chains over time."""
        from particlax.export import to_arviz

        return to_arviz(self.particles, None if self.history is None else self.history.particles)


@known_options
def run(
    flow: Flow,
    particles: PyTree | State,
    *,
    steps: int,
    key: Key[Array, ""],
    data: PyTree | Minibatches = None,
    thin: int | None = None,
    observers: Callable[[Snapshot], Any] | Sequence[Callable[[Snapshot], Any]] = (),
    observe_every: int | None = None,
    progress: bool = True,
) -> Result:
    """Take `steps` steps of `flow` from `particles`, or go on from the `state` of an earlier result.

    `data` is `px.Minibatches(arrays, n)`, or plain arrays for full batches. `thin=k` keeps every k-th cloud in
    `history`. Observers are called with a `Snapshot` every `observe_every` steps (by default about twice a
    second); one that returns True ends the run. Same key, same result, however the run is cut: noise and
    batches depend on the key and the step number.

    >>> import particlax as px
    >>> target = px.Target(lambda x: -0.5 * jnp.sum(x**2))
    >>> flow = px.sgld(target, step_size=0.1)
    >>> key = jax.random.key(0)
    >>> result = px.run(flow, jnp.zeros((5, 2)), steps=100, key=key, thin=10, progress=False)
    >>> result.history.particles.shape
    (10, 5, 2)
    """
    whole("steps", steps, 0)
    for name, value in (("thin", thin), ("observe_every", observe_every)):
        if value is not None:
            whole(name, value, 1)
    watching = [observers] if callable(observers) else list(observers)
    expect("flow", flow, Flow, "px.svgd(target, optimizer=optax.adam(0.05))")
    key = as_key(key)
    state = _resumed(flow, particles) if isinstance(particles, State) else flow.init(particles)
    if thin and state.shared is not None:
        raise OptionError(
            "thin keeps clouds along the way, but not the leaves that they share, without which they mean nothing; leave "
            "thin out, and keep what you need with an observer"
        )
    batches = _checked_data(flow, state, data, key)
    # Noise is folded from the key by step number; batches have the stream of a step never reached.
    fixed = (flow, batches, key, jax.random.fold_in(key, 2**31 - 1))
    began, first, stopped = time.perf_counter(), int(state.step), False
    log_density: Array = jnp.full(num_particles(state.particles), jnp.nan)
    pace, keeper = _Pace(steps, observe_every if watching else None), _Keeper(state, thin, steps)
    with _Bar(steps, progress) as bar:
        while pace.done < steps and not stopped:
            size = min(pace.next(), keeper.room(int(state.step)))
            state, log_density, kept = _advance(fixed, state, size, keeper)
            keeper.keep(int(state.step) - size, size, kept)
            pace.took(size)
            seconds = time.perf_counter() - began
            bar.update(pace.done, seconds, log_density)
            if pace.due():
                stopped = _observe(watching, state, log_density, first + steps, seconds)
    return Result(state, log_density, keeper.history(), time.perf_counter() - began, stopped)


def _observe(
    observers: Sequence[Callable[[Snapshot], Any]],
    state: State,
    log_density: Array,
    steps: int,
    seconds: float,
) -> bool:
    """Show every observer a snapshot of its own; whether one of them answered True."""
    answers = [watch(Snapshot(_copy(state), log_density, steps, seconds)) for watch in observers]
    return any(
        np.ndim(answer) == 0 and np.asarray(answer).dtype == bool and bool(answer)
        for answer in answers
    )


class _Pace:
    """How many steps to take before Python looks again."""

    def __init__(self, steps: int, every: int | None):
        self.steps, self.every = steps, every
        self.done, self.chunk, self.mark = 0, 1, time.perf_counter()

    def next(self) -> int:
        self.mark = time.perf_counter()
        left = self.steps - self.done
        return min(self.chunk, left, self.every - self.done % self.every if self.every else left)

    def took(self, size: int) -> None:
        self.done += size
        spent = max(time.perf_counter() - self.mark, 1e-9)
        self.chunk = max(1, int(min(4 * max(size, self.chunk), size * CHUNK_SECONDS / spent)))

    def due(self) -> bool:
        return not self.every or self.done % self.every == 0 or self.done == self.steps


class _Keeper:
    """Collects every `thin`-th cloud on the host, from device buffers of bounded size."""

    def __init__(self, state: State, thin: int | None, steps: int):
        cloud = sum(leaf.nbytes for leaf in jax.tree.leaves(state.particles))
        self.thin = thin or 0
        self.rows = 0
        if thin:  # powers of two: few sizes, few compilations
            wanted, room = max(1, -(-steps // thin)), max(1, HISTORY_BYTES // max(cloud, 1))
            self.rows = 1 << min((wanted - 1).bit_length(), room.bit_length() - 1)
        self.steps: list[np.ndarray] = []
        self.clouds: list[PyTree] = []
        self.like = state.particles if thin else None

    def room(self, step: int) -> int:
        return self.rows * self.thin - step % self.thin if self.thin else 1 << 30

    def keep(self, start: int, size: int, buffer: PyTree) -> None:
        if not self.thin:
            return
        steps = np.arange(start + 1, start + size + 1, dtype=np.int64)
        steps = steps[steps % self.thin == 0]
        self.steps.append(steps)
        self.clouds.append(jax.tree.map(lambda rows: np.asarray(rows[: len(steps)]), buffer))

    def history(self) -> History | None:
        if not self.thin:
            return None
        if not self.clouds:
            empty = jax.tree.map(lambda a: np.zeros((0, *a.shape), a.dtype), self.like)
            return History(np.zeros(0, np.int64), empty)
        clouds = jax.tree.map(lambda *parts: np.concatenate(parts), *self.clouds)
        return History(np.concatenate(self.steps), clouds)


class _Bar:
    """The progress bar: share done, steps per second, time left, mean log density."""

    def __init__(self, steps: int, shown: bool):
        self.bar = Progress(
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} steps"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[note]}"),
            disable=not shown,
        )
        self.task = self.bar.add_task("", total=steps, rate="", note="")

    def __enter__(self) -> "_Bar":
        self.bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.__exit__(*error)

    def update(self, done: int, seconds: float, log_density: Array) -> None:
        if not self.bar.disable:
            note = f"mean log density {float(jnp.mean(log_density)):.4g}"
            self.bar.update(self.task, completed=done, rate=f"{done / seconds:.0f}/s", note=note)


def _step(fixed: Any, state: State) -> tuple[State, Info]:
    flow, data, noise_key, data_key = fixed
    batch = data.batch(data_key, state.step) if isinstance(data, Minibatches) else data
    return flow.step(noise_key, state, batch)


def _one(fixed: Any, state: State) -> tuple[State, Array]:
    state, info = _step(fixed, state)
    return state, info.log_density.astype(jnp.result_type(float))


@eqx.filter_jit(donate="all-except-first")
def _chunk(fixed: Any, state: State, size: Array, thin: Array, rows: int) -> Any:
    """`size` steps; with `rows`, the clouds of steps that `thin` divides, in a buffer."""

    def body(_: Any, carry: Any) -> Any:
        state, _, ok, buffer, row = carry
        state, log_density = _one(fixed, state)
        ok = ok & ~jnp.any(_bad_value(log_density))
        if rows:
            # Every cloud is written, only the wanted ones are left behind: no branch, no copy.
            buffer = jax.tree.map(lambda b, p: b.at[row].set(p), buffer, state.particles)
            row = row + (state.step % thin == 0)
        return state, log_density, ok, buffer, row

    blank = jnp.zeros(num_particles(state.particles), jnp.result_type(float))
    empty = jax.tree.map(lambda p: jnp.zeros((rows + 1, *p.shape), p.dtype), state.particles)
    carry = (state, blank, jnp.array(True), empty if rows else None, jnp.int32(0))
    state, log_density, ok, buffer, _ = lax.fori_loop(0, size, body, carry)
    return state, log_density, ok & ~jnp.any(_bad_move(state)), buffer


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


def _advance(fixed: Any, state: State, size: int, keeper: _Keeper) -> tuple[State, Array, PyTree]:
    before = _copy(state)  # the chunk donates its input; from this copy a failure is replayed
    thin, rows = jnp.int32(max(keeper.thin, 1)), keeper.rows
    state, log_density, ok, kept = _chunk(fixed, state, jnp.int32(size), thin, rows)
    if not bool(ok):
        raise _failure(fixed, before, size)
    return state, log_density, kept


@eqx.filter_jit
def _replay(fixed: Any, state: State, size: Array) -> tuple[State, Array]:
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


def _failure(fixed: Any, before: State, size: int) -> NonFiniteError:
    """The error for a chunk that met NaN, by replaying it step by step from its start."""
    state, flags = _replay(fixed, before, jnp.int32(size))
    step, num = int(state.step), num_particles(state.particles)
    cause = int(np.argmax(np.asarray(flags).any(1)))
    bad = np.flatnonzero(np.asarray(flags[cause])).tolist()
    listed = ", ".join(map(str, bad[:10])) + (", ..." if len(bad) > 10 else "")
    what, remedy = (
        ("the log density is NaN or infinite", "Check the log density there"),
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


def _copy(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def _resumed(flow: Flow, state: State) -> State:
    """A copy of an earlier state, if it is one of this flow."""
    shared = None if state.shared is None else state.shared.values
    wanted = jax.eval_shape(flow.init, state.particles, state.carried, shared)
    same = jax.tree.structure(wanted) == jax.tree.structure(state)
    if not same or any(
        (a.shape, a.dtype) != (b.shape, b.dtype)
        for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(state), strict=True)
    ):
        raise OptionError(
            "the state to go on from has other parts or shapes than this flow's: it comes from a flow with "
            "another integrator, other terms or other particles. Go on with the same flow, or start anew from "
            "state.particles"
        )
    return _copy(state)


def _checked_data(flow: Flow, state: State, data: Any, key: Array) -> Any:
    wanted = flow.target.num_data
    if wanted is None or data is None:
        return data  # the target itself says what is missing or too much, at the first step
    if isinstance(data, Minibatches):
        num, arrays = data.num_data, data.arrays
        batch = jax.eval_shape(data.batch, key, state.step)
    else:
        batch = arrays = data = jax.tree.map(jnp.asarray, data)
        num = num_rows(data)
        refuse_not_finite("the data", data)
    if num != wanted:
        raise DataError(
            f"the data have {num} rows but the target was made with num_data={wanted}; expected the same "
            "number, since the likelihood is scaled by num_data / batch size"
        )
    flow.check_data(state, batch, arrays)
    return data
