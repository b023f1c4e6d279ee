"""Tags of prompts beside those of rewards; targets and references have files of their own."""

import pytest

from flowcorr.config.task import RewardTerm
from flowcorr.errors import ConfigError
from flowcorr.records import Prompt
from flowcorr.rewards import check_tags

TAGGED = [Prompt(text=text, tag=tag) for text, tag in (("a", "text"), ("bb", "count"), ("ccc", "text"))]


def term(name, tags=()):
    return RewardTerm(name=name, tags=tags)


@pytest.mark.parametrize(
    ("terms", "gold", "message"),
    [
        (
            [term("ocr", tags=("tezt",)), term("b")],
            [],
            r"reward.terms\[ocr\].tags='tezt' is unknown \(did you mean text\?\); choose from text, count",
        ),
        ([term("a")], [term("ocr", tags=("x",))], r"reward.gold\[ocr\].tags='x' is unknown"),
        (
            [term("ocr", tags=("text",))],
            [term("b")],
            "no term of reward.terms scores prompts with the tag 'count'",
        ),
        ([term("ocr", tags=("text", "count"))], [], "no term of reward.terms scores prompts without a tag"),
    ],
)
def test_tags_and_prompts_that_do_not_fit_are_named(terms, gold, message):
    with pytest.raises(ConfigError, match=message):
        check_tags(terms, gold, [*TAGGED, Prompt(text="d")])


def test_tags_that_fit():
    check_tags([term("a", tags=("text",)), term("b")], [term("c", tags=("count",))], TAGGED)
    check_tags([term("a", tags=("text",)), term("b", tags=("count",))], [], TAGGED)
