"""flow_grpo's keys."""

import pytest

from flowcorr.errors import ConfigError
from flowcorr.translate import translate
from tests.translate.configs import GRPO, loaded


def test_flow_grpos_values(grpo, tmp_path):
    text = translate(f"{grpo}:get")
    found = loaded(tmp_path, text)
    assert (found.rollout.prompts_per_step, found.rollout.n, found.actor.mini_batches) == (16, 16, 2)
    assert (found.sampling.sde_window_size, found.sampling.sde_window_range) == (9, (0, 9))
    assert found.sampling.sde_noise_range == (0, 10)
    assert (found.actor.kl_coef, found.actor.kl_weighting) == (0.04, "flow_grpo")
    assert found.algorithm.rollout_correction.mode == "bypass"
    assert (found.sampling.guidance_scale, found.trainer.seed) == (4.5, 42)
    assert (found.model.dtype, found.data.heldout_path) == ("float16", "dataset/ocr/test.txt")
    assert [(term.name, term.weight) for term in found.reward.terms] == [
        ("pickscore", 1),
        ("my_rewards:geneval", 0.5),
    ]
    assert "population std" in text
    # A run that ends by itself would end before its first evaluation.
    assert found.trainer.total_steps > 100 * found.trainer.eval_every
    assert "total_steps: 100000  # flow_grpo always does this; default here: 30 (it trains until" in text


def test_flow_grpo_needs_its_gpus(grpo, tmp_path):
    grpo.write_text(GRPO.replace("gpu_number = 4", "number = 4"), encoding="utf-8")
    with pytest.raises(ConfigError, match="give it with --gpus N"):
        translate(f"{grpo}:get")
    assert loaded(tmp_path, translate(f"{grpo}:get", gpus=2)).rollout.prompts_per_step == 8


def test_flow_grpos_adam_in_8_bits_is_adamw_of_bitsandbytes_here_too(grpo, tmp_path):
    assert loaded(tmp_path, translate(f"{grpo}:get")).actor.optimizer == "adamw"
    grpo.write_text(
        GRPO.replace("    return", "    config.train.use_8bit_adam = True\n    return"), encoding="utf-8"
    )
    text = translate(f"{grpo}:get")
    assert loaded(tmp_path, text).actor.optimizer == "adamw_8bit"
    assert "optimizer: adamw_8bit  # train.use_8bit_adam (AdamW of bitsandbytes in both)" in text
