"""Ovis-Image in vllm-omni; tests of all families are in `test_families.py`."""

from flowcorr.models.ovis_image import OvisImage


def test_the_engine_adapts_seven_of_its_twelve_targets():
    assert [target for target in OvisImage.lora_targets if not OvisImage.vllm_omni.adapts(target)] == [
        "attn.to_out.0",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    ]
