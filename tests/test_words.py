import hashlib

import pytest

from flowcorr.errors import ConfigError
from flowcorr.words import heldout_words, is_heldout, train_words


def test_vocabularies_are_disjoint_and_split_by_hash():
    train, heldout = train_words(5000), heldout_words(5000)

    assert not set(train) & set(heldout)
    assert all(is_heldout(word) for word in heldout)
    assert not any(is_heldout(word) for word in train)


def test_words_are_distinct_lowercase_and_three_or_four_letters():
    words = train_words(2000, seed=3) + heldout_words(2000, seed=3)

    assert len(set(words)) == 4000
    assert all(word.isascii() and word.isalpha() and word.islower() for word in words)
    assert {len(word) for word in words} == {3, 4}


def test_a_smaller_count_is_the_beginning_of_a_larger_one():
    assert heldout_words(10, seed=1) == heldout_words(50, seed=1)[:10]
    assert heldout_words(10, seed=1) != heldout_words(10, seed=2)


def test_words_never_change():
    # The shipped model was pretrained on this split: other words would make its held-out words seen ones.
    digest = hashlib.sha256(" ".join(train_words(1000) + heldout_words(1000)).encode()).hexdigest()

    assert heldout_words(4) == ["uhm", "gxzv", "clp", "ramw"]
    assert train_words(4) == ["tkgn", "xnht", "isxr", "zmwg"]
    assert digest.startswith("45cc211c4a449695")


def test_a_tenth_of_all_strings_is_held_out():
    share = sum(is_heldout(str(number)) for number in range(20_000)) / 20_000

    assert abs(share - 0.1) < 0.01


def test_more_words_than_the_vocabulary_can_give_are_refused():
    with pytest.raises(ConfigError, match="choose 0 to"):
        heldout_words(100_000)
