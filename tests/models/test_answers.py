"""Answers of another shape and embeddings that are not finite are refused, with the method or encoder at fault."""

import pytest
import torch

from flowcorr.config import ModelConfig
from flowcorr.errors import ConfigError
from flowcorr.models import CannotCompare, Guidance, load_family
from flowcorr.models.answers import check_finite
from flowcorr.models.prompt_cache import PromptCache
from tests.models.adapters import compared, with_conditioning, with_velocity
from tests.prompts import prompts_of


@pytest.mark.parametrize(
    ("name", "methods", "message"),
    [
        (
            "sd3",
            with_conditioning(lambda rows: {n: x for n, x in rows.items() if "neg" not in n}),
            "guidance_scale=3 would have no effect.*negative_NAME for each NAME of prompt_embeds",
        ),
        (
            "flux",
            {"distills_guidance": False},
            r"guidance_scale=3 would have no effect.*distills_guidance",
        ),
        (
            "wan",
            with_conditioning(lambda rows: {n: x[:1] for n, x in rows.items()}),
            r"embed .*prompt_embeds .*\(1, 48, 32\) .* 2 prompts",
        ),
        ("sd3", with_conditioning(lambda rows: tuple(rows.values())), r"embed .* tuple .* 2 prompts"),
        (
            "flux",
            with_velocity(lambda x: x.flatten(1, 2)),
            r"predict .*\(2, 24, 16\) .*\(2, 4, 6, 16\)",
        ),
        ("sd3", with_velocity(lambda x: (x,)), r"predict .* tuple .*\(2, 4, 8, 8\)"),
        (
            "wan",
            {"guide": lambda self, negative, positive, scale: positive[0]},
            r"guide .*\(16, 3, 4, 6\) .*\(2, 16, 3, 4, 6\)",
        ),
    ],
)
def test_answers_of_another_shape_are_refused(adapter_of, name, methods, message):
    family = adapter_of(name, **methods)
    with pytest.raises(ConfigError, match=rf"model\.family=[\w.]*:Wrong: .*{message}") as error:
        compared(family, name)
    assert not isinstance(error.value, CannotCompare)


@pytest.mark.parametrize("encoder", ["text_encoder", "text_encoder_2", "text_encoder_3"])
def test_the_encoder_that_overflows_is_named(encoder):
    family = load_family(ModelConfig(path="tiny_ocr", max_sequence_length=8))
    damaged = getattr(family.pipeline, encoder)
    with torch.no_grad():
        list(damaged.parameters())[-1].fill_(torch.inf)
    with pytest.raises(ConfigError, match=rf"^'cat': .*: {encoder} \({type(damaged).__name__}\) "):
        PromptCache(family, Guidance(), prompts_of(["cat", "dog"]))


@pytest.mark.parametrize(
    ("name", "dtype", "named"),
    [
        ("prompt_embeds", "float32", r"^'elk': .*\(prompt_embeds\)"),
        ("negative_prompt_embeds", "float32", "^the negative prompt of 'dog': .*text encoder "),
        ("references", "float32", r"^'dog': .*\(references\).* vae .*damaged"),
        ("references", "float16", r"^'dog': .*\(references\).* vae .*float16; .*model\.dtype=bfloat16$"),
    ],
)
def test_a_prompt_is_named_and_hidden_tokens_do_not_count(name, dtype, named):
    family = load_family(ModelConfig(path="tiny_ocr", max_sequence_length=8))
    family.dtype = getattr(torch, dtype)
    rows, mask = torch.zeros(3, 4, 2), torch.ones(3, 4, dtype=torch.bool)
    mask[1, 3] = False
    rows[1, 3] = torch.nan
    prompts, embeddings = prompts_of(["cat", "dog", "elk"]), {"prompt_embeds_mask": mask}
    check_finite(family, prompts, Guidance(), {"prompt_embeds": rows, **embeddings})
    rows[2, 0] = torch.nan
    with pytest.raises(ConfigError, match=named):
        check_finite(family, prompts, Guidance(), {name: rows, **embeddings})
