"""The gap that precision explains is that of the coarsest part, amplified by guidance."""

import pytest

from flowcorr.rollout.precision import (
    LARGEST_GAP,
    MARGIN,
    NO_GAP,
    OTHER_PROCESS,
    ROUNDINGS,
    image_limit_of,
    usual_gap,
)


@pytest.mark.parametrize(
    ("sections", "name", "scale"),
    [
        ({"rollout": {"dtype": "bfloat16"}}, "bfloat16", 1),
        ({"actor": {"autocast": True}}, "bfloat16", 1),
        ({"model": {"dtype": "float16"}}, "float16", 1),
        ({"rollout": {"emulate": "int4"}}, "int4", 1),
        ({"rollout": {"dtype": "bfloat16", "emulate": "int8"}}, "bfloat16", 1),
        ({"rollout": {"engine": {"quantization": "fp8"}}}, "fp8", 1),
        ({"rollout": {"name": "vllm_omni"}, "model": {"quantization": "nf4"}}, "nf4", 1),
        ({"rollout": {"name": "somebody:ENGINE"}, "model": {"quantization": "int8"}}, "int8", 1),
        ({"rollout": {"dtype": "bfloat16"}, "model": {"quantization": "nf4"}}, "bfloat16", 1),
        (
            {
                "rollout": {"name": "vllm_omni", "dtype": "bfloat16", "engine": {"weight_sync": "merged"}},
                "model": {"quantization": "nf4"},
            },
            "bfloat16",
            1,
        ),
        ({"rollout": {"dtype": "bfloat16"}, "sampling": {"guidance_scale": 4.0}}, "bfloat16", 4),
        ({"rollout": {"emulate": "fp8"}, "sampling": {"true_cfg_scale": 2.5}}, "fp8", 2.5),
    ],
)
def test_the_usual_gap_is_that_of_the_coarsest_part(make_config, sections, name, scale):
    rounding = ROUNDINGS[name]
    expected = rounding.plain + (rounding.guided - rounding.plain) * (scale - 1) / 3
    assert usual_gap(make_config(**sections)) == pytest.approx(MARGIN * expected)


def test_distilled_guidance_amplifies_nothing(make_config):
    config = make_config(rollout={"dtype": "bfloat16"}, sampling={"guidance_scale": 4.0})
    assert usual_gap(config, 1.0) == pytest.approx(MARGIN * ROUNDINGS["bfloat16"].plain)


def test_stacks_in_float32_agree_to_what_is_no_gap_at_all(make_config):
    assert usual_gap(make_config()) == NO_GAP
    assert usual_gap(make_config(sampling={"guidance_scale": 4.0})) == NO_GAP
    outside = make_config(rollout={"name": "vllm_omni"})
    assert usual_gap(outside) == pytest.approx(MARGIN * OTHER_PROCESS.plain)


def test_no_precision_excuses_another_model(make_config):
    config = make_config(rollout={"emulate": "int4"}, sampling={"guidance_scale": 20.0})
    assert usual_gap(config) == LARGEST_GAP


def test_images_are_judged_by_the_dtypes_in_which_both_stacks_decode(make_config):
    bfloat16, outside = {"dtype": "bfloat16"}, {"name": "vllm_omni"}
    limits = [
        image_limit_of(make_config(model=model, rollout=rollout))
        for model, rollout in (
            ({}, {}),
            ({}, outside),
            ({}, bfloat16),  # decoded by the trainer's VAE
            ({}, outside | bfloat16),
            (bfloat16, outside),
            (bfloat16, bfloat16),
        )
    ]
    assert limits[0] == limits[1] == limits[2] < 1.4  # grey levels of a decoder a twentieth off
    assert limits[0] < limits[3] == limits[4] == limits[5] < 1.4
