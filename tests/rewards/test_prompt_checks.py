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
    ("terms", "gold", "named"),
    [
        (
            [term("ocr", tags=("tezt",)), term("b")],
            [],
            r"reward\.terms\[ocr\]\.tags='tezt' .*text\?.* text, count$",
        ),
        ([term("a")], [term("ocr", tags=("x",))], r"reward\.gold\[ocr\]\.tags='x' "),
        (
            [term("ocr", tags=("text",))],
            [term("b")],
            r"reward\.terms .* tag 'count';",
        ),
        ([term("ocr", tags=("text", "count"))], [], r"reward\.terms .*without a tag;"),
    ],
)
def test_tags_and_prompts_that_do_not_fit_are_named(terms, gold, named):
    with pytest.raises(ConfigError, match=named):
        check_tags(terms, gold, [*TAGGED, Prompt(text="d")])


def test_tags_that_fit():
    check_tags([term("a", tags=("text",)), term("b")], [term("c", tags=("count",))], TAGGED)
    check_tags([term("a", tags=("text",)), term("b", tags=("count",))], [], TAGGED)
