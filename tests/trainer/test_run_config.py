"""The configuration of a run, which may be a stranger's: it is read, and nothing that it names is run."""

import os

import pytest

from flowcorr import config
from flowcorr.config import yaml_text
from flowcorr.errors import ConfigError
from flowcorr.trainer.run_config import ENGINE, LOSS, MODES, imported_by_eval, notes, read_config

CORRECTION = "algorithm.rollout_correction"
LOADED = "import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\n"


def write(folder, values):
    """A run's `config.yaml` with these values."""
    (folder / "config.yaml").write_text(yaml_text.dump(values), encoding="utf-8")
    return folder


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of a stranger's on Python's path; its `ran` says whether it was imported."""
    path = tmp_path / "a_strangers_code.py"
    path.write_text(
        f"{LOADED}from flowcorr.config import ENGINES\n"
        "from flowcorr.correction.modes import RS_MODES\n"
        "def loss(terms, actor_config): ...\n"
        "mode = RS_MODES['token_k2']\n"
        "engine = ENGINES['vllm_omni']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return path


def ran(module):
    return module.with_suffix(".ran").exists()


def test_what_flowcorr_wrote_is_read(tmp_path):
    settings = config.load_mapping({"sampling": {"negative_prompt": "${a} \\${b}", "guidance_scale": 2}})
    (tmp_path / "config.yaml").write_text(config.to_yaml(settings), encoding="utf-8")
    found = read_config(tmp_path)
    assert found.config == settings
    assert found.values == config.to_mapping(settings)
    assert (found.left_out, found.loss_mode) == ({}, "flow_grpo")
    assert read_config(tmp_path, ["trainer.seed=7"]).config.trainer.seed == 7


@pytest.mark.parametrize(
    "algorithm",
    [
        {
            "rollout_correction": {
                "rollout_rs": "token_k1,a_strangers_code:mode",
                "rollout_rs_threshold": "0.5_2,1",
            }
        },
        {"rollout_rs": "a_strangers_code:mode", "rollout_rs_threshold": 1.0},
        {
            "rollout_rs": "a_strangers_code:mode",
            "rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 2.0},
        },
    ],
)
@pytest.mark.filterwarnings("ignore:.*belong:FutureWarning")
def test_losses_modes_and_engines_are_not_imported(algorithm, module, tmp_path):
    actor = {"loss_mode": "a_strangers_code:loss", "loss_options": {"beta": 2}}
    reward = {"terms": [{"name": "a_strangers_code:reward"}]}
    rollout = {"name": "a_strangers_code:engine", "engine": {"speed": 3}}
    write(tmp_path, {"actor": actor, "algorithm": algorithm, "reward": reward, "rollout": rollout})
    found = read_config(tmp_path)
    assert not ran(module)
    assert found.loss_mode == "a_strangers_code:loss"
    assert found.config.actor.loss_mode == "flow_grpo"
    assert found.config.algorithm.rollout_correction.rollout_rs is None
    assert found.values["actor"]["loss_options"] == {"beta": 2}
    assert "a_strangers_code:mode" in found.values["algorithm"]["rollout_correction"]["rollout_rs"]
    assert (found.config.rollout.name, found.config.rollout.engine) == ("in_process", {})
    assert (found.values["rollout"]["name"], found.values["rollout"]["engine"]) == tuple(rollout.values())
    assert found.left_out.keys() == {LOSS, MODES, ENGINE}
    assert [note.rpartition("--allow-import ")[2] for note in notes(found.left_out)] == [
        f"a_strangers_code:{name}" for name in ("loss", "engine", "mode")
    ]
    assert imported_by_eval(found.config) == {"reward.terms[0].name": "a_strangers_code:reward"}


def test_what_is_allowed_is_imported(module, tmp_path):
    correction = {"rollout_rs": "a_strangers_code:mode", "rollout_rs_threshold": 1.0}
    actor = {"loss_mode": "a_strangers_code:loss"}
    write(tmp_path, {"actor": actor, "algorithm": {"rollout_correction": correction}})
    found = read_config(tmp_path, allow_imports=["a_strangers_code:mode"])
    assert ran(module)
    assert found.config.algorithm.rollout_correction.rollout_rs == "a_strangers_code:mode"
    assert found.left_out == {LOSS: "a_strangers_code:loss"}
    found = read_config(tmp_path, allow_imports=["a_strangers_code:mode", "a_strangers_code:loss"])
    assert (found.config.actor.loss_mode, found.left_out) == ("a_strangers_code:loss", {})
    write(tmp_path, {"rollout": {"name": "a_strangers_code:engine"}})
    found = read_config(tmp_path, allow_imports=["a_strangers_code:engine"])
    assert (found.config.rollout.name, found.left_out) == ("a_strangers_code:engine", {})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"", "config.yaml is missing"),
        (b"\xff\xfe", "UTF-8 .* byte 0 "),
        (b"a: [", r"YAML: .*\(line 1, column 5\)"),
        (b"- 1\n- 2\n", "sections of keys, .* list "),
        (b"step,loss\n1,2\n", "sections of keys, .* str "),
        (b"trainer: {seed: 1, seed: 2}", "'seed' .* twice"),
        (b"actor: {loss_mode: 7}", "actor.loss_mode=7 .* text"),
        (b'actor: {loss_mode: "a:b\\nc"}', r"'a:b\\nc' .* package.module:name"),
        (b"actor: {loss_mode: ':'}", "':' .* package.module:name"),
        (b"actor: {lr: .nan}", "actor.lr=nan .* above 0"),
        (b"actor: {lr: 1e400}", "1e400 .* float64"),
        (b"trainer: {seed: 1" + b"0" * 5000 + b"}", r"10000000000000000000\.\.\. .* 19 digits"),
        (b"model: {path: '${oc.env:HOME}'}", r"line 1 .* \$\{...\};"),
        (b"model: {path: '\\\\${oc.env:HOME}'}", r"line 1 .* \$\{...\};"),
        (b"trainer: !!python/object/apply:os.system [id]", "tag .*apply:os.system "),
        (b"a: " + b"[" * 10**4, "20000 values, or 50 levels"),
        (b"# " + b"a" * 10**6, "1000002 bytes, .* 1000000 "),
        (
            b'rollout: {worker_resources: {"a\\e[31m\\nb": x}}',
            r"worker_resources.a\\x1b\[31m\\nb='x' .* number",
        ),
        (b"\x00" * 100, "YAML: .* #x0000"),
    ],
)
def test_odd_files_are_refused_in_one_line(text, named, tmp_path):
    if text:
        (tmp_path / "config.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=named) as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_a_name_without_a_file_is_no_run(make, tmp_path):
    make(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=rf"^{tmp_path} .*: config\.yaml "):
        read_config(tmp_path)
