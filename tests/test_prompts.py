"""The tests' prompts: a pipeline that does not tell them apart is refused."""

import pytest
import torch

from flowcorr.models import Guidance
from tests.prompts import check_told_apart, prompts_of


class OneAnswer:
    """A family with given embeddings."""

    def __init__(self, **rows):
        self.rows = rows

    def embed(self, prompts, guidance):
        return self.rows


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ({"prompt_embeds": torch.ones(2, 2)}, "rows 0 and 1 .*prompt_embeds "),
        ({"negative_prompt_embeds": torch.eye(2)[1:].expand(2, 2)}, "rows 1 and 2 .*prompt_embeds "),
        ({"references": torch.ones(2, 1, 3)}, "rows 0 and 1 .*references "),
    ],
)
def test_a_prompt_a_negative_one_or_references_like_another_are_refused(answer, named):
    family = OneAnswer(**{"prompt_embeds": torch.eye(2), **answer})
    with pytest.raises(ValueError, match=named):
        check_told_apart(family, prompts_of(["cat", "dog"]), Guidance(guidance_scale=3.0))
