import pytest
from instruments.doctor.faults import GUIDED, assert_named, blank, check, cut, other_words, separate, shorter

from tests.planted.mistakes import pooled_of_another, rolled
from tests.planted.plants import conditioned

POOLED = {"fits": "another's", "field": "pooled_prompt_embeds"}
FAULTS = {
    "other prompts": (conditioned(other_words, told=True), {}, {"field": "pooled_prompt_embeds"}),
    "another sequence length": (
        conditioned(shorter, told=True),
        {},
        {"field": "prompt_embeds", "engine_shape": [4, 15, 64], "shape": [4, 16, 64]},
    ),
    "mixed up unnoticed": (conditioned(rolled, told=False), {}, {"fits": "others"}),
    "cut after two tokens unnoticed": (conditioned(cut(2), told=False), {}, {"fits": "cut", "tokens": 2}),
    "cut after four tokens unnoticed": (conditioned(cut(4), told=False), {}, {"fits": "cut", "tokens": 4}),
    "blank after two tokens, guided": (
        conditioned(blank(2), told=False),
        {"sampling": GUIDED},
        {"fits": "blank", "tokens": 2},
    ),
    "blank after four tokens, bfloat16": (
        conditioned(blank(4), told=False),
        {"rollout": {"dtype": "bfloat16"}},
        {"fits": "blank", "tokens": 4},
    ),
    "pooled of another": (conditioned(pooled_of_another, told=False), {}, POOLED),
    "pooled of another, guided": (
        conditioned(pooled_of_another, told=False),
        {"sampling": GUIDED},
        POOLED,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_other_prompts(small_run, fault):
    plant, sections, numbers = FAULTS[fault]
    run = small_run(**sections)
    engine = separate(run)
    plant(engine)
    assert_named(check(run, engine, float32=False), "embeddings", **numbers)
