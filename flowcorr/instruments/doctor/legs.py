"""How far captured samples are from their replay, leg by leg, in limits: above 1, rounding does not explain it.

| leg | from | to |
|---|---|---|
| `before` | initial noise | latents before the window's first step |
| `log_probs` | the window's latents before and after each step | the engine's log-probs |
| `between` | latents after a step of the window | latents before its next one, the same if no step lies between |
| `after` | latents after the window's last step | final latents |

The limit of a leg follows from the relative error of a velocity in the precision of the coarser stack.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowcorr import sde
from flowcorr.dumps.replay import ReplaySamples
from flowcorr.errors import FlowcorrError
from flowcorr.instruments.doctor.stack import Inputs, Stack
from flowcorr.instruments.stored import rounding_of, stored_in
from flowcorr.questions import outside
from flowcorr.questions.question import ERRORS
from flowcorr.sde.log_prob import HALF_LOG_TWO_PI
from flowcorr.sde.transition import mean_over_elements

LegName = Literal["before", "log_probs", "between", "after"]

_ULP = 2.0**-23  # of float32
_BEYOND = 1e9  # limits, of values that are not finite
# Rounding of latents adds to that of a velocity on a leg; float32 stacks stay below a tenth of this.
_PATH_FACTOR = 50.0
_BY_SAMPLE = ("_noise", "_final", "_before", "_after", "_log_probs")
_OF_WINDOW = ("_limits", "square", "std", "step", "noise")


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """A way to make a log-prob of the mean square `z^2` of a step's noise and of its std `s`.

    Attributes:
        name: in words.
        scaled: whether the square is divided by `2 s^2`.
        normaliser: which of `- log s` and `- log(2 pi) / 2` are added.
        summed: whether it is a sum over the latent instead of a mean.
        times: factor of a mean, such as the number of channels, over which a sum was taken.
        per_step: whether the std lacks the root of the step.
    """

    name: str
    scaled: bool = True
    normaliser: Literal["full", "std", "none"] = "full"
    summed: bool = False
    times: int = 1
    per_step: bool = False

    def of(self, square: Tensor, std: Tensor, step: Tensor, num_elements: int) -> Tensor:
        """Log-probs `[n, T]`."""
        if self.per_step:
            square, std = square * step, std / step.sqrt()
        value = -square / 2 if self.scaled else -square * std.square()
        if self.normaliser != "none":
            value = value - std.log()
        if self.normaliser == "full":
            value = value - HALF_LOG_TWO_PI
        return value * self.factor(num_elements)

    def factor(self, num_elements: int) -> int:
        """Times that a mean over the elements is taken."""
        return num_elements if self.summed else self.times


MEAN = Convention(name="means with their normaliser")
CONVENTIONS: tuple[Convention, ...] = (
    MEAN,
    Convention(name="means without - log s - log(2 pi) / 2", normaliser="none"),
    Convention(name="means without - log(2 pi) / 2", normaliser="std"),
    Convention(name="means without 1 / (2 s^2)", scaled=False, normaliser="none"),
    Convention(name="sums", summed=True),
    Convention(name="sums without - log s - log(2 pi) / 2", normaliser="none", summed=True),
    Convention(name="sums without - log(2 pi) / 2", normaliser="std", summed=True),
    Convention(name="sums without 1 / (2 s^2)", scaled=False, normaliser="none", summed=True),
    Convention(name="means of a density whose std lacks the root of the step", per_step=True),
)


class Legs:
    """The legs of captured samples, as far as they can be replayed.

    Args:
        stack: replays them.
        velocity_error: relative error of a velocity that is explained; the stack's by default.
        log_probs: `[n, T]` of the trainer, which are judged in place of the engine's, and no other leg.

    Attributes:
        known: the legs that can be judged.
        convention: what the captured log-probs are; None where that is not known.
        square, std, step, noise: of the window's steps, where log-probs are judged: mean squares of their noise, stds
            and sizes `[n, T]`, and the noise `[n, T, *L]`.
        agrees: whether the window's replay agrees with the capture.
    """

    def __init__(
        self, stack: Stack, velocity_error: float | None = None, *, log_probs: Tensor | None = None
    ) -> None:
        self._stack, samples = stack, stack.samples
        self._error = stack.velocity_error if velocity_error is None else velocity_error
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
        self._stored = max((rounding_of(value, _ULP / 2) for value in captured), default=_ULP / 2)
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
            self._limits = self._limits_of(step, velocity, reach, self.square)
            self.step = step.step
            self.convention = self._fitting_convention()
            self.agrees = bool((self._window(stack.captured).abs() <= 1).all())

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

    def _limits_of(self, step: sde.Transition, velocity: Tensor, reach: Tensor, square: Tensor) -> Tensor:
        """`[n, T]`, the largest difference of mean-pooled log-probs that rounding explains.

        An error of the mean by `r` stds moves a log-prob by `r^2 / 2`, and by `r / sqrt(D)` times a normal variable of
        the spread of the noise.
        """
        assert self._before is not None
        error = self._error
        size = mean_over_elements(velocity.square(), 2) * (error * reach).square()
        size = size + mean_over_elements(self._before.double().square(), 2) * self._stored**2
        r = size.sqrt() / step.std
        elements = self._before[0, 0].numel()
        rounding = 4 * _ULP * (1 + step.std.log().abs())
        spread = square.sqrt().clamp(min=1)
        return r.square() / 2 + 4 * r * spread / elements**0.5 + rounding * spread.square()

    def _fitting_convention(self) -> Convention | None:
        """The convention with which the replay agrees in the most samples; None where it does with none."""
        if self._log_probs is None:
            return None
        gaps = {
            convention: self._gap(convention, self.square, self.std, self.step, self._limits).abs().amax(1)
            for convention in self._conventions
        }
        counts = {convention: int((gap <= 1).sum()) for convention, gap in gaps.items()}
        best = max(counts, key=lambda convention: counts[convention])
        return best if counts[best] else None

    @property
    def _conventions(self) -> Sequence[Convention]:
        """All that a log-prob may be, sums over the channels alone among them."""
        channels = self._stack.latent_shape[0]
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
        limits = self._limits_of(step, velocity, reach, square)
        if self._log_probs is None:
            # Without log-probs there is the spread of noise, of which chance explains more.
            limit = 2 * limits + ERRORS * (2 / self._elements) ** 0.5
            return _in_limits(square - 1, limit)
        # Where no convention fits the captured inputs, each may be that of others.
        conventions = self._conventions if self.convention is None else (self.convention,)
        gaps = [self._gap(convention, square, std, step.step, limits) for convention in conventions]
        return min(gaps, key=lambda gap: float(gap.abs().max()))

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

    def _path(self, leg: LegName, inputs: Inputs) -> Tensor:
        """`[n, m]`, the replayed end of a leg less the captured one, in units of the limit of their distance."""
        assert self._before is not None
        assert self._after is not None
        assert self._noise is not None
        whole = outside.legs(
            inputs.initial_scale * self._noise,
            self._before,
            self._after,
            self._final,
            torch.tensor([self._stack.steps] * len(self._rows)),
            len(inputs.timesteps),
        )

        def step(index: int, latents: Tensor, rows: Tensor) -> Tensor:
            samples = [self._rows[row] for row in rows.tolist()]
            drift = self._stack.velocity(latents, [index] * len(latents), samples, inputs)
            return latents - (inputs.sigmas[index] - inputs.sigmas[index + 1]) * drift

        gaps, ways, sizes, has_steps = [], [], [], False
        for part in whole:
            if part.name == leg:
                latents, moves = part.walk(step)
                gaps.append((latents - part.end).flatten(1).double())
                ways.append((part.end - part.begin).flatten(1).double())
                sizes.append(part.end.flatten(1).double())
                has_steps |= bool(moves)
        way, size = (torch.cat(values, 1).norm(dim=1) for values in (ways, sizes))
        error = _PATH_FACTOR * min(self._error, 1 / (2 * _PATH_FACTOR))
        limit = error * way * has_steps + (2 * self._stored + 16 * _ULP) * size
        return _in_limits(torch.cat(gaps, 1), limit[:, None])


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
