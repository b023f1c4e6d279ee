"""The doctor's checks, each of one explanation for a gap between rollout engine and actor.

An explanation is accepted on evidence of its own: under it, most of the gap must be gone. So a check does not
fail for what another part does, and what no check explains is left to `weights`.

Numbers in comments were measured on the embedded model (float32 actor, D = 512, 4 to 10 steps, noise level 0.7).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from flowcorr import sde
from flowcorr.actor import DiffusionActor
from flowcorr.algorithm.noise import bounds_ratio, term_limit
from flowcorr.config.schema import Config
from flowcorr.diagnostics.report import Finding, clip_key, ratio_distance
from flowcorr.diagnostics.trials import Trials, score_means, velocity_gap
from flowcorr.rollout import RolloutEngine
from flowcorr.rollout.base import attention_name
from flowcorr.sde.log_prob import HALF_LOG_TWO_PI

NO_GAP = 1e-5  # of the velocity: nothing to explain; float32 stacks agree to 4e-7 (2e-6 under guidance)
EXPLAINED = 0.75  # of r^2, so that what is left is half as large: planted faults reach 0.98 and more
SIGMA_TOLERANCE = 1e-5  # float32 tables agree to their rounding, 6e-8; bfloat16 sigmas are off by 1e-3
STD_TOLERANCE = 1e-4  # float32 stds agree to their rounding, 1e-7; a noise level of 0.8 for 0.7 gives 0.14
LOG_PROB_TOLERANCE = 1e-5  # a log-prob follows from its own mean to 5e-7; bfloat16 rounding costs 2e-3
LOG_PROB_ROUNDING = 2e-6  # relative above 1: two float32 means of the same numbers differ by 1.2e-7
NOISE_GAP = 0.05  # rms of latents of unit scale: other noise gives 0.9 and more
SHAPE_GAP = 1e-3  # rms; 3e-7 in float32 (2e-6 under guidance)
EMBEDDING_TOLERANCE = 2e-2  # relative: rounding to bfloat16 costs at most 4e-3, another word 0.9
Z_LIMIT = 6.0  # standard deviations, over a few hundred terms at most
# Like EXPLAINED, for guidance that is off: without it, about 0.45 of an fp8 engine's gap goes on a random model
# that guidance hardly moves; precision alone stays below.
UNGUIDED = 0.3
# Tried where guidance is an input of the model, and its effect is any function of the scale.
USUAL_SCALES = (0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0, 7.0, 7.5, 10.0)
# Of the move: up to 0.02 if all layers are bound (0.08 for a random FLUX in bfloat16), 0.55 for half of them.
MISSING_WARN, MISSING_FAIL = 0.1, 0.25
# Grey levels of 255: images round to 0.5, and a velocity gap g costs 14 g (bfloat16 0.13, fp8 0.5, int4 2.0).
# Decoding without the VAE's scaling costs 4.7, another decoder 30.
IMAGE_ROUNDING, IMAGE_GAIN = 0.5, 60.0
CLIP_SHARE = 0.1

# Root mean square difference of the velocities, as a share of the velocity: about three times what the embedded
# model shows (bfloat16 0.010, int8 0.008, fp8 0.04, int4 0.15). Guidance amplifies them (scale 4: by 1.8 to 3.3).
PRECISION_GAP: Mapping[str, float] = {
    "float32": 2e-3,
    "bfloat16": 0.03,
    "int8": 0.03,
    "fp8": 0.1,
    "int4": 0.4,
}
WARN_FACTOR = 4.0  # between the gap that warns and the gap that fails
LARGEST_GAP = 0.6  # fails at any precision; matrices moved at random by half of their size give 0.64


@runtime_checkable
class Describes(Protocol):
    """An engine that can say what it computes with."""

    def describe(self) -> Mapping[str, str]:
        """Plain facts such as `{"attention": "FLASH_ATTN", "dtype": "bfloat16"}`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exam:
    """What a check may look at; `actor` holds the weights that `trials.base` was sampled with."""

    actor: DiffusionActor
    engine: RolloutEngine
    trials: Trials

    @property
    def config(self) -> Config:
        return self.actor.config


Check = Callable[[Exam], Finding]


def run_checks(exam: Exam) -> list[Finding]:
    """All findings in the order of `CHECKS`; what a failed check would upset is not judged."""
    findings: list[Finding] = []
    failed: set[str] = set()
    for name, check, blockers in CHECKS:
        causes = [blocker for blocker in blockers if blocker in failed]
        finding = _skipped(f"not judged while {causes[0]} fails") if causes else check(exam)
        findings.append(replace(finding, check=name))
        if finding.status == "FAIL":
            failed.add(name)
    return findings


# The trajectory's own story: no model is needed to judge it ----------------------------------------------


def _finite(exam: Exam) -> Finding:
    trials = exam.trials
    for trial in (trials.base, trials.bare, trials.moved):
        for who, tensors in (
            ("engine", (trial.rollout.latents, trial.engine_means, trial.rollout.log_probs)),
            ("actor", (trial.means, trial.log_probs)),
        ):
            if not all(bool(tensor.isfinite().all()) for tensor in tensors):
                return _failed(
                    f"the {who} returns values that are not finite",
                    remedy=f"the {who}'s dtype overflows, or its weights are broken: try float32 there",
                )
    return _passed("latents, means and log-probs are finite")


def _schedule(exam: Exam) -> Finding:
    rollout, schedule = exam.trials.base.rollout, exam.trials.schedule
    sigmas, after = _table(exam)[:-1], _table(exam)[1:]
    places = _places(exam)
    gaps = (rollout.sigmas - sigmas[places]).abs(), (rollout.sigmas_next - after[places]).abs()
    gap = float(torch.stack(gaps).max())
    steps = len(schedule.timesteps)
    if gap <= SIGMA_TOLERANCE:
        return _passed(f"the sigmas are those of the actor's {steps} steps", gap, SIGMA_TOLERANCE)
    rounded = sigmas.to(torch.bfloat16).float()[places]
    why = ": they are rounded to bfloat16" if torch.equal(rollout.sigmas, rounded) else ""
    return _failed(
        f"sigmas are off the actor's schedule of {steps} steps by up to {gap:.2g}{why}",
        gap,
        SIGMA_TOLERANCE,
        "give both stacks one scheduler config (shift, dynamic shift) and one sampling.num_inference_steps, and "
        "take sigmas from the table by step index",
    )


def _window(exam: Exam) -> Finding:
    rollout, sampling = exam.trials.base.rollout, exam.config.sampling
    low, high = sampling.sde_window_range
    found, size = rollout.step_indices, sampling.sde_window_size
    remedy = (
        "pass sampling.sde_window_size, sde_window_range (half-open) and window_per with every request, and read "
        "them per request"
    )
    if not torch.equal(found, _places(exam)):
        first, place = int(found[0, 0]), int(_places(exam)[0, 0])
        return _failed(f"a step is called {first}, but its sigma is that of step {place}", remedy=remedy)
    consecutive = found.shape[1] == size and bool((found.diff(dim=1) == 1).all())
    if not consecutive or int(found.min()) < low or int(found.max()) >= high:
        windows = sorted({tuple(row) for row in found.tolist()})
        return _failed(
            f"the SDE windows {windows} are not {size} consecutive steps within [{low}, {high})",
            remedy=remedy,
        )
    starts = found[:, 0].unflatten(0, (exam.trials.num_prompts, -1))
    if sampling.window_per == "group" and bool((starts != starts[:, :1]).any()):
        return _failed("the images of one prompt have different windows", remedy=remedy)
    return _passed(f"windows are {size} consecutive steps within [{low}, {high})")


def _timesteps(exam: Exam) -> Finding:
    trial = exam.trials.base
    rollout = trial.rollout
    table = torch.tensor(exam.trials.schedule.timesteps, device=rollout.timesteps.device)
    expected, fed = table[_places(exam)], rollout.timesteps.float()
    gap = float((fed - expected).abs().max())
    replay = "the actor replays Rollout.timesteps; a training loop of your own has to do so as well"
    for name, change in _ROUNDINGS.items():
        if gap and torch.equal(fed, change(expected)):
            return _warned(f"the engine feeds timesteps {name}, off by up to {gap:.2g}", gap, 0.0, replay)
    feed = "feed the model what its own scheduler gives, in float32, and return exactly that as Rollout.timesteps"
    if gap:
        return _failed(
            f"timesteps are off the schedule's by up to {gap:.3g}, and not by rounding", gap, 0.0, feed
        )
    if trial.velocity_gap() > NO_GAP:
        for name, change in {**_ROUNDINGS, **_UNITS}.items():
            share = _explained_by_timesteps(exam, change(expected))
            if share < EXPLAINED:
                continue
            message = f"the steps fit timesteps {name}, which is {100 * share:.0f} % of the gap; others are returned"
            if name in _ROUNDINGS and exam.config.rollout.dtype == "bfloat16":
                return _warned(message, share, EXPLAINED, feed)
            return _failed(message, share, EXPLAINED, feed)
    return _passed("the model is fed the schedule's timesteps", gap, 0.0)


def _latent_dtype(exam: Exam) -> Finding:
    latents = exam.trials.base.rollout.latents
    for place, states in enumerate(latents.unbind(1)):
        for dtype in (torch.bfloat16, torch.float16):
            if torch.equal(states, states.to(dtype).float()):
                return _failed(
                    f"the latents at place {place} of the window are all {str(dtype)[6:]} numbers: they were rounded",
                    remedy="draw, keep and return the window's latents in float32, the initial noise included",
                )
    return _passed("the trajectory is float32")


def _transition(exam: Exam) -> Finding:
    trial, sampling = exam.trials.base, exam.config.sampling
    gap = float((trial.engine_stds / trial.stds - 1).abs().max())
    if gap <= STD_TOLERANCE:
        return _passed("the steps' stds agree", gap, STD_TOLERANCE)
    return _failed(
        f"the engine's step stds are off by up to {100 * gap:.2g} %",
        gap,
        STD_TOLERANCE,
        f"sample with sampling.sde_type={sampling.sde_type} and sampling.noise_level={sampling.noise_level}; "
        "return the full std of a step",
    )


def _log_probs(exam: Exam) -> Finding:
    trial = exam.trials.base
    found, expected = trial.rollout.log_probs, _own_log_probs(exam)
    gap = float((found - expected).abs().max())
    remedy = "score with flowcorr.sde.log_prob: the mean over the elements, with its normaliser, in float32"
    if gap > LOG_PROB_TOLERANCE:
        for name, formula in _formulas(exam):
            if torch.allclose(found, formula, rtol=1e-4, atol=LOG_PROB_TOLERANCE):
                return _failed(
                    f"log-probs are {name}: off by up to {gap:.2g}", gap, LOG_PROB_TOLERANCE, remedy
                )
        if torch.equal(found, found.to(torch.bfloat16).float()):
            return _failed(
                f"log-probs are rounded to bfloat16: off by up to {gap:.2g}", gap, LOG_PROB_TOLERANCE, remedy
            )
    return _passed("log-probs are mean-pooled, normalised and float32", gap, LOG_PROB_TOLERANCE)


def _bookkeeping(exam: Exam) -> Finding:
    """`z = (delta + r^2/2) sqrt(D) / r`, standard normal if nothing but the step means differs."""
    trial = exam.trials.base
    squared, delta = trial.squared_distance().double(), (trial.log_probs - trial.rollout.log_probs).double()
    # A log-prob is itself rounded, which is not the means' doing.
    rounding = LOG_PROB_ROUNDING * trial.log_probs.abs().double().clamp(min=1)
    if exam.config.sampling.cps_unscaled:  # log-probs are in units of 2 s^2 nats
        unit = 2 * trial.stds.double().square()
        delta, rounding = delta / unit, rounding / unit
    excess = ((delta + squared / 2).abs() - rounding).clamp(min=0)
    z = float((excess * math.sqrt(trial.rollout.num_elements) / squared.sqrt().clamp(min=1e-12)).max())
    if z > Z_LIMIT:
        return _failed(
            f"log-probs differ by {z:.3g} standard deviations from what the step means explain",
            z,
            Z_LIMIT,
            "the returned latents, means or sigmas are not those that were scored: it is no lack of precision",
        )
    return _passed(f"log-probs differ as the step means do (|z| up to {z:.2f})", z, Z_LIMIT)


def _determinism(exam: Exam) -> Finding:
    first, second = exam.trials.base.rollout.latents, exam.trials.again.latents
    gap = _rms(first - second)
    if gap > NOISE_GAP:
        return _failed(
            f"the same seeds gave other latents, off by {gap:.2g} (rms)",
            gap,
            NOISE_GAP,
            "seed each sample's noise by (seed, training step, group, member), never by a global generator",
        )
    if gap:
        return _warned(
            f"the same seeds gave latents that are off by {gap:.2g} (rms)",
            gap,
            0.0,
            "kernels that add up in no fixed order: runs cannot be repeated exactly",
        )
    return _passed("the same seeds give the same bits", gap, 0.0)


def _batch_shape(exam: Exam) -> Finding:
    alone = exam.trials.alone
    gap = _rms(exam.trials.base.rollout.latents[-alone.num_samples :] - alone.latents)
    if gap > NOISE_GAP:
        return _failed(
            f"a prompt sampled alone differs by {gap:.2g} (rms) from the same prompt in a batch",
            gap,
            NOISE_GAP,
            "seed each sample's noise by its own ids, not by its place in the batch",
        )
    if gap > SHAPE_GAP:
        return _warned(
            f"a prompt sampled alone differs by {gap:.2g} (rms) from the same prompt in a batch",
            gap,
            SHAPE_GAP,
            "kernels depend on the batch's shape; harmless as long as the noise floor below is small",
        )
    return _passed("a prompt is sampled alike alone and in a batch", gap, SHAPE_GAP)


# What the model is given ---------------------------------------------------------------------------------


def _embeddings(exam: Exam) -> Finding:
    found, worst, name = exam.trials.base.rollout.conditioning, 0.0, ""
    remedy = (
        "use the same text encoders, prompts, negative prompt and model.max_sequence_length on both sides"
    )
    for key, expected in exam.trials.conditioning.items():
        if key not in found or found[key].shape != expected.shape:
            shape = list(found[key].shape) if key in found else "no value"
            return _failed(f"{key} is {shape} in the engine and {list(expected.shape)} here", remedy=remedy)
        difference = (found[key].double() - expected.to(found[key].device).double()).norm()
        gap = float(difference / expected.double().norm().clamp(min=1e-12))
        worst, name = max((worst, name), (gap, key))
    if worst > EMBEDDING_TOLERANCE:
        return _failed(
            f"the engine's {name} is off by {100 * worst:.2g} %", worst, EMBEDDING_TOLERANCE, remedy
        )
    if exam.trials.base.velocity_gap() > NO_GAP:
        share = exam.trials.base.explained_by(_other_prompts(exam))
        if share >= EXPLAINED:
            return _failed(
                f"the steps fit other prompts of the batch, which is {100 * share:.0f} % of the gap",
                share,
                EXPLAINED,
                "a batch's prompts are mixed up on their way into the engine",
            )
    return _passed("prompt embeddings agree", worst, EMBEDDING_TOLERANCE)


def _guidance(exam: Exam) -> Finding:
    """Finds the scale that the engine's steps fit: means are linear in it, unless guidance is distilled."""
    actor, trial = exam.actor, exam.trials.base
    distilled, key = actor.family.distills_guidance, actor.family.guidance_key
    configured = getattr(actor.guidance, key)
    if configured <= 1 and not distilled:
        return _passed("guidance is off")
    if trial.velocity_gap() <= NO_GAP:
        return _passed(f"{key}={configured:g} acts on both sides", configured, configured)
    if distilled:
        scales = [scale for scale in USUAL_SCALES if scale != configured]
        found, means = min(
            ((scale, _guided(exam, key, scale)) for scale in scales),
            key=lambda guided: float(trial.squared_distance(guided[1]).mean()),
        )
        share = trial.explained_by([means])
        unguided = 0.0
    else:
        plain = _guided(exam, key, 1.0)
        push = trial.means - plain
        factor = _fit(push, trial.engine_means - plain)
        found = 1 + (configured - 1) * factor
        share, unguided = trial.explained_by([plain + factor * push]), trial.explained_by([plain])
    if share >= EXPLAINED or unguided >= UNGUIDED:
        return _failed(
            f"the steps fit {key}={found:.3g} instead of {configured:g}, which is {100 * share:.0f} % of the gap",
            found,
            configured,
            f"pass sampling.{key} and the negative prompt to the engine; a scale of 1 means that guidance is off",
        )
    if distilled:
        return _passed(f"no usual {key} fits the steps better than {configured:g}", configured, configured)
    return _passed(f"the steps fit {key}={found:.3g}", found, configured)


# What the model is ---------------------------------------------------------------------------------------


def _sync(exam: Exam) -> Finding:
    """Whether the engine has the newest weights, or ones from before."""
    trial, under = exam.trials.moved, exam.trials.moved_under
    lora = bool(exam.config.model.lora.rank)
    # With nothing of the adapter in it, the engine is left to `lora`, which ties with the weights from before
    # where these have none either.
    candidates = ("bare", "previous", "current") if lora else ("previous", "current")
    shares = {name: trial.explained_by([under[name]]) for name in candidates}
    name, share = max(shares.items(), key=lambda item: item[1])
    if name != "bare" and share >= EXPLAINED:
        when = "of one sync ago" if name == "previous" else "from before several syncs"
        return _failed(
            f"after a sync the engine still samples with the weights {when}",
            share,
            EXPLAINED,
            "check the answer of every sync, and that no request keeps an old version; lag that is meant belongs "
            "into rollout.staleness",
        )
    return (
        _passed("the newest weights sample", share, EXPLAINED) if lora else _arrival(exam, "trained weights")
    )


def _weights(exam: Exam) -> Finding:
    trial = exam.trials.bare
    gap, usual = trial.velocity_gap(), _usual_gap(exam)
    kl = float(trial.squared_distance().mean() / 2)
    message = f"velocities differ by {100 * gap:.2g} %, an exact KL of {kl:.2g} nats a latent element a step"
    limit = min(WARN_FACTOR * usual, LARGEST_GAP)
    if not gap <= limit:
        return _failed(
            f"{message}: more than precision explains",
            gap,
            limit,
            "compare model.path, revision and variant of both stacks, and the engine's quantization; guidance that "
            "only the engine applies looks the same",
        )
    if gap > usual:
        return _warned(
            message, gap, usual, "a coarse engine: train decoupled, and watch rollout_corr/exact_kl"
        )
    return _passed(message, gap, usual)


def _lora(exam: Exam) -> Finding:
    if not exam.config.model.lora.rank:
        return _skipped("model.lora.rank=0: all weights are trained, see sync")
    return _arrival(exam, "adapter")


def _arrival(exam: Exam, what: str) -> Finding:
    """Whether new weights move the engine's steps as they move the actor's."""
    trial, without = exam.trials.moved, exam.trials.moved_under["bare"]
    move = trial.means - without
    gap, precision = trial.velocity_gap(), exam.trials.bare.velocity_gap()
    size = velocity_gap(trial.means, without, trial.still)
    # What precision costs without the move is not the move's fault; it varies by some 10 % between trials.
    missing = math.sqrt(max(gap**2 - 1.5 * precision**2, 0.0)) / max(size, 1e-12)
    share = _fit(move, trial.engine_means - without)
    message = f"{100 * share:.0f} % of what the {what} changes in the actor's steps arrives in the engine"
    if missing <= MISSING_WARN:
        return _passed(message, missing, MISSING_WARN)
    names = "compare the names of the engine's layers with those that are sent"
    if missing <= MISSING_FAIL:
        return _warned(message, missing, MISSING_WARN, f"{names}: a few may be left out")
    if trial.explained_by([without]) >= EXPLAINED:
        message = f"nothing of the {what} acts in the engine: it binds to no layer, or never arrives"
        remedy = f"{names}, pass the adapter with every request, and check the answer of every sync"
    elif share > 1 + MISSING_FAIL or trial.explained_by([without + share * move]) >= EXPLAINED:
        message += ": its scale differs"
        remedy = "apply the adapter once, scaled by model.lora.alpha / model.lora.rank"
    else:
        message += ": some layers are left out"
        remedy = f"{names}; fused projections need a mapping"
    return _failed(message, missing, MISSING_FAIL, remedy)


def _attention(exam: Exam) -> Finding:
    if not isinstance(exam.engine, Describes):
        return _skipped("the engine does not describe itself")
    facts = exam.engine.describe()
    own = attention_name(exam.actor.transformer)
    message = f"engine: {', '.join(f'{key} {value}' for key, value in facts.items())}; actor: attention {own}"
    gap, usual = exam.trials.base.velocity_gap(), _usual_gap(exam)
    if gap > usual and facts.get("attention") != own:
        return _warned(
            message, gap, usual, "try the engine's plain attention (SDPA) to see whether the gap goes"
        )
    return _passed(message, gap, usual)


def _images(exam: Exam) -> Finding:
    """The steps after the window and the decoder, which no log-prob covers."""
    rollout = exam.trials.base.rollout
    if rollout.images is None:
        return _skipped("the engine decodes no images")
    rows = torch.arange(0, rollout.num_samples, rollout.num_samples // exam.trials.num_prompts)
    expected = _continued(exam, rows.to(rollout.latents.device)).float()
    found = rollout.images[rows.to(rollout.images.device)].to(expected.device).float()
    if found.shape != expected.shape:
        return _failed(
            f"images are {list(found.shape[1:])} in the engine and {list(expected.shape[1:])} here",
            remedy="pass sampling.height and sampling.width to the engine",
        )
    gap = float((found - expected).abs().mean())
    message = f"images differ by {gap:.2g} grey levels of 255 from the actor's of the same trajectories"
    usual = IMAGE_ROUNDING + IMAGE_GAIN * _usual_gap(exam)
    if gap > WARN_FACTOR * usual:
        remedy = "compare the VAEs, their scaling and shift, and the Euler steps after the window"
        return _failed(message, gap, WARN_FACTOR * usual, remedy)
    if gap > usual:
        return _warned(message, gap, usual, "rewards see what the engine draws; look at a few of its images")
    return _passed(message, gap, usual)


def _clip(exam: Exam) -> Finding:
    config = exam.config
    correction = config.algorithm.rollout_correction
    if correction is None or not correction.bypass_mode:
        return _passed("the clip is anchored at recomputed log-probs, which this gap does not reach")
    if correction.loss_type != "ppo_clip" or not bounds_ratio(config.actor):
        return _passed("the loss does not clip")
    share = float(outside_clip(exam).double().mean())
    key = clip_key(config.actor)
    message = f"{100 * share:.0f} % of terms lie outside {key} before any update"
    if share > CLIP_SHARE:
        return _warned(message, share, CLIP_SHARE, f"widen {key.partition('=')[0]}, or train decoupled")
    return _passed(message, share, CLIP_SHARE)


# Helpers -------------------------------------------------------------------------------------------------


def outside_clip(exam: Exam) -> Tensor:
    """`[B, T]`: terms whose ratio, as the loss uses it, is outside its range though nothing was learned."""
    trial = exam.trials.base
    step_indices, actor = trial.rollout.step_indices, exam.config.actor
    limit = term_limit(actor, step_indices)
    if limit is None:
        return torch.zeros_like(step_indices, dtype=torch.bool)
    delta = (trial.log_probs - trial.rollout.log_probs).double()
    step_kl = trial.squared_distance().double() / 2
    return ratio_distance(delta, step_kl, trial.stds.double(), step_indices, actor) > limit


_ROUNDINGS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "rounded to bfloat16": lambda timesteps: timesteps.to(torch.bfloat16).float(),
    "rounded to bfloat16 after a division by 1000": lambda timesteps: (
        (timesteps / 1000).to(torch.bfloat16).float() * 1000
    ),
    "rounded to float16": lambda timesteps: timesteps.to(torch.float16).float(),
}
_UNITS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "divided by 1000": lambda timesteps: timesteps / 1000,
    "times 1000": lambda timesteps: timesteps * 1000,
}


def _guided(exam: Exam, key: str, scale: float) -> Tensor:
    """The actor's step means `[B, T, *L]` of the base trial at another guidance scale."""
    actor, before = exam.actor, exam.actor.guidance
    changed: dict[str, Any] = {key: scale}
    try:
        actor.guidance = replace(before, **changed)
        return score_means(actor, exam.trials.base.rollout)
    finally:
        actor.guidance = before


def _explained_by_timesteps(exam: Exam, timesteps: Tensor) -> float:
    trial = exam.trials.base
    if torch.equal(timesteps, trial.rollout.timesteps):
        return 0.0
    return trial.explained_by([score_means(exam.actor, replace(trial.rollout, timesteps=timesteps))])


def _other_prompts(exam: Exam) -> list[Tensor]:
    """The actor's means of the base trajectories under each other prompt of the batch."""
    rollout, count = exam.trials.base.rollout, exam.trials.num_prompts
    members = rollout.num_samples // count
    return [
        score_means(
            exam.actor,
            replace(
                rollout,
                conditioning={
                    name: rows.roll(shift * members, 0) for name, rows in rollout.conditioning.items()
                },
            ),
        )
        for shift in range(1, count)
    ]


def _table(exam: Exam) -> Tensor:
    return torch.tensor(exam.trials.schedule.sigmas, device=exam.trials.base.rollout.sigmas.device)


def _places(exam: Exam) -> Tensor:
    """`[B, T]`, the steps of the actor's schedule whose sigmas are nearest to the trajectory's."""
    return (exam.trials.base.rollout.sigmas[..., None] - _table(exam)[:-1]).abs().argmin(-1)


def _own_log_probs(exam: Exam) -> Tensor:
    """The log-probs `[B, T]` that follow from the engine's own means, stds and latents."""
    trial = exam.trials.base
    rollout = trial.rollout
    step = sde.Transition(trial.engine_means, trial.engine_stds, rollout.sigmas - rollout.sigmas_next)
    return sde.log_prob(rollout.latents[:, 1:], step, cps_unscaled=exam.config.sampling.cps_unscaled)


def _formulas(exam: Exam) -> Iterator[tuple[str, Tensor]]:
    """Other quantities that go by the name of log-prob."""
    right, stds = _own_log_probs(exam), exam.trials.base.engine_stds
    elements = exam.trials.base.rollout.num_elements
    scaled = right if exam.config.sampling.cps_unscaled else right + stds.log() + HALF_LOG_TWO_PI
    yield "summed over the elements instead of averaged", right * elements
    yield "without their normaliser", scaled
    yield "without their normaliser, and summed over the elements", scaled * elements
    yield "negative squared distances without their scale", scaled * 2 * stds.square()
    yield (
        "densities, where sampling.cps_unscaled asks for squared distances",
        right / (2 * stds.square()) - (stds.log() + HALF_LOG_TWO_PI),
    )


@torch.no_grad()
def _continued(exam: Exam, rows: Tensor) -> Tensor:
    """Images of the actor's Euler steps from the last window latents of the samples `rows`."""
    actor, schedule = exam.actor, exam.trials.schedule
    rollout = exam.trials.base.rollout.select(rows)
    latents, ends = rollout.latents[:, -1].clone(), rollout.step_indices[:, -1]
    for index, timestep in enumerate(schedule.timesteps):
        going = (ends < index).nonzero().squeeze(1)
        if not len(going):
            continue
        velocity = actor.family.velocity(
            actor.transformer,
            latents[going],
            latents.new_full((len(going),), timestep),
            {name: tensor[going] for name, tensor in rollout.conditioning.items()},
            actor.guidance,
        )
        sigma, sigma_next = schedule.sigmas[index : index + 2]
        latents[going] -= (sigma - sigma_next) * velocity
    return actor.family.decode(latents)


def _usual_gap(exam: Exam) -> float:
    """The largest velocity gap that the precision of both sides accounts for."""
    config, rollout = exam.config, exam.config.rollout
    names = {rollout.dtype, config.model.dtype, "bfloat16" if config.actor.autocast else "float32"}
    if rollout.emulate != "none":
        names.add(rollout.emulate)
    if rollout.engine.get("quantization") or rollout.engine.get("quantization_config"):
        names.add("fp8")
    distilled = exam.actor.family.distills_guidance
    scale = 1.0 if distilled else config.sampling.guidance_scale
    amplified = max(1.0, scale, config.sampling.true_cfg_scale)
    return amplified * max(PRECISION_GAP[name] for name in names)


def _fit(direction: Tensor, target: Tensor) -> float:
    """Least-squares factor of `direction` in `target`."""
    direction, target = direction.double(), target.double()
    return float((direction * target).sum() / direction.square().sum().clamp(min=1e-30))


def _rms(difference: Tensor) -> float:
    return float(difference.double().square().mean().sqrt())


def _passed(message: str, value: float | None = None, threshold: float | None = None) -> Finding:
    return Finding(status="PASS", message=message, value=value, threshold=threshold)


def _warned(message: str, value: float, threshold: float, remedy: str) -> Finding:
    return Finding(status="WARN", message=message, value=value, threshold=threshold, remedy=remedy)


def _failed(
    message: str, value: float | None = None, threshold: float | None = None, remedy: str = ""
) -> Finding:
    return Finding(status="FAIL", message=message, value=value, threshold=threshold, remedy=remedy)


def _skipped(message: str) -> Finding:
    return Finding(status="SKIP", message=message)


_TRAJECTORY = ("finite", "schedule", "latent_dtype", "transition", "bookkeeping")
_INPUTS = (*_TRAJECTORY, "timesteps", "embeddings", "guidance")

CHECKS: Sequence[tuple[str, Check, Sequence[str]]] = (
    ("finite", _finite, ()),
    ("schedule", _schedule, ("finite",)),
    ("window", _window, ("finite", "schedule")),
    ("latent_dtype", _latent_dtype, ("finite",)),
    ("transition", _transition, ("finite", "schedule")),
    ("log_probs", _log_probs, ("finite", "latent_dtype")),
    ("bookkeeping", _bookkeeping, ("finite", "schedule", "latent_dtype", "transition", "log_probs")),
    ("determinism", _determinism, ("finite",)),
    ("timesteps", _timesteps, _TRAJECTORY),
    ("embeddings", _embeddings, (*_TRAJECTORY, "timesteps")),
    ("batch_shape", _batch_shape, ("finite", "determinism", "embeddings")),
    ("guidance", _guidance, (*_TRAJECTORY, "timesteps", "embeddings")),
    ("sync", _sync, _INPUTS),
    ("weights", _weights, (*_INPUTS, "sync")),
    ("lora", _lora, (*_INPUTS, "sync", "weights")),
    ("attention", _attention, (*_INPUTS, "sync", "weights", "lora")),
    ("images", _images, (*_INPUTS, "window", "sync", "weights", "lora")),
    ("clip", _clip, (*_INPUTS, "sync", "weights", "lora")),
)
"""Name, check, and the checks whose failure would upset it; in the order in which they are made."""
