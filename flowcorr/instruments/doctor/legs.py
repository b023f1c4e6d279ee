"""How far captured samples are from their replay, leg by leg, in limits: above 1, rounding does not explain it.

| leg | from | to |
|---|---|---|
| `before` | initial noise | latents before the window's first step |
| `log_probs` | the window's latents before and after each step | the engine's log-probs |
| `between` | latents after a step of the window | latents before its next one |
| `after` | latents after the window's last step | final latents |

The limit of a leg follows from the relative error of a velocity in the precision of the coarser stack.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from flowcorr import sde
from flowcorr.dumps.replay import ReplaySamples
from flowcorr.instruments.doctor.stack import Inputs, Stack
from flowcorr.instruments.stored import rounding_of, stored_in
from flowcorr.sde.log_prob import HALF_LOG_TWO_PI
from flowcorr.sde.transition import mean_over_elements

LegName = Literal["before", "log_probs", "between", "after"]

_ULP = 2.0**-23  # of float32
_BEYOND = 1e9  # limits, of values that are not finite
# Rounding of latents adds to that of a velocity on a leg; float32 stacks stay below a tenth of this.
_PATH_FACTOR = 50.0
_NOISE_ERRORS = 6.0  # standard errors of the spread of noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """A way to make a log-prob of the mean square `z^2` of a step's noise and of its std `s`.

    Attributes:
        name: in words.
        scaled: whether the square is divided by `2 s^2`.
        normaliser: which of `- log s` and `- log(2 pi) / 2` are added.
        summed: whether it is a sum over the latent instead of a mean.
    """

    name: str
    scaled: bool = True
    normaliser: Literal["full", "std", "none"] = "full"
    summed: bool = False

    def of(self, square: Tensor, std: Tensor, num_elements: int) -> Tensor:
        """Log-probs `[n, T]`."""
        value = -square / 2 if self.scaled else -square * std.square()
        if self.normaliser != "none":
            value = value - std.log()
        if self.normaliser == "full":
            value = value - HALF_LOG_TWO_PI
        return value * num_elements if self.summed else value


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
)


class Legs:
    """The legs of captured samples, as far as they can be replayed.

    Attributes:
        known: the legs that can be judged.
        convention: what the captured log-probs are; None where that is not known.
        square, std, noise: of the window's steps, where log-probs are judged: mean squares of their noise and stds
            `[n, T]`, and the noise `[n, T, *L]`.
        agrees: whether the window's replay agrees with the capture.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack, samples = stack, stack.samples
        self._noise, self._final = stack.tensor("initial_noise"), stack.tensor("final_latents")
        log_probs = samples.tensors().get("log_probs")
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
            if any(right - left > 1 for left, right in itertools.pairwise(steps)):
                known.append("between")
            if self._final is not None:
                known.append("after")
        self.known: tuple[LegName, ...] = tuple(known)
        self.convention: Convention | None = None
        self.agrees = False
        if "log_probs" in known:
            step, velocity = self._transition(stack.captured)
            self._limits = self._limits_of(step, velocity)
            self.square, self.std, self.noise = self._squares(step)
            self.convention = self._fitting_convention()
            self.agrees = bool((self._window(stack.captured) <= 1).all())

    def scores(self, inputs: Inputs, legs: Sequence[LegName]) -> dict[LegName, Tensor]:
        """`[n]` float64 by leg: the gap of each sample in limits, the largest over its steps."""
        return {leg: self._window(inputs) if leg == "log_probs" else self._path(leg, inputs) for leg in legs}

    def _transition(self, inputs: Inputs) -> tuple[sde.Transition, Tensor]:
        """The window's steps under `inputs`, in float64, and velocities `[n, T, *L]`."""
        assert self._before is not None
        stack, steps = self._stack, self._stack.steps
        n, count = self._before.shape[:2]
        velocity = stack.velocity(
            self._before.flatten(0, 1),
            steps * n,
            [row for row in range(n) for _ in range(count)],
            inputs,
        ).view_as(self._before)
        sigmas = torch.tensor(inputs.sigmas, dtype=torch.float64, device=stack.device)
        sigma, following = (
            sigmas[[index + offset for index in steps]].expand(n, -1).contiguous() for offset in (0, 1)
        )
        level = stack.samples.noise_level
        assert level is not None, "`known` says so"
        kind = cast(sde.SdeType, stack.samples.sde_type)
        step = sde.transition(kind, self._before.double(), velocity.double(), sigma, following, level)
        return step, velocity.double()

    def _squares(self, step: sde.Transition) -> tuple[Tensor, Tensor, Tensor]:
        """Mean squares of the steps' noise and stds, `[n, T]`, and the noise `[n, T, *L]`."""
        assert self._after is not None
        noise = sde.added_noise(self._after.double(), step)
        return mean_over_elements(noise.square(), 2), step.std, noise

    def _limits_of(self, step: sde.Transition, velocity: Tensor) -> Tensor:
        """`[n, T]`, the largest difference of mean-pooled log-probs that rounding explains.

        An error of the mean by `r` stds moves a log-prob by `r^2 / 2`, and by `r / sqrt(D)` times a normal variable.
        """
        assert self._before is not None
        error = self._stack.velocity_error
        # The mean moves by about the step times the error of the velocity.
        size = mean_over_elements(velocity.square(), 2) * (error * step.step).square()
        size = size + mean_over_elements(self._before.double().square(), 2) * self._stored**2
        r = size.sqrt() / step.std
        elements = self._before[0, 0].numel()
        rounding = 4 * _ULP * (1 + step.std.log().abs())
        return r.square() / 2 + 4 * r / elements**0.5 + rounding

    def _fitting_convention(self) -> Convention | None:
        """The convention with which the replay agrees in the most samples; `MEAN` where it does with none."""
        if self._log_probs is None:
            return None
        counts = {
            convention: int((self._gap(convention, self.square, self.std) <= 1).sum())
            for convention in CONVENTIONS
        }
        best = max(CONVENTIONS, key=lambda convention: counts[convention])
        return best if counts[best] else MEAN

    @property
    def _elements(self) -> int:
        assert self._before is not None
        return self._before[0, 0].numel()

    @property
    def _claimed(self) -> Tensor:
        assert self._log_probs is not None
        return self._log_probs

    def _window(self, inputs: Inputs) -> Tensor:
        step, _ = self._transition(inputs)
        square, std, _ = self._squares(step)
        if self.convention is None:
            # Without log-probs there is the spread of noise, of which chance explains more.
            limit = 2 * self._limits + _NOISE_ERRORS * (2 / self._elements) ** 0.5
            return _in_limits((square - 1).abs(), limit).amax(1)
        return self._gap(self.convention, square, std)

    def _gap(self, convention: Convention, square: Tensor, std: Tensor) -> Tensor:
        """Difference `[n]` of the captured log-probs from those of a convention, in units of the limit."""
        scale = self._elements if convention.summed else 1
        gap = (self._claimed - convention.of(square, std, self._elements)).abs() / scale
        rounding = _ULP * self._claimed.abs() / scale
        return _in_limits(gap, self._limits + rounding).amax(1)

    def _path(self, leg: LegName, inputs: Inputs) -> Tensor:
        """Distance of a replayed leg from the captured one, as a share of the leg, in units of the limit."""
        assert self._before is not None
        assert self._after is not None
        assert self._noise is not None
        steps, total = self._stack.steps, len(inputs.timesteps)
        if leg == "before":
            parts = [(self._noise, self._before[:, 0], range(steps[0]))]
        elif leg == "after":
            assert self._final is not None
            parts = [(self._after[:, -1], self._final, range(steps[-1] + 1, total))]
        else:
            places = itertools.pairwise(steps)
            parts = [
                (self._after[:, place], self._before[:, place + 1], range(left + 1, right))
                for place, (left, right) in enumerate(places)
            ]
        gaps, ways, sizes = [], [], []
        for begin, end, indices in parts:
            latents = begin
            for index in indices:
                drift = self._stack.velocity(
                    latents, [index] * len(latents), list(range(len(latents))), inputs
                )
                latents = latents - (inputs.sigmas[index] - inputs.sigmas[index + 1]) * drift
            gaps.append((latents - end).flatten(1).double())
            ways.append((end - begin).flatten(1).double())
            sizes.append(end.flatten(1).double())
        gap, way, size = (torch.cat(values, 1).norm(dim=1) for values in (gaps, ways, sizes))
        error = _PATH_FACTOR * min(self._stack.velocity_error, 1 / (2 * _PATH_FACTOR))
        has_steps = any(len(indices) for *_, indices in parts)
        limit = error * way * has_steps + (2 * self._stored + 16 * _ULP) * size
        return _in_limits(gap, limit)


def _in_limits(gap: Tensor, limit: Tensor | float) -> Tensor:
    """`gap / limit`, and `_BEYOND` where that is not finite."""
    return (gap / limit).nan_to_num(_BEYOND, posinf=_BEYOND)


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
