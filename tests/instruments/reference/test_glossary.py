"""Words of the tools."""

import pytest

from flowcorr.instruments.metrics.table import find_metric
from flowcorr.instruments.reference.glossary import SYNONYMS, WORDS


@pytest.mark.parametrize("name", WORDS)
def test_a_word_says_when_to_worry_or_its_first_metric_does(name):
    word = WORDS[name]
    rows = [find_metric(metric) for metric in word.metrics]
    assert all(rows)
    assert bool(word.worry) == bool(word.remedy)
    assert word.worry or rows[0].rule is not None


def test_synonyms_lead_to_words():
    assert set(SYNONYMS.values()) <= WORDS.keys()
    assert all(name == name.lower() for name in (*WORDS, *SYNONYMS))
