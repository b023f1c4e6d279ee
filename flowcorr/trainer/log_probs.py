"""The terms from which the losses of a training step were computed, one file a step: `step_000123.safetensors`.

`flowcorr lab` replays these files under other corrections, and `flowcorr report` draws them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowcorr.config.schema import Config
from flowcorr.errors import BackendError, ConfigError
from flowcorr.records import ActorBatch, PolicyStep
from flowcorr.sde import step_kl

FOLDER = "log_probs"
FORMAT_VERSION = "1"
_STEP, _PARTIAL = "step_{:06d}.safetensors", ".partial_"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoggedTerms:
    """The terms of a training step, `[B, T]` unless another shape is given.

    Log-probs and exact KLs are in nats per latent element; exact KLs are None if no step means were computed.

    Attributes:
        rollout_log_probs: of the rollout policy.
        old_log_probs: of the old policy, in the PPO ratio: recomputed in decoupled mode, the rollout's in bypass.
        current_log_probs: of the current policy, as the loss used them last; NaN if not finite. With one epoch they are
            scored with the term's mini-batch. In decoupled mode those of the first mini-batch therefore equal the old
            ones, if the old policy has the current weights (`actor.old_policy`).
        advantages: `[B]`, before rejection.
        rewards: `[B]`, the values that `reward/mean` averages.
        timesteps, sigmas, sigmas_next, step_indices: as in `Rollout`.
        stds: full standard deviations of the steps.
        group_ids, policy_versions: `[B]`, as in `Rollout`.
        old_rollout_kl: exact KL of the old policy from the rollout policy.
        current_old_kl: exact KL of the current policy from the old policy.
        current_rollout_kl: exact KL of the current policy from the rollout policy.
        num_elements: `D`.
        bypass: whether the step was in bypass mode.
    """

    rollout_log_probs: Tensor
    old_log_probs: Tensor
    current_log_probs: Tensor
    advantages: Tensor
    rewards: Tensor
    timesteps: Tensor
    sigmas: Tensor
    sigmas_next: Tensor
    stds: Tensor
    step_indices: Tensor
    group_ids: Tensor
    policy_versions: Tensor
    num_elements: int
    bypass: bool
    old_rollout_kl: Tensor | None = None
    current_old_kl: Tensor | None = None
    current_rollout_kl: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, without those that are None."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    @staticmethod
    def concatenate(parts: Sequence[LoggedTerms]) -> LoggedTerms:
        """The samples of all parts in order; all parts must have the same optional tensors."""
        columns = [part.tensors() for part in parts]
        joined: dict[str, Any] = {name: torch.cat([part[name] for part in columns]) for name in columns[0]}
        return replace(parts[0], **joined)


class TermRecorder:
    """The `record` of an update: keeps the last score of each term.

    Args:
        batch: the batch of the update.
        advantages: `[B]`, before rejection.
        rewards: `[B]`.
        bypass: whether the training step is in bypass mode.
    """

    def __init__(self, batch: ActorBatch, *, advantages: Tensor, rewards: np.ndarray, bypass: bool) -> None:
        self._batch, self._advantages, self._rewards, self._bypass = batch, advantages, rewards, bypass
        self._seen: dict[str, Tensor] = {}

    def __call__(self, part: ActorBatch, policy: PolicyStep) -> None:
        self._put("current_log_probs", part, policy.log_prob)
        self._put("stds", part, policy.std)
        for name, means in (("current_old_kl", part.old_means), ("current_rollout_kl", part.rollout.means)):
            if means is not None:
                self._put(name, part, step_kl(policy.mean.detach(), means, policy.std))

    def terms(self) -> LoggedTerms:
        """All terms of the batch, on the CPU."""
        batch, rollout = self._batch, self._batch.rollout
        assert batch.old_log_probs is not None
        seen = dict(self._seen)
        if batch.old_means is not None and rollout.means is not None:
            seen["old_rollout_kl"] = step_kl(batch.old_means, rollout.means, seen["stds"])
        terms = LoggedTerms(
            rollout_log_probs=rollout.log_probs,
            old_log_probs=batch.old_log_probs,
            advantages=self._advantages,
            rewards=torch.as_tensor(self._rewards, dtype=torch.float32),
            timesteps=rollout.timesteps,
            sigmas=rollout.sigmas,
            sigmas_next=rollout.sigmas_next,
            step_indices=rollout.step_indices,
            group_ids=rollout.group_ids,
            policy_versions=rollout.policy_versions,
            num_elements=rollout.num_elements,
            bypass=self._bypass,
            **seen,
        )
        on_cpu: dict[str, Any] = {name: value.cpu() for name, value in terms.tensors().items()}
        return replace(terms, **on_cpu)

    def _put(self, name: str, part: ActorBatch, values: Tensor) -> None:
        assert part.places is not None, "an update that is recorded numbers its terms"
        shape = self._batch.rollout.log_probs.shape
        column = self._seen.setdefault(name, values.new_full(shape, math.nan))
        column.view(-1)[part.places] = values.detach()


def save(folder: Path, step: int, terms: LoggedTerms, config: Config) -> None:
    """Write the terms of a step to a file in `folder`, completely or not at all.

    Its metadata, all text: `format_version`, `step`, `num_elements` (`D`), `mode` (`decoupled`: old log-probs were
    recomputed; `bypass`: they are the rollout's), `loss_mode` and, as JSON, `clip_ratio`.

    Raises:
        BackendError: the folder cannot be written to.
    """
    path = folder / _STEP.format(step)
    partial = path.with_name(f"{_PARTIAL}{path.name}")
    metadata = {
        "format_version": FORMAT_VERSION,
        "step": str(step),
        "num_elements": str(terms.num_elements),
        "mode": "bypass" if terms.bypass else "decoupled",
        "loss_mode": config.actor.loss_mode,
        "clip_ratio": json.dumps(config.actor.clip_ratio),
    }
    # safetensors needs tensors that share no memory; in bypass mode, old log-probs are the rollout's.
    layout = torch.contiguous_format
    tensors = {name: value.clone(memory_format=layout) for name, value in terms.tensors().items()}
    try:
        folder.mkdir(exist_ok=True)
        save_file(tensors, partial, metadata)
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise BackendError(
            f"{path} cannot be written ({error}); free space, or set trainer.dump_log_probs=false and continue with "
            "--resume"
        ) from error


def load(path: Path) -> LoggedTerms:
    """Read the file of a step.

    Raises:
        ConfigError: the file is damaged, or has another format.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            version = metadata.get("format_version")
            if version != FORMAT_VERSION:
                raise ConfigError(
                    f"{path} has format_version {version}, and this flowcorr reads {FORMAT_VERSION}; "
                    "use the flowcorr that wrote it"
                )
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
        return LoggedTerms(
            num_elements=int(metadata["num_elements"]), bypass=metadata["mode"] == "bypass", **tensors
        )
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error}); delete it, and go on without this step") from error


def files(run_dir: Path) -> dict[int, Path]:
    """The files of a run by training step, in ascending order."""
    found = ((_step_of(path), path) for path in (run_dir / FOLDER).glob(_STEP.replace("{:06d}", "*")))
    return dict(sorted((step, path) for step, path in found if step is not None))


def discard_after(run_dir: Path, step: int) -> None:
    """Delete the files of later steps; training from `step` will write them again."""
    for later, path in files(run_dir).items():
        if later > step:
            path.unlink()


def _step_of(path: Path) -> int | None:
    number = path.stem.partition("_")[2]
    return int(number) if number.isdecimal() else None
