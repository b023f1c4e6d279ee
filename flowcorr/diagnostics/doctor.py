"""Do the rollout engine and the actor agree, and if not, which part is to blame?

The engine samples the same few prompts again and again while the actor's weights are moved by known amounts.
From what it returns (latents, sigmas, timesteps, log-probs, step means, conditioning) and what the actor makes
of the same trajectories, each check tests one explanation of a gap. Checks run from the plainest to the most
indirect, and an explanation that was found settles the checks that it would upset.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowcorr import sde
from flowcorr.actor import DiffusionActor
from flowcorr.diagnostics.report import DoctorReport, Finding, Status, StepNoise
from flowcorr.models import Conditioning, Guidance, Schedule
from flowcorr.records import PolicyStep, Rollout
from flowcorr.rollout import RolloutEngine, Weights
from flowcorr.sde.transition import mean_over_elements

QUANTILES = (0.5, 0.9, 0.99)
_PERTURBATION = (
    0.05  # of the adapter, relative to its layers: large against rounding, small against the weights
)

# Thresholds. KLs are exact and a latent element; `r` is their root, in units of the step's std.
KL_WARN, KL_FAIL = 1e-4, 1e-2
EMBEDDING_TOLERANCE = 2e-2  # relative; bfloat16 encoders differ by less
LOG_PROB_TOLERANCE = 1e-4
SIGMA_TOLERANCE = 1e-5
BATCH_WARN = 1e-2
Z_LIMIT = 6.0
ADAPTER_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """One rollout and the actor's scores of it under the weights that the engine was told to use."""

    rollout: Rollout
    scores: PolicyStep

    @property
    def squared_distance(self) -> Tensor:
        """`r^2` `[B, T]` between the engine's and the actor's step means."""
        return _r_squared(self.rollout.means, self.scores.mean, self.scores.std)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trials:
    """Everything that the checks look at.

    Attributes:
        base: under the weights as they are.
        again: the same once more.
        first, second: under two perturbed weights, with the same noise as `base`.
        alone: the first prompt of `base` in a batch of its own.
        scored: `scored[name]` are the scores of `second.rollout` under the weights `base` and `first`.
        conditioning: the actor's own, a row a sample.
        schedule: the actor's own.
    """

    base: Trial
    again: Rollout
    first: Trial
    second: Trial
    alone: Rollout
    scored: dict[str, PolicyStep]
    conditioning: Conditioning
    schedule: Schedule


def examine(actor: DiffusionActor, engine: RolloutEngine, conditioning: Conditioning) -> DoctorReport:
    """Compare both stacks on the prompts of `conditioning` (one row each, at least two).

    The actor's and the engine's weights are as before when this returns.

    Args:
        actor: trains.
        engine: samples; built from the same configuration.
        conditioning: the actor's embeddings of a few prompts.
    """
    trials = _run_trials(actor, engine, conditioning)
    findings: list[Finding] = []
    for check in (
        _schedule,
        _window,
        _timesteps,
        _latent_dtype,
        _noise_level,
        _log_probs,
        _determinism,
        _batch_shape,
        _embeddings,
        _guidance,
        _adapter,
        _weights,
        _bookkeeping,
    ):
        findings.append(
            check(actor, trials, {finding.check for finding in findings if finding.status == "FAIL"})
        )
    findings.append(_clip(actor, trials, {finding.check for finding in findings if finding.status == "FAIL"}))
    return DoctorReport(
        findings=findings,
        noise=_noise_floor(actor, trials),
        num_elements=trials.base.rollout.num_elements,
        clip_ratio=actor.config.actor.clip_ratio,
    )


# Trials --------------------------------------------------------------------------------------------------


def _run_trials(actor: DiffusionActor, engine: RolloutEngine, conditioning: Conditioning) -> Trials:
    count = len(next(iter(conditioning.values())))
    original, history = actor.snapshot(), list(engine.history)
    perturbed = [_perturbed(actor, original, seed) for seed in (1, 2)]

    def draw(weights: Weights, rows: int = count) -> Rollout:
        actor.load_weights(weights.tensors)
        for _ in range(actor.config.rollout.staleness + 1):
            engine.sync(weights)
        chosen = {name: tensor[:rows] for name, tensor in conditioning.items()}
        return engine.sample(chosen, range(rows), training_step=0, with_means=True).to(actor.device)

    def trial(weights: Weights) -> Trial:
        rollout = draw(weights)
        return Trial(rollout=rollout, scores=_score(actor, rollout))

    try:
        base = trial(original)
        again, alone = draw(original), draw(original, 1)
        first, second = trial(perturbed[0]), trial(perturbed[1])
        scored = {}
        for name, weights in (("base", original), ("first", perturbed[0])):
            actor.load_weights(weights.tensors)
            scored[name] = _score(actor, second.rollout)
    finally:
        actor.load_weights(original.tensors)
        if history:
            engine.restore(history)
        else:
            engine.sync(original)
    members = base.rollout.num_samples // count
    return Trials(
        base=base,
        again=again,
        first=first,
        second=second,
        alone=alone,
        scored=scored,
        conditioning={name: tensor.repeat_interleave(members, 0) for name, tensor in conditioning.items()},
        schedule=actor.family.schedule(
            actor.config.sampling.num_inference_steps, tuple(base.rollout.latents.shape[2:])
        ),
    )


def _perturbed(actor: DiffusionActor, weights: Weights, seed: int) -> Weights:
    """The weights moved at random by a few per cent of their layers' scale."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in weights.tensors.items():
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
        scale = tensor.float().square().mean().sqrt().item()
        if "lora_B" in name or scale == 0.0:
            # An adapter's B starts at 0: give B A the size of a few per cent of a layer's weights.
            scale = 1.0 / math.sqrt(tensor.shape[0])
        moved[name] = tensor + _PERTURBATION * scale * noise
    return Weights(version=weights.version, tensors=moved)


@torch.no_grad()
def _score(actor: DiffusionActor, rollout: Rollout) -> PolicyStep:
    return actor.score(rollout)


@contextlib.contextmanager
def _guided(actor: DiffusionActor, guidance: Guidance) -> Iterator[None]:
    before, actor.guidance = actor.guidance, guidance
    try:
        yield
    finally:
        actor.guidance = before


def _r_squared(means: Tensor | None, others: Tensor, std: Tensor) -> Tensor:
    assert means is not None, "the trials ask for step means"
    return mean_over_elements((means - others).square(), std.dim()) / std.square()


# Checks: (actor, trials, failed checks) -> finding ---------------------------------------------------------


def _schedule(actor: DiffusionActor, trials: Trials, failed: set[str]) -> Finding:
    rollout = trials.base.rollout
    table = torch.tensor(trials.schedule.sigmas, device=rollout.sigmas.device)
    steps = len(trials.schedule.timesteps)
    remedy = (
        "give both stacks the same scheduler config (shift, dynamic shift) and sampling.num_inference_steps"
    )
    if int(rollout.step_indices.max()) >= steps:
        return _fail(
            "schedule", f"the engine took step {int(rollout.step_indices.max())} of {steps}", remedy=remedy
        )
    expected = torch.stack([table[rollout.step_indices], table[rollout.step_indices + 1]])
    gap = float((torch.stack([rollout.sigmas, rollout.sigmas_next]) - expected).abs().max())
    message = f"sigmas differ from the actor's schedule of {steps} steps by up to {gap:.2g}"
    if gap > SIGMA_TOLERANCE:
        return _fail("schedule", message, gap, SIGMA_TOLERANCE, remedy)
    return _pass("schedule", f"sigmas of {steps} steps agree", gap, SIGMA_TOLERANCE)


def _window(actor: DiffusionActor, trials: Trials, failed: set[str]) -> Finding:
    rollout, sampling = trials.base.rollout, actor.config.sampling
    low, high = sampling.sde_window_range
    found = rollout.step_indices
    consecutive = bool((found.diff(dim=1) == 1).all()) and found.shape[1] == sampling.sde_window_size
    if not consecutive or int(found.min()) < low or int(found.max()) >= high:
        return _fail(
            "window",
            f"the engine's SDE windows are {sorted({tuple(row) for row in found.tolist()})}, which do not lie in "
            f"[{low}, {high}) with {sampling.sde_window_size} consecutive steps",
            remedy="pass sampling.sde_window_size and sde_window_range (half-open) to the engine with each request",
        )
    return _pass("window", f"{sampling.sde_window_size} consecutive steps within [{low}, {high})")


def _timesteps(actor: DiffusionActor, trials: Trials, failed: set[str]) -> Finding:
    if "schedule" in failed:
        return _skip("timestep_dtype", "schedule")
    rollout = trials.base.rollout
    table = torch.tensor(trials.schedule.timesteps, device=rollout.timesteps.device)
    expected, fed = table[rollout.step_indices], rollout.timesteps.float()
    gap = float((fed - expected).abs().max())
    if gap == 0.0:
        return _pass("timestep_dtype", "the model is fed the schedule's timesteps", gap)
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        if torch.equal(fed, expected.to(dtype).float()):
            return Finding(
                check="timestep_dtype",
                status="WARN",
                message=f"the engine rounds timesteps to {name} (by up to {gap:.2g}); the actor replays them",
                value=gap,
                remedy="nothing, as long as the trainer feeds Rollout.timesteps; a loop of your own must do so too",
            )
    return _fail(
        "timestep_dtype",
        f"timesteps differ from the schedule's by up to {gap:.3g}, and not by rounding",
        gap,
        remedy="feed the model the timesteps of its own scheduler (sigma times 1000 for most families)",
    )


def _latent_dtype(actor: DiffusionActor, trials: Trials, failed: set[str]) -> Finding:
    latents = trials.base.rollout.latents
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        if torch.equal(latents, latents.to(dtype).float()):
            return _fail(
                "latent_dtype",
                f"every latent of the trajectory is a {name} number: it was rounded on its way",
                remedy="keep and return the window's latents in float32, also the initial noise",
            )
    return _pass("latent_dtype", "the trajectory is float32")


def _noise_level(actor: DiffusionActor, trials: Trials, failed: set[str]) -> Finding:
    if "schedule" in failed:
        return _skip("noise_level", "schedule")
    rollout = trials.base.rollout
    assert rollout.stds is not None, "engines return stds with means"
    gap = float((rollout.stds / trials.base.scores.std - 1).abs().max())
    if gap > LOG_PROB_TOLERANCE:
        sampling = actor.config.sampling
        return _fail(
            "noise_level",
            f"the engine's step stds differ from the actor's by up to {100 * gap:.2g} %",
            gap,
            LOG_PROB_TOLERANCE,
            f"sample with sampling.sde_type={sampling.sde_type} and noise_level={sampling.noise_level} on both sides",
        )
    return _pass("noise_level", "step stds agree", gap, LOG_PROB_TOLERANCE)


def _log_probs(actor: DiffusionActor, trials: Trials, failed: set[str]) -> Finding:
    if "latent_dtype" in failed:
        return _skip("log_probs", "latent_dtype")
    rollout = trials.base.rollout
    assert rollout.means is not None and rollout.stds is not None
    own = sde.Transition(rollout.means, rollout.stds, rollout.sigmas - rollout.sigmas_next)
    expected = sde.log_prob(rollout.latents[:, 1:], own, cps_unscaled=actor.config.sampling.cps_unscaled)
    gap = float((expected - rollout.log_probs).abs().max())
    if not gap <= LOG_PROB_TOLERANCE:
        return _fail(
            "log_probs",
            f"the engine's log-probs differ by up to {gap:.2g} from those of its own means, stds and latents",
            gap,
            LOG_PROB_TOLERANCE,
            "score the returned latents with flowcorr.sde.log_prob: mean-pooled, normalised, float32",
        )
    return _pass(
        "log_probs", "log-probs follow from the engine's own means and latents", gap, LOG_PROB_TOLERANCE
    )


def _determinism(actor: DiffusionActor, trials: Trials, failed: set[str]) -> Finding:
    gap = _largest_gap(trials.base.rollout.latents, trials.again.latents)
    if gap > BATCH_WARN:
        return _fail(
            "determinism",
            f"the same seeds gave latents that differ by up to {gap:.2g}",
            gap,
            BATCH_WARN,
            "seed the noise of each sample by (seed, step, group, member), not by a global generator",
        )
    if gap:
        return _warn("determinism", f"the same seeds gave latents that differ by up to {gap:.2g}", gap, 0.0)
    return _pass("determinism", "the same seeds give the same bits", gap)


def _batch_shape(actor: DiffusionActor, trials: Trials, failed: set[str]) -> Finding:
    if "determinism" in failed:
        return _skip("batch_shape", "determinism")
    gap = _largest_gap(trials.base.rollout.latents[: trials.alone.num_samples], trials.alone.latents)
    if gap > BATCH_WARN:
        return _warn(
            "batch_shape",
            f"a prompt sampled alone differs by up to {gap:.2g} from the same prompt in a batch",
            gap,
            BATCH_WARN,
            "low-precision kernels depend on the batch's shape; nothing to do if exact KLs are small",
        )
    return _pass("batch_shape", f"a prompt sampled alone differs by {gap:.2g}", gap, BATCH_WARN)


def _embeddings(actor: DiffusionActor, trials: Trials, failed: set[str]) -> Finding:
    worst, name = 0.0, ""
    for key, expected in trials.conditioning.items():
        found = trials.base.rollout.conditioning.get(key)
        if found is None or found.shape != expected.shape:
            shape = None if found is None else list(found.shape)
            return _fail(
                "embeddings",
                f"the engine's {key} has shape {shape}, the actor's {list(expected.shape)}",
                remedy="use the same text encoders and model.max_sequence_length on both sides",
            )
        difference = (found.double() - expected.to(found.device).double()).norm()
        gap = float(difference / expected.double().norm().clamp(min=1e-12))
        worst, name = max((worst, name), (gap, key))
    if worst > EMBEDDING_TOLERANCE:
        return _fail(
            "embeddings",
            f"the engine's {name} differs from the actor's by {100 * worst:.2g} %",
            worst,
            EMBEDDING_TOLERANCE,
            "use the same text encoders, prompts, negative prompt and model.max_sequence_length on both sides",
        )
    return _pass("embeddings", "prompt embeddings agree", worst, EMBEDDING_TOLERANCE)


def _guidance(actor: DiffusionActor, trials: Trials, failed: set[str]) -> Finding:
    """The scale under which the actor's means fit the engine's best: means are linear in it."""
    for cause in ("embeddings", "schedule", "noise_level", "timestep_dtype"):
        if cause in failed:
            return _skip("guidance", cause)
    key = "true_cfg_scale" if actor.guidance.true_cfg_scale > 1 else "guidance_scale"
    configured = getattr(actor.guidance, key)
    if configured <= 1:
        return _pass("guidance", "guidance is off")
    rollout = trials.base.rollout
    with _guided(actor, replace(actor.guidance, **{key: 1.0})):
        plain = _score(actor, rollout)
    push = trials.base.scores.mean - plain.mean
    found = 1 + (configured - 1) * _fit(push, _means(rollout) - plain.mean)
    message = f"the engine's steps fit a {key} of {found:.3g}; configured is {configured:g}"
    if abs(found - configured) > 0.05 * configured:
        return _fail(
            "guidance",
            message,
            found,
            configured,
            f"pass sampling.{key} to the engine; 1 means that it is off there",
        )
    return _pass("guidance", message, found, configured)


def _adapter(actor: DiffusionActor, trials: Trials, failed: set[str]) -> Finding:
    """Whether new weights move the engine's steps as they move the actor's."""
    for cause in ("embeddings", "schedule", "noise_level", "timestep_dtype", "guidance", "latent_dtype"):
        if cause in failed:
            return _skip("adapter", cause)
    engine, scores = _means(trials.second.rollout), trials.second.scores
    moves = {name: scores.mean - trials.scored[name].mean for name in ("base", "first")}
    arrived = {name: _fit(moves[name], engine - trials.scored[name].mean) for name in moves}
    what = "the adapter" if actor.config.model.lora.rank else "the weights"
    sync = (
        "check that the engine loads what sync sends: names of layers, versions, and the result of each call"
    )
    if abs(arrived["first"]) < ADAPTER_SHARE and arrived["base"] > ADAPTER_SHARE:
        return _fail(
            "stale_weights",
            f"after a sync the engine still samples with the weights before: {100 * arrived['first']:.0f} % of the "
            "last change arrived",
            arrived["first"],
            1.0,
            sync,
        )
    share = arrived["base"]
    residual = float(
        (engine - trials.scored["base"].mean - share * moves["base"]).norm() / moves["base"].norm()
    )
    message = f"{100 * share:.0f} % of what {what} does to the actor's steps arrives in the engine"
    if abs(share) < ADAPTER_SHARE:
        remedy = (
            "the adapter binds to no layer there: check the engine's layer names and lora_request; " + sync
        )
        return _fail("adapter", message, share, 1.0, remedy)
    if abs(share - 1) > ADAPTER_SHARE:
        part = (
            "only some of its layers are bound"
            if residual > ADAPTER_SHARE
            else "its scale (alpha / rank) differs"
        )
        return _fail("adapter", f"{message}: {part}", share, 1.0, sync)
    return _pass("adapter", message, share, 1.0)


def _weights(actor: DiffusionActor, trials: Trials, failed: set[str]) -> Finding:
    if failed - {"determinism", "log_probs", "window"}:
        return _skip("weights", ", ".join(sorted(failed)))
    kl = float(trials.base.squared_distance.mean() / 2)
    message = f"exact KL between both stacks is {kl:.2g} nats a latent element"
    if not kl <= KL_FAIL:
        return _fail(
            "weights",
            message + ": more than precision explains",
            kl,
            KL_FAIL,
            "compare the checkpoints of both stacks component by component, and the engine's quantization",
        )
    if kl > KL_WARN:
        return _warn("weights", message, kl, KL_WARN, "a coarse quantization; consider decoupled mode")
    return _pass("weights", message, kl, KL_WARN)


def _bookkeeping(actor: DiffusionActor, trials: Trials, failed: set[str]) -> Finding:
    """`z = (delta + r^2/2) sqrt(D) / r` of DESIGN 6: standard normal if only the step means differ."""
    if failed:
        return _skip("bookkeeping", ", ".join(sorted(failed)))
    rollout, scores = trials.base.rollout, trials.base.scores
    r_squared = trials.base.squared_distance.double()
    delta = scores.log_prob.double() - rollout.log_probs.double()
    # Rounding of the log-probs themselves is not the means': it is taken off before the division by r.
    resolution = 4 * torch.finfo(torch.float32).eps * scores.log_prob.abs().double().clamp(min=1)
    distance = ((delta + r_squared / 2).abs() - resolution).clamp(min=0)
    z = float((distance * math.sqrt(rollout.num_elements) / r_squared.sqrt().clamp(min=1e-12)).max())
    if z > Z_LIMIT:
        return _fail(
            "bookkeeping",
            f"log-probs differ by {z:.1f} standard deviations more than the step means explain",
            z,
            Z_LIMIT,
            "latents, sigmas or timesteps of the trajectory are not those that were scored",
        )
    return _pass(
        "bookkeeping",
        f"differences of log-probs follow from the step means (largest |z| {z:.2f})",
        z,
        Z_LIMIT,
    )


def _clip(actor: DiffusionActor, trials: Trials, failed: set[str]) -> Finding:
    if failed:
        return _skip("clip", ", ".join(sorted(failed)))
    clip = actor.config.actor.clip_ratio
    delta = (trials.base.scores.log_prob - trials.base.rollout.log_probs).double()
    share = float((delta.expm1().abs() > clip).double().mean())
    message = f"{100 * share:.1f} % of terms lie outside actor.clip_ratio={clip:g} before any update"
    if share > 0.1:
        return _warn(
            "clip", message, share, 0.1, "widen actor.clip_ratio, or train decoupled instead of in bypass"
        )
    return _pass("clip", message, share, 0.1)


# Helpers --------------------------------------------------------------------------------------------------


def _noise_floor(actor: DiffusionActor, trials: Trials) -> list[StepNoise]:
    rollout = trials.base.rollout
    delta = (trials.base.scores.log_prob - rollout.log_probs).double()
    clip = actor.config.actor.clip_ratio
    steps = []
    for index in sorted(set(rollout.step_indices.flatten().tolist())):
        here = rollout.step_indices == index
        quantiles = torch.quantile(delta[here].abs(), delta.new_tensor(QUANTILES)).tolist()
        steps.append(
            StepNoise(
                step_index=index,
                sigma=float(rollout.sigmas[here][0]),
                abs_delta=tuple(quantiles),
                exact_kl=float(trials.base.squared_distance[here].mean() / 2),
                outside_clip=float((delta[here].expm1().abs() > clip).double().mean()),
            )
        )
    return steps


def _means(rollout: Rollout) -> Tensor:
    assert rollout.means is not None, "the trials ask for step means"
    return rollout.means


def _fit(direction: Tensor, target: Tensor) -> float:
    """Least-squares factor of `direction` in `target`."""
    direction, target = direction.double(), target.double()
    return float((direction * target).sum() / direction.square().sum().clamp(min=1e-30))


def _largest_gap(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max())


def _finding(
    status: Status, check: str, message: str, value: float | None, threshold: float | None, remedy: str
) -> Finding:
    return Finding(
        check=check, status=status, message=message, value=value, threshold=threshold, remedy=remedy
    )


def _pass(check: str, message: str, value: float | None = None, threshold: float | None = None) -> Finding:
    return _finding("PASS", check, message, value, threshold, "")


def _warn(check: str, message: str, value: float, threshold: float, remedy: str = "") -> Finding:
    return _finding("WARN", check, message, value, threshold, remedy)


def _fail(
    check: str, message: str, value: float | None = None, threshold: float | None = None, remedy: str = ""
) -> Finding:
    return _finding("FAIL", check, message, value, threshold, remedy)


def _skip(check: str, cause: str) -> Finding:
    return _finding("SKIP", check, f"not judged: {cause} explains it", None, None, "")
