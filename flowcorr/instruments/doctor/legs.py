"""How far captured samples are from their replay, leg by leg, in limits: above 1, rounding does not explain it.

| leg | from | to |
|---|---|---|
| `before` | initial noise | latents before the window's first step |
| `log_probs` | the window's latents before and after each step | the engine's log-probs |
| `between` | latents after a step of the window | latents before its next one, the same if no step lies between |
| `after` | latents after the window's last step | final latents |

Limits are those of training. Outside the window, that of the leg's question, in units of the largest velocity gap that
the precision of both stacks accounts for: captured samples do not say the gap of their window. Of log-probs, chance
with step means as far apart as the largest velocity gap of clean runs moves them. Of latents with no step between them,
the equality of a rollout's trajectory. Latents that were stored in half precision add its rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from flowcorr import sde
from flowcorr.dumps.replay import ReplaySamples
from flowcorr.errors import FlowcorrError
from flowcorr.instruments.doctor.conventions import CONVENTIONS, MEAN, Convention
from flowcorr.instruments.doctor.stack import Inputs, Stack
from flowcorr.instruments.stored import rounding_of, stored_in
from flowcorr.metrics import Metrics
from flowcorr.models.packed import PackedFamily
from flowcorr.questions import legs as outside
from flowcorr.questions.noise import moments
from flowcorr.questions.normal import beyond, largest_kl
from flowcorr.questions.question import ERRORS, OUTSIDE
from flowcorr.rollout.precision import LARGEST_DISTANCE
from flowcorr.sde.transition import mean_over_elements, over_elements

LegName = outside.LegName | Literal["log_probs"]

_ULP = 2.0**-23  # of float32
_ROUNDING = 8 * _ULP  # relative, of float32 latents over the steps of a leg
_UNDOING = (
    12  # tries of a step back, each of which is closer by the share of a step that a velocity changes in it
)
_BEYOND = 1e9  # limits, of values that are not finite
_BY_SAMPLE = ("_noise", "_final", "_before", "_after", "_log_probs")
_OF_WINDOW = ("_limits", "square", "std", "step", "noise", "distance")


class Legs:
    """The legs of captured samples, as far as they can be replayed.

    Args:
        stack: replays them.
        dtype: in which the engine computed; as captured by default.
        log_probs: `[n, T]` of the trainer, which are judged in place of the engine's, and no other leg.

    Attributes:
        known: the legs that can be judged.
        convention: what the captured log-probs are; None where that is not known.
        square, std, step, distance, noise: of the window's steps, where log-probs are judged: mean squares of their
            noise, stds, sizes, and the largest explained distances of step means in stds `[n, T]`, and the noise
            `[n, T, *L]`.
        agrees: whether the window's replay agrees with the capture.
    """

    def __init__(self, stack: Stack, dtype: str | None = None, *, log_probs: Tensor | None = None) -> None:
        self._stack, samples = stack, stack.samples
        self._clean_gap, self._usual_gap = stack.gaps_in(dtype or stack.dtype)
        self._noise, self._final = stack.tensor("initial_noise"), stack.tensor("final_latents")
        of_engine, log_probs = (
            log_probs is None,
            samples.tensors().get("log_probs") if log_probs is None else log_probs,
        )
        self._before, self._after, self._log_probs = (
            None if values is None else values[:, : len(stack.steps)]
            for values in (
                stack.tensor("latents"),
                stack.tensor("next_latents"),
                None if log_probs is None else log_probs.double().to(stack.device),
            )
        )
        captured = [value for value in (self._before, self._after, self._final) if value is not None]
        self._rounding = max((rounding_of(value, _ROUNDING) for value in captured), default=_ROUNDING)
        known: list[LegName] = []
        has_schedule = samples.guidance_scale is not None and stack.own is not None
        steps = stack.steps
        if self._before is not None and has_schedule and steps:
            known.append("before")
            if samples.noise_level is not None and samples.sigmas is not None:
                known.append("log_probs")
            if len(steps) > 1:
                known.append("between")
            if self._final is not None:
                known.append("after")
        known = known if of_engine else [leg for leg in known if leg == "log_probs"]
        self.known: tuple[LegName, ...] = tuple(known)
        self.convention: Convention | None = None
        self.agrees = False
        self._velocities: dict[Inputs, Tensor] = {}
        self._rows = list(range(len(samples.prompts)))
        if "log_probs" in known:
            step, velocity, reach = self._transition(stack.captured)
            self.square, self.std, self.noise = self._squares(step)
            self.distance = self._distance(step, velocity, reach)
            self._limits = self._limits_of(step, self.distance, self.square)
            self.step = step.step
            self.convention = self._fitting_convention()
            self.agrees = bool((self._window(stack.captured).abs() <= 1).all())

    @property
    def told_noise(self) -> tuple[Tensor, float]:
        """Step noise `[N, *L]` that rounding does not hide, and how much of rounding is in it at most (rms)."""
        told = self.distance <= LARGEST_DISTANCE
        return self.noise[told], float(self.distance[told].square().mean().sqrt())

    @property
    def num_samples(self) -> int:
        """Captured samples that are judged."""
        return len(self._rows)

    def of_samples(self, rows: Sequence[int]) -> Legs:
        """The same legs of some samples alone."""
        part = copy.copy(self)
        part._rows, part._velocities = [self._rows[row] for row in rows], {}
        for name in (*_BY_SAMPLE, *(_OF_WINDOW if "log_probs" in self.known else ())):
            value = getattr(self, name)
            setattr(part, name, None if value is None else value[list(rows)])
        return part

    def scores(self, inputs: Inputs, legs: Sequence[LegName]) -> dict[LegName, Tensor]:
        """`[n]` float64 by leg: the gap of each sample in limits, the largest over its steps."""
        return {
            leg: self._window(inputs).abs().amax(1)
            if leg == "log_probs"
            else self._path(leg, inputs).norm(dim=1).clamp(max=_BEYOND)
            for leg in legs
        }

    def residuals(self, inputs: Inputs, legs: Sequence[LegName]) -> Tensor:
        """All differences of the legs in limits, with their signs: `[n, m]` float64."""
        parts = [self._window(inputs) if leg == "log_probs" else self._path(leg, inputs) for leg in legs]
        return torch.cat(parts, 1)

    def spread(self, inputs: Inputs) -> float:
        """Root mean square of the noise of the window's steps under `inputs`: 1 where their stds are right."""
        return float(self._squares(self._transition(inputs)[0])[0].mean().sqrt())

    def _transition(self, inputs: Inputs) -> tuple[sde.Transition, Tensor, Tensor]:
        """The window's steps under `inputs`, in float64; velocities `[n, T, *L]`, and the way of a mean by one of 1."""
        assert self._before is not None
        stack, steps = self._stack, self._stack.steps
        n, count = self._before.shape[:2]
        if inputs.of_velocity not in self._velocities:
            # Those of the captured inputs are asked for again and again, and the latest ones with other numbers.
            for other in [*self._velocities][1:-1]:
                del self._velocities[other]
            rows = [row for row in self._rows for _ in range(count)]
            self._velocities[inputs.of_velocity] = stack.velocity(
                self._before.flatten(0, 1), steps * n, rows, inputs
            ).view_as(self._before)
        velocity = self._velocities[inputs.of_velocity]
        sigmas = torch.tensor(inputs.sigmas, dtype=torch.float64, device=stack.device)
        sigma, following = (
            sigmas[[index + offset for index in steps]].expand(n, -1).contiguous() for offset in (0, 1)
        )
        assert inputs.noise_level is not None, "`known` says so"
        nowhere = torch.zeros_like(sigma)[..., None]
        step, of_unit = (
            sde.transition(
                inputs.sde_type, *given, sigma, following, inputs.noise_level, sigma_max=inputs.sigma_max
            )
            for given in ((self._before.double(), velocity.double()), (nowhere, nowhere + 1))
        )
        return step, velocity.double(), of_unit.mean.abs()[..., 0]

    def _squares(self, step: sde.Transition) -> tuple[Tensor, Tensor, Tensor]:
        """Mean squares of the steps' noise and stds, `[n, T]`, and the noise `[n, T, *L]`."""
        assert self._after is not None
        noise = sde.added_noise(self._after.double(), step)
        return mean_over_elements(noise.square(), 2), step.std, noise

    def _distance(self, step: sde.Transition, velocity: Tensor, reach: Tensor) -> Tensor:
        """`[n, T]`, the largest distance of step means in stds that rounding explains."""
        assert self._before is not None
        size = mean_over_elements(velocity.square(), 2) * (self._clean_gap * reach).square()
        size = size + mean_over_elements(self._before.double().square(), 2) * self._rounding**2
        return size.sqrt() / step.std

    def _limits_of(self, step: sde.Transition, distance: Tensor, square: Tensor) -> Tensor:
        """`[n, T]`, the largest difference of mean-pooled log-probs that such a distance explains.

        Under other inputs the noise is not standard normal: its mean `square` is another.
        """
        square = square.clamp(min=1)
        return largest_kl(distance, self._elements / square, 4 * _ULP * (1 + step.std.log().abs()) * square)

    def _fitting_convention(self) -> Convention | None:
        """The convention with which the replay agrees in the most samples; None where it does with none."""
        if self._log_probs is None:
            return None
        found = {
            convention: _agreement(self._gap(convention, self.square, self.std, self.step, self._limits))
            for convention in self._conventions
        }
        best = max(found, key=lambda convention: found[convention])
        return best if found[best][0] else None

    @property
    def _conventions(self) -> Sequence[Convention]:
        """All that a log-prob may be, sums over the channels alone among them."""
        channels = self._stack.latent_shape[-1 if isinstance(self._stack.family, PackedFamily) else 0]
        by_channel = Convention(name="sums over the channels of means over places", times=channels)
        return (*CONVENTIONS, by_channel)

    @property
    def reordered(self) -> str:
        """The axis along which captured log-probs are those of another place, in words; empty where they are not."""
        if self._log_probs is None:
            return ""
        for axis, words in ((1, "steps of the window"), (0, "samples")):
            for places in range(1, self._claimed.shape[axis]):
                moved = self._claimed.roll(places, axis)
                scored = self.square, self.std, self.step, self._limits
                inner = self._gap(MEAN, *scored, claimed=moved).narrow(
                    axis, places, moved.shape[axis] - places
                )
                if inner.shape[axis] > 1 and bool((inner.abs() <= 1).all()):
                    return words
                back = self._gap(MEAN, *scored, claimed=self._claimed.roll(-places, axis))
                inner = back.narrow(axis, 0, moved.shape[axis] - places)
                if inner.shape[axis] > 1 and bool((inner.abs() <= 1).all()):
                    return words
        return ""

    @property
    def _elements(self) -> int:
        assert self._before is not None
        return self._before[0, 0].numel()

    @property
    def _claimed(self) -> Tensor:
        assert self._log_probs is not None
        return self._log_probs

    def _window(self, inputs: Inputs) -> Tensor:
        """`[n, T]`, differences of the window's log-probs from the captured ones, in limits."""
        try:
            step, velocity, reach = self._transition(inputs)
        except FlowcorrError:  # a step that has no density, or no noise level of its kind
            return torch.full_like(self.square, _BEYOND)
        square, std, _ = self._squares(step)
        limits = self._limits_of(step, self._distance(step, velocity, reach), square)
        if self._log_probs is None:
            # Without log-probs there is the spread of noise, of which chance explains more.
            limit = 2 * limits + ERRORS * (2 / self._elements) ** 0.5
            return _in_limits(square - 1, limit)
        # Where no convention fits the captured inputs, each may be that of others.
        conventions = self._conventions if self.convention is None else (self.convention,)
        gaps = [self._gap(convention, square, std, step.step, limits) for convention in conventions]
        # By steps: of one input that is another, most of a sample's steps may agree.
        return max(gaps, key=lambda gap: (int((gap.abs() <= 1).sum()), -float(gap.abs().max())))

    def _gap(
        self,
        convention: Convention,
        square: Tensor,
        std: Tensor,
        step: Tensor,
        limits: Tensor,
        claimed: Tensor | None = None,
    ) -> Tensor:
        """Difference `[n, T]` of the captured log-probs from those of a convention, in units of the limit."""
        claimed = self._claimed if claimed is None else claimed
        scale = convention.factor(self._elements)
        gap = (claimed - convention.of(square, std, step, self._elements)) / scale
        rounding = _ULP * claimed.abs() / scale
        return _in_limits(gap, limits + rounding)

    def _path(self, name: outside.LegName, inputs: Inputs) -> Tensor:
        """`[n, m]`, the captured end of a leg less the replayed one, in units of the limit of their distance.

        Where no step lies between two latents, that is the largest of their differences.
        """
        assert self._before is not None
        assert self._after is not None
        assert self._noise is not None

        def step(index: int, latents: Tensor, rows: Tensor) -> Tensor:
            samples = [self._rows[row] for row in rows.tolist()]
            drift = self._stack.velocity(latents, [index] * len(latents), samples, inputs)
            return latents - (inputs.sigmas[index] - inputs.sigmas[index + 1]) * drift

        every = outside.legs(
            inputs.initial_scale * self._noise,
            self._before,
            self._after,
            self._final,
            torch.tensor([self._stack.steps] * len(self._rows), device=self._noise.device),
            len(inputs.timesteps),
        )
        own = [leg for leg in every if leg.name == name]
        moving, apart = [], []
        for part in outside.repeat(own, step, lambda index, latents, rows: latents):
            gap, way, end = (rows.flatten(1).double() for rows in (part.gap, part.way, part.leg.end))
            if part.moves:
                moving.append(torch.stack([gap, way, end]))
            else:
                differences = _in_limits(gap, outside.SAME_LATENTS + 2 * self._rounding * end.abs())
                apart.append(differences.gather(1, differences.abs().argmax(1, keepdim=True)))
        if not moving:
            return torch.cat(apart, 1)
        gap, way, end = torch.cat(moving, 2)
        way, end = (rows.norm(dim=1, keepdim=True) for rows in (way, end))
        limit = OUTSIDE[name].limit * self._usual_gap * way + 2 * self._rounding * end
        found = torch.cat([_in_limits(gap, limit), *apart], 1)
        if not inputs.noise_outside or bool((found.norm(dim=1) <= 1).all()):
            return found
        noisy = [self._noise_outside(leg, step, inputs) for leg in own if bool((leg.first < leg.stop).any())]
        return torch.cat([torch.stack(noisy, 1).amax(1, keepdim=True), *apart], 1)

    def _noise_outside(self, leg: outside.Leg, step: outside.Step, inputs: Inputs) -> Tensor:
        """`[n]`, how far a leg is from one with the noise of an SDE step in one of its steps, in limits of chance.

        Its steps are taken from the leg's start up to the one with noise, and undone from its end down to it.
        """
        assert inputs.noise_level is not None, "`known` says so"
        first, stop, rows = int(leg.first[0]), int(leg.stop[0]), torch.arange(len(self._rows))
        befores, afters = [leg.begin], [leg.end]
        for index in range(first, stop - 1):
            befores.append(step(index, befores[-1], rows))
        for index in range(stop - 1, first, -1):
            arrived = latents = afters[-1]
            for _ in range(_UNDOING):
                latents = arrived + latents - step(index, latents, rows)
            afters.append(latents)
        found = [torch.full((len(rows),), _BEYOND, dtype=torch.float64)]
        for index, before, after in zip(range(first, stop), befores, reversed(afters), strict=True):
            velocity = (before - step(index, before, rows)).double()
            sigma, following = (
                before.new_full((len(rows),), inputs.sigmas[index + k]).double() for k in (0, 1)
            )
            velocity = velocity / over_elements(sigma - following, velocity)
            try:
                drawn = sde.transition(
                    inputs.sde_type,
                    before.double(),
                    velocity,
                    sigma,
                    following,
                    inputs.noise_level,
                    sigma_max=inputs.sigma_max,
                )
            except FlowcorrError:  # a step that has no density
                continue
            noise, moved = (
                sde.added_noise(after.double(), drawn),
                velocity * over_elements(drawn.step, velocity),
            )
            distances = self._usual_gap * mean_over_elements(moved.square(), 1).sqrt() / drawn.std
            found.append(
                torch.tensor([_beyond(*pair) for pair in zip(noise, distances.tolist(), strict=True)])
            )
        return min(found, key=lambda score: float(score.max())).to(leg.end.device, torch.float64)


def _beyond(noise: Tensor, gap: float) -> float:
    """How far noise `[*L]` is from standard normal, as a share of what chance and a gap of means explain."""
    if not gap <= LARGEST_DISTANCE:
        return _BEYOND
    values = Metrics(moments(noise)).compute()
    return max(beyond({name: values[name] for name in ("mean", "std", "tails")}, noise.numel(), gap).values())


def _agreement(gap: Tensor) -> tuple[int, float]:
    """The samples of a `gap` `[n, T]` that are within their limits, and how small the largest of all is."""
    largest = gap.abs().amax(1)
    return int((largest <= 1).sum()), -float(largest.max())


def _in_limits(gap: Tensor, limit: Tensor | float) -> Tensor:
    """`gap / limit`, and `_BEYOND` where that is not finite."""
    return (gap / limit).nan_to_num(_BEYOND, posinf=_BEYOND, neginf=-_BEYOND)


def rounding_notes(samples: ReplaySamples) -> list[str]:
    """A line where latents were stored in half precision, which the replay then allows for."""
    tensors = samples.tensors()
    found = [stored_in(tensors[name]) for name in ("latents", "next_latents") if name in tensors]
    names = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in found if dtype is not None)
    return [
        f"latents were stored in {name}: differences below that rounding are not seen, such as log-probs of the "
        "latents before it"
        for name in names
    ]
