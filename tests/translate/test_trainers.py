"""Scripts of other trainers."""

import pytest

from flowcorr.translate.trainers import other_trainer


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "#!/bin/bash\n# fastvideo/train_old.py\ntorchrun \\\n  fastvideo/train_grpo_flux.py --mix_grpo",
            "line 4: it starts fastvideo/train_grpo_flux.py of MixGRPO, whose configuration flowcorr does not",
        ),
        (
            "torchrun fastvideo/train_grpo_flux.py --lr 1",
            "line 1: it starts fastvideo/train_grpo_flux.py of DanceGRPO, whose",
        ),
        (
            "accelerate launch --num_processes=4 scripts/train_sd3.py --config config/grpo.py:signs",
            "line 1: it starts scripts/train_sd3.py of flow_grpo; translate its configuration, config/grpo.py:signs",
        ),
        ("python scripts/train_flux_fast.py", "translate its configuration, config/grpo.py:NAME"),
        (
            "ff-train examples/signs.yaml",
            "it starts ff-train of Flow-Factory; translate its YAML, examples/signs.yaml",
        ),
        ('ff-train "$CONFIG"', "it starts ff-train of Flow-Factory; translate its YAML"),
        (
            "python3 -m verl.trainer.main_ppo a=1",
            "it starts verl.trainer.main_ppo of verl, whose configuration",
        ),
        ("accelerate launch train_dreambooth_lora.py", "of diffusers' own script, whose"),
    ],
)
def test_a_script_is_named_by_what_it_starts(text, reason):
    assert reason in other_trainer(text)


@pytest.mark.parametrize("text", ["", "echo hello", "# ff-train a.yaml"])
def test_another_script_is_not_named(text):
    assert other_trainer(text) == ""
