import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import yaml
from PIL import Image
from tiny_pipelines import FAMILIES
from torch import Tensor

from flowcorr import config as configs
from flowcorr.actor.weights import TrainedWeights
from flowcorr.config import load_mapping
from flowcorr.config.schema import Config
from flowcorr.errors import CheckpointError, ConfigError
from flowcorr.models import load_family
from flowcorr.trainer import checkpoint, export_run
from flowcorr.trainer.checkpoint import TrainingState

STEP = 3
BASE_METRICS = '{"step": 0, "eval/reward": 0.25, "eval/reward_std": 0.1, "eval/image/dark": 0.5}\n'
METRICS = BASE_METRICS + '{"step": 3, "eval/reward": 0.75, "eval/reward_std": 0.1, "eval/image/dark": 0.5}\n'


@dataclass(frozen=True)
class SavedRun:
    """The folder of a run with one checkpoint, its configuration, and the weights that its policy has."""

    folder: Path
    config: Config
    weights: dict[str, Tensor]


def saved_run(folder, **sections):
    """A run whose weights were moved at random, as its folder holds it."""
    config = load_mapping(sections)
    family = load_family(config.model)
    weights = TrainedWeights(family, config)
    for index, parameter in enumerate(weights.parameters.values()):
        draw = torch.Generator().manual_seed(index)
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=draw).to(parameter)
    state = TrainingState(step=STEP, tensors={"one": torch.zeros(1)}, facts={"best": None})
    checkpoint.save(folder / "checkpoints", state, weights.save)
    (folder / "config.yaml").write_text(configs.to_yaml(config))
    (folder / "metrics.jsonl").write_text(METRICS)
    (folder / "images").mkdir()
    for name in ("before_after.png", "eval_after.png", "rollout_000001.png"):
        Image.new("RGB", (8, 8)).save(folder / "images" / name)
    snapshot = weights.snapshot().tensors
    return SavedRun(folder, config, {name: value.clone() for name, value in weights.merged(snapshot)})


def of_family(name, path, **model):
    tiny = FAMILIES[name]
    height, width = tiny.size
    sampling = {"height": height, "width": width, "num_inference_steps": 2, "sde_window_range": [0, 1]}
    sampling |= {"sde_window_size": 1} | ({"num_frames": tiny.frames} if tiny.frames else {})
    return {"model": {"path": str(path), "lora": {"rank": 4, "alpha": 6.0}} | model, "sampling": sampling}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in ("sd3", "ovis_image") else pytest.mark.system)
        for name in FAMILIES
    ],
)
def run_of_family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    path = FAMILIES[request.param].build(folder / "model")
    return saved_run(folder / "a_run", **of_family(request.param, path))


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sd3")
    return saved_run(folder / "a_run", **of_family("sd3", FAMILIES["sd3"].build(folder / "model")))


def code_of(card):
    """The blocks of code on a card."""
    return re.findall(r"^```python\n(.*?)^```", card.read_text(), re.M | re.S)


def merged_of(transformer):
    """The weights of a transformer with an adapter of peft, by diffusers' names."""
    adapter = {name: module for name, module in transformer.named_modules() if hasattr(module, "lora_A")}
    found = {
        name.replace(".base_layer", ""): value.clone()
        for name, value in transformer.state_dict().items()
        if ".lora_" not in name
    }
    for name, module in adapter.items():
        (key,) = module.lora_A
        update = module.lora_B[key].weight @ module.lora_A[key].weight
        found[f"{name}.weight"] += module.scaling[key] * update
    return found


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:.*torch_dtype.*:FutureWarning")  # diffusers 0.40 has no other name
def test_the_code_of_the_card_loads_the_policy_and_draws(run_of_family, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", FAMILIES["flux"].size, "red").save("reference.png")
    export_run(run_of_family.folder, tmp_path / "out", merge=True)
    by_diffusers, by_peft, merged = code_of(tmp_path / "out" / "README.md")
    loading, _, drawing = by_diffusers.rpartition("sample = ")
    names: dict = {}
    exec(loading, names)
    if "FluxKontext" not in type(names["pipe"]).__name__:  # which draws a megapixel, whatever it is asked for
        exec(f"sample = {drawing}", names)
        sampling = run_of_family.config.sampling
        assert np.asarray(names["sample"]).shape[-3:] == (sampling.height, sampling.width, 3)
    assert_same(merged_of(names["pipe"].transformer), run_of_family.weights)
    exec(merged, names)
    assert_same(names["pipe"].transformer.state_dict(), run_of_family.weights)
    names["pipe"].transformer = load_family(run_of_family.config.model).transformer
    exec(by_peft, names)
    assert isinstance(names["transformer"], peft.PeftModel)
    assert_same(merged_of(names["transformer"].base_model.model), run_of_family.weights)


def test_the_folder_is_complete_and_holds_no_secret(small_run, tmp_path):
    sections = yaml.safe_load((small_run.folder / "config.yaml").read_text())
    sections["reward"]["terms"] = [{"name": "jpeg_compressibility", "options": {"api_key": "sesame"}}]
    (small_run.folder / "config.yaml").write_text(yaml.safe_dump(sections))
    made = export_run(small_run.folder)
    assert made.folder == small_run.folder / "export"
    assert set(made.files) == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "images/before_after.png",
        "images/eval_after.png",
        "pytorch_lora_weights.safetensors",
        "recipe.yaml",
    }
    written = yaml.safe_load((made.folder / "recipe.yaml").read_text())
    assert written["reward"]["terms"][0].pop("options") == {"api_key": "***"}
    assert written["model"] == sections["model"]
    options = json.loads((made.folder / "adapter_config.json").read_text())
    assert options["base_model_name_or_path"] == small_run.config.model.path
    assert "sesame" not in "".join(
        path.read_text() for path in made.folder.glob("*.*") if "tensors" not in path.name
    )


def test_a_folder_with_files_is_left_alone(small_run, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=f"^{tmp_path} .*--out$"):
        export_run(small_run.folder, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    path = FAMILIES["sd3"].build(tmp_path / "model")
    run = saved_run(tmp_path / "a_run", **of_family("sd3", path))
    adapter = run.folder / "checkpoints" / "step_000003" / "adapter_model.safetensors"
    adapter.write_bytes(adapter.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(CheckpointError):
        export_run(run.folder)
    assert not (run.folder / "export").exists()


def test_a_run_of_all_weights_is_a_transformer(tmp_path, monkeypatch):
    path = FAMILIES["sd3"].build(tmp_path / "model")
    sections = of_family("sd3", path)
    sections["model"]["lora"] = {"rank": 0}
    run = saved_run(tmp_path / "a_run", **sections)
    with pytest.raises(ConfigError, match=f"^--merge .* {run.folder}, "):
        export_run(run.folder, merge=True)
    made = export_run(run.folder)
    (code,) = code_of(made.folder / "README.md")
    names: dict = {}
    exec(code.rpartition("sample = ")[0].replace(", torch_dtype=torch.float32", ""), names)
    assert_same(names["pipe"].transformer.state_dict(), run.weights)
