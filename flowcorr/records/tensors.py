"""The tensors that travel through one training step: frozen records, `[B]`-first, on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, Self, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from flowcorr.errors import BatchError, ConfigError, unknown_choice
from flowcorr.metrics import Metrics

_NUMBERS = ("latents", "next_latents", "final_latents", "means", "stds", "sigmas", "sigmas_next", "log_probs")
_IDS = ("step_indices", "group_ids", "policy_versions", "members", "worker_ids")
_DTYPES = dict.fromkeys(_NUMBERS, (torch.float32, torch.float64)) | dict.fromkeys(_IDS, (torch.int64,))

Images: TypeAlias = Tensor
"""Samples of `B` prompts, uint8: images `[B, H, W, 3]`, or videos `[B, F, H, W, 3]` of `F` frames."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Window:
    """The `T` SDE steps of `B` trajectories.

    Attributes:
        latents: `[B, T, *L]` float32, before each step.
        next_latents: `[B, T, *L]` float32, after each step.
        step_indices: `[B, T]` int64, the steps' places in the schedule.
        timesteps: `[B, T]`, as they were fed to the model.
        sigmas: `[B, T]` float32, noise levels before the steps.
        sigmas_next: `[B, T]` float32, noise levels after the steps.
        means: `[B, T, *L]` float32, the rollout policy's step means, if they were asked for.
        stds: `[B, T]` float32, the full standard deviations of the steps, beside `means`.
    """

    latents: Tensor
    next_latents: Tensor
    step_indices: Tensor
    timesteps: Tensor
    sigmas: Tensor
    sigmas_next: Tensor
    means: Tensor | None = None
    stds: Tensor | None = None

    @property
    def step_sizes(self) -> Tensor:
        """`[B, T]`, `sigma - sigma_next`."""
        return self.sigmas - self.sigmas_next

    def columns(self) -> dict[str, Tensor]:
        """The tensors by name; a field that is None is left out."""
        return tensors_of(self)

    def step(self, t: int) -> Window:
        """Step `t` alone, as a window of one step."""
        return _each(self, lambda column: column[:, t : t + 1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """Trajectories of `B` samples through a window of `T` SDE steps, as the rollout engine made them.

    Attributes:
        window: the steps.
        log_probs: `[B, T]` float32, nats per latent element under the rollout policy.
        group_ids: `[B]` int64; samples of one prompt share one.
        policy_versions: `[B]` int64, optimizer steps behind the weights that sampled.
        members: `[B]` int64, the place of each sample within its group, which seeds its noise; the trainer sets it.
        worker_ids: `[B]` int64, the Ray worker that sampled; None with a single engine.
        conditioning: `[G, ...]` tensors that the model family feeds to its transformer, one row a prompt.
        conditioning_rows: `[B]` int64, the row of each sample; None only without conditioning.
        images: of each sample; None if nothing was decoded.
        final_latents: `[B, *L]` float32, the latents that were decoded, or None likewise.
        finite_images: `[B]` bool, whether the decoder's pixels were finite before they became integers. None if nothing
            was decoded, or the engine does not know; the trainer then decodes `final_latents` itself.
    """

    window: Window
    log_probs: Tensor
    group_ids: Tensor
    policy_versions: Tensor
    members: Tensor | None = None
    worker_ids: Tensor | None = None
    conditioning: Mapping[str, Tensor] = field(default_factory=dict)
    conditioning_rows: Tensor | None = None
    images: Images | None = None
    final_latents: Tensor | None = None
    finite_images: Tensor | None = None

    @property
    def num_samples(self) -> int:
        """`B`."""
        return self.log_probs.shape[0]

    @property
    def num_steps(self) -> int:
        """`T`, the SDE steps of the window."""
        return self.log_probs.shape[1]

    @property
    def num_elements(self) -> int:
        """`D`, the number of latent elements of one sample."""
        return self.latent_shape.numel()

    @property
    def latent_shape(self) -> torch.Size:
        """`L`."""
        return self.window.latents.shape[2:]

    @property
    def decoded(self) -> Images:
        """`images` of a rollout that comes from an engine, which decodes them.

        Raises:
            BatchError: there are none.
        """
        if self.images is None:
            raise BatchError("Rollout.images is missing; a rollout engine returns the images of its samples")
        return self.images

    def validate(self) -> Self:
        """Return the record if its shapes and dtypes fit together.

        Raises:
            BatchError: a shape disagrees with `log_probs` `[B, T]`; nothing is broadcast. Or numbers are less precise
                than float32, or ids are not int64.
        """
        if self.log_probs.dim() != 2:
            raise BatchError(f"Rollout.log_probs has shape {list(self.log_probs.shape)}; it must be [B, T]")
        samples, steps = self.log_probs.shape
        for name, column in self.window.columns().items():
            shape = self.latent_shape if name in ("latents", "next_latents", "means") else ()
            check_shape(f"Window.{name}", column, (samples, steps, *shape))
        for name in ("group_ids", "policy_versions"):
            check_shape(f"Rollout.{name}", getattr(self, name), (samples,))
        for name in ("members", "worker_ids", "finite_images"):
            if getattr(self, name) is not None:
                check_shape(f"Rollout.{name}", getattr(self, name), (samples,))
        if self.final_latents is not None:
            check_shape("Rollout.final_latents", self.final_latents, (samples, *self.latent_shape))
        if self.conditioning:
            self._check_conditioning()
        for name, tensor in (tensors_of(self) | self.window.columns()).items():
            allowed = _DTYPES.get(name, (tensor.dtype,))
            if tensor.dtype not in allowed:
                raise BatchError(f"Rollout's {name} have dtype {tensor.dtype}; they must be {allowed[0]}")
        return self

    def sample_conditioning(self, samples: Tensor | None = None) -> dict[str, Tensor]:
        """`conditioning` with a row for each sample, or for each of `samples` `[b]`: `{name: [b, ...]}`."""
        if not self.conditioning:
            return {}
        assert self.conditioning_rows is not None, "`validate` has checked it"
        rows = self.conditioning_rows if samples is None else self.conditioning_rows[samples]
        return {name: tensor[rows] for name, tensor in self.conditioning.items()}

    def _check_conditioning(self) -> None:
        rows, (first, *_) = self.conditioning_rows, self.conditioning.values()
        if rows is None:
            raise BatchError(
                "Rollout.conditioning_rows is missing; give the row of Rollout.conditioning of each sample"
            )
        check_shape("Rollout.conditioning_rows", rows, (self.num_samples,))
        for name, tensor in self.conditioning.items():
            if len(tensor) != len(first):
                raise BatchError(
                    f"Rollout.conditioning[{name!r}] has shape {list(tensor.shape)}; its first axis must be "
                    f"G={len(first)}, as in the others"
                )

    def select(self, index: Tensor | slice) -> Rollout:
        """The samples at `index` along the batch axis; they share the conditioning of all."""
        return _each(self, lambda column: column[index])

    def only(self, index: Tensor) -> Rollout:
        """Select the samples at ascending indices `[B']`; no copy is made if that is all of them."""
        return self if len(index) == self.num_samples else self.select(index)

    def step(self, t: int) -> Rollout:
        """The window's step `t` alone, as a window of one step."""
        return replace(self, window=self.window.step(t), log_probs=self.log_probs[:, t : t + 1])

    def to(self, device: torch.device | str) -> Rollout:
        """The same record on `device`."""
        conditioning = {name: tensor.to(device) for name, tensor in self.conditioning.items()}
        return replace(_each(self, lambda column: column.to(device)), conditioning=conditioning)

    @staticmethod
    def concatenate(parts: list[Rollout]) -> Rollout:
        """The samples of all parts, in order; every part must hold the same optional fields."""
        first = parts[0]
        joined = replace(
            concatenated(parts),
            conditioning={
                name: torch.cat([part.conditioning[name] for part in parts]) for name in first.conditioning
            },
        )
        if not first.conditioning:
            return joined
        sizes = [len(next(iter(part.conditioning.values()))) for part in parts]
        starts = [sum(sizes[:place]) for place in range(len(parts))]
        rows = [
            part.conditioning_rows + start
            for part, start in zip(parts, starts, strict=True)
            if part.conditioning_rows is not None
        ]
        return replace(joined, conditioning_rows=torch.cat(rows))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActorBatch:
    """The batch of an update: trajectories, their advantages, and the weights and mask of the correction.

    Attributes:
        rollout: the trajectories.
        advantages: `[B]` float32, or float64 as the trainer's are.
        old_log_probs: `[B, T]`, nats per latent element under the proximal policy; None before it is known.
        old_means: `[B, T, *L]`, the step means of the policy of `old_log_probs`, or None unless the loss needs them.
        rollout_is_weights: `[B, T]` detached weights that multiply the loss, or None.
        keep: `[B, T]` bool, False for rejected terms, or None.
        places: `[B, T]` int64, index of each term in the flattened batch that this one was cut from, or None.
    """

    rollout: Rollout
    advantages: Tensor
    old_log_probs: Tensor | None = None
    old_means: Tensor | None = None
    rollout_is_weights: Tensor | None = None
    keep: Tensor | None = None
    places: Tensor | None = None

    def numbered(self) -> ActorBatch:
        """The batch with its terms numbered in `places`."""
        terms = self.rollout.log_probs
        return replace(self, places=torch.arange(terms.numel(), device=terms.device).view_as(terms))

    def select(self, index: Tensor | slice) -> ActorBatch:
        """The samples at `index` along the batch axis."""
        return _each(self, lambda column: column[index])

    def step(self, t: int) -> ActorBatch:
        """The window's step `t` alone, as a window of one step."""
        columns = {name: value[:, t : t + 1] for name, value in tensors_of(self).items() if value.dim() > 1}
        return replace(self, rollout=self.rollout.step(t), **columns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """The actor's scores of the steps `[B, T]` of a batch.

    Attributes:
        log_probs: nats per latent element.
        means: `[B, T, *L]`, step means, or None where they were not asked for.
        stds: full standard deviations of the steps.
    """

    log_probs: Tensor
    means: Tensor | None
    stds: Tensor

    def select(self, index: Tensor) -> Scores:
        """The samples at `index` along the batch axis."""
        return _each(self, lambda column: column[index])

    def detach(self) -> Scores:
        """The same values without their graph."""
        return _each(self, torch.detach)

    @staticmethod
    def concatenate(parts: Sequence[Scores], dim: int = 0) -> Scores:
        """All parts, of which either all or none have means, along the samples or (1) along the steps."""
        return concatenated(parts, dim)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms:
    """The numbers of SDE steps that losses and corrections read: of whole windows `[b, T]`, or of single steps `[b]`.

    Log-probs and exact KLs are in nats per latent element.

    Attributes:
        log_prob: of the current policy, differentiable; of the old policy until the current one was scored.
        old_log_prob: of the old policy, which anchors the ratio.
        rollout_log_prob: of the rollout policy.
        advantage: one a sample, expanded over `T` in windows.
        std: full standard deviation of the step; NaN if unknown.
        step: `sigma - sigma_next`.
        step_index: int64, the step's place in the schedule.
        sigma: noise level before the step, or None.
        worker: int64, the Ray worker that sampled; None with a single engine.
        old_kl, reference_kl: exact KL of the current policy from the old and the reference policy, differentiable; NaN
            if a mean is not finite, and None if unknown.
        rollout_kl: likewise from the rollout policy, differentiable if score centering reads it.
        old_rollout_kl: likewise of the old policy from the rollout policy, without a gradient.
        drift_square, gradient_square: squares of the drift and of the signal in the gradient of the term's group and
            step, over the number of its terms; see `flowcorr.algorithm.score_drift`. NaN or None where not measured.
        weight: detached importance weights, or None for 1.
        keep: bool, False for terms that take no part, or None for all.
        num_elements: `D`, or None if unknown.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    rollout_log_prob: Tensor
    advantage: Tensor
    std: Tensor
    step: Tensor
    step_index: Tensor
    sigma: Tensor | None = None
    worker: Tensor | None = None
    old_kl: Tensor | None = None
    rollout_kl: Tensor | None = None
    reference_kl: Tensor | None = None
    old_rollout_kl: Tensor | None = None
    drift_square: Tensor | None = None
    gradient_square: Tensor | None = None
    weight: Tensor | None = None
    keep: Tensor | None = None
    num_elements: int | None = None

    def select(self, index: Tensor | slice | tuple[slice, Tensor]) -> Terms:
        """The samples at `index` along the batch axis, or at `(samples, steps)` of windows."""
        return _each(self, lambda column: column[index])

    @staticmethod
    def concatenate(parts: Sequence[Terms]) -> Terms:
        """The samples of all parts in order; every part must hold the same optional columns."""
        return concatenated(parts)

    def detach(self) -> Terms:
        """The same values without their graph."""
        return _each(self, torch.detach)

    def to(self, device: torch.device | str) -> Terms:
        """The same record on `device`."""
        return _each(self, lambda column: column.to(device))

    def per_term(self) -> Terms:
        """`[b, T]` as `[b * T]`: every SDE step a sample of its own."""
        return _each(self, torch.flatten)

    def windows(self) -> Terms:
        """`[b]` as `[b, 1]`: every SDE step a window of its own; `[b, T]` is returned as it is."""
        if self.log_prob.dim() == 2:
            return self
        return _each(self, lambda column: column.unsqueeze(1))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutput:
    """A loss as a sum, with the counts that its mean is taken over.

    Attributes:
        loss_sum: 0-d, differentiable, the sum over kept terms.
        count_all: 0-d, valid terms, kept or not.
        count_kept: 0-d, terms that entered the sum.
        metrics: `actor/*` metrics of the update.
        correction_metrics: `rollout_corr/*` of the correction inside the loss; empty outside bypass mode.
        keep: bool, like the terms, False where the correction rejected one, or None; a loss of one's own may leave it.
    """

    loss_sum: Tensor
    count_all: Tensor
    count_kept: Tensor
    metrics: Metrics
    correction_metrics: Metrics = field(default_factory=Metrics)
    keep: Tensor | None = None

    def mean(self, denominator: Literal["kept", "all"] = "kept") -> Tensor:
        """The mean loss over kept terms, or over all; 0 without terms.

        Raises:
            ConfigError: `denominator` is neither.
        """
        if denominator not in ("kept", "all"):
            raise ConfigError(unknown_choice("denominator", denominator, ("kept", "all")))
        count = self.count_kept if denominator == "kept" else self.count_all
        return self.loss_sum / count.clamp(min=1)


RecordT = TypeVar("RecordT")


HIGHEST_NOISE_LEVEL = 1.001
"""The largest sigma, which is 1 up to rounding."""
LOWEST_NOISE_LEVEL = 1e-4
"""A sigma up to here counts as 0: the noise of such a step would drown in the float32 rounding of the latents."""


def check_tensor(name: str, tensor: Tensor, shape: str) -> None:
    """Raise `BatchError` unless `tensor` is one; `shape` is in words."""
    if not isinstance(tensor, Tensor):
        raise BatchError(f"{name} is of type {type(tensor).__name__}; it must be a torch tensor {shape}")


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise `BatchError` unless `tensor` is one, of exactly `shape`."""
    check_tensor(name, tensor, f"of shape {list(shape)}")
    if tuple(tensor.shape) != shape:
        raise BatchError(
            f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}, as nothing is broadcast"
        )


def _each(record: RecordT, change: Callable[[Tensor], Tensor]) -> RecordT:
    """Apply a function to every tensor of a record, including nested records."""
    changed: dict[str, Any] = {name: change(tensor) for name, tensor in tensors_of(record).items()}
    changed |= {name: _each(inner, change) for name, inner in _records(record).items()}
    return replace(cast(Any, record), **changed)


def concatenated(parts: Sequence[RecordT], dim: int = 0) -> RecordT:
    """Concatenate the tensors of records, including nested records."""
    tensors, records = ([of(part) for part in parts] for of in (tensors_of, _records))
    joined: dict[str, Any] = {name: torch.cat([part[name] for part in tensors], dim) for name in tensors[0]}
    joined |= {name: concatenated([part[name] for part in records], dim) for name in records[0]}
    return replace(cast(Any, parts[0]), **joined)


def tensors_of(record: Any) -> dict[str, Tensor]:
    """The tensors among the fields of a record, by name."""
    values = {entry.name: getattr(record, entry.name) for entry in fields(record)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _records(record: Any) -> dict[str, Any]:
    values = {entry.name: getattr(record, entry.name) for entry in fields(record)}
    return {name: value for name, value in values.items() if is_dataclass(value)}
