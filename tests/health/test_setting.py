"""What is read from a configuration, and that nothing else is needed."""

from flowcorr.config import load
from flowcorr.health.setting import Setting


def test_a_configuration_gives_loss_correction_and_schedule():
    overrides = ["rollout.staleness=2", "sampling.sde_type=cps", "sampling.cps_unscaled=true"]
    setting = Setting.of(load("tiny_ocr_lora", overrides))
    assert (setting.num_steps, setting.window_size, setting.window_end) == (10, 2, 4)
    assert (setting.staleness, setting.densities, setting.quantization) == (2, False, "none")
    assert setting.actor.clip_ratio == 1e-3
    assert setting.correction.preset == "disabled"


def test_bands_begin_without_a_measurement():
    assert Setting.of(load("tiny_ocr_lora_bypass")).bands().noise == {}
