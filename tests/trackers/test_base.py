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


def test_a_tracker_of_ones_own_is_imported(tmp_path, monkeypatch):
    (tmp_path / "my_trackers.py").write_text("class Mine:\n    def finish(self): ...\n\nnumber = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert [type(tracker).__name__ for tracker in build_trackers(["my_trackers:Mine"])] == [
        "JsonlTracker",
        "Mine",
    ]
    with pytest.raises(
        ConfigError, match=r"trainer\.trackers='my_trackers:number' is of type int; name a class"
    ):
        build_trackers(["my_trackers:number"])
    with pytest.raises(
        ConfigError, match="trainer.trackers='my_trackers:Other': the module my_trackers has no"
    ):
        build_trackers(["my_trackers:Other"])
