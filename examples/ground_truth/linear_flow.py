"""A flow whose policy gradient is known exactly, to measure what each correction does to its estimate.

The data are Gaussian, so the flow's velocity is linear and its SDE steps, `x' = a x + b theta + s noise`, are
those of `flowcorr.sde`. The policy's two parameters `theta` move the data mean along two directions of latent
space that the reward sees. The rollout policy differs by a shift of every step's mean, of root mean square `r`
stds a latent element: `delta = -r^2/2 + (r / sqrt(D)) z` with standard normal `z`. The shift is the same for all
states, or grows with the state, as one that quantized weights make.

Only three directions of the `D` matter, those of both parameters and the rest of the shift, so that a sample
costs three normals a step whatever `D` is; all other directions are the same under both policies and cancel.

**Truth** is the gradient of the target policy's expected reward, from window starts that both policies share. An
estimate averages over terms of mean-pooled log-probs; times `T D` it is in the truth's unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flowcorr.algorithm.apply import correct
from flowcorr.algorithm.centering import centred
from flowcorr.correction import PRESETS, RolloutCorrectionConfig
from flowcorr.correction.bounds import SCALES, scale_factor
from flowcorr.errors import ConfigError, unknown_choice
from flowcorr.losses import LOSSES, flow_grpo, reinforce
from flowcorr.records import Terms
from flowcorr.sde import transition

SCHEDULE_STEPS = 10
NOISE_LEVEL = 0.7
DEFAULT_CLIP = 1e-3  # as `actor.clip_ratio`
CENTRED = {
    "disabled": "centred",
    "decoupled_token_is": "centred_token_is",
    "bypass_ppo_clip": "centred_bypass",
}
"""Names of presets with score centering."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearFlow:
    """One setting of the flow and of its mismatch.

    Attributes:
        num_elements: `D`, latent elements of a sample.
        num_steps: `T`, SDE steps of the window, the first of a schedule of 10.
        r: root mean square shift of the rollout's step means, in stds a latent element.
        alignment: share of the shift's length that lies in the plane the reward sees, as much along the truth
            as across: `random_alignment(D)` is a random direction's, as of rounding; 1 is a rollout policy that
            is all ahead of the target, -1 one that is behind, as a stale one.
        by_state: whether the shift is multiplied by the first coordinate of the state before the step, in its stds
            under the target policy: by a number of mean 0 and mean square 1.
        curvature: `kappa` of the reward `y1 - kappa (y1^2 + y2^2) / 2`, `y` being the last latent's coordinates
            in units of their std. With 0, the gradient is the same for every shift.

    Raises:
        ConfigError: a number is out of range.
    """

    num_elements: int
    num_steps: int = 2
    r: float = 0.0
    alignment: float = 0.0
    by_state: bool = False
    curvature: float = 1.0

    def __post_init__(self) -> None:
        if self.num_elements < 3:
            raise ConfigError(f"num_elements={self.num_elements}; the flow needs 3 latent elements or more")
        if not 1 <= self.num_steps <= SCHEDULE_STEPS:
            raise ConfigError(f"num_steps={self.num_steps}; the schedule has 1 to {SCHEDULE_STEPS} steps")
        if not (self.r >= 0 and abs(self.alignment) <= 1):
            raise ConfigError(
                f"r={self.r}, alignment={self.alignment}; use r >= 0, and an alignment from -1 to 1"
            )

    @property
    def shift(self) -> Tensor:
        """`[3]`, rollout mean less target mean of every step, in stds: along both parameters, and the rest.

        With `by_state`, that of a state whose first coordinate is one std.
        """
        seen = self.alignment / math.sqrt(2)
        direction = torch.tensor([seen, seen, math.sqrt(1 - self.alignment**2)], dtype=torch.float64)
        return self.r * math.sqrt(self.num_elements) * direction

    @property
    def truth(self) -> Tensor:
        """`[2]`, the exact gradient of the target policy's expected reward, at `theta = 0`."""
        steps = steps_of(self.num_steps)
        return torch.stack(((steps.reach * steps.lever).sum(), steps.reach.new_zeros(())))

    def expected_reward(self, offset: Tensor) -> Tensor:
        """Expected reward where `y` has the mean `offset` `[..., 2]` and unit variances."""
        return offset[..., 0] - self.curvature * (offset.square().sum(-1) / 2 + 1)


def random_alignment(num_elements: int) -> float:
    """`sqrt(2 / D)`, the root mean square share of a random direction that lies in a plane."""
    return math.sqrt(2 / num_elements)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """`x' = gain x + lever theta + std noise` for each of the window's steps, `[T]` float64.

    Attributes:
        gain, lever, std: of the step.
        reach: what a unit at this step's end adds to `y`, the last latent in units of its std.
        start: what a unit at the window's start adds to `y`.
    """

    gain: Tensor
    lever: Tensor
    std: Tensor
    reach: Tensor
    start: Tensor


def velocity(latents: Tensor, data_mean: Tensor, sigma: Tensor) -> Tensor:
    """Exact velocity `E[x1 - x0 | x]` of the flow from noise to data with mean `data_mean` and unit variance."""
    offset = latents - (1 - sigma) * data_mean
    return (2 * sigma - 1) / ((1 - sigma).square() + sigma.square()) * offset - data_mean


@lru_cache(maxsize=SCHEDULE_STEPS)
def steps_of(num_steps: int) -> Steps:
    """The first `num_steps` steps of the schedule, as `flowcorr.sde.transition` takes them."""
    sigmas = torch.linspace(1, 0, SCHEDULE_STEPS + 1, dtype=torch.float64)
    sigma, sigma_next = sigmas[:num_steps], sigmas[1 : num_steps + 1]
    zero, one = torch.zeros(num_steps, 1, dtype=torch.float64), torch.ones(num_steps, 1, dtype=torch.float64)

    def mean(latents: Tensor, theta: Tensor) -> Tensor:
        v = velocity(latents, theta, sigma[:, None])
        return transition("sde", latents, v, sigma, sigma_next, NOISE_LEVEL).mean[:, 0]

    gain, lever = mean(one, zero), mean(zero, one)
    std = transition("sde", zero, zero, sigma, sigma_next, NOISE_LEVEL).std
    after = torch.cat((gain.flip(0).cumprod(0).flip(0), one[0]))  # from each step's start to the window's end
    variance = after[0].square() + (after[1:] * std).square().sum()
    return Steps(
        gain=gain, lever=lever, std=std, reach=after[1:] / variance.sqrt(), start=after[0] / variance.sqrt()
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Noise:
    """What `M` samples are made of: window starts `[M, 2]` and step noises `[M, T, 3]`, standard normal."""

    start: Tensor
    steps: Tensor


def draw(num_samples: int, num_steps: int, seed: int = 0) -> Noise:
    """Noise for `num_samples` samples, the same for every flow of so many steps."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(num_samples, 2 + 3 * num_steps, dtype=torch.float64, generator=generator)
    return Noise(start=normal[:, :2], steps=normal[:, 2:].reshape(num_samples, num_steps, 3))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectories:
    """`M` samples of the rollout policy.

    Attributes:
        shift: `[M, T, 3]`, rollout mean less target mean, in stds.
        target_log_prob: `[M, T]`, nats per latent element, without the part that both policies share.
        rollout_log_prob: likewise under the rollout policy.
        advantage: `[M]`, reward less its exact mean under the rollout policy; no division by a std.
        score: `[M, T, 2]`, gradient of the target's **summed** log-prob by `theta`.
        twin: `[M, 2]`, the gradient estimate of each sample had the target policy sampled it with the same
            noise: unbiased, and close where the shift is small, so that differences from it are exact.
    """

    shift: Tensor
    target_log_prob: Tensor
    rollout_log_prob: Tensor
    advantage: Tensor
    score: Tensor
    twin: Tensor


def simulate(flow: LinearFlow, noise: Noise) -> Trajectories:
    """Let the rollout policy sample, and score it under both policies."""
    steps = steps_of(flow.num_steps)
    shift = _shifts(flow, noise)
    moved = noise.steps + shift
    rewards = _reward(flow, noise.start, moved)
    twin_advantage = _reward(flow, noise.start, noise.steps) - flow.expected_reward(torch.zeros(2))
    unit = (steps.lever / steps.std)[:, None]
    return Trajectories(
        shift=shift,
        target_log_prob=moved.square().sum(-1) / (-2 * flow.num_elements),
        rollout_log_prob=noise.steps.square().sum(-1) / (-2 * flow.num_elements),
        advantage=rewards - _expected_reward(flow),
        score=unit * moved[..., :2],
        twin=twin_advantage[:, None] * (unit * noise.steps[..., :2]).sum(1),
    )


def _shifts(flow: LinearFlow, noise: Noise) -> Tensor:
    """`[M, T, 3]`, the shift of each step of the rollout policy, which depends on its own earlier steps."""
    if not flow.by_state:
        return flow.shift.expand(*noise.steps.shape)
    steps, first, shifts = steps_of(flow.num_steps), noise.start[:, 0], []
    for t, spread in enumerate(_spreads(flow.num_steps)):
        shifts.append(flow.shift * (first / spread)[:, None])
        first = steps.gain[t] * first + steps.std[t] * (noise.steps[:, t, 0] + shifts[-1][:, 0])
    return torch.stack(shifts, 1)


def _spreads(num_steps: int) -> Tensor:
    """`[T]`, stds of a coordinate before each step under the target policy."""
    steps, variance, spreads = steps_of(num_steps), torch.ones((), dtype=torch.float64), []
    for t in range(num_steps):
        spreads.append(variance.sqrt())
        variance = steps.gain[t].square() * variance + steps.std[t].square()
    return torch.stack(spreads)


def _reward(flow: LinearFlow, start: Tensor, moved: Tensor) -> Tensor:
    steps = steps_of(flow.num_steps)
    y = steps.start * start + torch.einsum("t,mtj->mj", steps.reach * steps.std, moved[..., :2])
    return y[:, 0] - flow.curvature * y.square().sum(-1) / 2


def _expected_reward(flow: LinearFlow) -> Tensor:
    """The exact mean reward of the rollout policy."""
    steps = steps_of(flow.num_steps)
    if not flow.by_state:
        return flow.expected_reward((steps.reach * steps.std).sum() * flow.shift[:2])
    return -flow.curvature * _loadings(flow).y.square().sum() / 2  # y is normal, of mean 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loadings:
    """A shift in proportion to the state: what the noise of start and steps adds under the rollout policy.

    The noise is `[2 + 2 T]`: both coordinates of the start, and of each step.

    Attributes:
        y: `[2, 2 + 2 T]`, to `y`.
        factor: `[T, 2 + 2 T]`, to the number that the shift of each step is multiplied by.
    """

    y: Tensor
    factor: Tensor


def _loadings(flow: LinearFlow) -> Loadings:
    steps, count = steps_of(flow.num_steps), 2 + 2 * flow.num_steps
    noise = torch.eye(count, dtype=torch.float64)
    state, factors = noise[:2], []
    for t, spread in enumerate(_spreads(flow.num_steps)):
        factors.append(state[0] / spread)
        own = noise[2 + 2 * t : 4 + 2 * t]
        state = steps.gain[t] * state + steps.std[t] * (own + flow.shift[:2, None] * factors[-1])
    return Loadings(y=steps.reach[-1] * state, factor=torch.stack(factors))


def expected_gradient_by_state(flow: LinearFlow, *, centred: bool) -> Tensor:
    """`[2]`, exact expectation of the estimate without weights, for a shift in proportion to the state.

    `y` is linear in the noise and of mean 0, so that of the advantage `y1 - kappa |y|^2 / 2` less its mean only the
    linear part has a covariance with what is linear. A step's score is its noise plus its shift. Centering leaves the
    noise: the gradient at the rollout policy, whose later steps carry a step's end further or less far. Without it the
    shift's own covariance with the advantage, the drift, is left in.

    Args:
        flow: with `by_state`.
        centred: whether the score is centred.
    """
    steps, loadings = steps_of(flow.num_steps), _loadings(flow)
    own = loadings.y[0, 2:].view(flow.num_steps, 2)  # covariances of y1 with the noise of each step
    drift = (loadings.factor @ loadings.y[0])[:, None] * flow.shift[:2]
    covariance = own if centred else own + drift
    return ((steps.lever / steps.std)[:, None] * covariance).sum(0)


def expected_gradient(flow: LinearFlow, level: str | None = None, scale: str | float = "sum") -> Tensor:
    """`[2]`, exact expectation of the estimate with uncapped weights `exp(scale delta)` of a level.

    Such weights tilt the Gaussian noise: they take back the share `tau = scale / D` of the shift of the steps
    that they look at, and multiply what remains by their mean, `exp(-tau (1 - tau) D r^2 / 2)` for each. Hence `sum`
    takes back all, `sqrt` one part in `sqrt(D)`, `mean` one in `D`; `token` does so only for the step whose term it
    weighs, and the states before it and the steps after it stay the rollout policy's.

    Args:
        level: `token`, `sequence`, `geometric`, or None for no weights.
        scale: as `log_ratio_scale`.

    Raises:
        ConfigError: the level or the scale is unknown.
    """
    tilts = _tilts(flow, level, scale)
    steps, shift = steps_of(flow.num_steps), flow.shift
    squared = shift.square().sum()
    mean_weight = torch.exp(-(tilts * (1 - tilts)).sum(1) * squared / 2)  # [T], of the term's weight
    remaining = (1 - tilts)[..., None] * shift[:2]  # [term, step, 2]
    travel = steps.reach * steps.std
    offset = torch.einsum("u,tuj->tj", travel, remaining)  # of y, as the term sees it
    slope = torch.stack((1 - flow.curvature * offset[:, 0], -flow.curvature * offset[:, 1]), -1)
    surplus = flow.expected_reward(offset) - flow.expected_reward(travel.sum() * shift[:2])
    lean = torch.diagonal(remaining).T * (steps.lever / steps.std * surplus)[:, None]
    return (mean_weight[:, None] * ((steps.reach * steps.lever)[:, None] * slope + lean)).sum(0)


def _tilts(flow: LinearFlow, level: str | None, scale: str | float) -> Tensor:
    """`[T, T]`, the share of the shift at a step (column) that the weight of a term (row) takes back."""
    tau = scale_factor(scale, flow.num_elements) / flow.num_elements
    ones = torch.ones(flow.num_steps, flow.num_steps, dtype=torch.float64)
    match level:
        case None:
            return 0.0 * ones
        case "token":
            return tau * torch.eye(flow.num_steps, dtype=torch.float64)
        case "sequence":
            return tau * ones
        case "geometric":
            return tau / flow.num_steps * ones
    raise ConfigError(unknown_choice("level", level, ("token", "sequence", "geometric")))


def chi_squared(flow: LinearFlow, scale: str | float = "sum") -> float:
    """`E[w^2] / E[w]^2 - 1` of uncapped sequence weights, `exp(tau^2 T D r^2) - 1`, `tau = scale / D`.

    For `sum` it is the chi-squared divergence of the window's target from its rollout policy, `exp(T D r^2) - 1`:
    the steps' log-ratios are independent normals of variance `D r^2`. Their effective sample size is
    `1 / (1 + chi^2)` of the batch.
    """
    tau = scale_factor(scale, flow.num_elements) / flow.num_elements
    return math.expm1(min(tau**2 * flow.num_steps * flow.num_elements * flow.r**2, 700.0))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimates:
    """What a correction makes of `M` samples.

    Attributes:
        gradient: `[M, 2]`, each sample's part of the loss's gradient ascent, times `D`, a sum over its steps.
        counted: `[M]`, its terms in the denominator of the loss.
        metrics: `rollout_corr/*` over all samples.
        num_steps: `T`.
    """

    gradient: Tensor
    counted: Tensor
    metrics: dict[str, float]
    num_steps: int

    def batches(self, size: int) -> Tensor:
        """`[M // size, 2]`, the gradient estimates of batches of `size` samples, in the truth's unit."""
        whole = len(self.gradient) // size * size
        sums = self.gradient[:whole].reshape(-1, size, 2).sum(1)
        counts = self.counted[:whole].reshape(-1, size).sum(1)
        return self.num_steps * sums / counts.clamp(min=1)[:, None]


def estimate(
    flow: LinearFlow,
    trajectories: Trajectories,
    config: RolloutCorrectionConfig,
    *,
    clip_ratio: float = DEFAULT_CLIP,
) -> Estimates:
    """Gradient of the corrected loss at the first update, where the current policy is the old one.

    Correction and loss are the trainer's own, differentiated with autograd by a `theta` of each sample, in which
    log-probs are linear to first order and exact KLs are squares.
    """
    target, rollout = trajectories.target_log_prob, trajectories.rollout_log_prob
    theta = torch.zeros(len(target), 2, dtype=torch.float64, requires_grad=True)
    log_prob = target + (trajectories.score * theta[:, None]).sum(-1) / flow.num_elements
    bypass = config.mode == "bypass"
    rollout_kl, old_kl = (
        _step_kl(flow, theta, shift) for shift in (trajectories.shift, torch.zeros_like(trajectories.shift))
    )
    terms = Terms(
        log_prob=log_prob,
        old_log_prob=rollout if bypass else target,
        rollout_log_prob=rollout,
        advantage=trajectories.advantage[:, None].expand_as(target),
        std=torch.full_like(target, math.nan),
        step=torch.full_like(target, math.nan),
        step_index=torch.arange(flow.num_steps).expand_as(target),
        old_kl=rollout_kl if bypass else old_kl,
        rollout_kl=rollout_kl,
        old_rollout_kl=torch.zeros_like(target) if bypass else rollout_kl.detach(),
        num_elements=flow.num_elements,
    )
    if bypass and config.bypass_scope == "step":
        terms = terms.per_term()  # every term is a trajectory of its own, as the trainer hands it to the loss
    terms, metrics = correct(terms, config, num_steps=flow.num_steps)
    assert terms.keep is not None
    weighs = bypass and config.loss_type == "reinforce"
    if config.score_centering:
        terms = centred(terms, config, LOSSES["reinforce" if weighs else "flow_grpo"])
    options: dict[str, Any] = {"adv_clip_max": math.inf, "weight": terms.weight, "keep": terms.keep}
    if weighs:
        output = reinforce(terms.log_prob, terms.advantage, **options)
    else:
        output = flow_grpo(
            terms.log_prob, terms.old_log_prob, terms.advantage, clip_ratio=clip_ratio, **options
        )
    (gradient,) = torch.autograd.grad(output.loss_sum, theta)
    keep = terms.keep.view(target.shape)
    counted = keep if config.rollout_rs_denominator == "kept" else torch.ones_like(keep)
    return Estimates(
        gradient=-flow.num_elements * gradient,
        counted=counted.sum(1),
        metrics=metrics.compute(),
        num_steps=flow.num_steps,
    )


def _step_kl(flow: LinearFlow, theta: Tensor, shift: Tensor) -> Tensor:
    """`[M, T]`, exact KL of the steps of `theta` `[M, 2]` from steps `shift` `[M, T, 3]` off, nats an element."""
    steps = steps_of(flow.num_steps)
    moved = (steps.lever / steps.std)[:, None] * theta[:, None] - shift[..., :2]
    return (moved.square().sum(-1) + shift[..., 2].square()) / (2 * flow.num_elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How good the gradient estimates of batches are; all in units of the truth's length or its square.

    Attributes:
        bias_along: signed, along the truth: -1 is a gradient that vanishes, which a larger learning rate or Adam
            may make up for; standard error `bias_along_se`.
        bias_across: signed, perpendicular to the truth: a wrong direction; standard error `bias_across_se`.
        variance: trace of the covariance of a batch's estimate.
        mse: mean squared error, bias and variance; standard error `mse_se`.
        on_policy_variance: variance, and mean squared error, of samples of the target policy itself.
        worth: how many samples of the target policy itself do as well as one of these, each with the best fixed
            factor on its gradient, as tuned or normalised step sizes find it; standard error `worth_se`. Where
            there is bias, it depends on the size of the batch. Above 1, the rollout policy's samples happen to
            tell more than the target's own, or the bias lies along the truth.
        kept: share of terms that were not rejected.
        mean_weight: mean importance weight, after the cap; 1 without weights.
        ess: effective sample size of the weights, a share; 1 without weights.
    """

    bias_along: float
    bias_along_se: float
    bias_across: float
    bias_across_se: float
    variance: float
    mse: float
    mse_se: float
    on_policy_variance: float
    worth: float
    worth_se: float
    kept: float
    mean_weight: float
    ess: float

    @property
    def bias(self) -> float:
        """Length of the bias; noise of the size of its standard error makes it larger than it is."""
        return math.hypot(self.bias_along, self.bias_across)

    @property
    def bias_se(self) -> float:
        """Standard error of the longer of both components."""
        return max(self.bias_along_se, self.bias_across_se)


def assess(flow: LinearFlow, trajectories: Trajectories, estimates: Estimates, batch_size: int) -> Quality:
    """Bias, variance and mean squared error of batches of `batch_size` samples, with their standard errors.

    Bias and `worth` compare with the same samples' twins of the target policy, whose expectation is the truth.
    Weights without a cap have such heavy tails where `T D r^2` is above 1 that no standard error can be trusted.
    """
    length = flow.truth.norm()
    truth = flow.truth / length
    batches = estimates.batches(batch_size) / length
    twins = trajectories.twin[: len(batches) * batch_size].reshape(-1, batch_size, 2).mean(1) / length
    bias, bias_se = _mean(_without_common_noise(batches - truth, twins - truth))
    mse, mse_se = _mean((batches - truth).square().sum(1))
    worth, worth_se = _worth(batches, twins)
    return Quality(
        bias_along=float(bias[0]),
        bias_along_se=float(bias_se[0]),
        bias_across=float(bias[1]),
        bias_across_se=float(bias_se[1]),
        variance=float(batches.var(0).sum()),
        mse=float(mse),
        mse_se=float(mse_se),
        on_policy_variance=float(twins.var(0).sum()),
        worth=worth,
        worth_se=worth_se,
        kept=1.0 - estimates.metrics["rollout_corr/rollout_rs_masked_fraction"],
        mean_weight=estimates.metrics.get("rollout_corr/rollout_is_mean", 1.0),
        ess=estimates.metrics.get("rollout_corr/rollout_is_eff_sample_size", 1.0),
    )


def _mean(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the first axis and its standard error."""
    return values.mean(0), values.std(0) / math.sqrt(len(values))


def _without_common_noise(values: Tensor, noise: Tensor) -> Tensor:
    """`values` less what they share with `noise`, whose expectation is 0: a control variate."""
    centred = noise - noise.mean(0)
    share = (centred * values).sum(0) / centred.square().sum(0)
    return values - share * noise


def _worth(batches: Tensor, twins: Tensor) -> tuple[float, float]:
    """Noise-to-signal ratio of `twins` over that of `batches`, and its standard error by the delta method.

    With the best factor `c >= 0`, `min_c E|c g - truth|^2` is `q / (1 + q)` with
    `q = E|g|^2 / E[g along truth]^2 - 1`, which for an unbiased estimate falls as one over the batch size.
    """
    if float(batches[:, 0].mean()) <= 0:
        return 0.0, 0.0
    ratio, influence = _noise_to_signal(batches)
    twin_ratio, twin_influence = _noise_to_signal(twins)
    worth = float(twin_ratio / ratio)
    return worth, worth * float(_mean(twin_influence / twin_ratio - influence / ratio)[1])


def _noise_to_signal(batches: Tensor) -> tuple[Tensor, Tensor]:
    """`E|g|^2 / E[g along truth]^2 - 1`, and what each batch contributes to its error."""
    along, squared = batches[:, 0], batches.square().sum(1)
    signal, power = along.mean(), squared.mean()
    return power / signal**2 - 1, squared / signal**2 - 2 * power / signal**3 * along


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A correction to compare: its name (a preset's), the scale of its log-ratios (`-` where none acts), its config."""

    name: str
    scale: str
    config: RolloutCorrectionConfig


def arms(scales: Sequence[str] = SCALES) -> Iterator[Arm]:
    """Every preset but aliases, at every scale where one acts; centred ones; `exact_seq_is`, uncapped ratios."""
    for preset in PRESETS:
        config = RolloutCorrectionConfig.from_preset(preset)
        if config.rollout_is is None and config.rollout_rs is None:
            yield Arm(name=preset, scale="-", config=config)
            continue
        for scale in scales:
            scaled = RolloutCorrectionConfig.from_preset(preset, log_ratio_scale=scale)
            yield Arm(name=preset, scale=scale, config=scaled)
    for preset, label in CENTRED.items():
        for scale in scales if preset == "decoupled_token_is" else ("-",):
            keys = {} if scale == "-" else {"log_ratio_scale": scale}
            config = RolloutCorrectionConfig.from_preset(preset, score_centering=True, **keys)
            yield Arm(name=label, scale=scale, config=config)
    exact = RolloutCorrectionConfig.from_preset(
        "decoupled_seq_is", rollout_is_threshold=math.inf, log_ratio_scale="sum"
    )
    yield Arm(name="exact_seq_is", scale="sum", config=exact)
