"""The effect of a preset on measured terms, corrected as in training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowcorr.algorithm import MeasuredBands
from flowcorr.algorithm.apply import correct, sees_windows
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.instruments.setting import Setting
from flowcorr.metrics import Metrics
from flowcorr.records import Terms


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corrected:
    """Terms after a correction.

    Attributes:
        terms: as the loss gets them, of windows `[S, T]` or of single steps `[S * T]`.
        judged, keep: `[S, T]` bool, the terms that the correction got and those that it kept.
        metrics: `rollout_corr/*`.
    """

    terms: Terms
    judged: Tensor
    keep: Tensor
    metrics: Metrics

    def counts(self) -> dict[str, int]:
        """Terms and samples that were judged, and those rejected; a sample counts if one of its terms does."""
        rejected = self.judged & ~self.keep
        return {
            "terms": int(self.judged.sum()),
            "samples": int(self.judged.any(1).sum()),
            "rejected_terms": int(rejected.sum()),
            "rejected_samples": int(rejected.any(1).sum()),
        }


def corrected(
    terms: Terms,
    setting: Setting,
    correction: RolloutCorrectionConfig,
    *,
    steps: Iterable[slice] = (slice(None),),
    group_ids: Tensor | None = None,
    before_update: Tensor | None = None,
    bands: MeasuredBands | None = None,
) -> Corrected:
    """Correct terms `[S, T]`: all at once, or step by step where the correction looks at a training step as a whole.

    Args:
        terms: of one or more training steps.
        setting: the run's.
        correction: the correction that is tried, in decoupled or bypass mode, or off.
        steps: the samples of each training step.
        group_ids: `[S]`; no two training steps share a group. `rejection_groups` reads them.
        before_update: `[S, T]` bool, terms that were scored before their training step's first update, from which
            alone bands are measured; None for all.
        bands: in bypass mode, of the training steps before, for `auto` thresholds; they learn from these steps.
    """
    bypass = correction.mode == "bypass"
    single_steps = bypass and not sees_windows(setting.actor, correction)
    in_turn = correction.needs_batch or (correction.rollout_is_batch_normalize and not bypass)
    parts, metrics = [], []
    for rows in steps if in_turn else [slice(None)]:
        part = terms.select(rows)
        part = part.per_term() if single_steps else part
        after, measured = correct(
            part,
            correction,
            group_ids=None if group_ids is None or bypass else group_ids[rows],
            actor_config=setting.actor if bypass else None,
            num_steps=setting.num_steps,
            noise=None if bands is None else bands.noise,
        )
        if bypass and correction.needs_batch and bands is not None:
            assert terms.num_elements is not None, "auto thresholds and z-scores need the size of the latents"
            judged = replace(part, log_prob=part.log_prob.detach())
            if before_update is not None:
                measured_by = before_update[rows].reshape(part.log_prob.shape)
                judged = replace(
                    judged, keep=measured_by if part.keep is None else measured_by & part.keep.bool()
                )
            measured = measured.merge(bands.observe(correction, [judged], terms.num_elements))
        parts.append(after)
        metrics.append(measured)
    whole, everywhere = Terms.concatenate(parts), torch.ones_like(terms.log_prob, dtype=torch.bool)
    return Corrected(
        terms=whole,
        judged=everywhere if terms.keep is None else terms.keep.bool(),
        keep=everywhere if whole.keep is None else whole.keep.view(terms.log_prob.shape),
        metrics=Metrics.merged(metrics),
    )
