"""Rollout engines by name."""

import pytest

from flowcorr.config import ENGINES, Engine, load_mapping, resolve_engine
from flowcorr.errors import ConfigError

MODULE = """
from flowcorr.config import Engine
mine = Engine(build="my_engines:build")
shared = Engine(build="my_engines:build", shares_weights=True, takes_options=False)
other = object()
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_engines.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def test_names_and_paths_lead_to_rows(module):
    assert resolve_engine("in_process") is ENGINES["in_process"]
    assert resolve_engine("my_engines:mine") == Engine(build="my_engines:build")


@pytest.mark.parametrize(
    ("name", "named"),
    [
        (
            "vllm-omni",
            r"^rollout\.name='vllm-omni' .*vllm_omni\?\).*'package\.module:name'$",
        ),
        ("my_engines:nothing", r"^rollout\.name='my_engines:nothing'.*flowcorr\.config\.Engine"),
        ("my_engines:other", r"^rollout\.name='my_engines:other' .* object; .*examples/new_engine\.py"),
    ],
)
def test_other_names_are_refused(module, name, named):
    with pytest.raises(ConfigError, match=named):
        load_mapping({"rollout": {"name": name}})


def test_rules_ask_the_row(module):
    fsdp = {"model": {"lora": {"rank": 0}}, "actor": {"fsdp": True}}
    with pytest.raises(ConfigError, match=r"actor\.fsdp=True .*rollout\.name='my_engines:mine'"):
        load_mapping({**fsdp, "rollout": {"name": "my_engines:mine"}})
    load_mapping({**fsdp, "rollout": {"name": "my_engines:shared"}})
    load_mapping({"rollout": {"name": "my_engines:mine", "engine": {"speed": 3}}})
    with pytest.warns(UserWarning, match=r"rollout\.engine=.*rollout\.name=my_engines:shared "):
        load_mapping({"rollout": {"name": "my_engines:shared", "engine": {"speed": 3}}})
