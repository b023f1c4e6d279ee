"""The numbers of a gap that advice is from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from flowcorr.health.setting import Setting, limit_at
from flowcorr.instruments.audit.explained import Beyond
from flowcorr.instruments.audit.tables import exact_ess, joint_nats, outliers
from flowcorr.instruments.dumped_loss import ratio_limit
from flowcorr.instruments.gap_table import Gap
from flowcorr.losses import Limit, resolve_loss

# Uncorrected bias, behind, is 28 sqrt(x / 0.1) % of the gradient: below 3 % at x = 1e-3, for any shift there is.
NEGLIGIBLE_NATS = 5e-4
MAX_OUTLIERS = 0.05  # more are no outliers but the distribution; rejecting them hides its cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The numbers of a gap that the rules look at, with the setting of its run.

    Attributes:
        setting: with which the run goes on; of another trainer's correction, it holds the mode alone.
        num_steps: SDE steps of the window.
        num_elements: `D`.
        joint_nats: mean over samples of the exact KL of the whole window, `D` times its sum over steps.
        exact_ess: share of samples that exact weights keep.
        outliers: share of terms that `step_z` would reject.
        outlier_band: largest distance of a ratio from 1 that is no outlier at any step.
        clip_by_step: clip range that bypass needs, by step index.
        stale_nats: joint nats of older weights alone, without the engine's part.
        recompute_share: of the time of rollout, recompute and update; None if it was not timed.
        older_weights: whether the weights that sample are older than those that learn; None where nothing tells it.
        beyond: the step whose gap is farthest beyond what the run's precision explains, if there is one.
    """

    setting: Setting
    num_steps: int
    num_elements: int
    joint_nats: float
    exact_ess: float
    outliers: float
    outlier_band: float
    clip_by_step: Mapping[int, float]
    stale_nats: float = 0.0
    recompute_share: float | None = None
    older_weights: bool | None = None
    beyond: Beyond | None = None

    @classmethod
    def of(
        cls,
        gap: Gap,
        *,
        stale_nats: float = 0.0,
        recompute_share: float | None = None,
        older_weights: bool | None = None,
        beyond: Beyond | None = None,
    ) -> Self | None:
        """The numbers of a gap; None without `num_elements`, without which it has no size."""
        terms, size = gap.terms, gap.terms.num_elements
        if size is None:
            return None
        share, band = outliers(terms)
        needed = {index: gap.clip_needed(here) for index, here in gap.by_step()}
        if gap.setting.actor.ratio_level != "step":  # the window has one ratio
            needed = dict.fromkeys(needed, max(needed.values()))
        return cls(
            setting=gap.setting,
            num_steps=terms.old_log_prob.shape[1],
            num_elements=size,
            joint_nats=joint_nats(terms),
            exact_ess=exact_ess(terms),
            outliers=share,
            outlier_band=band,
            clip_by_step=needed,
            stale_nats=stale_nats,
            recompute_share=recompute_share,
            older_weights=older_weights,
            beyond=beyond,
        )

    @property
    def limit(self) -> Limit | None:
        """The key of `actor` that bounds the ratio; None if the loss has none."""
        return resolve_loss(self.setting.actor).limit

    @property
    def clip_limit(self) -> float | Sequence[float] | None:
        """Largest distance of a ratio from 1, a number or one by step index; None if the loss bounds none."""
        return ratio_limit(self.setting.actor)

    @property
    def clip_needed(self) -> float:
        """The largest clip range that bypass needs at any step."""
        return max(self.clip_by_step.values())

    @property
    def r(self) -> float:
        """Root mean square gap of the step means, in stds a latent element."""
        return math.sqrt(2 * self.joint_nats / (self.num_steps * self.num_elements))

    @property
    def negligible(self) -> bool:
        return self.joint_nats <= NEGLIGIBLE_NATS

    @property
    def has_headroom(self) -> bool:
        """Whether the clip range leaves room above bypass's noise; never with stale weights, around which it clips."""
        if self.older_weights:
            return False
        if self.clip_limit is None:
            return self.negligible
        return all(needed <= limit_at(self.clip_limit, index) for index, needed in self.clip_by_step.items())

    @property
    def systematic(self) -> bool:
        """Whether most of the gap points along the learned change of weights; rounding points anywhere."""
        return self.stale_nats > self.joint_nats / 2

    @property
    def unexplained(self) -> bool:
        """Whether a fault is likelier than any rounding and staleness that the run states."""
        return self.beyond is not None and not (self.negligible or self.systematic or self.if_newest)

    @property
    def if_newest(self) -> bool:
        """Whether a gap beyond precision is a fault only if no older weights sampled, which nothing tells."""
        return self.older_weights is None and self.beyond is not None and self.beyond.like_staleness

    @property
    def has_outliers(self) -> bool:
        return not self.negligible and 0 < self.outliers <= MAX_OUTLIERS
