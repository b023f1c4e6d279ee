"""The files of a folder: damaged ones, those of two runs, and what they tell together."""

import math

import pytest
import torch
from instruments.dumped_runs import terms_of, write_run
from instruments.foreign_dumps import draw_steps

import flowcorr
from flowcorr import dumps
from flowcorr.errors import ConfigError
from flowcorr.instruments.steps import as_terms, diagnosed, read_dumped, records
from tests.odd_files import BATCH, write_step


def test_noise_levels_stand_for_step_indices(tmp_path):
    """Windows of each sample's own; one noise level was rounded to bfloat16."""
    schedule = torch.tensor([1.0, 0.9, 0.7, 0.5])
    own = torch.stack([schedule[start : start + 2] for start in [0, 1, 2, 1] * 8])
    draw_steps(tmp_path, steps=1, without=("step_indices",), sigmas=own)
    rounded = torch.where(own == 0.9, own.bfloat16().float(), own)
    flowcorr.dump(tmp_path, 2, rollout_log_probs=own, old_log_probs=own, advantages=own[:, 0], sigmas=rounded)
    run = read_dumped(tmp_path)
    assert run.levels.tolist() == pytest.approx([1.0, 0.9, 0.7, 0.5], rel=1e-2)
    assert run.setting.num_steps == 4
    found = [as_terms(step.terms).step_index for step in run.steps.values()]
    assert torch.equal(found[0], found[1])
    assert found[0][:3].tolist() == [[0, 1], [1, 2], [2, 3]]
    assert "rollout_corr/step_3/kl" in records(run)[0]


def test_of_six_files_a_damaged_one_is_left_out(tmp_path):
    draw_steps(tmp_path, steps=6)
    path = tmp_path / "step_000003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=f"^1 of 6 .*: {path} ") as caught:
        run = read_dumped(tmp_path)
    assert list(run.steps) == [1, 2, 4, 5, 6]
    assert run.notes == (str(caught[0].message),)
    assert [record["step"] for record in records(run)] == [1, 2, 4, 5, 6]


def test_if_no_file_can_be_read_the_first_is_named(tmp_path):
    for step in (1, 2):
        write_step(tmp_path, step, metadata={"loss_mode": None})
    with pytest.raises(ConfigError, match=rf"^{tmp_path}: 2 of 2 .*step_000001\.safetensors .*loss_mode "):
        read_dumped(tmp_path)


@pytest.mark.parametrize(
    ("metadata", "tensors", "named"),
    [
        (
            {"num_elements": "65"},
            {},
            "num_elements=64 and num_elements=65;",
        ),
        (
            {},
            {
                "rollout_log_probs": torch.zeros(BATCH, 3),
                "old_log_probs": torch.zeros(BATCH, 3),
                **dict.fromkeys(("current_log_probs", "step_indices", "sigmas")),
            },
            "SDE steps a sample=2 and SDE steps a sample=3;",
        ),
    ],
)
def test_files_of_two_runs_are_told_apart(metadata, tensors, named, tmp_path):
    write_step(tmp_path, 1)
    write_step(tmp_path, 2, metadata=metadata, tensors=tensors)
    with pytest.raises(
        ConfigError, match=rf"step_000001\.safetensors and .*step_000002\.safetensors .*{named}"
    ):
        read_dumped(tmp_path)


def test_step_indices_stay_within_the_schedule(tmp_path):
    run_dir = write_run(tmp_path / "run", [terms_of(), terms_of(steps=11)], "sampling.num_inference_steps=10")
    with pytest.warns(UserWarning, match=r"step_000002\.safetensors: step_indices reaches 10, .* 10 steps;"):
        assert list(read_dumped(run_dir).steps) == [1]
    write_step(tmp_path / "foreign", metadata={"clip_ratio": "[0.1, 0.1]"})
    with pytest.raises(
        ConfigError, match=r"step_000001\.safetensors: step_indices reaches 3, .*clip_ratio has 2 "
    ):
        read_dumped(tmp_path / "foreign")


def test_sigmas_that_lie_anywhere_are_no_schedule(tmp_path):
    """A trainer that draws a noise level for each sample has no steps to count by."""
    sigmas = torch.rand(2000, 2, generator=torch.Generator().manual_seed(0))
    flowcorr.dump(
        tmp_path, 1, rollout_log_probs=sigmas, old_log_probs=sigmas, advantages=sigmas[:, 0], sigmas=sigmas
    )
    run = read_dumped(tmp_path)
    assert (run.levels, run.setting.num_steps) == (None, 2)
    assert run.notes[-1].startswith("sigmas ")


def test_a_step_that_was_scored_before_and_is_no_more_is_a_fault(tmp_path):
    draw_steps(tmp_path)
    last, path = max(dumps.files(tmp_path).items())
    terms = dumps.load(path)
    terms.old_log_probs[:, 1] = math.nan
    dumps.save(path.parent, last, terms, dumps.load_loss(path))
    run = read_dumped(tmp_path)
    assert records(run)[-1]["rollout_corr/nonfinite_fraction"] == 0.5
    (found,) = diagnosed(run)
    assert found.numbers["since training step"] == last


def test_trained_steps_that_move_are_no_fault(tmp_path):
    """As of MixGRPO, whose window slides; a dump holds the whole schedule."""
    for step in range(1, 5):
        draw = torch.Generator().manual_seed(step)
        rollout = torch.randn(32, 4, generator=draw)
        old = rollout + 1e-4 * torch.randn(32, 4, generator=draw)
        first = (step + 1) // 2 - 1
        old[:, :first] = old[:, first + 2 :] = math.nan
        flowcorr.dump(tmp_path, step, rollout_log_probs=rollout, old_log_probs=old, advantages=rollout[:, 0])
    run = read_dumped(tmp_path)
    assert run.scored is None
    assert [record["rollout_corr/nonfinite_fraction"] for record in records(run)] == [0] * 4
    assert not diagnosed(run)


def test_a_step_of_flowcorrs_own_that_is_broken_from_the_start_is_a_fault(tmp_path):
    terms = [terms_of(seed=seed) for seed in (0, 1)]
    for one in terms:
        one.old_log_probs[:, 1] = math.nan
    run = read_dumped(write_run(tmp_path / "own", terms))
    assert [record["rollout_corr/nonfinite_fraction"] for record in records(run)] == [0.5] * 2
    (found,) = diagnosed(run)
    assert found.numbers["since training step"] == 1
