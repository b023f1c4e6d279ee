"""Conventions of log-probs and advantages."""

import pytest
import torch

import flowcorr
from flowcorr import dumps
from flowcorr.instruments.doctor.replayed.conventions import examine_advantages, examine_convention
from flowcorr.instruments.doctor.replayed.legs import Legs


@pytest.mark.parametrize(
    ("scale", "normaliser", "status", "cause"),
    [(1, True, None, ""), (1, False, "PASS", ""), ("D", True, "FAIL", "log_probs_summed")],
)
def test_log_probs(scale, normaliser, status, cause, stack_of):
    legs = Legs(stack_of())
    elements = legs.noise[0, 0].numel()
    values = -legs.square / 2
    if normaliser:
        values = values - legs.std.log() - 0.9189385332046727
    values = values * (elements if scale == "D" else 1)
    found = examine_convention(Legs(stack_of(log_probs=torch.cat([values, values]))), 0)
    assert (None if found is None else found.status) == status
    assert found is None or found.cause == cause


@pytest.mark.parametrize(("both", "status"), [(True, "PASS"), (False, "FAIL")])
def test_a_normaliser_that_one_side_lacks_cancels_in_no_ratio(both, status, stack_of, tmp_path):
    legs = Legs(stack_of())
    plain = (-legs.square / 2).repeat(8, 1)
    trainer = plain if both else plain - legs.std.log().repeat(8, 1) - 0.9189385332046727
    flowcorr.dump(
        tmp_path, 0, rollout_log_probs=plain, old_log_probs=trainer, advantages=plain[:, 0], num_elements=512
    )
    captured = Legs(stack_of(log_probs=torch.cat([plain[: len(legs.square)]] * 2)))
    found = examine_convention(captured, 0, dumps.files(tmp_path)[0])
    assert (found.status, found.cause) == (status, "" if both else "log_probs_normaliser")


def dumped(folder, advantages):
    for step, values in enumerate(advantages):
        rollout = torch.zeros(len(values), 2)
        flowcorr.dump(folder, step, rollout_log_probs=rollout, advantages=values)
    return dumps.files(folder)


def test_advantages(tmp_path):
    draw = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    centred = draw - draw.mean(1, keepdim=True)
    assert examine_advantages(dumped(tmp_path / "a", centred)).status == "PASS"
    found = examine_advantages(dumped(tmp_path / "b", centred + 1))
    assert (found.cause, found.status) == ("advantages_not_centred", "FAIL")


def test_a_part_of_the_groups_cannot_tell(tmp_path):
    found = examine_advantages(dumped(tmp_path, torch.tensor([[1.0, -1.0, 1.0, 0.5]])))
    assert (found.status, found.cause) == ("SKIP", "")
    assert examine_advantages({}).status == "SKIP"
