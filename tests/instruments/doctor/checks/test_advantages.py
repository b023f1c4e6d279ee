"""Advantages that another trainer dumped."""

from types import SimpleNamespace

import torch

import flowcorr
from flowcorr import dumps
from flowcorr.instruments.doctor.checks.advantages import check_captured_advantages


def advantages_of(files):
    return check_captured_advantages(SimpleNamespace(terms=files))


def dumped(folder, advantages):
    for step, values in enumerate(advantages):
        rollout = torch.zeros(len(values), 2)
        flowcorr.dump(folder, step, rollout_log_probs=rollout, advantages=values)
    return dumps.files(folder)


def test_advantages(tmp_path):
    draw = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    centred = draw - draw.mean(1, keepdim=True)
    assert advantages_of(dumped(tmp_path / "a", centred)).level == "healthy"
    found = advantages_of(dumped(tmp_path / "b", centred + 1))
    assert (found.cause, found.level) == ("advantages_not_centred", "serious")


def test_a_part_of_the_groups_cannot_tell(tmp_path):
    found = advantages_of(dumped(tmp_path, torch.tensor([[1.0, -1.0, 1.0, 0.5]])))
    assert (found.level, found.cause) == ("note", "")
    assert advantages_of({}).level == "note"


def test_advantages_of_0_are_told_from_none(tmp_path):
    zeros, none = advantages_of(dumped(tmp_path, torch.zeros(2, 4))), advantages_of({})
    assert zeros.level == none.level == "note"
    assert "all dumped advantages are 0" in zeros.sentence
    assert zeros.remedy != none.remedy
