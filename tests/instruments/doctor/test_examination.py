"""Healthy engines pass, whatever their configuration; and the exam leaves no trace."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from instruments.doctor.faults import GUIDED, check, finding_of, separate

from flowcorr import sde
from flowcorr.data import PromptStream
from flowcorr.errors import BackendError
from flowcorr.instruments.doctor import (
    diagnose,
    examination,
    examine,
    examine_before_start,
    examines_before_start,
)
from flowcorr.instruments.page import as_json, exit_code
from flowcorr.records import Prompt


@pytest.mark.parametrize(
    ("shared", "sections"),
    [
        (True, {}),
        (True, {"sampling": GUIDED}),
        (True, {"actor": {"micro_batch_size": 3, "fold_steps": False}}),
        (False, {}),
        (False, {"sampling": {**GUIDED, "sde_type": "cps"}}),
        (False, {"sampling": {"sde_type": "dance_sde", "window_per": "sample", "sde_window_size": 1}}),
        (False, {"rollout": {"staleness": 2, "batch_size": 3}}),
        (
            False,
            {
                "sampling": {
                    "sde_window_layout": "scattered",
                    "num_inference_steps": 6,
                    "sde_window_range": (0, 5),
                }
            },
        ),
        (
            False,
            {"sampling": {"num_inference_steps": 6, "sde_window_range": (0, 3), "sde_noise_range": (0, 6)}},
        ),
    ],
)
def test_healthy_float32_passes_everything(small_run, shared, sections):
    run = small_run(**sections)
    report = check(run, run.engine if shared else separate(run))
    assert set(report.causes("healthy")) == {finding.cause for finding in report.findings}
    assert exit_code(report) == 0


@pytest.mark.parametrize(
    ("rollout", "sampling"),
    [
        ({"dtype": "bfloat16"}, {}),
        ({"dtype": "bfloat16"}, GUIDED),
        ({"emulate": "fp8"}, {"num_inference_steps": 10, "sde_window_range": (0, 8)}),
        ({"emulate": "int8"}, GUIDED),
        ({"emulate": "int4"}, GUIDED),
    ],
)
def test_lost_precision_is_no_failure(small_run, rollout, sampling):
    run = small_run(rollout=rollout, sampling=sampling)
    report = check(run, run.engine, float32=False)
    assert report.causes() == []
    assert 1e-6 < report.table("noise_floor")[0]["exact_kl"] < 0.1


@pytest.mark.parametrize("rollout", [{}, {"emulate": "int8"}])  # the cause of a gap is looked for
def test_one_prompt_shows_all_but_the_mixing_of_prompts(small_run, rollout):
    run = small_run(rollout=rollout)
    one = {name: rows[:1] for name, rows in run.conditioning.items()}
    report = examine(run.actor, run.engine, one, float32=False)
    assert report.causes() == []
    assert set(report.causes("note")) == {"batch_shape", *(["float32"] if rollout else [])}


def test_full_fine_tuning(full_run):
    report = check(full_run, full_run.engine)
    assert report.causes() == []
    assert report.causes("note") == ["lora"]
    assert finding_of(report, "sync").numbers["arrived"] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("rollout", [{}, {"emulate": "int8"}, {"staleness": 2}])
def test_everything_is_as_before(small_run, rollout):
    run = small_run(rollout=rollout)
    for seed in range(3):
        run.stir(seed=seed)
    before, history, expected = run.actor.weights.snapshot(), run.engine.history, run.sample()
    random, guidance = torch.get_rng_state(), run.actor.guidance
    examine(run.actor, run.engine, run.conditioning)
    after = run.actor.weights.snapshot()
    assert all(torch.equal(after.tensors[name], value) for name, value in before.tensors.items())
    assert after.version == before.version
    assert run.actor.guidance == guidance
    assert all(parameter.grad is None for parameter in run.actor.weights.parameters.values())
    assert [weights.version for weights in run.engine.history] == [weights.version for weights in history]
    assert torch.equal(run.sample().log_probs, expected.log_probs)
    assert torch.equal(torch.get_rng_state(), random)


# Engines that keep the precision that they are started with -----------------------------------------------


@pytest.fixture
def fixed_precision(monkeypatch, make_config):
    """A configuration in bfloat16 whose engine is started once for each precision; and what was started."""
    config = make_config(
        rollout={"n": 2, "dtype": "bfloat16", "placement": "ray"}, data={"num_train": 4, "num_heldout": 2}
    )
    build, started = examination.build_stacks, []

    def local(config, family, texts):
        started.append(config.rollout.dtype)
        return build(replace(config, rollout=replace(config.rollout, placement="local")), family, texts)

    monkeypatch.setattr(examination, "build_stacks", local)
    return config, started


def test_such_an_engine_is_started_in_float32_first(fixed_precision):
    config, started = fixed_precision
    report = diagnose(config, num_prompts=2)
    assert started == ["float32", "bfloat16"]
    assert finding_of(report, "float32").level == "healthy"
    assert report.causes() == []


class Shown(list):
    """The reports that a hook shows, and the run folder that it writes to."""

    def __init__(self, folder, run):
        super().__init__()
        self.folder, self.run = folder, run

    def start(self, config):
        examine_before_start(config, self.folder, self.append)(self.run)

    @property
    def written(self):
        return json.loads((self.folder / "doctor.json").read_text())


@pytest.fixture
def before_start(small_run, tmp_path):
    """A run in bfloat16 that is about to start."""
    run = small_run(rollout={"dtype": "bfloat16"})
    prompts = PromptStream([Prompt(text=text) for text in ("cat", "dog", "cat")], seed=0)
    rows = {"cat": 0, "dog": 1}
    connected = SimpleNamespace(
        actor=run.actor,
        engine=run.engine,
        prompts=prompts,
        cache=lambda prompts: {
            name: tensor[[rows[prompt.text] for prompt in prompts]]
            for name, tensor in run.conditioning.items()
        },
    )
    return Shown(tmp_path, connected)


def test_before_a_run_it_is_started_in_float32_and_the_report_is_kept(fixed_precision, before_start):
    config, started = fixed_precision
    before_start.start(config)
    assert started == ["float32"]
    (report,) = before_start
    assert finding_of(report, "float32").level == "healthy"
    assert before_start.written == json.loads(as_json(report))
    assert before_start.run.prompts.position == 0


@pytest.mark.parametrize("texts", [("cat", "cat", "cat", "cat", "dog"), ("cat",)])
def test_a_run_whose_next_prompts_have_one_text_starts(fixed_precision, before_start, tmp_path, texts):
    config, _ = fixed_precision
    lines = tmp_path / "train.jsonl"
    lines.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    (tmp_path / "heldout.txt").write_text("red\n")
    data = replace(config.data, path=str(lines), heldout_path=str(tmp_path / "heldout.txt"))
    prompts = [Prompt(text=text) for text in texts]
    stream = before_start.run.prompts = PromptStream(prompts, seed=0)
    while len({prompt.text for prompt in stream.peek(examination.NUM_PROMPTS)}) > 1:
        stream.next(1)
    before_start.start(replace(config, data=data))
    (report,) = before_start
    assert report.causes() == []
    assert (finding_of(report, "batch_shape").level == "note") == (len(set(texts)) == 1)


def test_a_failure_in_float32_stops_the_run_with_its_findings_on_disk(
    fixed_precision, before_start, monkeypatch
):
    config, _ = fixed_precision
    monkeypatch.setattr(sde, "step_noise", lambda shape, groups, *_, **__: torch.zeros(len(groups), *shape))
    with pytest.raises(BackendError, match=r" noise, .*doctor\.json; "):
        before_start.start(config)
    assert before_start.written["level"] == "serious"
    failed = [finding for finding in before_start.written["findings"] if finding["level"] == "serious"]
    assert [finding["cause"] for finding in failed] == ["noise"]
    assert failed[0]["numbers"]["dtype"] == "float32"


@pytest.mark.parametrize(
    ("rollout", "doctor", "examined"),
    [
        ({}, "auto", False),
        ({"emulate": "fp8", "staleness": 1, "dtype": "bfloat16"}, "auto", False),
        ({"placement": "ray"}, "auto", True),
        ({"name": "vllm_omni"}, "auto", True),
        ({}, True, True),
        ({"name": "vllm_omni"}, False, False),
    ],
)
def test_engines_with_processes_or_a_model_of_their_own_are_examined(make_config, rollout, doctor, examined):
    config = make_config(rollout=rollout, trainer={"doctor": doctor})
    assert examines_before_start(config) == examined


def test_float32_can_be_turned_off(fixed_precision):
    config, started = fixed_precision
    report = diagnose(config, num_prompts=2, float32=False)
    assert started == ["bfloat16"]
    assert finding_of(report, "float32").level == "note"


def test_an_engine_that_does_not_start_in_float32(fixed_precision, monkeypatch):
    config, _ = fixed_precision
    build = examination.build_stacks

    def only_bfloat16(config, family, texts):
        if config.rollout.dtype == "float32":
            raise BackendError("no kernel")
        return build(config, family, texts)

    monkeypatch.setattr(examination, "build_stacks", only_bfloat16)
    report = diagnose(config, num_prompts=2)
    told = finding_of(report, "float32")
    assert (told.level, "no kernel" in told.sentence) == ("note", True)
    with pytest.raises(BackendError, match="no kernel"):
        diagnose(config, num_prompts=2, float32=True)
