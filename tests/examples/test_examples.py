"""The examples run as they stand."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from flowcorr import config
from flowcorr.cli import main
from flowcorr.config.schema import ActorConfig
from flowcorr.data import read_prompts
from flowcorr.errors import ConfigError, RolloutFault
from flowcorr.instruments.plan.preflight import check_settings
from flowcorr.instruments.report import report
from flowcorr.records import Terms
from flowcorr.trackers import METRICS_FILE, read_metrics
from tests.examples.scripts import EXAMPLES, load

SMALL = (
    "rollout.prompts_per_step=2",
    "rollout.n=2",
    "sampling.num_inference_steps=4",
    "data.num_heldout=4",
    "trainer.eval_num_inference_steps=2",
)
FEW_WORDS = "data.num_train=8"


def test_own_loop_learns_and_measures_the_gap(capsys):
    history = load("own_loop").main(2)
    assert len(history) == 2
    for metrics in history:
        assert all(math.isfinite(value) for value in metrics.values())
        assert 1e-6 < metrics["rollout_corr/logprob_abs_diff_mean"] < 1e-2  # bfloat16 against float32
        assert 0.5 < metrics["rollout_corr/rollout_is_eff_sample_size"] <= 1
    assert capsys.readouterr().out.startswith("step 1:")


def test_own_loop_centres_the_score():
    """Values stay, the gradient does not: the gap of the first step is the same, and that of the second is not."""
    gaps = []
    for score_centering in (False, True):
        torch.manual_seed(0)  # of the adapter
        history = load("own_loop").main(2, score_centering=score_centering)
        assert ("rollout_corr/rollout_is_mean" in history[0]) != score_centering
        gaps.append([metrics["rollout_corr/logprob_abs_diff_mean"] for metrics in history])
    assert gaps[0][0] == pytest.approx(gaps[1][0], rel=1e-5)
    assert gaps[0][1] != pytest.approx(gaps[1][1], rel=1e-5)  # by how much differs from CPU to CPU


def test_custom_reward_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = load("custom_reward")
    result = example.main(str(tmp_path / "ink"), 1, *SMALL, FEW_WORDS)
    assert result.status == "finished"
    assert 0 < result.metrics["eval/reward"] < 100
    assert f"{result.metrics['eval/reward']:.2f}" in capsys.readouterr().out
    sys.modules.pop("custom_reward", None)


def test_custom_loss_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = load("custom_loss")
    result = example.main(str(tmp_path / "run"), 1, *SMALL, FEW_WORDS)
    assert result.status == "finished"
    assert f"{result.metrics['eval/exact_match']:.3f}" in capsys.readouterr().out
    logged = [record for record in read_metrics(tmp_path / "run" / METRICS_FILE) if "actor/loss" in record]
    assert all(0 <= record["rollout_corr/raised_fraction"] <= 1 for record in logged)
    with pytest.raises(ConfigError, match=r"loss_options=\{'over': 1\} .*above: float"):
        example.main(str(tmp_path / "other"), 1, "actor.loss_options=null", "actor.loss_options={over: 1}")
    sys.modules.pop("custom_loss", None)


def test_custom_check_is_asked_by_training_report_and_doctor(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    own, run = "trainer.checks=[custom_check:SAME_IMAGES]", tmp_path / "run"
    small = [*SMALL, FEW_WORDS, "trainer.total_steps=1", "trainer.doctor=false"]
    assert main(["train", "tiny_ocr_lora", own, *small, "--out", str(run)]) == 0
    assert [record.get("rollout/same_images") for record in read_metrics(run / METRICS_FILE)][-1] == 0
    (left_out,) = [finding for finding in report([run]).findings if finding.cause == "files"]
    assert "custom_check:SAME_IMAGES" in left_out.sentence
    capsys.readouterr()
    main(["doctor", "tiny_ocr_lora", own, *small, "--json"])
    levels = {found["cause"]: found["level"] for found in json.loads(capsys.readouterr().out)["findings"]}
    assert levels["same_images"] == "healthy"
    sys.modules.pop("custom_check", None)


OWN_ROWS = """
from flowcorr.health import Metric, Rule
from flowcorr.metrics import mean

def terms(terms):
    assert terms.log_prob.dim() == 2
    return mean(terms.log_prob.sum() * 0 + 3 * terms.log_prob.numel(), terms.log_prob.numel())

THREE = Metric(
    name="own/three",
    meaning="three.",
    measure=terms,
    label="three",
    rule=Rule(name="three", what="three", high=2.0, advice="take less"),
)
ODD_REWARD = Metric(
    name="reward/mean",
    meaning="the mean reward.",
    rule=Rule(name="odd_reward", what="the mean reward", low=1e6, advice="reward more"),
)
TAKEN = Metric(name="rollout_corr/kl", meaning="the KL.", measure=terms)
"""


@pytest.mark.parametrize("preset", ["decoupled_token_is", "bypass_ppo_clip", "disabled"])
def test_rows_of_ones_own_are_judged_from_outside_the_package(tmp_path, monkeypatch, capsys, preset):
    """A metric and a rule, in one file beside the recipe."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("own_rows.py").write_text(OWN_ROWS, encoding="utf-8")
    small = [*SMALL, FEW_WORDS, "trainer.total_steps=1", "trainer.doctor=false", "actor.mini_batches=2"]
    rows = "trainer.metrics=[own_rows:THREE,own_rows:ODD_REWARD]"
    preset = f"algorithm.rollout_correction.preset={preset}"
    assert main(["train", "tiny_ocr_lora", preset, *small, rows, "--out", "run"]) == 0
    printed = capsys.readouterr().out
    assert "  three 3  " in printed
    assert all(f"{metric}, value" in printed for metric in ("own/three", "reward/mean"))
    (record,) = [record for record in read_metrics(Path("run", METRICS_FILE)) if "actor/loss" in record]
    assert record["own/three"] == 3

    allowed = ["own_rows:THREE", "own_rows:ODD_REWARD"]
    judged, strangers = (report([Path("run")], allow_imports=names) for names in (allowed, []))
    causes = [{finding.cause for finding in made.findings} for made in (judged, strangers)]
    assert causes[0] - causes[1] == {"three", "odd_reward"}
    (left_out,) = [finding for finding in strangers.findings if finding.cause == "files"]
    assert ",".join(allowed) in left_out.sentence
    sys.modules.pop("own_rows", None)


@pytest.mark.parametrize(
    ("name", "wrong"), [("TAKEN", "rollout_corr/kl"), ("mean", "type function"), ("NONE", "has no 'NONE'")]
)
def test_a_row_that_cannot_be_used_is_refused(tmp_path, monkeypatch, name, wrong):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_rows.py").write_text(OWN_ROWS, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"trainer.metrics='own_rows:{name}'.*{wrong}"):
        check_settings(config.load("tiny_ocr_lora", [f"trainer.metrics=[own_rows:{name}]"]))
    sys.modules.pop("own_rows", None)


def test_new_engine_trains_and_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    small = (*SMALL, FEW_WORDS, "rollout.replay_every=1")
    example = load("new_engine")
    gaps = {}
    for dtype in ("bfloat16", "float16"):
        result = example.main(str(tmp_path / dtype), 1, *small, f"rollout.dtype={dtype}")
        assert result.status == "finished"
        measured = [
            step.get("rollout_corr/logprob_abs_diff_mean")
            for step in read_metrics(tmp_path / dtype / METRICS_FILE)
        ]
        gaps[dtype] = max(filter(None, measured))
    assert 0 < gaps["float16"] < gaps["bfloat16"] < 1e-2
    assert f"{result.metrics['eval/exact_match']:.3f}" in capsys.readouterr().out
    for override, named in (
        ("rollout.staleness=2", r"rollout\.staleness=2 .*rollout\.name=new_engine"),
        ("rollout.engine={computes_in: float16}", r"rollout\.engine=.*computes_in.* leave it out$"),
    ):
        with pytest.raises(ConfigError, match=f"^{named}"):
            example.main(str(tmp_path / "refused"), 1, *small, override)
    engine = sys.modules["new_engine"].AutocastEngine
    build = engine.__init__

    def coarser(self, *given, **options):  # than it says
        build(self, *given, **options)
        self.dtype = torch.bfloat16

    monkeypatch.setattr(engine, "__init__", coarser)
    with pytest.raises(RolloutFault) as stopped:
        example.main(str(tmp_path / "coarse"), 1, *small, "rollout.dtype=float32")
    assert {finding.cause for finding in stopped.value.findings} <= {"kl", "replay_window"}
    sys.modules.pop("new_engine", None)


def test_custom_loss_is_what_it_says():
    log_ratio = torch.tensor([-0.3, 0.15, 0.3, 0.3])
    terms = Terms(
        log_prob=log_ratio,
        std=torch.ones(4),
        step=torch.ones(4),
        old_log_prob=torch.zeros(4),
        rollout_log_prob=torch.zeros(4),
        advantage=torch.tensor([-1.0, 1.0, 1.0, -1.0]),
        step_index=torch.zeros(4, dtype=torch.int64),
    )
    loss = load("custom_loss").CLIP_HIGHER.objective(terms, ActorConfig(clip_ratio=0.1), above=0.2)
    # Cut at .9, not cut, cut at 1.2, and not cut where it is the pessimistic side.
    expected = 0.9 - math.exp(0.15) - 1.2 + math.exp(0.3)
    assert loss.loss_sum.item() == pytest.approx(expected, rel=1e-5)
    assert loss.metrics.compute()["actor/pg_clipfrac_higher"] == 0.5


def test_custom_reward_is_what_it_says():
    import numpy as np

    images = np.full((2, 4, 4, 3), 255, dtype=np.uint8)
    images[1, :2] = 0
    assert load("custom_reward").ink(images, []).tolist() == pytest.approx([0, 50])


def test_an_editing_family_of_ones_own_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    result = load("tiny_edit").main(str(tmp_path / "edit"), 1, *SMALL, count=32)
    assert result.status == "finished"
    assert 0.6 < result.metrics["eval/reward"] < 1
    assert "shade: 0.804" in capsys.readouterr().out
    sys.modules.pop("tiny_edit", None)


def test_sign_edits_are_those_that_ship_with_the_recipes(tmp_path):
    load("sign_edits").write(tmp_path / "sign_edits")
    shipped = EXAMPLES.parent / "recipes" / "sign_edits.jsonl"
    assert (tmp_path / "sign_edits.jsonl").read_text() == shipped.read_text()
    prompts = read_prompts(tmp_path / "sign_edits.jsonl")
    assert len({prompt.key for prompt in prompts}) == 240
    assert {prompt.images[0].image().size for prompt in prompts} == {(512, 512)}
    assert len({prompt.images[0].digest for prompt in prompts}) == 24
    assert all(prompt.target for prompt in prompts)
