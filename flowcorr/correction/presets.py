"""The named corrections: each a class method with arguments, mixed into `RolloutCorrectionConfig`.

Source of most: Liu, Li et al., "When Speed Kills Stability", https://richardli.xyz/rl-collapse; IcePop:
Ling Team, "Every Step Evolves", arXiv:2510.18855.
"""

from __future__ import annotations

from typing import Any, Self

from flowcorr.correction.bounds import Band, Threshold, parse_band

GEO_BAND: Band = (0.999, 1.001)
SEQ_BAND: Band = (0.5, 2.0)
ICEPOP_LOWER, ICEPOP_UPPER = 0.5, 5.0
IS_CAP = 2.0
K3_BOUND = 0.01
VETO = 1e-4

PRESETS: dict[str, str] = {
    "decoupled_token_is": "each step's ratio as its weight, capped at 2 (token TIS)",
    "token_is": "= decoupled_token_is",
    "token_tis": "= decoupled_token_is",
    "decoupled_seq_is": "the trajectory's ratio as its weight, capped at 2 (sequence TIS)",
    "seq_is": "= decoupled_seq_is",
    "decoupled_seq_is_rs": "sequence TIS, and trajectories with a ratio outside 0.5..2 are rejected",
    "seq_is_rs": "= decoupled_seq_is_rs",
    "seq_mis": "= decoupled_seq_is_rs",
    "decoupled_geo_rs": "no weights; rejects trajectories with a geometric mean ratio outside 0.999..1.001",
    "geo_rs": "decoupled_geo_rs with a veto on steps whose ratio is below 1e-4",
    "geo_mis": "= geo_rs",
    "decoupled_geo_rs_seq_tis": "decoupled_geo_rs with sequence TIS",
    "decoupled_geo_rs_token_tis": "decoupled_geo_rs with token TIS",
    "decoupled_k3_rs": "no weights; rejects trajectories with a mean k3 divergence above 0.01",
    "decoupled_k3_rs_seq_tis": "decoupled_k3_rs with sequence TIS",
    "decoupled_k3_rs_token_tis": "decoupled_k3_rs with token TIS",
    "decoupled_token_icepop": "each step's ratio as its weight, zero outside 0.5..5 (IcePop)",
    "bypass_ppo_clip": "no old log-probs: PPO clips the ratio to the rollout policy",
    "ppo_is_bypass": "= bypass_ppo_clip",
    "bypass_ppo_clip_geo_rs": "bypass_ppo_clip, and steps with a ratio outside 0.999..1.001 are rejected",
    "bypass_ppo_clip_k3_rs": "bypass_ppo_clip, and steps with a k3 divergence above 0.01 are rejected",
    "bypass_pg_is": "no old log-probs: REINFORCE with the trajectory's ratio as its weight, capped at 2",
    "pg_is": "= bypass_pg_is",
    "pure_is": "= bypass_pg_is",
    "bypass_pg_token_icepop": "REINFORCE with each step's ratio as its weight, zero outside 0.5..5",
    "bypass_pg_geo_rs": "REINFORCE without weights; rejects trajectories as decoupled_geo_rs does",
    "pg_rs": "bypass_pg_geo_rs with a veto on steps whose ratio is below 1e-4",
    "bypass_pg_geo_rs_seq_tis": "bypass_pg_geo_rs with sequence TIS",
    "bypass_pg_geo_rs_token_tis": "bypass_pg_geo_rs with token TIS",
    "disabled": "measures the gap and corrects nothing",
}


class PresetMethods:
    """Class methods that build the presets; thresholds are their arguments.

    `rs_threshold` is a band of ratios (`"0.999_1.001"`, a pair, or one number `u` for `[1/u, u]`);
    `rs_threshold_lower` replaces its lower bound.
    """

    @classmethod
    def decoupled_token_is(cls, threshold: Threshold = IS_CAP) -> Self:
        return cls(**_weights("token", threshold))

    token_is = token_tis = decoupled_token_is

    @classmethod
    def decoupled_seq_is(cls, threshold: Threshold = IS_CAP) -> Self:
        return cls(**_weights("sequence", threshold))

    seq_is = decoupled_seq_is

    @classmethod
    def decoupled_seq_is_rs(
        cls,
        is_threshold: Threshold = IS_CAP,
        rs_threshold: Threshold = SEQ_BAND,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = None,
    ) -> Self:
        rejection = _ratios("seq_sum_k1", rs_threshold, rs_threshold_lower, veto_threshold)
        return cls(**_weights("sequence", is_threshold), **rejection)

    seq_is_rs = seq_mis = decoupled_seq_is_rs

    @classmethod
    def decoupled_geo_rs(
        cls,
        rs_threshold: Threshold = GEO_BAND,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = None,
    ) -> Self:
        return cls(**_ratios("seq_mean_k1", rs_threshold, rs_threshold_lower, veto_threshold))

    @classmethod
    def geo_rs(
        cls,
        rs_threshold: Threshold = GEO_BAND,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = VETO,
    ) -> Self:
        return cls(**_ratios("seq_mean_k1", rs_threshold, rs_threshold_lower, veto_threshold))

    geo_mis = geo_rs

    @classmethod
    def decoupled_geo_rs_seq_tis(
        cls,
        is_threshold: Threshold = IS_CAP,
        rs_threshold: Threshold = GEO_BAND,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = None,
    ) -> Self:
        rejection = _ratios("seq_mean_k1", rs_threshold, rs_threshold_lower, veto_threshold)
        return cls(**_weights("sequence", is_threshold), **rejection)

    @classmethod
    def decoupled_geo_rs_token_tis(
        cls,
        is_threshold: Threshold = IS_CAP,
        rs_threshold: Threshold = GEO_BAND,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = None,
    ) -> Self:
        rejection = _ratios("seq_mean_k1", rs_threshold, rs_threshold_lower, veto_threshold)
        return cls(**_weights("token", is_threshold), **rejection)

    @classmethod
    def decoupled_k3_rs(cls, rs_threshold: float = K3_BOUND) -> Self:
        return cls(**_divergence(rs_threshold))

    @classmethod
    def decoupled_k3_rs_seq_tis(
        cls, is_threshold: Threshold = IS_CAP, rs_threshold: float = K3_BOUND
    ) -> Self:
        return cls(**_weights("sequence", is_threshold), **_divergence(rs_threshold))

    @classmethod
    def decoupled_k3_rs_token_tis(
        cls, is_threshold: Threshold = IS_CAP, rs_threshold: float = K3_BOUND
    ) -> Self:
        return cls(**_weights("token", is_threshold), **_divergence(rs_threshold))

    @classmethod
    def decoupled_token_icepop(
        cls, threshold: float = ICEPOP_UPPER, threshold_lower: float = ICEPOP_LOWER
    ) -> Self:
        return cls(**_weights("token", (threshold_lower, threshold)))

    @classmethod
    def bypass_ppo_clip(cls) -> Self:
        return cls(**_BYPASS)

    ppo_is_bypass = bypass_ppo_clip

    @classmethod
    def bypass_ppo_clip_geo_rs(
        cls,
        rs_threshold: Threshold = GEO_BAND,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = None,
    ) -> Self:
        return cls(**_BYPASS, **_ratios("seq_mean_k1", rs_threshold, rs_threshold_lower, veto_threshold))

    @classmethod
    def bypass_ppo_clip_k3_rs(cls, rs_threshold: float = K3_BOUND) -> Self:
        return cls(**_BYPASS, **_divergence(rs_threshold))

    @classmethod
    def bypass_pg_is(cls, threshold: Threshold = IS_CAP) -> Self:
        return cls(**_REINFORCE, **_TRAJECTORY, **_weights("sequence", threshold))

    pg_is = pure_is = bypass_pg_is

    @classmethod
    def bypass_pg_token_icepop(
        cls, threshold: float = ICEPOP_UPPER, threshold_lower: float = ICEPOP_LOWER
    ) -> Self:
        return cls(**_REINFORCE, **_weights("token", (threshold_lower, threshold)))

    @classmethod
    def bypass_pg_geo_rs(
        cls,
        rs_threshold: Threshold = GEO_BAND,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = None,
    ) -> Self:
        rejection = _ratios("seq_mean_k1", rs_threshold, rs_threshold_lower, veto_threshold)
        return cls(**_REINFORCE, **_TRAJECTORY, **rejection)

    @classmethod
    def pg_rs(
        cls,
        rs_threshold: Threshold = GEO_BAND,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = VETO,
    ) -> Self:
        rejection = _ratios("seq_mean_k1", rs_threshold, rs_threshold_lower, veto_threshold)
        return cls(**_REINFORCE, **_TRAJECTORY, **rejection)

    @classmethod
    def bypass_pg_geo_rs_seq_tis(
        cls,
        is_threshold: Threshold = IS_CAP,
        rs_threshold: Threshold = GEO_BAND,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = None,
    ) -> Self:
        rejection = _ratios("seq_mean_k1", rs_threshold, rs_threshold_lower, veto_threshold)
        return cls(**_REINFORCE, **_TRAJECTORY, **_weights("sequence", is_threshold), **rejection)

    @classmethod
    def bypass_pg_geo_rs_token_tis(
        cls,
        is_threshold: Threshold = IS_CAP,
        rs_threshold: Threshold = GEO_BAND,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = None,
    ) -> Self:
        rejection = _ratios("seq_mean_k1", rs_threshold, rs_threshold_lower, veto_threshold)
        return cls(**_REINFORCE, **_TRAJECTORY, **_weights("token", is_threshold), **rejection)

    @classmethod
    def disabled(cls) -> Self:
        return cls()


_BYPASS: dict[str, Any] = {"bypass_mode": True}
_REINFORCE: dict[str, Any] = {"bypass_mode": True, "loss_type": "reinforce"}
_TRAJECTORY: dict[str, Any] = {"bypass_scope": "trajectory"}


def _weights(level: str, threshold: Threshold) -> dict[str, Any]:
    return {"rollout_is": level, "rollout_is_threshold": threshold}


def _ratios(mode: str, upper: Threshold, lower: float | None, veto: float | None) -> dict[str, Any]:
    if lower is not None:
        band = parse_band(upper, "rollout_rs_threshold")
        upper = (lower, band[1] if isinstance(band, tuple) else band)
    return {"rollout_rs": mode, "rollout_rs_threshold": upper, "rollout_token_veto_threshold": veto}


def _divergence(bound: float) -> dict[str, Any]:
    return {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": bound}
