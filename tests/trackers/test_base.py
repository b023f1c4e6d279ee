import pytest

from flowcorr.errors import ConfigError
from flowcorr.trackers import JsonlTracker, TensorBoardTracker, build_trackers, redact, redact_override


@pytest.mark.parametrize("names", [[], ["jsonl"]])
def test_jsonl_is_always_there(names):
    assert [type(tracker) for tracker in build_trackers(names)] == [JsonlTracker]


def test_jsonl_comes_first_and_nothing_twice():
    trackers = build_trackers(["tensorboard", "jsonl", "tensorboard"])
    assert [type(tracker) for tracker in trackers] == [JsonlTracker, TensorBoardTracker]


def test_unknown_tracker_is_refused():
    with pytest.raises(ConfigError, match=r"trainer.trackers='tensorbord'.*did you mean tensorboard"):
        build_trackers(["tensorbord"])


def test_redact_hides_secrets_and_nothing_else():
    config = {
        "hub_token": "t",
        "rollout_token_veto_threshold": 1e-4,
        "rollout_is": "token",
        "key": None,
        "reward": {"terms": [{"options": {"headers": {"Authorization": "Bearer x", "X-Api-Key": "y"}}}]},
    }
    assert redact(config) == {
        "hub_token": "***",
        "rollout_token_veto_threshold": 1e-4,
        "rollout_is": "token",
        "key": None,
        "reward": {"terms": [{"options": {"headers": {"Authorization": "***", "X-Api-Key": "***"}}}]},
    }
    assert config["hub_token"] == "t"


@pytest.mark.parametrize("name", ["apikey", "apiKey", "X-ApiKey"])
def test_redact_knows_api_keys_in_one_word(name):
    assert redact({name: "s3cret"}) == {name: "***"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://host/score?api_key=SECRET", "https://host/score?***"),
        ("HTTP://host:80?a=1&b=SECRET#top", "HTTP://host:80?***#top"),
        ("http://host/score?***", "http://host/score?***"),
        ("http://host/score", "http://host/score"),
        ("http://host/score?", "http://host/score?"),
        ("what is https://host?", "what is https://host?"),
        ("runs/a?b=c", "runs/a?b=c"),
    ],
)
def test_redact_hides_the_query_of_an_address(text, shown):
    config = {"url": text, "terms": [{"options": {"urls": [text]}}]}
    assert redact(config) == {"url": shown, "terms": [{"options": {"urls": [shown]}}]}
    assert config["url"] == text


def test_overrides_are_shown_without_their_secrets():
    secrets = ["reward.terms=[{name: jpeg, api_key: sesame}]", "reward.terms.0.api_key=sesame"]
    assert [redact_override(text) for text in ["rollout.n=4", *secrets]] == [
        "rollout.n=4",
        "reward.terms=***",
        "reward.terms.0.api_key=***",
    ]
