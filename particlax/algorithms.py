"""The samplers of the paper, as sums of terms.

| sampler  | drift | Stein | diffusion, realised as            |
|----------|-------|-------|-----------------------------------|
| sgld     | 1     | 0     | `Langevin` noise                  |
| sghmc    | 1     | 0     | `Langevin` noise, second order    |
| w_sgld   | 1     | 0     | `Transport` (discrete flow, JKO)  |
| w_sgld_b | 1     | 0     | `Blob`                            |
| svgd     | 0     | 1     | none                              |
| pi_sgld  | 1     | > 0   | `Transport`, `Blob` or `Langevin` |
| calibrated | 1   | 0     | `Blob`, matched, `Ensemble` metric |

Every sampler takes `metric=` and says how to step by exactly one of `step_size=` (plain Euler steps: a
number or an optax schedule), `optimizer=` (any optax optimizer; deterministic samplers only) and
`integrator=` (any of `px.integrators`).
"""

from typing import Any

import optax

from particlax.checks import Scheduled
from particlax.diffusions import Blob, Coupling, FixedScale, Force, Langevin, Transport
from particlax.errors import OptionError, expect, known_options
from particlax.flow import Flow
from particlax.integrators import Euler, Integrator, Momentum, Optax
from particlax.kernels import RBF, Kernel, LayerWise
from particlax.metrics import Ensemble, Identity, Metric
from particlax.target import Target
from particlax.terms import Drift, Stein, Term

__all__ = ["calibrated", "pi_sgld", "sghmc", "sgld", "svgd", "w_sgld", "w_sgld_b"]


@known_options
def sgld(
    target: Target,
    *,
    step_size: Scheduled | None = None,
    integrator: Integrator | None = None,
    metric: Metric = Identity(),
) -> Flow:
    """Stochastic gradient Langevin dynamics: x_i += eps s_i + sqrt(2 eps) N(0, I), M chains.

    `integrator=px.integrators.RMS(eps)` makes it pSGLD, `metric=px.metrics.Ensemble()` affine invariant.

    >>> import particlax as px
    >>> flow = px.sgld(px.Target(lambda x: -0.5 * x @ x), step_size=1e-2)
    """
    return Flow(target, (Drift(), Langevin()), _stepping(step_size, None, integrator), metric)


@known_options
def sghmc(
    target: Target,
    *,
    step_size: Scheduled,
    friction: float = 1.0,
    metric: Metric = Identity(),
) -> Flow:
    """SGHMC, second-order Langevin: dx = q dt, dq = (s - friction q) dt + sqrt(2 friction) dW.

    In the terms of Chen et al. (2014), their learning rate is step_size^2 and their alpha friction * step_size.

    >>> import particlax as px
    >>> flow = px.sghmc(px.Target(lambda x: -0.5 * x @ x), step_size=0.1, friction=1.0)
    """
    return Flow(target, (Drift(), Langevin()), Momentum(step_size, friction), metric)


@known_options
def svgd(
    target: Target,
    *,
    kernel: Kernel | LayerWise = RBF(),
    optimizer: optax.GradientTransformation | None = None,
    step_size: Scheduled | None = None,
    integrator: Integrator | None = None,
    metric: Metric = Identity(),
) -> Flow:
    """Stein variational gradient descent (Liu & Wang 2016; paper eq. 6).

    >>> import particlax as px
    >>> flow = px.svgd(px.Target(lambda x: -0.5 * x @ x), optimizer=optax.adagrad(0.1))
    """
    return Flow(
        target, (Stein(kernel=kernel),), _stepping(step_size, optimizer, integrator), metric
    )


@known_options
def w_sgld(
    target: Target,
    *,
    coupling: Coupling = FixedScale(),
    inner: int = 1,
    calibrate: bool | str = False,
    optimizer: optax.GradientTransformation | None = None,
    step_size: Scheduled | None = None,
    integrator: Integrator | None = None,
    metric: Metric = Identity(),
) -> Flow:
    """w-SGLD: SGLD as a discrete gradient flow, the diffusion realised by transport (paper eq. 19-21).

    `coupling` is the paper's `FixedScale(gamma, lam)` or a real `Sinkhorn(lam)`; `inner` steps make one JKO step.
    Plain transport does not balance the drift and leaves far too little variance, often none; `calibrate=True`
    (M > D) mends that, `w_sgld_b` avoids it.

    >>> import particlax as px
    >>> flow = px.w_sgld(px.Target(lambda x: -0.5 * x @ x), optimizer=optax.adam(0.05), calibrate=True)
    """
    transport = Transport(coupling=coupling, inner=inner, calibrate=calibrate)
    return Flow(target, (Drift(), transport), _stepping(step_size, optimizer, integrator), metric)


@known_options
def w_sgld_b(
    target: Target,
    *,
    kernel: Kernel | LayerWise = RBF(),
    calibrate: bool | str = False,
    optimizer: optax.GradientTransformation | None = None,
    step_size: Scheduled | None = None,
    integrator: Integrator | None = None,
    metric: Metric = Identity(),
) -> Flow:
    """w-SGLD-B: SGLD with the diffusion realised by the blob method (paper eq. 22).

    `calibrate=True` gives the exact moments of Gaussians (M > D), `"matched"` those and a shape that holds on
    skewed targets.

    >>> import particlax as px
    >>> flow = px.w_sgld_b(px.Target(lambda x: -0.5 * x @ x), optimizer=optax.adam(0.05))
    """
    blob = Blob(kernel=kernel, calibrate=calibrate)
    return Flow(target, (Drift(), blob), _stepping(step_size, optimizer, integrator), metric)


@known_options
def pi_sgld(
    target: Target,
    *,
    stein: Scheduled = 1.0,
    diffusion: Term = Transport(),
    kernel: Kernel | LayerWise = RBF(),
    optimizer: optax.GradientTransformation | None = None,
    step_size: Scheduled | None = None,
    integrator: Integrator | None = None,
    metric: Metric = Identity(),
) -> Flow:
    """pi-SGLD: SGLD and SVGD at once, drift + stein * phi + diffusion (paper section 5).

    `diffusion` is `Transport()` as in the paper, `Blob()`, or `Langevin()`, which makes it SPOS. The drift
    takes the diffusion's weight, as stationarity demands. `stein=0` is w-SGLD, w-SGLD-B or SGLD. With plain
    transport only phi holds the drift: give `stein` a large weight (the toy study has 1000), or use `Blob()`.

    >>> import particlax as px
    >>> flow = px.pi_sgld(px.Target(lambda x: -0.5 * x @ x), diffusion=px.diffusions.Langevin(), step_size=0.01)
    """
    expect("diffusion", diffusion, Term, "px.diffusions.Blob()")
    off = not callable(stein) and isinstance(stein, (int, float)) and stein == 0
    interaction = () if off else (Stein(stein, kernel),)
    terms = (Drift(diffusion.weight), *interaction, diffusion)
    return Flow(target, terms, _stepping(step_size, optimizer, integrator), metric)


@known_options
def calibrated(
    target: Target,
    *,
    step_size: Scheduled = 0.1,
    diffusion: Term = Blob(calibrate="matched"),
    metric: Metric = Ensemble(limit=2.0),
) -> Flow:
    """For when particles are dear (20 to 200, M > D + 1): a deterministic flow with honest covariance.

    Drift and a calibrated force in the `Ensemble` metric, so that nothing depends on the target's scales; on a
    Gaussian the cloud comes to rest with exactly the target's mean and covariance, if the step is small enough for it
    to rest (with 4 or 5 particles, 0.01). The metric's `limit` tames starts
    that are much wider than the target. A schedule that ends low (0.1, 0.03, 0.01) settles the cloud.

    >>> import particlax as px
    >>> flow = px.calibrated(px.Target(lambda x: -0.5 * x @ x))
    """
    expect("diffusion", diffusion, Force, 'px.diffusions.Blob(calibrate="matched")')
    terms = (Drift(diffusion.weight), diffusion)
    return Flow(target, terms, Euler(step_size), metric)


def _stepping(step_size: Any, optimizer: Any, integrator: Any) -> Integrator:
    choices = {"step_size": step_size, "optimizer": optimizer, "integrator": integrator}
    given = [name for name, value in choices.items() if value is not None]
    if len(given) != 1:
        raise OptionError(
            f"the sampler got {' and '.join(given) or 'no way to step'}; expected exactly one of step_size="
            "(a number or schedule), optimizer=(such as optax.adam(0.05)) and integrator="
        )
    if step_size is not None:
        return Euler(step_size)
    return Optax(optimizer) if optimizer is not None else integrator
