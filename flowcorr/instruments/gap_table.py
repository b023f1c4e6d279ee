"""The gap between a rollout and the trainer's scores of it, compared with the clip range, and its table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from flowcorr.algorithm.noise_floor import ratio_distance
from flowcorr.algorithm.score_drift import score_drift
from flowcorr.health.setting import Setting
from flowcorr.instruments.dumped_loss import ratio_limit
from flowcorr.instruments.faults import delta
from flowcorr.instruments.gap_words import two_digits
from flowcorr.instruments.outcome import Column, Table
from flowcorr.losses import clip_by_term, resolve_loss
from flowcorr.metrics import Metrics
from flowcorr.records import Terms

QUANTILES = (0.5, 0.9, 0.99)  # of |delta log p|, that the table shows
ABS_DELTA = tuple(f"abs_delta_{100 * level:.0f}" for level in QUANTILES)
# Bypass, random shifts: clip ranges of .5, 1, 2 and more times the .99 quantile give a bias of 15, 2.3 and 1.8 % (1.8
# without a clip). The rest of the range is left to learning, which a clip at 2 would leave none.
CLIP_HEADROOM = 4.0
CLIP_QUANTILE = 0.99


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gap:
    """A gap, and the ratios that the loss would start with in bypass mode.

    Attributes:
        terms: `[B, T]`; `old_log_prob` is the trainer's, and `old_rollout_kl` its exact KL from the rollout policy.
        setting: of the run, with which it goes on.
        distance: `[B, T]`, `|ratio - 1|`.
        limit: `[B, T]`, how far the loss lets each ratio be from 1; NaN where no bound is known.
    """

    terms: Terms
    setting: Setting
    distance: Tensor
    limit: Tensor

    @classmethod
    def of(cls, terms: Terms, setting: Setting) -> Self:
        """The gap of terms under one loss."""
        actor, log_ratio = setting.actor, delta(terms)
        known, limit = torch.ones_like(log_ratio), ratio_limit(actor)
        as_used = resolve_loss(actor).log_ratio(log_ratio, terms.old_rollout_kl, terms.std)
        return cls(
            terms=terms,
            setting=setting,
            distance=ratio_distance(as_used, known.bool(), actor.ratio_level),
            limit=known * (math.nan if limit is None else clip_by_term(limit, terms.step_index)),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """The gap of all parts in order; the run goes on as the last one."""
        return cls(
            terms=Terms.concatenate([part.terms for part in parts]),
            setting=parts[-1].setting,
            distance=torch.cat([part.distance for part in parts]),
            limit=torch.cat([part.limit for part in parts]),
        )

    def by_step(self) -> Iterator[tuple[int, Tensor]]:
        """Each step of the schedule, and its terms `[B, T]` bool."""
        for index in self.terms.step_index.unique().tolist():
            yield index, self.terms.step_index == index

    def outside(self, where: Tensor | None = None) -> float | None:
        """Share of ratios outside the clip range, over the terms in a mask or all; None if no range is known."""
        known = ~self.limit.isnan() if where is None else where & ~self.limit.isnan()
        return float((self.distance > self.limit)[known].double().mean()) if known.any() else None

    def clip_needed(self, where: Tensor) -> float:
        """The clip range that leaves room for learning above the noise of the terms in a mask."""
        return clip_needed(self.distance[where])


def clip_needed(distance: Tensor) -> float:
    """The clip range that leaves learning its room above the noise, from `|ratio - 1|` before any update."""
    return CLIP_HEADROOM * float(torch.quantile(distance.flatten(), CLIP_QUANTILE))


def step_table(gap: Gap) -> Table:
    """The gap at each step of the schedule, before any update."""
    log_ratio, kl, sigmas, rows = delta(gap.terms), gap.terms.old_rollout_kl, gap.terms.sigma, []
    assert kl is not None, "a gap has exact KLs"
    assert sigmas is not None, "a gap has noise levels"
    drifts = Metrics(score_drift(gap.terms)).compute()
    for index, here in gap.by_step():
        sigma = float(sigmas[here][0])
        rows.append(
            (
                index,
                sigma if math.isfinite(sigma) else None,
                int(here.sum()),
                float(log_ratio[here].mean()),
                *torch.quantile(log_ratio[here].abs(), log_ratio.new_tensor(QUANTILES)).tolist(),
                float(kl[here].mean()),
                gap.outside(here),
                gap.clip_needed(here),
                *([drifts.get(f"rollout_corr/step_{index}/score_drift")] if drifts else []),
            )
        )
    size, num_elements = "{:.1e}".format, gap.terms.num_elements
    nats = Column(name="exact_kl", heading="exact KL", show=size)
    if num_elements is not None:
        nats = Column(name="exact_kl", heading="joint nats", show=lambda kl: two_digits(num_elements * kl))
    return Table(
        name="steps",
        title="By step",
        note="delta log p, in nats a latent element"
        + "; joint nats of a step" * (num_elements is not None)
        + "; score drift: share of the squared gradient that follows from the gap alone" * bool(drifts),
        columns=[
            Column(name="step_index", heading="step", words=True),
            Column(name="sigma", show="{:.3f}".format),
            Column(name="num_terms", heading="terms"),
            Column(name="mean_delta", heading="mean", show=size),
            *(
                Column(name=name, heading=f"|delta| {level:.0%}", show=size)
                for name, level in zip(ABS_DELTA, QUANTILES, strict=True)
            ),
            nats,
            Column(name="outside_clip", heading="outside clip", show="{:.0%}".format),
            Column(name="clip_needed", heading="clip needed", show=size),
            *([Column(name="score_drift", heading="score drift", show="{:.2%}".format)] if drifts else []),
        ],
        rows=rows,
    )
