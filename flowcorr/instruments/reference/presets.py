"""The table of presets that `flowcorr presets` prints."""

from __future__ import annotations

from rich.console import Console

from flowcorr.correction import PRESETS, RolloutCorrectionConfig
from flowcorr.instruments.terminal import printing_on, show_table


def show_presets(console: Console | None = None) -> None:
    """Print the name, the aliases, the keys and the effect of each preset."""
    rows = []
    for name, preset in PRESETS.items():
        config = RolloutCorrectionConfig.from_preset(name)
        names = "\n".join([name, *(f"  = {alias}" for alias in preset.aliases)])
        rows.append((names, _mode(config), _weights(config), _rejection(config), preset.summary))
    columns = ("preset", "mode", "weights", "rejection", "what it does")
    with printing_on(console) as printer:
        show_table(printer, columns, rows, words=4, prose=True)


def _mode(preset: RolloutCorrectionConfig) -> str:
    return f"bypass, {preset.loss_type}" if preset.mode == "bypass" else "decoupled"


def _weights(preset: RolloutCorrectionConfig) -> str:
    if preset.rollout_is is None:
        return "-"
    return f"{preset.rollout_is} {_bound(preset.rollout_is_threshold)}"


def _rejection(preset: RolloutCorrectionConfig) -> str:
    parts = (
        [] if preset.rollout_rs is None else [f"{preset.rollout_rs} {_bound(preset.rollout_rs_threshold)}"]
    )
    if preset.rollout_token_veto_threshold is not None:
        parts.append(f"veto {preset.rollout_token_veto_threshold:g}")
    return ", ".join(parts) or "-"


def _bound(threshold: object) -> str:
    return "..".join(f"{bound:g}" for bound in threshold) if isinstance(threshold, tuple) else f"{threshold}"
