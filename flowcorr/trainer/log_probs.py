"""What the losses of a training step were computed from, as one file a step: `log_probs/step_000123.safetensors`.

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

from flowcorr.algorithm.apply import exact_kl
from flowcorr.config.schema import Config
from flowcorr.errors import BackendError, ConfigError
from flowcorr.records import ActorBatch, PolicyStep

FOLDER = "log_probs"
FORMAT_VERSION = "1"
_STEP, _PARTIAL = "step_{:06d}.safetensors", ".partial_"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoggedTerms:
    """The terms of a training step, `[B, T]` where nothing else is said.

    Log-probs are in nats per latent element, and so are the exact KLs, which are None where no step means were
    computed.

    Attributes:
        rollout_log_probs: under the policy that sampled.
        old_log_probs: of the PPO ratio: recomputed in decoupled mode, the rollout's in bypass.
        current_log_probs: as the update scored the term last, the value that its loss used: with one epoch that of
            its mini-batch, so that in decoupled mode the first mini-batch's equal the old ones where those are of the
            current weights (`actor.old_policy`). NaN where not finite.
        advantages: `[B]`, as they were before anything was rejected.
        rewards: `[B]`, as `reward/mean` averages them.
        timesteps, sigmas, sigmas_next, step_indices: of the steps, as in `Rollout`.
        stds: full standard deviations of the steps.
        group_ids, policy_versions: `[B]`, as in `Rollout`.
        old_rollout_kl: exact KL of the old from the rollout policy.
        current_old_kl: of the current from the old policy.
        current_rollout_kl: of the current from the rollout policy.
        clip_centers: what the loss took log-ratios relative to, or None for 0.
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
    clip_centers: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that there are, by name."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    @staticmethod
    def concatenate(parts: Sequence[LoggedTerms]) -> LoggedTerms:
        """The samples of all parts, in order; every part must hold the same optional tensors."""
        columns = [part.tensors() for part in parts]
        whole: dict[str, Any] = {name: torch.cat([part[name] for part in columns]) for name in columns[0]}
        return replace(parts[0], **whole)


class TermRecorder:
    """Follows an update, as its `record`; where a term is scored again, the later score takes the place of the earlier.

    Args:
        batch: what the update is given.
        advantages: `[B]`, before anything was rejected.
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
                self._put(name, part, exact_kl(policy.mean.detach(), means, policy.std))
        if part.clip_centers is not None:
            self._put("clip_centers", part, part.clip_centers)

    def terms(self) -> LoggedTerms:
        """All terms of the batch, on the CPU."""
        batch, rollout = self._batch, self._batch.rollout
        assert batch.old_log_probs is not None
        seen = dict(self._seen)
        if batch.old_means is not None and rollout.means is not None:
            seen["old_rollout_kl"] = exact_kl(batch.old_means, rollout.means, seen["stds"])
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
    """Write the terms of a step into `folder`, so that their file is whole or absent.

    Its metadata, all text: `format_version`, `step`, `num_elements` (`D`), `mode` (`decoupled`: old log-probs were
    recomputed, `bypass`: they are the rollout's), `loss_mode` and, as JSON, `clip_ratio`.

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
    # Each in memory of its own, as a file needs it: in bypass mode, old log-probs are the rollout's.
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
        ConfigError: it is damaged, or of another format.
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
    """The files of a run by training step, in order."""
    found = ((_step_of(path), path) for path in (run_dir / FOLDER).glob(_STEP.replace("{:06d}", "*")))
    return dict(sorted((step, path) for step, path in found if step is not None))


def discard_after(run_dir: Path, step: int) -> None:
    """Delete the files of later steps, which training from `step` will write anew."""
    for later, path in files(run_dir).items():
        if later > step:
            path.unlink()


def _step_of(path: Path) -> int | None:
    number = path.stem.partition("_")[2]
    return int(number) if number.isdecimal() else None
