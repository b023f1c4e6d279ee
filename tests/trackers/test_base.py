import pytest

from flowcorr.errors import ConfigError
from flowcorr.trackers import JsonlTracker, TensorBoardTracker, build_trackers


@pytest.mark.parametrize("names", [[], ["jsonl"]])
def test_jsonl_is_always_there(names):
    assert [type(tracker) for tracker in build_trackers(names)] == [JsonlTracker]


def test_jsonl_comes_first_and_nothing_twice():
    trackers = build_trackers(["tensorboard", "jsonl", "tensorboard"])
    assert [type(tracker) for tracker in trackers] == [JsonlTracker, TensorBoardTracker]


def test_unknown_tracker_is_refused():
    with pytest.raises(ConfigError, match=r"trainer.trackers='tensorbord'.*did you mean tensorboard"):
        build_trackers(["tensorbord"])
