import sys
from types import ModuleType

import pytest
import torch

from flowcorr.config.schema import ActorConfig
from flowcorr.correction import OFF, RolloutCorrectionConfig
from flowcorr.errors import ConfigError
from flowcorr.losses import LOSS_KEYS, LOSSES, Limit, Loss, loss_of, resolve_loss


@pytest.fixture
def own_module(monkeypatch):
    module = ModuleType("own_losses")

    def plain(terms, actor_config):
        return None

    def with_options(terms, actor_config, *, width, sign=1):
        return terms, actor_config, width, sign

    def three_records(policy_step, batch_step, actor_config, *, width=1):
        return None

    module.plain, module.with_options, module.number = plain, with_options, 3
    module.one_argument, module.three_records = lambda terms: None, three_records
    module.ROW = Loss(objective=with_options, limit=Limit(key="importance_cap", is_cap=True), needs_kl=True)
    monkeypatch.setitem(sys.modules, "own_losses", module)
    return module


def resolve(name, **options):
    return resolve_loss(ActorConfig(loss_mode=name, loss_options=options))


def test_built_in_losses_by_name():
    assert set(LOSSES) == {"flow_grpo", "grpo_guard", "flow_dppo", "importance_cap", "reinforce"}
    assert all(resolve(name) is LOSSES[name] for name in LOSSES)
    assert {name for name in LOSSES if LOSSES[name].needs_kl} == {"grpo_guard", "flow_dppo"}
    assert set(ActorConfig.__dataclass_fields__) >= LOSS_KEYS


@pytest.mark.parametrize(
    ("actor", "limit"),
    [
        ({"clip_ratio": 0.02}, 0.02),
        ({"clip_ratio": (0.1, 0.2)}, (0.1, 0.2)),
        ({"loss_mode": "grpo_guard", "clip_ratio": 0.02}, 0.02),
        ({"loss_mode": "importance_cap", "importance_cap": 1.5}, 0.5),
        ({"loss_mode": "importance_cap", "importance_cap": 1.0}, None),
        ({"loss_mode": "flow_dppo"}, None),
    ],
)
def test_how_far_a_loss_lets_a_ratio_be_from_1(actor, limit):
    actor = ActorConfig(**actor)
    loss = resolve_loss(actor)
    assert loss.ratio_limit(actor) == limit
    if isinstance(limit, float):
        assert loss.limit.value(limit) == getattr(actor, loss.limit.key)


def test_only_grpo_guard_changes_the_log_ratio_before_it_exponentiates():
    delta, kl, std = torch.tensor([0.2, -0.1]), torch.tensor([0.1, 0.3]), torch.tensor([0.5, 2.0])
    for name, loss in LOSSES.items():
        expected = [0.15, 0.4] if name == "grpo_guard" else [0.2, -0.1]
        assert loss.log_ratio(delta, kl, std).tolist() == pytest.approx(expected)


def test_the_correction_may_bring_its_own_loss():
    actor = ActorConfig(loss_mode="grpo_guard")
    reinforce = RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce")
    assert loss_of(actor, reinforce) is LOSSES["reinforce"]
    for correction in (OFF, RolloutCorrectionConfig(), RolloutCorrectionConfig(bypass_mode=True)):
        assert loss_of(actor, correction) is LOSSES["grpo_guard"]


def test_a_loss_of_ones_own_by_import_path(own_module):
    assert resolve("own_losses:plain") == Loss(objective=own_module.plain, limit=Limit(key="clip_ratio"))
    assert resolve("own_losses:with_options", width=2.0).objective("t", "a") == ("t", "a", 2.0, 1)
    row = resolve("own_losses:ROW", width=2.0, sign=-1)
    assert (row.limit, row.needs_kl) == (own_module.ROW.limit, True)
    assert row.objective("t", "a") == ("t", "a", 2.0, -1)


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("flow_gpo", {}, r"^actor\.loss_mode='flow_gpo' .*flow_grpo\?.*package\.module:name"),
        ("no_such_package.losses:mine", {}, "no module 'no_such_package'"),
        (":mine", {}, "no module ''"),
        ("own_losses:missing", {}, "own_losses has no 'missing'"),
        ("own_losses:", {}, "own_losses has no ''"),
        ("own_losses:number", {}, r"'own_losses:number' .* int; .*flowcorr\.losses\.Loss"),
        ("own_losses:one_argument", {}, r"'own_losses:one_argument': .* \(terms\), .*\(terms, actor_config, "),
        ("own_losses:three_records", {"width": 2},
         r"^actor\.loss_options=\{'width': 2\} .*actor\.loss_mode='own_losses:three_records': .*'actor_config'; .* "
         r"\(policy_step, batch_step, actor_config, \*, width=1\), .*\(terms, actor_config, \*\*loss_options\)$"),
        ("own_losses:with_options", {}, r"'own_losses:with_options': .*'width'; .*\*, width, sign=1\)"),
        ("own_losses:ROW", {"widht": 1}, r"'own_losses:ROW': .*'width'"),
        ("own_losses:plain", {"width": 1}, r"'own_losses:plain': .*'width'; .* \(terms, actor_config\),"),
        ("own_losses:with_options", {"width": 1, "sing": 1}, "'own_losses:with_options': .*'sing'"),
        ("flow_grpo", {"width": 1}, "loss_mode='flow_grpo': .*'width'"),
    ],
)  # fmt: skip
def test_names_and_options_that_lead_nowhere(name, options, named):
    with pytest.raises(ConfigError, match=named):
        resolve(name, **options)
