"""The tests' prompts: every tiny pipeline tells them apart, and a fixture that does not is refused."""

import pytest
import torch
from tiny_pipelines import FAMILIES

from flowcorr.config import ModelConfig
from flowcorr.models import Guidance, load_family
from tests.prompts import check_told_apart, prompts_of


def loaded(name, folder, tokens):
    if FAMILIES[name].images:
        pytest.importorskip("torchvision")
    path = FAMILIES[name].build(folder)
    size = FAMILIES[name].size
    return load_family(ModelConfig(path=str(path), max_sequence_length=tokens), reference_size=size)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_tells_prompts_and_references_apart(name, tmp_path):
    family = loaded(name, tmp_path, FAMILIES[name].tokens)
    guidance = Guidance(**FAMILIES[name].guidance)
    prompts = prompts_of(["cat", "dog", "owl"], images=family.num_references[1])
    check_told_apart(family, prompts, guidance)


@pytest.mark.parametrize("name", ["qwen_image_edit", "qwen_image_edit_plus"])
def test_a_text_that_the_template_displaces_is_refused(name, tmp_path):
    family = loaded(name, tmp_path, 8)
    with pytest.raises(ValueError, match="rows 0 and 1 .*prompt_embeds "):
        check_told_apart(family, prompts_of(["cat", "dog"], images=FAMILIES[name].images), Guidance())


class OneAnswer:
    """A family with given embeddings."""

    def __init__(self, **rows):
        self.rows = rows

    def embed(self, prompts, guidance):
        return self.rows


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ({"negative_prompt_embeds": torch.eye(2)[1:].expand(2, 2)}, "rows 1 and 2 .*prompt_embeds "),
        ({"references": torch.ones(2, 1, 3)}, "rows 0 and 1 .*references "),
    ],
)
def test_a_negative_prompt_and_references_like_another_are_refused(answer, named):
    family = OneAnswer(prompt_embeds=torch.eye(2), **answer)
    with pytest.raises(ValueError, match=named):
        check_told_apart(family, prompts_of(["cat", "dog"]), Guidance(guidance_scale=3.0))
