import pytest

from flowcorr.config import RewardTerm
from flowcorr.errors import ConfigError
from flowcorr.records import Prompt
from flowcorr.rewards import check_targets
from flowcorr.rewards.targets import target_of


def term(name, *, tags=(), **options):
    return RewardTerm(name=name, tags=tags, options=options)


@pytest.mark.parametrize("target", [None, "", " ", "\u200b", "\u00a0\u00ad"])
def test_a_target_of_which_nothing_is_seen_is_none(target):
    assert target_of(Prompt(text="a sign", target=target)) is None


TARGETS = [
    Prompt(text="a", tag="text", target="A", place="prompts.jsonl:1"),
    Prompt(text="b", tag="text", target=" ", place="prompts.jsonl:2"),
    Prompt(text="c", tag="count", place="prompts.jsonl:4"),
]


@pytest.mark.parametrize(
    ("reward", "count"),
    [
        (term("ocr"), "2 of 3"),
        (term("ocr", tags=("text",)), "1 of 2"),
        (term("vlm_judge", mode="transcribe"), "2 of 3"),
        (term("vlm_judge", template="{target}?"), "2 of 3"),
    ],
)
def test_a_prompt_without_the_target_that_a_term_needs_is_named(reward, count):
    with pytest.raises(ConfigError, match=rf"^prompts\.jsonl:2: .*'b' .* {reward.name} .*\({count} "):
        check_targets([term("jpeg_compressibility"), reward], TARGETS)


UNCLEAR = [
    Prompt(text="a cat", place="prompts.txt:1"),
    Prompt(text='a sign that says "b', place="prompts.txt:2"),
    Prompt(text='a 6" and a 12" ruler', place="prompts.txt:3"),
]


def test_an_ambiguous_target_is_refused_where_one_is_needed():
    with pytest.raises(ConfigError, match=r"^prompts\.txt:2: .*\(2 of 2 .*data\.target_field"):
        check_targets([term("ocr")], UNCLEAR[1:])
    check_targets([term("pickscore")], UNCLEAR)


@pytest.mark.parametrize("name", ["http", "my_rewards:own"])
def test_a_reward_that_may_read_targets_is_told_of_ambiguous_ones(name):
    with pytest.warns(UserWarning, match=rf"^prompts\.txt:2: .* {name} .*\(2 of 3 "):
        check_targets([term(name)], UNCLEAR)
    check_targets([term(name)], UNCLEAR[:1])


def test_prompts_without_a_target_that_no_term_needs():
    terms = [
        term("vlm_judge"),
        term("vlm_judge", mode="score", template="{prompt}"),
        term("users_rewards:mean"),
    ]
    check_targets([*terms, term("ocr", tags=("sign",))], TARGETS)
    check_targets([term("ocr")], TARGETS[:1])
