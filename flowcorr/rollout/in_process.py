"""Sampling with diffusers in the trainer's own process, with the actor's weights or a copy of them."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from flowcorr import distributed, sde
from flowcorr.config.rollout import RolloutConfig
from flowcorr.config.schema import Config, SamplingConfig
from flowcorr.models import DTYPES, ModelFamily, SamplingPlan
from flowcorr.records import Rollout
from flowcorr.rollout.base import Merge, OnImages, SyncedWeights, Weights, attention_name, ignore_images
from flowcorr.rollout.emulate import round_weight
from flowcorr.rollout.sampler import decode, sample_sde_window

CPU_TOKENS = 5000
"""Tokens of a pass for each thread of a CPU, those of both halves of guidance: with more, an image takes longer."""


class InProcessEngine(SyncedWeights):
    """Samples in this process.

    It shares the actor's transformer if both have the same precision, and the engine `shares` and is neither emulated
    nor stale. Otherwise it keeps a copy that `sync` fills with merged, rounded, possibly older weights.

    Args:
        family: the pipeline.
        rollout: precision, emulation, staleness, batch sizes.
        sampling: how trajectories are drawn.
        seed: the run's seed.
        merge: see `Merge`.
        base: the transformer before an adapter was added, the copy's architecture.
        shares: False keeps a copy in any case, so that the engine can be changed while the actor is not.
    """

    def __init__(
        self,
        family: ModelFamily,
        rollout: RolloutConfig,
        sampling: SamplingConfig,
        *,
        seed: int,
        merge: Merge,
        base: nn.Module,
        shares: bool = True,
    ) -> None:
        super().__init__(rollout.staleness)
        self.family = family
        self.config = rollout
        self.seed = seed
        self.dtype = DTYPES[rollout.dtype]
        self.plan = SamplingPlan.of(family, sampling)
        alike = self.dtype == family.dtype and rollout.emulate == "none" and rollout.max_weight_age == 0
        self.shared = shares and alike
        self.merge = merge
        self._copy = None if self.shared else _frozen_copy(base, _device(family.transformer), self.dtype)

    def sample(
        self,
        conditioning: Mapping[str, Tensor],
        groups: Sequence[int],
        *,
        training_step: int,
        with_means: bool,
        on_images: OnImages = ignore_images,
    ) -> Rollout:
        """See `RolloutEngine.sample`; samples come group by group, in the order of `groups`."""
        count = self.config.n
        owners = [group for group in groups for _ in range(count)]
        members = [member for _ in groups for member in range(count)]
        own = torch.arange(len(groups), device=_device(self.transformer)).repeat_interleave(count)
        size = self.config.batch_size or self._batch_size(conditioning, len(owners))
        drawn = []
        for begin in range(0, len(owners), size):
            rows = slice(begin, begin + size)
            chunk = {name: values[own[rows].to(values.device)] for name, values in conditioning.items()}
            drawn.append(
                self._sample(chunk, owners[rows], members[rows], training_step, with_means, on_images)
            )
        return replace(
            Rollout.concatenate(drawn), conditioning=dict(conditioning), conditioning_rows=own
        ).validate()

    def _batch_size(self, conditioning: Mapping[str, Tensor], images: int) -> int:
        """Default number of images in a forward pass: all of them, or as many as suit a CPU.

        With several ranks it is all of them, since sharded weights allow no pass of one rank alone.
        """
        if _device(self.transformer).type != "cpu" or distributed.world_size() > 1:
            return images
        # Texts, and reference images, whose tokens stand on a grid. Both sides of guidance are equally long.
        own = [values for name, values in conditioning.items() if not name.startswith("negative_")]
        given = sum(math.prod(values.shape[1:-1]) for values in own if values.dim() > 2)
        sides = 1 if len(own) == len(conditioning) else 2
        tokens = sides * (self.family.image_tokens(self.plan.latent_shape) + given)
        batches = math.ceil(images / max(1, CPU_TOKENS * torch.get_num_threads() // tokens))
        return math.ceil(images / batches)

    @contextlib.contextmanager
    def in_float32(self) -> Iterator[None]:
        """Compute in float32 and without emulation meanwhile; a shared transformer is the actor's to convert."""
        config, dtype, stored = self.config, self.dtype, self._copy
        self.config, self.dtype = replace(config, dtype="float32", emulate="none"), torch.float32
        try:
            if stored is not None:
                self._copy = _frozen_copy(stored, _device(stored), torch.float32)
                self._reload()
            yield
        finally:
            self.config, self.dtype, self._copy = config, dtype, stored
            self._reload()

    def step_noise(
        self, groups: Sequence[int], members: Sequence[int], *, seed: int, training_step: int, step_index: int
    ) -> Tensor:
        """The noise `[B, *L]` of one step of the schedule, see `sde.step_noise`."""
        return sde.step_noise(
            self.plan.latent_shape,
            groups,
            members,
            seed=seed,
            training_step=training_step,
            step_index=step_index,
        )

    def describe(self) -> dict[str, str]:
        """The dtype of its weights and activations."""
        return {
            "attention": attention_name(self.transformer),
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def close(self) -> None:
        self._copy = None

    @property
    def transformer(self) -> nn.Module:
        """The transformer that samples: the actor's, or the copy."""
        return self.family.transformer if self._copy is None else self._copy

    def _reload(self) -> None:
        if self._loaded is not None:
            self._load(self._loaded)

    def _load(self, weights: Weights) -> None:
        self._loaded = weights
        if self._copy is not None:
            stored = self._copy.state_dict()
            for name, value in self.merge(weights.tensors):
                stored.pop(name).copy_(round_weight(value, self.config.emulate))
            assert not stored, "the merged weights are those of a whole transformer"

    def _sample(
        self,
        conditioning: Mapping[str, Tensor],
        groups: Sequence[int],
        members: Sequence[int],
        training_step: int,
        with_means: bool,
        on_images: OnImages,
    ) -> Rollout:
        transformer = self.transformer
        device = _device(transformer)
        inputs = {
            name: rows.to(device, self.dtype if rows.is_floating_point() else None)
            for name, rows in conditioning.items()
        }
        key = {"seed": self.seed, "training_step": training_step}
        plan = self.plan
        windows = plan.windows(groups, members, **key)
        initial = sde.initial_noise(
            plan.latent_shape, groups, members, **key, same_in_group=self.config.same_initial_noise
        )

        def velocity(latents: Tensor, timesteps: Tensor, rows: Tensor | slice) -> Tensor:
            chosen = {name: values[rows] for name, values in inputs.items()}
            return self.family.velocity(transformer, latents, timesteps, chosen, plan.guidance)

        def noise(step_index: int, rows: Sequence[int]) -> Tensor:
            owners, places = [groups[row] for row in rows], [members[row] for row in rows]
            return self.step_noise(owners, places, **key, step_index=step_index).to(device)

        window, log_probs, final = sample_sde_window(
            velocity,
            initial.to(device),
            self.family.in_dtype(plan.schedule, self.dtype),
            plan.sampling,
            windows.to(device),
            noise,
            twins=groups if self.config.same_initial_noise else None,
            with_means=with_means,
        )
        images, finite_images = decode(self.family, final, on_images)
        return Rollout(
            window=window,
            log_probs=log_probs,
            images=images,
            finite_images=finite_images,
            final_latents=final,
            group_ids=torch.tensor(groups, device=device),
            policy_versions=torch.full((len(groups),), self.version, device=device),
        )


def build(
    config: Config, family: ModelFamily, *, merge: Merge, base: nn.Module, probe: object
) -> InProcessEngine:
    """The engine `in_process`, see `build_backend`; the actor's own transformer needs no probe."""
    return InProcessEngine(
        family, config.rollout, config.sampling, seed=config.trainer.seed, merge=merge, base=base
    )


def _device(transformer: nn.Module) -> torch.device:
    return next(transformer.parameters()).device


def _frozen_copy(transformer: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A copy in `dtype` as diffusers loads one: some modules, and tables that no checkpoint holds, stay in float32."""
    # By nn.Module's own `to`: that of diffusers warns whenever it is given a dtype.
    copied = nn.Module.to(copy.deepcopy(transformer), device).requires_grad_(False)
    in_float32 = set(getattr(transformer, "_keep_in_fp32_modules", None) or ())
    stored = copied.state_dict().keys()
    for name, tensor in itertools.chain(copied.named_parameters(), copied.named_buffers()):
        if name in stored and tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if in_float32 & set(name.split(".")) else dtype)
    return copied
