"""Conventions of log-probs, told from the noise of captured steps."""

import pytest
import torch

from flowcorr.instruments.doctor.conventions import CONVENTIONS
from flowcorr.instruments.doctor.legs import Legs


@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda convention: convention.name)
def test_conventions_of_log_probs_are_told(convention, stack_of):
    legs = Legs(stack_of())
    elements = legs.noise[0, 0].numel()
    claimed = convention.of(legs.square, legs.std, legs.step, elements)
    given = torch.cat([claimed, claimed]).float()
    found = Legs(stack_of(log_probs=given))
    assert (found.convention, found.agrees) == (convention, True)
