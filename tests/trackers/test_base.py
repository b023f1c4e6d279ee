import sys
from types import SimpleNamespace

import pytest

from flowcorr.errors import ConfigError, MissingExtraError
from flowcorr.trackers import JsonlTracker, SwanLabTracker, TensorBoardTracker, WandbTracker, build_trackers


@pytest.mark.parametrize("names", [[], ["jsonl"]])
def test_jsonl_is_always_there(names):
    assert [type(tracker) for tracker in build_trackers(names).values()] == [JsonlTracker]


def test_jsonl_comes_first_and_nothing_twice():
    trackers = build_trackers(["tensorboard", "jsonl", "tensorboard"])
    assert list(trackers) == ["jsonl", "tensorboard"]
    assert [type(tracker) for tracker in trackers.values()] == [JsonlTracker, TensorBoardTracker]


@pytest.fixture
def my_trackers(tmp_path, monkeypatch):
    """A module with one tracker, `Mine`, on the path."""
    (tmp_path / "my_trackers.py").write_text("class Mine:\n    def finish(self): ...\n\nnumber = 3\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_tracker_of_ones_own_is_imported(my_trackers):
    assert [type(tracker).__name__ for tracker in build_trackers(["my_trackers:Mine"]).values()] == [
        "JsonlTracker",
        "Mine",
    ]


@pytest.mark.parametrize(
    ("name", "named"),
    [("tensorbord", r"tensorboard\?"), ("my_trackers:number", " int;"), ("my_trackers:Other", "no 'Other';")],
)
def test_a_name_of_no_tracker_is_refused(my_trackers, name, named):
    with pytest.raises(ConfigError, match=rf"trainer\.trackers='{name}'.*{named}"):
        build_trackers([name])


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "swanlab"])
def test_a_missing_package_is_said_before_a_model_is_loaded(monkeypatch, package):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"^tracker {package} .*flowcorr\[{package}\]"):
        build_trackers([package])


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
