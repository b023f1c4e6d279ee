"""Every key of a source is named in its recipe."""

from flowcorr.translate import translate
from flowcorr.translate.table import set_values
from flowcorr.translate.verl_omni import TABLE as VERL_OMNI
from tests.translate.configs import FACTORY, GRPO, RESOLVED, factory_yaml, loaded


def named(text, values):
    """The keys of a configuration that its recipe does not name."""
    return [
        key
        for key, _ in set_values(values)
        if key not in text and key.partition(".")[0] not in ("rewards", "reward_fn")
    ]


def keys_without_place(table):
    """A key for each pattern of the table."""
    return [
        pattern.replace("*", "some_key") for pattern in (*(rule.pattern for rule in table.left), *table.apart)
    ]


def test_of_verl_omni(omni):
    others = [
        key for key in keys_without_place(VERL_OMNI) if not key.endswith(("lr_some_key", "v1.trainer_mode"))
    ]
    _, text = omni(*(f"{key}=5" for key in others if "use_v1" not in key), "unheard.of=1", all_keys=True)
    assert named(text, RESOLVED) == []
    assert [key for key in (*others, "unheard.of") if key not in text] == []


def test_of_flow_grpo(grpo, tmp_path):
    text = translate(grpo, gpus=4, all_keys=True)
    loaded(tmp_path, text)
    assert named(text, GRPO) == []
    assert "gpus" in text


def test_of_flow_factory(factory):
    path_text = factory_yaml(unheard_of=1)
    assert "unheard_of" in path_text
    _, text = factory(unheard_of=1)
    lost = named(text, FACTORY)
    assert [key for key in lost if not key.startswith(("launcher", "data.max", "rewards"))] == []
    assert "unheard_of=1" in text
