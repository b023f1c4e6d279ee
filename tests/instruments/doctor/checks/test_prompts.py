import pytest
from instruments.doctor.faults import GUIDED, assert_named, blank, check, cut, other_words, separate, shorter

from tests.planted.mistakes import pooled_of_another, rolled
from tests.planted.plants import conditioned

FAULTS = {
    "other prompts": (conditioned(other_words, told=True), {}, "the engine's"),
    "another sequence length": (
        conditioned(shorter, told=True),
        {},
        "prompt_embeds is [4, 15, 64] in the engine and [4, 16, 64] here",
    ),
    "mixed up unnoticed": (conditioned(rolled, told=False), {}, "other prompts of the batch"),
    "cut after two tokens unnoticed": (conditioned(cut(2), told=False), {}, "prompts cut after 2 tokens"),
    "cut after four tokens unnoticed": (conditioned(cut(4), told=False), {}, "prompts cut after 4 tokens"),
    "blank after two tokens, guided": (
        conditioned(blank(2), told=False),
        {"sampling": GUIDED},
        "prompts blank after 2 tokens",
    ),
    "blank after four tokens, bfloat16": (
        conditioned(blank(4), told=False),
        {"rollout": {"dtype": "bfloat16"}},
        "prompts blank after 4 tokens",
    ),
    "pooled of another": (
        conditioned(pooled_of_another, told=False),
        {},
        "pooled_prompt_embeds of another prompt",
    ),
    "pooled of another, guided": (
        conditioned(pooled_of_another, told=False),
        {"sampling": GUIDED},
        "pooled_prompt_embeds of another prompt",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_other_prompts(small_run, fault):
    plant, sections, message = FAULTS[fault]
    run = small_run(**sections)
    engine = separate(run)
    plant(engine)
    assert_named(check(run, engine, float32=False), "embeddings", message)
