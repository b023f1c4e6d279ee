"""Embeddings that are not finite are refused with the encoder that gave them."""

import pytest
import torch

from flowcorr.config import ModelConfig
from flowcorr.errors import ConfigError
from flowcorr.models import Guidance, load_family
from flowcorr.models.overflow import check_finite
from flowcorr.models.prompt_cache import PromptCache
from tests.prompts import prompts_of


@pytest.mark.parametrize("encoder", ["text_encoder", "text_encoder_2", "text_encoder_3"])
def test_the_encoder_that_overflows_is_named(encoder):
    family = load_family(ModelConfig(path="tiny_ocr", max_sequence_length=8))
    damaged = getattr(family.pipeline, encoder)
    with torch.no_grad():
        list(damaged.parameters())[-1].fill_(torch.inf)
    with pytest.raises(
        ConfigError, match=rf"^'cat': its embeddings .*: {encoder} \({type(damaged).__name__}\) of"
    ):
        PromptCache(family, Guidance(), prompts_of(["cat", "dog"]))


def test_a_prompt_is_named_and_hidden_tokens_do_not_count():
    family = load_family(ModelConfig(path="tiny_ocr", max_sequence_length=8))
    rows, mask = torch.zeros(3, 4, 2), torch.ones(3, 4, dtype=torch.bool)
    mask[1, 3] = False
    rows[1, 3] = torch.nan
    prompts = prompts_of(["cat", "dog", "elk"])
    check_finite(family, prompts, Guidance(), {"prompt_embeds": rows, "prompt_embeds_mask": mask})
    rows[2, 0] = torch.nan
    with pytest.raises(ConfigError, match=r"^'elk': its embeddings \(prompt_embeds\)"):
        check_finite(family, prompts, Guidance(), {"prompt_embeds": rows, "prompt_embeds_mask": mask})
    with pytest.raises(
        ConfigError, match=r"^the negative prompt of 'dog': .* a text encoder of the model has damaged"
    ):
        check_finite(family, prompts, Guidance(), {"negative_prompt_embeds": rows})
    with pytest.raises(ConfigError, match="vae of the model has damaged weights; download"):
        check_finite(family, prompts, Guidance(), {"references": rows})
    family.dtype = torch.float16
    with pytest.raises(ConfigError, match="vae of the model overflows in float16; set model.dtype=bfloat16"):
        check_finite(family, prompts, Guidance(), {"references": rows})
