"""Differences of inputs, by the part of an adapter that computes them."""

import pytest
import torch

from flowcorr.models.adapter_inputs import decoder_difference, input_differences, part_of
from flowcorr.models.pipeline_call import Row

TEXT = torch.arange(12.0).view(4, 3)


def parts(ours, theirs):
    rows = (Row(inputs=inputs, output=torch.zeros(1)) for inputs in (ours, theirs))
    return list(input_differences(*rows, 1e-3, 1e-4))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("timestep", "timesteps"),
        ("t", "timesteps"),
        ("hidden_states", "latents"),
        ("x", "latents"),
        ("encoder_hidden_states", "prompt"),
        ("encoder_hidden_states_mask", "mask"),
        ("cap_feats", "prompt"),
        ("pooled_projections", "pooled_prompt"),
        ("img_ids", "positions"),
        ("guidance", "guidance"),
    ],
)
def test_the_part_of_an_input(name, part):
    assert part_of(name) == part


def test_padding_behind_a_mask_is_no_difference():
    mask = torch.tensor([True, True, False, False])
    ours = {"encoder_hidden_states": TEXT, "encoder_hidden_states_mask": mask}
    assert parts(ours, {"encoder_hidden_states": TEXT[:2]}) == []
    assert parts(ours | {"encoder_hidden_states_mask": ~mask}, {"encoder_hidden_states": TEXT[:2]}) == [
        "prompt"
    ]
    assert parts({"encoder_hidden_states": TEXT}, ours) == ["mask"]


def test_a_timestep_a_token_is_that_of_the_sample():
    assert parts({"timestep": torch.tensor(500.0)}, {"timestep": torch.full((6,), 500.0)}) == []
    assert parts({"timestep": torch.tensor(500.1)}, {"timestep": torch.full((6,), 500.0)}) == ["timesteps"]


@pytest.mark.parametrize(("change", "told"), [
    (lambda x: 2 * x, "gets 2 times"), (lambda x: x + 1, "plus 1"), (lambda x: x.flip(0), "another order")
])  # fmt: skip
def test_what_a_vae_gets(change, told):
    latents = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    assert decoder_difference(latents, latents, 1e-3) is None
    assert told in decoder_difference(change(latents), latents, 1e-3)[0]
