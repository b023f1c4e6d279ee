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
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from flowcorr import sde
from flowcorr.dumps.replay import ReplaySamples
from flowcorr.errors import FlowcorrError
from flowcorr.instruments.doctor.conventions import CONVENTIONS, MEAN, Convention, summed_over_channels
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Window:
    """The window's steps under some inputs, float64.

    Attributes:
        step, std: sizes and stds of the steps, `[n, T]`.
        noise: `[n, T, *L]`, that the captured steps added then.
        square: `[n, T]`, its mean square.
        distance: `[n, T]`, the largest distance of step means in stds that rounding explains.
        limits: `[n, T]`, the largest difference of mean-pooled log-probs that such a distance explains.
    """

    step: Tensor
    std: Tensor
    noise: Tensor
    square: Tensor
    distance: Tensor
    limits: Tensor

    def __getitem__(self, rows: list[int]) -> Window:
        return Window(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


class Legs:
    """The legs of captured samples, as far as they can be replayed.

    Args:
        stack: replays them.
        dtype: in which the engine computed; as captured by default.
        log_probs: `[n, T]` of the trainer, which are judged in place of the engine's, and no other leg.

    Attributes:
        stack: replays them.
        known: the legs that can be judged.
        window: its steps under the captured inputs; None where log-probs are not judged.
        convention: what the captured log-probs are; None where that is not known.
        agrees: whether the window's replay agrees with the capture.
    """

    def __init__(self, stack: Stack, dtype: str | None = None, *, log_probs: Tensor | None = None) -> None:
        self.stack, samples = stack, stack.samples
        self._clean_gap, self._usual_gap = stack.gaps_in(dtype or stack.dtype)
        self._noise, self._final = stack.tensor("initial_noise"), stack.tensor("final_latents")
        judged = samples.tensors().get("log_probs") if log_probs is None else log_probs
        self._before, self._after, self._log_probs = (
            None if values is None else values[:, : len(stack.steps)]
            for values in (
                stack.tensor("latents"),
                stack.tensor("next_latents"),
                None if judged is None else judged.double().to(stack.device),
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
        self.known = tuple(leg for leg in known if log_probs is None or leg == "log_probs")
        self.window: Window | None = None
        self.convention: Convention | None = None
        self.agrees = False
        self._velocities: dict[Inputs, Tensor] = {}
        self._rows = list(range(len(samples.prompts)))
        if "log_probs" in known:
            self.window = self._window(stack.captured)
            self.convention = self._fitting_convention(self.window)
            self.agrees = bool((self._log_prob_gaps(stack.captured).abs() <= 1).all())

    @property
    def num_samples(self) -> int:
        """Captured samples that are judged."""
        return len(self._rows)

    def of_samples(self, rows: Sequence[int]) -> Legs:
        """The same legs of some samples alone."""
        part = copy.copy(self)
        part._rows, part._velocities = [self._rows[row] for row in rows], {}
        for name in ("_noise", "_final", "_before", "_after", "_log_probs", "window"):
            value = getattr(self, name)
            setattr(part, name, None if value is None else value[list(rows)])
        return part

    def scores(self, inputs: Inputs, legs: Sequence[LegName]) -> dict[LegName, Tensor]:
        """`[n]` float64 by leg: the gap of each sample in limits, the largest over its steps."""
        return {
            leg: self._log_prob_gaps(inputs).abs().amax(1)
            if leg == "log_probs"
            else self._path(leg, inputs).norm(dim=1).clamp(max=_BEYOND)
            for leg in legs
        }

    def residuals(self, inputs: Inputs, legs: Sequence[LegName]) -> Tensor:
        """All differences of the legs in limits, with their signs: `[n, m]` float64."""
        parts = [
            self._log_prob_gaps(inputs) if leg == "log_probs" else self._path(leg, inputs) for leg in legs
        ]
        return torch.cat(parts, 1)

    def _window(self, inputs: Inputs) -> Window:
        """The window's steps under `inputs`.

        Raises:
            FlowcorrError: a step has no density, or the noise level is none of its kind.
        """
        assert self._before is not None
        assert self._after is not None
        stack, steps = self.stack, [index + inputs.shift for index in self.stack.steps]
        n, count = self._before.shape[:2]
        if inputs.of_velocity not in self._velocities:
            # Those of the captured inputs are asked for again and again, and the latest ones with other numbers.
            for other in [*self._velocities][1:-1]:
                del self._velocities[other]
            rows = [row for row in self._rows for _ in range(count)]
            self._velocities[inputs.of_velocity] = stack.velocity(
                self._before.flatten(0, 1), steps * n, rows, inputs
            ).view_as(self._before)
        velocity, before = self._velocities[inputs.of_velocity].double(), self._before.double()
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
            for given in ((before, velocity), (nowhere, nowhere + 1))
        )
        reach = of_unit.mean.abs()[..., 0]  # of a mean, by a velocity of 1
        rounding = mean_over_elements(velocity.square(), 2) * (self._clean_gap * reach).square()
        rounding = rounding + mean_over_elements(before.square(), 2) * self._rounding**2
        distance = rounding.sqrt() / step.std
        noise = sde.added_noise(self._after.double(), step)
        square = mean_over_elements(noise.square(), 2)
        spread = square.clamp(min=1)  # under other inputs the noise is not standard normal
        ulps = 4 * _ULP * (1 + step.std.log().abs()) * spread
        limits = largest_kl(distance, self._elements / spread, ulps)
        return Window(
            step=step.step, std=step.std, noise=noise, square=square, distance=distance, limits=limits
        )

    def _fitting_convention(self, window: Window) -> Convention | None:
        """The convention with which the replay agrees in the most samples; None where it does with none."""
        if self._log_probs is None:
            return None
        found = {
            convention: _agreement(self._gap(convention, window, self._log_probs))
            for convention in self._conventions
        }
        best = max(found, key=lambda convention: found[convention])
        return best if found[best][0] else None

    @property
    def _conventions(self) -> Sequence[Convention]:
        """All that a log-prob may be, sums over the channels alone among them."""
        channels = self.stack.latent_shape[-1 if isinstance(self.stack.family, PackedFamily) else 0]
        return (*CONVENTIONS, summed_over_channels(channels))

    @property
    def reordered(self) -> str:
        """The axis along which captured log-probs are those of another place, in words; empty where they are not."""
        if self._log_probs is None or self.window is None:
            return ""
        for axis, words in ((1, "steps of the window"), (0, "samples")):
            count = self._log_probs.shape[axis]
            for places in (*range(2 - count, 0), *range(1, count - 1)):  # at least two are left
                gap = self._gap(MEAN, self.window, self._log_probs.roll(places, axis))
                if bool((gap.narrow(axis, max(places, 0), count - abs(places)).abs() <= 1).all()):
                    return words
        return ""

    @property
    def _elements(self) -> int:
        assert self._before is not None
        return self._before[0, 0].numel()

    def _log_prob_gaps(self, inputs: Inputs) -> Tensor:
        """`[n, T]`, differences of the window's log-probs from the captured ones, in limits."""
        assert self.window is not None, "`known` says so"
        try:
            window = self._window(inputs)
        except FlowcorrError:
            return torch.full_like(self.window.square, _BEYOND)
        if self._log_probs is None:
            # Without log-probs there is the spread of noise, of which chance explains more.
            limit = 2 * window.limits + ERRORS * (2 / self._elements) ** 0.5
            return _in_limits(window.square - 1, limit)
        # Where no convention fits the captured inputs, each may be that of others.
        conventions = self._conventions if self.convention is None else (self.convention,)
        gaps = [self._gap(convention, window, self._log_probs) for convention in conventions]
        # By steps: of one input that is another, most of a sample's steps may agree.
        return max(gaps, key=lambda gap: (int((gap.abs() <= 1).sum()), -float(gap.abs().max())))

    def _gap(self, convention: Convention, window: Window, log_probs: Tensor) -> Tensor:
        """Difference `[n, T]` to the log-probs of a convention, in units of the limit."""
        scale = convention.factor(self._elements)
        own = convention.of(window.square, window.std, window.step, self._elements)
        rounding = _ULP * log_probs.abs() / scale
        return _in_limits((log_probs - own) / scale, window.limits + rounding)

    def _path(self, name: outside.LegName, inputs: Inputs) -> Tensor:
        """`[n, m]`, the captured end of a leg less the replayed one, in units of the limit of their distance.

        Where no step lies between two latents, that is the largest of their differences.
        """
        assert self._before is not None
        assert self._after is not None
        assert self._noise is not None

        def step(index: int, latents: Tensor, rows: Tensor) -> Tensor:
            samples = [self._rows[row] for row in rows.tolist()]
            drift = self.stack.velocity(latents, [index] * len(latents), samples, inputs)
            return latents - (inputs.sigmas[index] - inputs.sigmas[index + 1]) * drift

        steps = [index + inputs.shift for index in self.stack.steps]
        every = outside.legs(
            inputs.initial_scale * self._noise,
            self._before,
            self._after,
            self._final,
            torch.tensor([steps] * len(self._rows), device=self._noise.device),
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
            beyond_chance = [_beyond(*each) for each in zip(noise, moved, distances.tolist(), strict=True)]
            found.append(torch.tensor(beyond_chance))
        return min(found, key=lambda score: float(score.max())).to(leg.end.device, torch.float64)


def _beyond(noise: Tensor, moved: Tensor, gap: float) -> float:
    """Distance of noise from standard normal, as a share of the range that chance and a gap of means explain.

    Args:
        noise: `[*L]`, of a step.
        moved: like `noise`, that the velocity moved in the step. Of a step that was left out or taken twice, it is the
            "noise"; noise itself has a standard normal part along it.
        gap: of the step means, in stds.
    """
    if not gap <= LARGEST_DISTANCE:
        return _BEYOND
    values = Metrics(moments(noise)).compute()
    shares = beyond({name: values[name] for name in ("mean", "std", "tails")}, noise.numel(), gap)
    along = float((noise * moved).sum().abs() / moved.norm().clamp(min=1e-30)) / (
        ERRORS + gap * noise.numel() ** 0.5
    )
    return max(*shares.values(), along)


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
