"""Integrators: turn a velocity into the next cloud. They hold the memory; terms hold none.

Noise never passes through an optimiser: what scales the drift scales the noise by its square root, or the
combination is refused.
"""

import abc
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from particlax.blocks import wide
from particlax.checks import TRACED, Part, Scheduled, at, number, positive
from particlax.errors import OptionError
from particlax.terms import Velocity, add, scale

__all__ = ["RMS", "Euler", "Integrator", "Momentum", "Optax"]


def wider(tree: PyTree) -> PyTree:
    """A tree for sums of many small steps: 16 bits as 32."""
    return jax.tree.map(wide, tree)


def _zeros(particles: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.zeros_like(wide(leaf)), particles)


class Integrator(Part):
    """One stepping rule for every sum of terms."""

    takes_noise: ClassVar[bool] = True
    elementwise: ClassVar[bool] = False
    """Whether it scales coordinates one by one, which noise bears only in a diagonal metric."""

    @abc.abstractmethod
    def init(self, particles: PyTree) -> PyTree:
        """The integrator's memory."""

    @abc.abstractmethod
    def step(
        self, particles: PyTree, velocity: Velocity, memory: PyTree, step: Int[Array, ""]
    ) -> tuple[PyTree, PyTree]:
        """The next particles and memory."""


class Euler(Integrator):
    """x += eps * drift + sqrt(eps) * noise (Euler-Maruyama)."""

    step_size: Scheduled = eqx.field(converter=number)

    def __check_init__(self) -> None:
        positive("step_size", self.step_size)

    def init(self, particles: PyTree) -> PyTree:
        return ()

    def step(
        self, particles: PyTree, velocity: Velocity, memory: PyTree, step: Int[Array, ""]
    ) -> tuple[PyTree, PyTree]:
        eps, drift, noise = at(self.step_size, step), wider(velocity.drift), wider(velocity.noise)
        noise = None if noise is None else scale(jnp.sqrt(eps), noise)
        return add(wider(particles), scale(eps, drift), noise), memory


class Optax(Integrator):
    """Any optax optimizer, ascending along the drift; refuses noisy terms.

    >>> Optax(optax.adam(0.1)).takes_noise
    False
    """

    optimizer: optax.GradientTransformation
    takes_noise: ClassVar[bool] = False

    def __check_init__(self) -> None:
        if not hasattr(self.optimizer, "update") or not hasattr(self.optimizer, "init"):
            raise OptionError(
                f"optimizer is {self.optimizer!r}; expected an optax optimizer such as optax.adam(0.05)"
            )

    def init(self, particles: PyTree) -> PyTree:
        return self.optimizer.init(particles)

    def step(
        self, particles: PyTree, velocity: Velocity, memory: PyTree, step: Int[Array, ""]
    ) -> tuple[PyTree, PyTree]:
        descent = jax.tree.map(jnp.negative, velocity.drift)
        try:
            updates, memory = self.optimizer.update(descent, memory, particles)
        except AttributeError as error:
            if "'fast'" not in str(error):
                raise
            raise OptionError(
                f"the optimizer is optax.lookahead, which wants parameters of a form of its own ({error}); use another, such as "
                "optax.adam(0.05)"
            ) from error
        except jax.errors.ConcretizationTypeError as error:
            raise OptionError(TRACED.format(what="the optimizer, or a schedule in it,")) from error
        except TypeError as error:
            if "required" not in str(error):
                raise
            raise OptionError(
                f"the optimizer asks for more than gradients ({error}); a flow has no loss value to line-search "
                "on. Use one that needs gradients alone, such as optax.adam(0.05)"
            ) from error
        return optax.apply_updates(particles, updates), memory  # pyright: ignore


class RMS(Integrator):
    """x += eps G drift + sqrt(eps G) noise with G = 1 / (epsilon + sqrt V), V an average of drift^2.

    RMSprop's preconditioner on the drift and its square root on the noise: with `Langevin` this is pSGLD
    (Li et al. 2016), with V from the whole drift where they take the mean gradient over the batch: their step
    is N times this one. The correction for the change of G with x is left out, as is usual.
    """

    step_size: Scheduled = eqx.field(converter=number)
    decay: float = eqx.field(converter=number, default=0.99)
    epsilon: float = eqx.field(converter=number, default=1e-5)
    elementwise: ClassVar[bool] = True

    def __check_init__(self) -> None:
        positive("step_size", self.step_size)
        positive("epsilon", self.epsilon, schedule=False)
        if not 0 <= self.decay < 1:
            raise OptionError(f"decay is {self.decay}; expected a number in [0, 1)")

    def init(self, particles: PyTree) -> PyTree:
        return {"mean_square": _zeros(particles)}

    def step(
        self, particles: PyTree, velocity: Velocity, memory: PyTree, step: Int[Array, ""]
    ) -> tuple[PyTree, PyTree]:
        eps = at(self.step_size, step)
        drift, noise = wider(velocity.drift), wider(velocity.noise)
        average = lambda v, g: self.decay * v + (1 - self.decay) * g * g
        square = jax.tree.map(average, memory["mean_square"], drift)
        gain = jax.tree.map(lambda v: eps.astype(v.dtype) / (self.epsilon + jnp.sqrt(v)), square)
        drift = jax.tree.map(jnp.multiply, gain, drift)
        if noise is not None:
            noise = jax.tree.map(lambda g, n: jnp.sqrt(g) * n, gain, noise)
        return add(wider(particles), drift, noise), {"mean_square": square}


class Momentum(Integrator):
    """Second-order Langevin: dx = q dt, dq = (drift - friction q) dt + sqrt(friction) noise.

    Of `Drift` and `Langevin` it makes SGHMC; of deterministic terms the accelerated flow that comes to
    rest where the first-order one does (`Blob`: particle SGHMC; `Stein`: SVGD with momentum). The paper
    prints -B q - grad U for the force; with U the log density it is -B q + grad U. One step is kick, half a
    move, friction and noise, half a move (BAOA): one gradient, and exact positions on a Gaussian. With
    noise in a metric that moves with the cloud the law holds up to O(D / M).
    """

    step_size: Scheduled = eqx.field(converter=number)
    friction: float = eqx.field(converter=number, default=1.0)

    def __check_init__(self) -> None:
        positive("step_size", self.step_size)
        positive("friction", self.friction, zero=False, schedule=False)

    def init(self, particles: PyTree) -> PyTree:
        return {"momentum": _zeros(particles)}

    def step(
        self, particles: PyTree, velocity: Velocity, memory: PyTree, step: Int[Array, ""]
    ) -> tuple[PyTree, PyTree]:
        eps, drift, noise = at(self.step_size, step), wider(velocity.drift), wider(velocity.noise)
        decay = jnp.exp(-self.friction * eps)
        kicked = add(memory["momentum"], scale(eps, drift))
        halfway = add(wider(particles), scale(eps / 2, kicked))
        fresh: Any = None
        if noise is not None:
            fresh = scale(jnp.sqrt(-jnp.expm1(-2 * self.friction * eps) / 2), noise)
        slowed = add(scale(decay, kicked), fresh)
        return add(halfway, scale(eps / 2, slowed)), {"momentum": slowed}
