import re
import shutil
from types import ModuleType

import pytest
import torch
from diffusers.hooks import HookRegistry
from safetensors.torch import load_file, save_file
from tiny_pipelines import PIPELINES, build_tiny_flux, build_tiny_qwen_image, build_tiny_z_image

from flowcorr.config import ModelConfig
from flowcorr.errors import ConfigError
from flowcorr.models import EMBEDDED, Guidance, ModelFamily, load_family
from flowcorr.models.sd3 import SD3
from tests.prompts import prompts_of


def test_the_embedded_model_is_frozen_and_in_evaluation_mode():
    family = load_family(ModelConfig(path="tiny_ocr"))
    assert family.name == "sd3"
    modules = [part for part in family.pipeline.components.values() if isinstance(part, torch.nn.Module)]
    assert len(modules) >= 4
    for module in modules:
        assert not module.training
        assert not any(parameter.requires_grad for parameter in module.parameters())


def test_convolutions_in_float32_are_not_rounded_to_tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    load_family(ModelConfig(path="tiny_ocr"))
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_have_the_dtype_asked_for(dtype):
    family = load_family(ModelConfig(path="tiny_ocr", dtype=str(dtype).removeprefix("torch.")))
    assert {parameter.dtype for parameter in family.transformer.parameters()} == {dtype}
    assert family.dtype == dtype


def test_attention_is_computed_by_the_backend_that_is_named(tmp_path):
    path = str(build_tiny_flux(tmp_path / "flux"))
    family = load_family(ModelConfig(path=path, attention="native"))
    # diffusers keeps the backend's name to itself.
    backends = {processor._attention_backend for processor in family.transformer.attn_processors.values()}
    assert backends == {"native"}
    z_image = str(build_tiny_z_image(tmp_path / "z"))
    assert load_family(ModelConfig(path=z_image, attention="native")).name == "z_image"
    with pytest.raises(ConfigError, match=r"model\.attention='flesh' .*_native_cudnn"):
        load_family(ModelConfig(path=path, attention="flesh"))


def test_a_backend_that_the_model_would_not_use_is_an_error():
    with pytest.raises(ConfigError, match=r"model\.attention='native' .*SD3Transformer2DModel "):
        load_family(ModelConfig(path="tiny_ocr", attention="native"))


def test_family_may_be_named():
    assert load_family(ModelConfig(path="tiny_ocr", family="sd3")).name == "sd3"


def test_a_name_that_is_nothing_is_an_error():
    with pytest.raises(ConfigError, match=r"model\.path='no_such_pipeline' .*hf download no_such_pipeline"):
        load_family(ModelConfig(path="no_such_pipeline"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, r"model_index\.json .*missing"),
        ("{", "tiny_ocr: .*line 1 column 2"),
        ("{}", "tiny_ocr: '_class_name'"),
        ("[]", "tiny_ocr: "),
        ("null", "tiny_ocr: "),
        ('{"_class_name": ["FluxPipeline"]}', "tiny_ocr: "),
        ('{"_class_name": "X", "vae": ["diffusers"]}', "tiny_ocr: "),
        (
            '{"_class_name": "StableDiffusionPipeline"}',
            r"'StableDiffusionPipeline' .*StableDiffusion3Pipeline\?",
        ),
    ],
)
def test_an_index_of_no_known_pipeline_is_an_error(tmp_path, text, named):
    if text is not None:
        (tmp_path / "model_index.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"^model\.path='{tmp_path}'.*{named}"):
        load_family(ModelConfig(path=str(tmp_path)))


def test_weights_in_a_pickle_are_not_loaded(tmp_path):
    """Loading a pickle can run code; the error says how to convert it."""
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED["tiny_ocr"], folder)
    for part in ("transformer", "vae"):
        path = folder / part / "diffusion_pytorch_model.safetensors"
        torch.save(load_file(path), path.with_suffix(".bin"))
        path.unlink()
        with pytest.raises(ConfigError, match=rf"^model\.path='{folder}' .*/{part}\..*save_pretrained"):
            load_family(ModelConfig(path=str(folder)))
        shutil.copytree(EMBEDDED["tiny_ocr"] / part, folder / part, dirs_exist_ok=True)


def test_text_encoders_in_a_pickle_are_not_loaded(tmp_path):
    folder = build_tiny_flux(tmp_path / "flux")
    (path,) = (folder / "text_encoder").glob("*.safetensors")
    torch.save(load_file(path), path.with_name("pytorch_model.bin"))
    path.unlink()
    with pytest.raises(ConfigError, match=rf"^model\.path='{folder}' .*save_pretrained"):
        load_family(ModelConfig(path=str(folder)))


def test_an_incomplete_pipeline_is_an_error(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED["tiny_ocr"], folder)
    shutil.rmtree(folder / "transformer")
    with pytest.raises(ConfigError, match=rf"^model\.path='{folder}' .* sd3 pipeline: .*config\.json "):
        load_family(ModelConfig(path=str(folder)))


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
@pytest.mark.parametrize("content", [lambda whole: whole[:-100], lambda whole: b"version https://git-lfs"])
def test_a_damaged_file_of_weights_is_named(tmp_path, part, content):
    folder = build_tiny_flux(tmp_path / "flux")
    (path,) = (folder / part).glob("*.safetensors")
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(ConfigError, match=rf"^model\.path='{folder}': {path} .*damaged"):
        load_family(ModelConfig(path=str(folder)))


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder", "text_encoder_2"])
def test_a_weight_that_no_file_has_is_named(tmp_path, part):
    folder = build_tiny_flux(tmp_path / "flux")
    (path,) = (folder / part).glob("*.safetensors")
    weights = load_file(path)
    name = min(weights)
    del weights[name]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"^model\.path='{folder}': .* {part} .* {re.escape(name)}; "):
        load_family(ModelConfig(path=str(folder)))


@pytest.mark.parametrize(
    ("build", "part"),
    [(build_tiny_flux, "tokenizer"), (build_tiny_flux, "tokenizer_2"), (build_tiny_qwen_image, "tokenizer")],
)
def test_a_tokenizer_without_its_vocabulary_is_named(tmp_path, build, part):
    """Transformers would read every prompt as unknown tokens, or as none."""
    folder = build(tmp_path / "model")
    (folder / part / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=rf"^model\.path='{folder}': .* {part} .*tokenizer\.json"):
        load_family(ModelConfig(path=str(folder)))


def test_a_tokenizer_without_its_chat_template_is_named(tmp_path):
    folder = build_tiny_z_image(tmp_path / "model")
    (folder / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=rf"^model\.path='{folder}': .* chat_template\.jinja "):
        load_family(ModelConfig(path=str(folder)))
    assert load_family(ModelConfig(path=str(folder)), text_encoders=False).name == "z_image"


def test_a_text_encoder_needs_no_head_that_predicts_tokens(tmp_path):
    folder = build_tiny_qwen_image(tmp_path / "qwen_image")
    (path,) = (folder / "text_encoder").glob("*.safetensors")
    weights = load_file(path)
    del weights["lm_head.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    assert load_family(ModelConfig(path=str(folder))).pipeline.text_encoder is not None


def test_without_text_encoders_nothing_of_them_is_loaded():
    pipeline = load_family(ModelConfig(), text_encoders=False).pipeline
    encoders = [name for name in pipeline.components if name.startswith("text_encoder")]
    assert encoders
    assert all(getattr(pipeline, name) is None for name in encoders)


def test_on_a_cpu_nothing_is_offloaded():
    assert not load_family(ModelConfig(offload_text_encoders=True)).text_offloaded


def encoders_of(family):
    return [part for name, part in family.pipeline.components.items() if name.startswith("text_encoder")]


@pytest.mark.usefixtures("group_offloading")
@pytest.mark.parametrize("tiny", PIPELINES.values(), ids=PIPELINES)
def test_offloaded_text_encoders_give_the_same_embeddings(tmp_path, tiny):
    model = ModelConfig(path=str(tiny.build(tmp_path / "model")), max_sequence_length=16)
    guidance = Guidance(guidance_scale=3.0, true_cfg_scale=3.0, negative_prompt="bad")
    expected = load_family(model).encode(prompts_of(["cat", "dog"]), guidance)
    family = load_family(model)
    family.offload_text_encoders("cpu")
    for _ in range(2):  # the hooks stay
        found = family.encode(prompts_of(["cat", "dog"]), guidance)
        assert found.keys() == expected.keys()
        for name, rows in found.items():
            assert torch.equal(rows, expected[name]), name


@pytest.mark.usefixtures("group_offloading")
def test_each_layer_of_offloaded_text_encoders_has_a_hook_that_moves_it():
    family = load_family(ModelConfig())
    family.offload_text_encoders("cpu")
    kinds = (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm)
    layers = [
        layer for encoder in encoders_of(family) for layer in encoder.modules() if isinstance(layer, kinds)
    ]
    assert len(layers) > 10
    for layer in layers:
        assert HookRegistry.check_if_exists_or_initialize(layer).get_hook("group_offloading") is not None


@pytest.mark.usefixtures("group_offloading")
def test_offloaded_text_encoders_wait_in_main_memory(monkeypatch):
    # diffusers asks torch for the module of the device that computes; meta has none.
    monkeypatch.setattr(torch, "meta", ModuleType("meta"), raising=False)
    family = load_family(ModelConfig(offload_text_encoders=True), "meta")
    assert {family.transformer.device.type, family.pipeline.vae.device.type} == {"meta"}
    family.move_text_encoders(torch.device("meta"))
    tensors = [
        tensor for encoder in encoders_of(family) for tensor in (*encoder.parameters(), *encoder.buffers())
    ]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


class Nameless(SD3):
    """Its row of facts is incomplete."""

    name: str
    lora_targets = "attn.to_q"


class Misspelt(SD3):
    """The class of its pipeline has another name."""

    pipeline_class = "StableDifusion3Pipeline"


class Keyed(SD3):
    """Guidance by a key that is none."""

    guidance_key = "cfg_scale"


class Closed(SD3):
    """Its constructor takes nothing but the pipeline."""

    def __init__(self, pipeline):
        super().__init__(pipeline, dtype=torch.float32)


class Unfinished(ModelFamily):
    """Half of its methods are missing."""

    name = "unfinished"

    def embed(self, prompts, guidance):
        return {}


@pytest.mark.parametrize(
    ("family", "named"),
    [
        (Nameless, r"lora_targets='attn\.to_q' .*tuple"),
        (Misspelt, r"pipeline_class='StableDifusion3Pipeline' .*StableDiffusion3Pipeline\?"),
        (Keyed, "guidance_key='cfg_scale' .* guidance_scale, true_cfg_scale"),
        (Closed, r"Closed\(pipeline, dtype=.*'dtype'; .*\*\*options"),
        (
            Unfinished,
            r"pipeline_class, lora_targets, latent_shape\(\), predict\(\), schedule\(\); "
            "`flowcorr explain ModelFamily`",
        ),
    ],
)
def test_a_family_of_ones_own_that_is_not_complete_is_named(family, named):
    name = f"{__name__}:{family.__name__}"
    with pytest.raises(ConfigError, match=rf"^model\.family='?{name}'?: .*{named}") as error:
        load_family(ModelConfig(path="tiny_ocr", family=name))
    assert "model.path" not in str(error.value)
