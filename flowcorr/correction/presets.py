"""The presets: named corrections, one row each.

Source of most: Liu, Li et al., "When Speed Kills Stability", https://richardli.xyz/rl-collapse; IcePop:
Ling Team, "Every Step Evolves", arXiv:2510.18855.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowcorr.correction.bounds import AUTO, SECTION
from flowcorr.errors import ConfigError, unknown_choice

Keys = dict[str, Any]

CAP, ICEPOP_BAND = 2.0, (0.5, 5.0)  # of weights
RATIO_BAND, GEOMETRIC_BAND, K3_BOUND, VETO_RATIO = (0.5, 2.0), (0.999, 1.001), 0.01, 1e-4

TOKEN: Keys = {"rollout_is": "token", "rollout_is_threshold": CAP}
SEQUENCE: Keys = {"rollout_is": "sequence", "rollout_is_threshold": CAP}
ICEPOP: Keys = {"rollout_is": "token", "rollout_is_threshold": ICEPOP_BAND}
SEQ_RS: Keys = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": RATIO_BAND}
GEO_RS: Keys = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": GEOMETRIC_BAND}
K3_RS: Keys = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": K3_BOUND}
AUTO_RS: Keys = {"rollout_rs": "token_k1", "rollout_rs_threshold": AUTO}
VETO: Keys = {"rollout_token_veto_threshold": VETO_RATIO}
BYPASS: Keys = {"bypass_mode": True}
REINFORCE: Keys = {"bypass_mode": True, "loss_type": "reinforce"}
TRAJECTORY: Keys = {"bypass_scope": "trajectory"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One named correction.

    Attributes:
        keys: the configuration keys that it sets.
        summary: its effect, in one line.
        aliases: its other names.
    """

    keys: Keys
    summary: str
    aliases: tuple[str, ...] = ()


PRESETS: dict[str, Preset] = {
    "decoupled_token_is": Preset(
        keys=TOKEN,
        summary="each step's ratio as its weight, capped at 2 (token TIS)",
        aliases=("token_is", "token_tis"),
    ),
    "decoupled_seq_is": Preset(
        keys=SEQUENCE,
        summary="the trajectory's ratio as its weight, capped at 2 (sequence TIS)",
        aliases=("seq_is",),
    ),
    "decoupled_seq_is_rs": Preset(
        keys=SEQUENCE | SEQ_RS,
        summary="sequence TIS, and trajectories with a ratio outside 0.5..2 are rejected",
        aliases=("seq_is_rs", "seq_mis"),
    ),
    "decoupled_geo_rs": Preset(
        keys=GEO_RS,
        summary="no weights; rejects trajectories with a geometric mean ratio outside 0.999..1.001",
    ),
    "geo_rs": Preset(
        keys=GEO_RS | VETO,
        summary="decoupled_geo_rs with a veto on steps whose ratio is below 1e-4",
        aliases=("geo_mis",),
    ),
    "decoupled_geo_rs_seq_tis": Preset(keys=SEQUENCE | GEO_RS, summary="decoupled_geo_rs with sequence TIS"),
    "geo_rs_seq_tis": Preset(keys=SEQUENCE | GEO_RS | VETO, summary="geo_rs with sequence TIS"),
    "decoupled_geo_rs_token_tis": Preset(keys=TOKEN | GEO_RS, summary="decoupled_geo_rs with token TIS"),
    "decoupled_k3_rs": Preset(
        keys=K3_RS, summary="no weights; rejects trajectories with a mean k3 divergence above 0.01"
    ),
    "decoupled_k3_rs_seq_tis": Preset(keys=SEQUENCE | K3_RS, summary="decoupled_k3_rs with sequence TIS"),
    "decoupled_k3_rs_token_tis": Preset(keys=TOKEN | K3_RS, summary="decoupled_k3_rs with token TIS"),
    "decoupled_token_icepop": Preset(
        keys=ICEPOP, summary="each step's ratio as its weight, zero outside 0.5..5 (IcePop)"
    ),
    "bypass_ppo_clip": Preset(
        keys=BYPASS,
        summary="no old log-probs: PPO clips the ratio to the rollout policy",
        aliases=("ppo_is_bypass",),
    ),
    "bypass_ppo_clip_geo_rs": Preset(
        keys=BYPASS | GEO_RS,
        summary="bypass_ppo_clip, and steps with a ratio outside 0.999..1.001 are rejected",
    ),
    "bypass_ppo_clip_k3_rs": Preset(
        keys=BYPASS | K3_RS,
        summary="bypass_ppo_clip, and steps with a k3 divergence above 0.01 are rejected",
    ),
    "bypass_ppo_clip_auto_rs": Preset(
        keys=BYPASS | AUTO_RS,
        summary="bypass_ppo_clip, and steps outside the band that earlier training steps measured are rejected",
    ),
    "bypass_pg_is": Preset(
        keys=REINFORCE | TRAJECTORY | SEQUENCE,
        summary="no old log-probs: REINFORCE with the trajectory's ratio as its weight, capped at 2",
        aliases=("pg_is", "pure_is"),
    ),
    "bypass_pg_token_icepop": Preset(
        keys=REINFORCE | ICEPOP,
        summary="REINFORCE with each step's ratio as its weight, zero outside 0.5..5",
    ),
    "bypass_pg_geo_rs": Preset(
        keys=REINFORCE | TRAJECTORY | GEO_RS,
        summary="REINFORCE without weights; rejects trajectories as decoupled_geo_rs does",
    ),
    "pg_rs": Preset(
        keys=REINFORCE | TRAJECTORY | GEO_RS | VETO,
        summary="bypass_pg_geo_rs with a veto on steps whose ratio is below 1e-4",
        aliases=("bypass_pg_rs",),
    ),
    "bypass_pg_geo_rs_seq_tis": Preset(
        keys=REINFORCE | TRAJECTORY | SEQUENCE | GEO_RS, summary="bypass_pg_geo_rs with sequence TIS"
    ),
    "bypass_pg_geo_rs_token_tis": Preset(
        keys=REINFORCE | TRAJECTORY | TOKEN | GEO_RS, summary="bypass_pg_geo_rs with token TIS"
    ),
    "disabled": Preset(keys={}, summary="measures the gap and corrects nothing"),
}
NAMES = {name: preset for key, preset in PRESETS.items() for name in (key, *preset.aliases)}


def find_preset(name: object) -> Preset:
    """The preset of that name or alias.

    Raises:
        ConfigError: there is none.
    """
    if name in ("bypass", "decoupled"):
        plain = "bypass_ppo_clip" if name == "bypass" else "disabled"
        raise ConfigError(
            f"{SECTION}.preset={name!r} is a mode and not a preset; set preset={plain}, the plainest of that mode, "
            "or another that `flowcorr presets` lists"
        )
    if not isinstance(name, str) or name not in NAMES:
        raise ConfigError(unknown_choice(f"{SECTION}.preset", name, NAMES))
    return NAMES[name]
