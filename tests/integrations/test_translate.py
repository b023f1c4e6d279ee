"""All scripts of a verl-omni source tree: each becomes a recipe that loads, or is refused with a reason."""

import os
import warnings
from pathlib import Path

import pytest

from flowcorr import config
from flowcorr.errors import ConfigError
from flowcorr.translate import translate

pytestmark = pytest.mark.verl_omni


def test_every_script(tmp_path):
    root = Path(os.environ["VERL_OMNI"])
    scripts = [path for path in sorted(root.rglob("*.sh")) if "-m verl_omni.trainer" in path.read_text()]
    refused = {}
    for number, script in enumerate(scripts):
        try:
            text = translate(str(script))
        except ConfigError as error:
            refused[script.name] = str(error).rpartition(" (")[0]
            continue
        recipe = tmp_path / f"{number}.yaml"
        recipe.write_text(text, encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of bfloat16 weights without an adapter, as those scripts train
            assert config.load(recipe).rollout.n >= 2
    translated = len(scripts) - len(refused)
    print(f"{translated} of {len(scripts)} translated; refused:", *sorted(set(refused.values())), sep="\n  ")
    assert translated >= 25
    reasons = (
        *(
            "has no equivalent here",
            "makes videos",
            "trains no diffusion model",
            "it starts verl.trainer.main_ppo of verl",
        ),
        *("names no model of the families", "chooses other defaults", "only a shell could tell"),
    )
    assert [reason for reason in refused.values() if not any(known in reason for known in reasons)] == []
