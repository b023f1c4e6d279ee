"""The presets as class methods, as verl documents them: their arguments are the thresholds of `PRESETS`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from flowcorr.correction.bounds import AUTO, Band, Threshold, parse_band
from flowcorr.correction.presets import (
    CAP,
    GEOMETRIC_BAND,
    ICEPOP_BAND,
    K3_BOUND,
    RATIO_BAND,
    VETO_RATIO,
    Keys,
)

Cap = float | Band | str


class PresetMethods:
    """A method for each preset and its aliases.

    Of their arguments, `threshold` and `is_threshold` are of the weights, `rs_threshold` and `veto_threshold` of the
    rejection. `threshold_lower` and `rs_threshold_lower` are the lower ends of bands.
    """

    if TYPE_CHECKING:

        @classmethod
        def from_preset(cls, name: str, **overrides: Any) -> Self: ...

    @classmethod
    def decoupled_token_is(cls, threshold: Cap = CAP) -> Self:
        return cls.from_preset("decoupled_token_is", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_seq_is(cls, threshold: Cap = CAP) -> Self:
        return cls.from_preset("decoupled_seq_is", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_seq_is_rs(
        cls,
        is_threshold: Cap = CAP,
        rs_threshold: Threshold = RATIO_BAND,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = None,
    ) -> Self:
        rejection = _band(rs_threshold, rs_threshold_lower, veto_threshold)
        return cls.from_preset("decoupled_seq_is_rs", rollout_is_threshold=is_threshold, **rejection)

    @classmethod
    def decoupled_geo_rs(
        cls,
        rs_threshold: Threshold = GEOMETRIC_BAND,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = None,
    ) -> Self:
        return cls.from_preset("decoupled_geo_rs", **_band(rs_threshold, rs_threshold_lower, veto_threshold))

    @classmethod
    def geo_rs(
        cls,
        rs_threshold: Threshold = GEOMETRIC_BAND,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = VETO_RATIO,
    ) -> Self:
        return cls.from_preset("geo_rs", **_band(rs_threshold, rs_threshold_lower, veto_threshold))

    @classmethod
    def decoupled_geo_rs_seq_tis(
        cls,
        is_threshold: Cap = CAP,
        rs_threshold: Threshold = GEOMETRIC_BAND,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = None,
    ) -> Self:
        rejection = _band(rs_threshold, rs_threshold_lower, veto_threshold)
        return cls.from_preset("decoupled_geo_rs_seq_tis", rollout_is_threshold=is_threshold, **rejection)

    @classmethod
    def geo_rs_seq_tis(
        cls,
        is_threshold: Cap = CAP,
        rs_threshold: Threshold = GEOMETRIC_BAND,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = VETO_RATIO,
    ) -> Self:
        rejection = _band(rs_threshold, rs_threshold_lower, veto_threshold)
        return cls.from_preset("geo_rs_seq_tis", rollout_is_threshold=is_threshold, **rejection)

    @classmethod
    def decoupled_geo_rs_token_tis(
        cls,
        is_threshold: Cap = CAP,
        rs_threshold: Threshold = GEOMETRIC_BAND,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = None,
    ) -> Self:
        rejection = _band(rs_threshold, rs_threshold_lower, veto_threshold)
        return cls.from_preset("decoupled_geo_rs_token_tis", rollout_is_threshold=is_threshold, **rejection)

    @classmethod
    def decoupled_k3_rs(cls, rs_threshold: Threshold = K3_BOUND) -> Self:
        return cls.from_preset("decoupled_k3_rs", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_k3_rs_seq_tis(cls, is_threshold: Cap = CAP, rs_threshold: Threshold = K3_BOUND) -> Self:
        return cls.from_preset(
            "decoupled_k3_rs_seq_tis", rollout_is_threshold=is_threshold, rollout_rs_threshold=rs_threshold
        )

    @classmethod
    def decoupled_k3_rs_token_tis(cls, is_threshold: Cap = CAP, rs_threshold: Threshold = K3_BOUND) -> Self:
        return cls.from_preset(
            "decoupled_k3_rs_token_tis", rollout_is_threshold=is_threshold, rollout_rs_threshold=rs_threshold
        )

    @classmethod
    def decoupled_token_icepop(
        cls, threshold: float = ICEPOP_BAND[1], threshold_lower: float = ICEPOP_BAND[0]
    ) -> Self:
        return cls.from_preset("decoupled_token_icepop", rollout_is_threshold=(threshold_lower, threshold))

    @classmethod
    def bypass_ppo_clip(cls) -> Self:
        return cls.from_preset("bypass_ppo_clip")

    @classmethod
    def bypass_ppo_clip_geo_rs(
        cls,
        rs_threshold: Threshold = GEOMETRIC_BAND,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = None,
    ) -> Self:
        rejection = _band(rs_threshold, rs_threshold_lower, veto_threshold)
        return cls.from_preset("bypass_ppo_clip_geo_rs", **rejection)

    @classmethod
    def bypass_ppo_clip_k3_rs(cls, rs_threshold: Threshold = K3_BOUND) -> Self:
        return cls.from_preset("bypass_ppo_clip_k3_rs", rollout_rs_threshold=rs_threshold)

    @classmethod
    def bypass_ppo_clip_auto_rs(cls, rs_threshold: Threshold = AUTO) -> Self:
        return cls.from_preset("bypass_ppo_clip_auto_rs", rollout_rs_threshold=rs_threshold)

    @classmethod
    def bypass_pg_is(cls, threshold: Cap = CAP) -> Self:
        return cls.from_preset("bypass_pg_is", rollout_is_threshold=threshold)

    @classmethod
    def bypass_pg_token_icepop(
        cls, threshold: float = ICEPOP_BAND[1], threshold_lower: float = ICEPOP_BAND[0]
    ) -> Self:
        return cls.from_preset("bypass_pg_token_icepop", rollout_is_threshold=(threshold_lower, threshold))

    @classmethod
    def bypass_pg_geo_rs(
        cls,
        rs_threshold: Threshold = GEOMETRIC_BAND,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = None,
    ) -> Self:
        return cls.from_preset("bypass_pg_geo_rs", **_band(rs_threshold, rs_threshold_lower, veto_threshold))

    @classmethod
    def pg_rs(
        cls,
        rs_threshold: Threshold = GEOMETRIC_BAND,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = VETO_RATIO,
    ) -> Self:
        return cls.from_preset("pg_rs", **_band(rs_threshold, rs_threshold_lower, veto_threshold))

    @classmethod
    def bypass_pg_geo_rs_seq_tis(
        cls,
        is_threshold: Cap = CAP,
        rs_threshold: Threshold = GEOMETRIC_BAND,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = None,
    ) -> Self:
        rejection = _band(rs_threshold, rs_threshold_lower, veto_threshold)
        return cls.from_preset("bypass_pg_geo_rs_seq_tis", rollout_is_threshold=is_threshold, **rejection)

    @classmethod
    def bypass_pg_geo_rs_token_tis(
        cls,
        is_threshold: Cap = CAP,
        rs_threshold: Threshold = GEOMETRIC_BAND,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = None,
    ) -> Self:
        rejection = _band(rs_threshold, rs_threshold_lower, veto_threshold)
        return cls.from_preset("bypass_pg_geo_rs_token_tis", rollout_is_threshold=is_threshold, **rejection)

    @classmethod
    def disabled(cls) -> Self:
        return cls.from_preset("disabled")

    token_is = token_tis = decoupled_token_is
    seq_is = decoupled_seq_is
    seq_is_rs = seq_mis = decoupled_seq_is_rs
    geo_mis = geo_rs
    ppo_is_bypass = bypass_ppo_clip
    pg_is = pure_is = bypass_pg_is
    bypass_pg_rs = pg_rs


def _band(threshold: Threshold, lower: float | None, veto: float | None) -> Keys:
    """The keys of a rejection; `lower` takes the place of the band's lower end."""
    if lower is not None:
        band = parse_band(threshold, "rollout_rs_threshold")
        threshold = (lower, band[1] if isinstance(band, tuple) else band)
    return {"rollout_rs_threshold": threshold, "rollout_token_veto_threshold": veto}
