"""Running a flow: thousands of steps inside one compiled loop, Python only between chunks."""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from particlax import placement, programs
from particlax.begun import Begun, NoSaver
from particlax.checkpoints import Checkpoints, say
from particlax.checks import as_key, refuse_traced, whole
from particlax.data import Minibatches
from particlax.engine import (
    Clock,
    Fixed,
    Replaced,
    Taken,
    advance,
    advance_mending,
    copy,
    repeatable,
    together,
)
from particlax.errors import DataError, NonFiniteError, OptionError, expect, known_options, one_of
from particlax.fingerprint import describe_run
from particlax.flow import Flow, State
from particlax.history import History, Keeper
from particlax.particles import num_particles
from particlax.processes import Team
from particlax.progress import Bar
from particlax.saver import Saver
from particlax.sources import check_stream, checked_data
from particlax.streams import Feed, Stream

__all__ = ["Result", "Snapshot", "run"]

CHUNK_SECONDS = 0.5
"""Time between two looks from Python, unless observers or history ask for more."""
SMALL = 1 << 24
"""Numbers in a cloud up to which steps on a GPU are taken a few at a time."""


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
    replaced: tuple[Replaced, ...] = ()
    """Particles that were not finite and were replaced: step, particle, neighbour (`on_nonfinite="replace"`)."""

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
    data: PyTree | Minibatches | Stream = None,
    thin: int | None = None,
    observers: Callable[[Snapshot], Any] | Sequence[Callable[[Snapshot], Any]] = (),
    observe_every: int | None = None,
    progress: bool = True,
    checkpoint: str | os.PathLike | Checkpoints | None = None,
    every: int | str | None = None,
    on_nonfinite: str = "stop",
    mesh: jax.sharding.Mesh | None = None,
) -> Result:
    """Take `steps` steps of `flow` from `particles`, or go on from the `state` of an earlier result.

    `data` is `px.Minibatches(arrays, n)`, `px.Stream(arrays, n)` if they do not fit into memory, or plain arrays for full batches.
    `thin=k` keeps every k-th cloud in `history`. Observers are called with a `Snapshot` every `observe_every` steps (by default
    about twice a second); one that returns True ends the run. Same key, same result, however the run is cut: noise
    and batches depend on the key and the step number.

    `checkpoint` is a folder (or `px.Checkpoints`) to which the state is saved `every` so many steps or minutes ("5min"); the same
    command again goes on from there. `on_nonfinite="replace"` replaces particles that are not finite by a
    neighbour's copy, where "stop" ends the run.

    `mesh` has an axis "particles", along which the particles are divided among devices, and perhaps an axis "data", along which
    each batch is: jax.make_mesh((8,), ("particles",)). The result is the same, to rounding.

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
    one_of("on_nonfinite", on_nonfinite, ("stop", "replace"))
    expect("flow", flow, Flow, "px.svgd(target, optimizer=optax.adam(0.05))")
    watching = [observers] if callable(observers) else list(observers)
    refuse_traced("px.run", (flow, particles, key), "inside, scan over flow.step")
    key, saving = as_key(key), _checkpoints(checkpoint, every, thin)
    particles = placement.loosened(particles)
    state = _resumed(flow, particles) if isinstance(particles, State) else flow.init(particles)
    if thin and state.shared is not None:
        raise OptionError(
            "thin keeps clouds along the way, but not the leaves that they share, without which they mean nothing; leave "
            "thin out, and keep what you need with an observer"
        )
    first = int(state.step)
    state, key, layout = _placed(mesh, state, key, data)
    saver = NoSaver(layout) if saving is None else Saver(saving, layout)
    team = Team() if layout is None else layout.team
    with saver, team.noticing(saver.again):
        config = lambda: describe_run(flow, state, data, key)
        # An observer had ended the run: without observers nobody is left who would stop it again.
        begun = saver.begin(config, state, first + steps, watched=bool(watching))
        steady = saving is not None and saving.repeatable and programs.chooses(state)
        task = _Task(flow, key, first, steps, thin, watching, observe_every, on_nonfinite, steady, layout)  # fmt: skip
        with (
            task.source(begun, data, saver),
            Bar(steps, progress, int(begun.state.step) - first) as bar,
        ):
            return task.run(begun, saver, bar)


def _placed(
    mesh: jax.sharding.Mesh | None, state: State, key: Array, data: Any
) -> tuple[State, Array, placement.Layout | None]:
    """State and key where the mesh wants them, if there is one, and its layout."""
    if mesh is None:
        return state, key, None
    layout = placement.layout_of(mesh, state, num_particles(state.particles))
    arrays = None if isinstance(data, Stream) else data
    placement.refuse_different(layout, {"particles": state, "keys": key, "data": arrays})
    return placement.put(layout, state), placement.replicated(layout, key), layout


def _checkpoints(checkpoint: Any, every: int | str | None, thin: int | None) -> Checkpoints | None:
    if checkpoint is None:
        if every is not None:
            raise OptionError(f"every is {every!r} without a checkpoint; add checkpoint='a folder'")
        return None
    if thin:
        raise OptionError(
            "thin keeps clouds in memory, where a checkpoint cannot find them again; leave thin out and write what you need to "
            "a file of your own with an observer, or leave checkpoint out"
        )
    if not isinstance(checkpoint, Checkpoints):
        return Checkpoints(checkpoint, "5min" if every is None else every)
    if every is not None:
        raise OptionError(
            "every came beside px.Checkpoints; give it there: px.Checkpoints(folder, every=...)"
        )
    return checkpoint


@dataclasses.dataclass
class _Task:
    """One call of `run`: what to do, and the loop that does it."""

    flow: Flow
    key: Array
    first: int
    steps: int
    thin: int | None
    watching: list[Callable[[Snapshot], Any]]
    observe_every: int | None
    on_nonfinite: str
    repeatable: bool
    layout: placement.Layout | None = None
    feed: Feed | None = None
    data: Any = None
    program: str = programs.FAST

    def __post_init__(self) -> None:
        self.last = self.first + self.steps
        self.team = Team() if self.layout is None else self.layout.team
        self.flow = placement.replicated(self.layout, self.flow)  # its arrays, if it has any
        # Noise is folded from the key by step number; batches have the stream of a step never reached.
        self.data_key = jax.random.fold_in(self.key, 2**31 - 1)

    @contextlib.contextmanager
    def source(self, begun: Begun, data: Any, saver: Saver | NoSaver) -> Any:
        """The data of the run, checked; streams are open while the run goes on."""
        if not isinstance(data, Stream):
            data = checked_data(self.flow, begun.state, data, self.key)
            self.data = placement.replicated(self.layout, data)
            yield
            return
        if begun.stopped or int(begun.state.step) >= self.last:  # there is no batch to come
            yield
            return
        span = (self.first, int(begun.state.step), self.last)
        with self._rescuing(saver, self._resumed(begun)):
            feed = Feed(data, self.data_key, span, begun.position, self.layout)
        self.feed = feed
        try:
            check_stream(self.flow, begun.state, data, feed, self.key)
            yield
        finally:
            feed.close()

    def run(self, begun: Begun, saver: Saver | NoSaver, bar: Bar) -> Result:
        """Step until the end, looking up between chunks."""
        began, (state, log_density, replaced, _, stopped, _) = time.perf_counter(), begun
        every = self.observe_every if self.watching else None
        done = int(state.step) - self.first
        pace = _Pace(self.steps, every, done, self._together(state, every or 0, saver.steps))
        keeper = Keeper(state, self.thin, self.steps)
        here, stopped = self._resumed(begun), stopped or self._seen(begun, saver)
        while pace.done < self.steps and not stopped:
            step = self.first + pace.done
            room = functools.partial(self._room, step, pace, keeper, saver)
            with self._rescuing(saver, here):
                size = min(self.team.each(room))  # the same steps, whatever their clocks say
            if not size:  # the data are slow, but signals are not to wait for them
                shown = functools.partial(self._shown, state, log_density, 0.0)
                saver.look(here or begun, end=False, snapshot=shown)
                continue
            try:
                clock = Clock(jnp.int32(max(keeper.thin, 1)), keeper.rows, pace.together)
                taken = self._advance(state, step, size, clock, replaced)
            except NonFiniteError as error:
                raise saver.explained(error) from None
            state, log_density = taken.state, taken.log_density if taken.steps else log_density
            keeper.keep(step, taken.steps, taken.kept)
            pace.took(taken.steps)
            seconds = time.perf_counter() - began
            bar.update(pace.done, seconds, log_density)
            shown = functools.partial(self._shown, state, log_density, seconds)
            place = self.feed.position(step + taken.steps) if self.feed else None
            here = Begun(state, log_density, replaced, place)
            if taken.steps and pace.due():
                with self._rescuing(saver, here, observed=False):
                    stopped = _observe(self.watching, shown)
            stopped = any(self.team.each(functools.partial(bool, stopped)))
            end = stopped or pace.done == self.steps
            saver.look(here._replace(stopped=stopped), end=end, snapshot=shown)
        seconds = time.perf_counter() - began
        return Result(state, log_density, keeper.history(), seconds, stopped, tuple(replaced))

    def _resumed(self, begun: Begun) -> Begun | None:
        """Where the run was when it began, if it has taken steps before."""
        return begun if int(begun.state.step) > self.first else None

    def _seen(self, begun: Begun, saver: Saver | NoSaver) -> bool:
        """Show observers the state at which one of them had raised; whether they end the run there."""
        if begun.observed or not self.watching:
            return False
        shown = functools.partial(self._shown, begun.state, begun.log_density, 0.0)
        with self._rescuing(saver, begun, observed=False):
            stopped = _observe(self.watching, shown)
        stopped = any(self.team.each(functools.partial(bool, stopped)))
        saver.seen(begun._replace(stopped=stopped), shown)
        return stopped

    @contextlib.contextmanager
    def _rescuing(
        self, saver: Saver | NoSaver, here: Begun | None, *, observed: bool = True
    ) -> Iterator[None]:
        """What data or observers raise must not cost the steps before it; `observed`, whether observers have seen the last one."""
        try:
            yield
        except (Exception, SystemExit) as error:
            # A save takes all processes, and only a refusal of data is known to all.
            alike = not self.team.several or (observed and isinstance(error, DataError))
            if here is not None and alike:
                if isinstance(error, DataError) and error.state is None:
                    error.state = copy(here.state)
                    error.add_note(f"The state of step {int(here.state.step)} is in its .state.")
                saver.rescue(error, here._replace(observed=observed))
            raise

    def _room(self, step: int, pace: "_Pace", keeper: "Keeper", saver: Saver | NoSaver) -> int:
        fed = self.feed.room(step) if self.feed else 1 << 30
        return min(pace.next(), keeper.room(step), saver.room(step), fed)

    def _together(self, state: State, observed: int, saved: int) -> int:
        """Steps in an inner loop. On a GPU the host looks after each turn of a loop whether another follows, unless the number
        of turns is part of the program."""
        ends_anywhere = self.feed is not None or self.on_nonfinite == "replace"
        if ends_anywhere or not _waits(sum(leaf.size for leaf in jax.tree.leaves(state.particles))):
            return 1
        absolute = [saved, self.thin or 0]  # due by number, wherever the run began
        start = self.first if any(absolute) else 0
        return together(self.steps, int(state.step) - self.first, observed, *absolute, start)

    def _advance(
        self, state: State, step: int, size: int, clock: Clock, replaced: list[Replaced]
    ) -> Taken:
        data = self.data
        if self.feed:
            data = self.feed.at(step)
        fixed = Fixed(self.flow, data, self.key, self.data_key, self.layout, self.program)
        if self.repeatable and self.program == programs.FAST:
            fixed = repeatable(fixed, state)
            self.program = fixed.program
            if self.program == programs.ORDERED and self.team.first:
                say(
                    "this GPU sums in one order, so that the run repeats bit for bit; without that, px.Checkpoints(..., "
                    "repeatable=False), it is faster"
                )
        if self.on_nonfinite == "replace":
            return advance_mending(fixed, state, size, clock, replaced)
        return advance(fixed, state, size, clock)

    def _shown(self, state: State, log_density: Array, seconds: float) -> Snapshot:
        return Snapshot(copy(state), log_density, self.last, seconds)


def _waits(size: int) -> bool:
    """Whether steps of so many numbers are short enough that a loop's waiting for the host can be felt."""
    return jax.default_backend() == "gpu" and size <= SMALL


def _observe(observers: Sequence[Callable[[Snapshot], Any]], shown: Callable[[], Snapshot]) -> bool:
    """Show every observer a snapshot of its own; whether one of them answered True."""
    answers = [watch(shown()) for watch in observers]
    return any(
        np.ndim(answer) == 0 and np.asarray(answer).dtype == bool and bool(answer)
        for answer in answers
    )


class _Pace:
    """How many steps to take before Python looks again."""

    def __init__(self, steps: int, every: int | None, done: int, together: int):
        self.steps, self.every, self.together = steps, every, together
        self.done, self.chunk, self.mark = done, together, time.perf_counter()

    def next(self) -> int:
        self.mark = time.perf_counter()
        left = self.steps - self.done
        return min(self.chunk, left, self.every - self.done % self.every if self.every else left)

    def took(self, size: int) -> None:
        self.done += size
        spent = max(time.perf_counter() - self.mark, 1e-9)
        wanted = int(min(4 * max(size, self.chunk), size * CHUNK_SECONDS / spent))
        self.chunk = max(1, wanted // self.together) * self.together

    def due(self) -> bool:
        return not self.every or self.done % self.every == 0 or self.done == self.steps


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
    return copy(state)
