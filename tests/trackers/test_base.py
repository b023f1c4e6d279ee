import sys
from types import SimpleNamespace

import pytest

from flowcorr.errors import ConfigError
from flowcorr.trackers import JsonlTracker, SwanLabTracker, TensorBoardTracker, WandbTracker, build_trackers


@pytest.mark.parametrize("names", [[], ["jsonl"]])
def test_jsonl_is_always_there(names):
    assert [type(tracker) for tracker in build_trackers(names).values()] == [JsonlTracker]


def test_jsonl_comes_first_and_nothing_twice():
    trackers = build_trackers(["tensorboard", "jsonl", "tensorboard"])
    assert list(trackers) == ["jsonl", "tensorboard"]
    assert [type(tracker) for tracker in trackers.values()] == [JsonlTracker, TensorBoardTracker]


def test_unknown_tracker_is_refused():
    with pytest.raises(ConfigError, match=r"trainer.trackers='tensorbord'.*did you mean tensorboard"):
        build_trackers(["tensorbord"])


def test_a_tracker_of_ones_own_is_imported(tmp_path, monkeypatch):
    (tmp_path / "my_trackers.py").write_text("class Mine:\n    def finish(self): ...\n\nnumber = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert [type(tracker).__name__ for tracker in build_trackers(["my_trackers:Mine"]).values()] == [
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


@pytest.mark.parametrize(("tracker", "package"), [(WandbTracker, "wandb"), (SwanLabTracker, "swanlab")])
@pytest.mark.parametrize(
    ("left", "resume_step", "asked"),
    [("old\n", 1, "old"), ("", 1, None), (None, 1, None), ("old\n", None, None)],
)
def test_a_run_goes_on_under_the_id_that_its_folder_has(
    tracker, package, left, resume_step, asked, tmp_path, monkeypatch
):
    """Also where a crash or a full disk left the file empty, which the services would refuse as an id."""
    calls, file = [], tmp_path / f"{package}_run_id.txt"

    def init(**options):
        calls.append((options["id"], options["resume"]))
        return SimpleNamespace(id=options["id"] or "new", define_metric=lambda *_, **__: None)

    monkeypatch.setitem(sys.modules, package, SimpleNamespace(init=init, Error=RuntimeError))
    if left is not None:
        file.write_text(left)
    tracker().start("a run", tmp_path, resume_step=resume_step)
    assert calls == [(asked, asked and "allow")]
    assert file.read_text().strip() == (asked or "new")
