"""The best evaluation of a run, also of one that is resumed with another metric."""

import json
import re
from dataclasses import replace

import pytest

from flowcorr import trainer
from flowcorr.errors import ConfigError
from flowcorr.trainer import checkpoint
from flowcorr.trainer.best import best_checkpoint, best_so_far
from flowcorr.trainer.checkpoint import TrainingState
from flowcorr.trainer.evaluate import choose_checkpoint
from tests.trainer.runs import Recorder, records, small_config

RECORDS = (
    {"step": 0, "eval/reward": 0.1, "eval/other": 0.9},
    {"step": 2, "eval/reward": 0.7, "eval/other": 0.5},
    {"step": 3, "reward/mean": 0.1},
    {"step": 4, "eval/reward": 0.4, "eval/other": 0.6, "eval/rare": None},
)


@pytest.fixture
def folder(tmp_path):
    """A run of four steps, of which the checkpoints of the last two and of the best by `eval/reward` exist."""
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    for step in (2, 3, 4):
        checkpoint.folder_of(tmp_path / "checkpoints", step).mkdir(parents=True)
    return tmp_path


def state(*, best=(2, 0.7)):
    facts = {"config": {"trainer": {"best_metric": "eval/reward"}}, "best": best}
    return TrainingState(step=4, tensors={}, facts=facts)


def with_metric(name):
    return replace(small_config().trainer, best_metric=name)


def test_a_higher_score_is_the_best_and_an_equal_one_is_not(caplog):
    assert best_so_far(None, "eval/reward", 0, {"eval/reward": 0.5}) == (0, 0.5)
    assert best_so_far((0, 0.5), "eval/reward", 2, {"eval/reward": 0.6}) == (2, 0.6)
    assert best_so_far((2, 0.6), "eval/reward", 4, {"eval/reward": 0.6}) == (2, 0.6)
    assert caplog.messages == []


def test_only_the_first_evaluation_has_to_yield_the_metric(caplog):
    with pytest.raises(ConfigError, match=r"trainer\.best_metric='eval/parsed' .*from eval/reward$"):
        best_so_far(None, "eval/parsed", 0, {"eval/reward": 0.5})
    assert best_so_far((0, 0.5), "eval/parsed", 2, {"eval/reward": 0.6}) == (0, 0.5)
    (told,) = caplog.messages
    assert "step 2" in told
    assert "eval/parsed (trainer.best_metric)" in told


def test_the_best_by_the_same_metric_is_that_of_the_checkpoint(folder, caplog):
    assert best_checkpoint(folder, with_metric("eval/reward"), state()) == (2, 0.7)
    assert best_checkpoint(folder, with_metric("eval/reward"), state(best=None)) is None
    assert caplog.messages == []


def test_the_best_by_another_metric_is_among_the_checkpoints_that_exist(folder, caplog):
    assert best_checkpoint(folder, with_metric("eval/other"), state()) == (4, 0.6)
    (told,) = caplog.messages
    assert re.findall(r"eval/\w+|step \d|0\.\d", told) == [
        *("eval/reward", "eval/other", "step 4", "0.6"),
        *("step 2", "eval/reward"),
    ]


def test_without_a_score_of_another_metric_the_next_evaluation_is_the_best(folder, caplog):
    assert best_checkpoint(folder, with_metric("eval/rare"), state()) is None
    assert "eval/rare" in caplog.text
    assert "step 2" in caplog.text


@pytest.mark.parametrize(("kept", "best"), [((3, 4), (4, 0.4)), ((3,), None)])
def test_without_the_best_checkpoint_the_best_of_the_others_takes_its_place(folder, caplog, kept, best):
    for step in {2, 3, 4} - {*kept}:
        checkpoint.folder_of(folder / "checkpoints", step).rmdir()
    assert best_checkpoint(folder, with_metric("eval/reward"), state()) == best
    (told,) = caplog.messages
    assert re.findall(r"eval/\w+|step \d|0\.\d", told) == [
        *("step 2", "eval/reward"),
        *(["step 4", "0.4"] if best else []),
    ]


def test_another_metric_of_a_finished_run_changes_its_best_checkpoint(finished, caplog):
    root, name = finished / "checkpoints", "eval/image/dark"
    scores = {record["step"]: record[name] for record in records(finished) if name in record}
    kept = [int(choose_checkpoint(root, which)[0].name[-6:]) for which in ("best", "last")]
    best = max(set(checkpoint.steps(root)), key=scores.get)
    assert best not in kept
    trainer.train(small_config(f"trainer.best_metric={name}"), finished, resume=True)
    assert f"the best checkpoint is that of step {best}" in caplog.text
    assert choose_checkpoint(root, "best")[0] == checkpoint.folder_of(root, best)
    assert choose_checkpoint(root, "last")[0] == checkpoint.folder_of(root, 4)


def test_a_resumed_run_warns_of_both(tmp_path, caplog):
    keys = ("actor.lr_schedule=cosine", "trainer.eval_every=0")
    trainer.train(small_config(*keys, "trainer.total_steps=1"), tmp_path)
    name = next(name for name in records(tmp_path)[0] if name.startswith("eval/image/"))
    longer = small_config(*keys, "trainer.total_steps=2", f"trainer.best_metric={name}")
    caplog.clear()
    trainer.train(longer, tmp_path, resume=True, observer=Recorder())
    first, second = caplog.messages
    assert re.findall(r"trainer.best_metric|eval/reward|" + name, first)[:3] == [
        *("trainer.best_metric", "eval/reward", name)
    ]
    assert re.search(r"trainer.total_steps .*1 .*2, .*actor.lr_schedule=cosine", second)
