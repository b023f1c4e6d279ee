import sys
from types import ModuleType

import pytest

from flowcorr.errors import ConfigError
from flowcorr.losses import LOSSES, needs_means, resolve_loss


@pytest.fixture
def own_module(monkeypatch):
    module = ModuleType("own_losses")

    def plain(policy_step, batch_step, actor_config):
        return None

    def with_means(policy_step, batch_step, actor_config):
        return None

    with_means.needs_means = True
    module.plain, module.with_means, module.number = plain, with_means, 3
    monkeypatch.setitem(sys.modules, "own_losses", module)
    return module


def test_built_in_losses_by_name():
    assert set(LOSSES) == {"flow_grpo", "grpo_guard", "flow_dppo", "importance_cap", "reinforce"}
    assert all(resolve_loss(name) is LOSSES[name] for name in LOSSES)
    assert {name for name in LOSSES if needs_means(name)} == {"grpo_guard", "flow_dppo"}


def test_a_loss_of_ones_own_by_import_path(own_module):
    assert resolve_loss("own_losses:plain") is own_module.plain
    assert not needs_means("own_losses:plain")
    assert needs_means("own_losses:with_means")


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flow_gpo", r"actor\.loss_mode='flow_gpo' is unknown.*did you mean flow_grpo.*package\.module:name"),
        ("no_such_package.losses:mine", r"no module 'no_such_package' on the Python path"),
        (":mine", r"no module '' on the Python path"),
        ("own_losses:missing", r"the module own_losses has no 'missing'"),
        ("own_losses:", r"has no ''; name a function"),
        ("own_losses:number", r"is of type int; name a function"),
    ],
)
def test_names_that_lead_nowhere(name, message):
    with pytest.raises(ConfigError, match=message):
        resolve_loss(name)
