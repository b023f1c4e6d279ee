"""Which trainer a script starts, where it is not one that `flowcorr translate` reads scripts of."""

from __future__ import annotations

import re

_CONFIG = re.compile(r"--config[= ]\s*(\S+\.py:\w+)")
_YAML = re.compile(r"\bff-train\s+['\"]?([\w./~-]+\.ya?ml)")
_NEEDLES = (
    ("Flow-Factory", r"\bff-train\b|\bflow_factory\b"),
    ("flow_grpo", r"\bscripts/train_(sd3|flux|qwenimage|wan|bagel)\w*\.py"),
    ("MixGRPO", r"\bfastvideo/train_grpo\w*\.py"),
    ("DanceGRPO", r"\bfastvideo/train_\w+\.py"),
    ("verl", r"\bverl\.trainer\.\w+"),
    ("trl", r"\btrl\s+(grpo|dpo|sft)\b"),
    ("diffusers' own script", r"\btrain_\w*(dreambooth|text_to_image)\w*\.py"),
)
_MIX = re.compile(r"mix_?grpo|multi_reward_mix|training_strategy", re.IGNORECASE)


def other_trainer(text: str) -> str:
    """The trainer that a script starts instead of verl-omni, with its line and the file to translate; else empty."""
    for number, line in enumerate(text.splitlines(), 1):
        command = line.partition("#")[0]
        for name, pattern in _NEEDLES:
            found = re.search(pattern, command)
            if found is None:
                continue
            if name == "MixGRPO" and not _MIX.search(text):
                name = "DanceGRPO"
            return f"line {number}: it starts {found[0]} of {name}{_instead(name, text)}"
    return ""


def _instead(name: str, text: str) -> str:
    if name == "Flow-Factory":
        found = _YAML.search(text)
        return f"; translate its YAML{f', {found[1]}' if found else ''}"
    if name == "flow_grpo":
        found = _CONFIG.search(text)
        return f"; translate its configuration, {found[1] if found else 'config/grpo.py:NAME'}"
    return ", whose configuration flowcorr does not translate; it does those of verl-omni, flow_grpo and Flow-Factory"
