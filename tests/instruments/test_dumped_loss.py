"""The loss of a dumped step: its limit is that of the dump, or is not known."""

import sys
from types import ModuleType

import pytest
import torch

from flowcorr.config.schema import ActorConfig
from flowcorr.dumps import LoggedLoss
from flowcorr.instruments.dumped_loss import actor_of, hides_limit, ratio_limit, without_clipped_shares
from flowcorr.losses import LOSSES, flow_grpo


@pytest.mark.parametrize(
    ("loss", "limit", "hidden"),
    [
        (LoggedLoss(clip_ratio=1e-4), 1e-4, False),
        (LoggedLoss(clip_ratio=[1e-4, 2e-4]), (1e-4, 2e-4), False),
        (LoggedLoss(), None, True),
        (LoggedLoss(loss_mode="importance_cap", clip_ratio=1e-4), None, True),
        (LoggedLoss(loss_mode="reinforce", clip_ratio=1e-4), None, False),
        (LoggedLoss(loss_mode="grpo_guard", clip_ratio=1e-4), None, True),
        (LoggedLoss(loss_mode="flow_dppo"), None, True),
        (LoggedLoss(loss_mode="theirs:loss", clip_ratio=1e-4), 1e-4, False),
    ],
)
def test_a_limit_is_the_dumps_or_not_known(loss, limit, hidden):
    actor = actor_of(loss)
    assert (ratio_limit(actor), hides_limit(actor)) == (limit, hidden)


def test_every_loss_of_flowcorr_can_be_read_back():
    for name in LOSSES:
        assert actor_of(LoggedLoss(loss_mode=name)).adv_clip_max == ActorConfig().adv_clip_max


def test_a_loss_of_ones_own_is_imported_where_it_is_named(monkeypatch):
    module = ModuleType("their_losses")
    module.loss = LOSSES["importance_cap"]
    monkeypatch.setitem(sys.modules, "their_losses", module)
    loss = LoggedLoss(loss_mode="their_losses:loss", clip_ratio=1e-4)
    assert actor_of(loss).loss_mode == "flow_grpo"
    allowed = actor_of(loss, ["their_losses:loss"])
    assert (allowed.loss_mode, ratio_limit(allowed)) == ("their_losses:loss", None)


def test_clipped_shares_are_left_out():
    values = torch.zeros(2, 2)
    metrics = flow_grpo(values, values, values, clip_ratio=1e-4, adv_clip_max=5.0).metrics
    left = without_clipped_shares(metrics).compute()
    assert metrics.compute().keys() - left.keys() == {
        "actor/pg_clipfrac",
        "actor/pg_clipfrac_higher",
        "actor/pg_clipfrac_lower",
    }
