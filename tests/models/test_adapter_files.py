import copy
import json
from dataclasses import dataclass

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file
from tiny_pipelines import FAMILIES
from torch import Tensor

from flowcorr import lora
from flowcorr.config.schema import LoraConfig, ModelConfig
from flowcorr.errors import ConfigError
from flowcorr.models import ModelFamily, load_family
from flowcorr.models.adapter_files import (
    DIFFUSERS_FILE,
    PEFT_CONFIG,
    plain_name,
    read_adapter,
    rescaled,
    write_adapter,
)
from tests.models.learning import load_adapter

RANK, ALPHA = 4, 6.0  # a scale that is no power of 2
FILE = "pytorch_lora_weights.safetensors"


@dataclass(frozen=True)
class Saved:
    """A model, its transformer without adapter, its adapter as it was saved, and the adapter's part of each weight."""

    path: str
    folder: str
    family: ModelFamily
    bare: torch.nn.Module
    updates: dict[str, Tensor]

    @property
    def layers(self):
        return {name for name, part in self.bare.named_modules() if isinstance(part, torch.nn.Linear)}

    def plain(self):
        return copy.deepcopy(self.bare)

    def started(self, warm_start, **options):
        transformer = self.plain()
        config = LoraConfig(**{"rank": RANK, "alpha": ALPHA, "warm_start": str(warm_start), **options})
        lora.add_adapter(transformer, self.family, config, seed=3)
        return updates_of(transformer)


def updates_of(transformer):
    """What an adapter of peft adds to each weight, by the layer."""
    updates = {}
    for name, module in transformer.named_modules():
        if hasattr(module, "lora_A") and len(module.lora_A):
            (adapter,) = module.lora_A
            update = module.scaling[adapter] * module.lora_B[adapter].weight @ module.lora_A[adapter].weight
            updates[name.removeprefix("base_model.model.")] = update.detach()
    return updates


def save(name, folder):
    path = str(FAMILIES[name].build(folder / "model"))
    family = load_family(ModelConfig(path=path))
    bare = copy.deepcopy(family.transformer)
    lora.add_adapter(family.transformer, family, LoraConfig(rank=RANK, alpha=ALPHA), seed=0)
    draw = torch.Generator().manual_seed(1)
    for parameter in family.transformer.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=draw)
    state, metadata = lora.adapter_state(family.transformer), lora.adapter_metadata(family.transformer)
    write_adapter(str(folder / "adapter"), state, metadata)
    return Saved(path, str(folder / "adapter"), family, bare, updates_of(family.transformer))


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, tmp_path_factory):
    return save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return save("qwen_image", tmp_path_factory.mktemp("qwen"))


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, update in expected.items():
        torch.testing.assert_close(found[name], update, msg=lambda text, name=name: f"{name}: {text}")


# Written ---------------------------------------------------------------------------------------------------


def test_diffusers_loads_it_at_full_strength(saved):
    pipeline = DiffusionPipeline.from_pretrained(saved.path)
    load_adapter(pipeline, saved.folder)
    assert_same(updates_of(pipeline.transformer), saved.updates)


def test_a_transformer_loads_it_without_a_loader_of_its_pipeline(saved):
    transformer = saved.plain()
    transformer.load_lora_adapter(saved.folder, use_safetensors=True)
    assert_same(updates_of(transformer), saved.updates)


def test_peft_loads_it_at_full_strength(saved):
    import peft

    model = peft.PeftModel.from_pretrained(saved.plain(), saved.folder)
    assert_same(updates_of(model), saved.updates)


def test_a_reader_of_alpha_keys_alone_has_its_full_strength(saved):
    """As ComfyUI reads a file: no header; `alpha` is a tensor, and where it is missing the scale is 1."""
    state = load_file(f"{saved.folder}/{FILE}")
    updates = {}
    for name, down in state.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            scale = state[f"{layer}.alpha"].item() / len(down) if f"{layer}.alpha" in state else 1.0
            updates[layer.removeprefix("transformer.")] = scale * state[f"{layer}.lora_B.weight"] @ down
    assert_same(updates, saved.updates)


@pytest.mark.parametrize("alpha", [RANK, ALPHA, 32.0])
def test_a_warm_start_has_its_full_strength_under_any_alpha(saved, alpha):
    assert_same(saved.started(saved.folder, alpha=alpha), saved.updates)


def test_an_adapter_in_8_bits_is_read_as_the_numbers_that_it_holds(saved, tmp_path):
    state = load_file(f"{saved.folder}/{FILE}")
    coarse = {name: (8 * value).to(torch.float8_e4m3fn) for name, value in state.items()}
    save_file(coarse, tmp_path / FILE)
    expected = {name.removeprefix("transformer."): value.float() for name, value in coarse.items()}
    pairs = read_adapter(str(tmp_path), saved.layers, saved.family.pipeline_class)
    for layer, pair in pairs.items():
        assert torch.equal(pair.down, expected[f"{layer}.lora_A.weight"])
        assert torch.equal(rescaled(pair.up, 1.5), 1.5 * expected[f"{layer}.lora_B.weight"])


@pytest.mark.parametrize(
    ("dtype", "factor", "kept"),
    [
        (torch.bfloat16, 2.0, torch.bfloat16),
        (torch.bfloat16, 0.125, torch.bfloat16),
        (torch.bfloat16, 1.5, torch.float32),
        (torch.float32, 1.5, torch.float32),
        (torch.float64, 1.5, torch.float64),
    ],
)
def test_a_scale_is_put_into_tensors_without_rounding_to_a_coarse_dtype(dtype, factor, kept):
    up = torch.randn(5, 3, dtype=dtype)
    assert rescaled(up, factor).dtype == kept
    torch.testing.assert_close(rescaled(up, factor).double(), up.double() * factor, rtol=1e-7, atol=0)


# Read ------------------------------------------------------------------------------------------------------


def tensors_of(saved):
    """As diffusers saves them, without `transformer.`, at scale 1."""
    return {
        name.removeprefix("transformer."): value
        for name, value in load_file(f"{saved.folder}/{FILE}").items()
    }


def as_kohya(state, alpha, layer_name=lambda layer: layer):
    """`lora_down`, `lora_up` and `alpha`, with the same product."""
    out = {}
    for name, value in state.items():
        layer, _, side = name.rpartition(".lora_")
        down = side == "A.weight"
        out[f"{layer_name(layer)}.lora_{'down' if down else 'up'}.weight"] = (
            value if down else value * RANK / alpha
        )
        out[f"{layer_name(layer)}.alpha"] = torch.tensor(alpha)
    return out


LAYOUTS = {
    "diffusers": lambda state: {f"transformer.{name}": value for name, value in state.items()},
    "peft": lambda state: {f"base_model.model.{name}": value for name, value in state.items()},
    "bare": lambda state: state,
    "ai-toolkit": lambda state: {f"diffusion_model.{name}": value for name, value in state.items()},
    "checkpoint": lambda state: {f"model.diffusion_model.{name}": value for name, value in state.items()},
    "DiffSynth": lambda state: {
        name.replace(".weight", ".default.weight"): value for name, value in state.items()
    },
    "lightning": lambda state: as_kohya(state, 8.0),
    "lightning, other alpha": lambda state: as_kohya(state, 1.0),
    "ai-toolkit with alpha": lambda state: as_kohya(state, 2.0, lambda layer: f"diffusion_model.{layer}"),
    "kohya": lambda state: as_kohya(state, 3.0, lambda layer: "lora_unet_" + layer.replace(".", "_")),
    "old diffusers": lambda state: {
        f"transformer.{name}".replace("lora_A", "lora.down").replace("lora_B", "lora.up"): value
        for name, value in state.items()
    },
    "bfloat16": lambda state: {
        name: value.to(torch.bfloat16).to(torch.float16).to(torch.bfloat16) for name, value in state.items()
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_that_people_have_are_read(saved, tmp_path, layout):
    state = {name: value.contiguous() for name, value in LAYOUTS[layout](tensors_of(saved)).items()}
    save_file(state, tmp_path / "any_name.safetensors")
    found = saved.started(tmp_path / "any_name.safetensors")
    if layout == "bfloat16":
        assert all((found[name] - update).abs().max() < 0.1 for name, update in saved.updates.items())
    else:
        assert_same(found, saved.updates)


@pytest.mark.parametrize(
    ("name", "layer", "sides"),
    [
        ("flux", "lora_unet_double_blocks_0_img_attn_qkv", ("down", "up")),
        ("flux2_klein", "diffusion_model.double_blocks.0.img_attn.qkv", ("A", "B")),
    ],
)
def test_names_of_another_code_base_are_those_that_diffusers_converts(tmp_path, name, layer, sides):
    """Black Forest Labs' names, in which q, k and v are one layer, with an alpha."""
    saved = save(name, tmp_path)
    width = saved.bare.transformer_blocks[0].attn.to_q.in_features
    down, up = torch.randn(RANK, width), torch.randn(3 * width, RANK)
    state = {f"{layer}.lora_{side}.weight": value for side, value in zip(sides, (down, up), strict=True)}
    save_file({**state, f"{layer}.alpha": torch.tensor(8.0)}, tmp_path / "bfl.safetensors")
    pairs = read_adapter(str(tmp_path / "bfl.safetensors"), saved.layers, saved.family.pipeline_class)
    expected = (8.0 / RANK * up @ down).chunk(3)
    for part, update in zip("qkv", expected, strict=True):
        pair = pairs[f"transformer_blocks.0.attn.to_{part}"]
        torch.testing.assert_close(pair.scale * pair.up @ pair.down, update)


def with_tensor(name, value):
    return lambda state: {**state, name: value}


FIRST = "transformer_blocks.0.attn.to_q"
BROKEN = {
    "nan": (
        lambda state: {name: value * torch.nan for name, value in state.items()},
        "numbers that are not finite",
    ),
    "inf in half": (
        lambda state: {
            name: value.half() / 0 if "lora_B" in name else value for name, value in state.items()
        },
        "numbers that are not finite",
    ),
    "integers": (lambda state: {name: value.to(torch.int8) for name, value in state.items()}, "torch.int8"),
    "complex": (
        lambda state: {name: value.to(torch.complex64) for name, value in state.items()},
        "torch.complex64",
    ),
    "nothing": (lambda state: {}, "it holds no LoRA"),
    "one matrix": (
        lambda state: {name: value for name, value in state.items() if name != f"{FIRST}.lora_B.weight"},
        f"one matrix of two for {FIRST}",
    ),
    "two adapters": (with_tensor(f"{FIRST}.lora_A.style.weight", torch.ones(4, 4)), "several adapters of"),
    "two adapters under different prefixes": (
        lambda state: {
            **state,
            **{f"diffusion_model.{name}": value.clone() for name, value in state.items()},
        },
        "several adapters of",
    ),
    "an alpha of no matrices": (
        with_tensor(f"transformer.{FIRST}.alpha", torch.tensor(8.0)),
        rf"transformer\.{FIRST}\.alpha, and no matrices of that name",
    ),
    "several ranks": (
        lambda state: {
            name: value[:2] if name == f"{FIRST}.lora_A.weight" else value for name, value in state.items()
        },
        "ranks from 2 to 4",
    ),
    "text encoder": (
        with_tensor("text_encoder.layers.0.q_proj.lora_A.weight", torch.ones(4, 4)),
        "also adapts a text encoder",
    ),
    "kohya's text encoder": (
        with_tensor("lora_te1_layers_0.lora_down.weight", torch.ones(4, 4)),
        "a text encoder",
    ),
    "DoRA": (with_tensor(f"{FIRST}.lora_magnitude_vector", torch.ones(4)), "it holds DoRA"),
    "LoKr": (lambda state: {f"{FIRST}.lokr_w1": torch.ones(4, 4)}, "it holds LoKr"),
    "LoHa": (lambda state: {f"{FIRST}.hada_w1_a": torch.ones(4, 4)}, "it holds LoHa"),
    "difference": (with_tensor(f"{FIRST}.diff", torch.ones(4, 4)), "whole differences"),
    "bias": (with_tensor(f"{FIRST}.lora_B.bias", torch.ones(4)), "it holds biases"),
    "convolution": (with_tensor("conv.lora_A.weight", torch.ones(4, 4, 1, 1)), "a LoRA on linear layers"),
    "alpha of 0": (with_tensor(f"{FIRST}.alpha", torch.tensor(0.0)), "alpha is 0.0"),
    "alphas": (with_tensor(f"{FIRST}.alpha", torch.ones(3)), r"alpha is \[1.0, 1.0, 1.0\]"),
    "another model": (
        lambda state: {
            name.replace("transformer_blocks", "down_blocks"): value for name, value in state.items()
        },
        "names that neither this transformer nor diffusers' converter for QwenImagePipeline knows",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_is_no_plain_lora_is_named(qwen, tmp_path, case):
    change, named = BROKEN[case]
    file = tmp_path / FILE
    save_file({name: value.contiguous() for name, value in change(tensors_of(qwen)).items()}, file)
    with pytest.raises(ConfigError, match=rf"^model\.lora\.warm_start='{tmp_path}' .*{named}"):
        qwen.started(tmp_path)


OPTIONS = [
    ('{"lora_alpha": "32"}', "lora_alpha='32', which must be a number above 0"),
    ('{"lora_alpha": true}', "lora_alpha=True"),
    ('{"lora_alpha": NaN}', "lora_alpha=nan"),
    ('{"lora_alpha": 1e999}', "lora_alpha=inf"),
    ('{"lora_alpha": [4]}', r"lora_alpha=\[4\]"),
    ('{"lora_alpha": -4}', "lora_alpha=-4"),
    ('{"r": 8}', "options say r=8, and its tensors have rank 4"),
    ('{"r": "4"}', "r='4', which must be a number"),
    ('{"lora_alpha": 32,', "cannot be read as JSON"),
    ("", "cannot be read as JSON"),
    ("[" * 10**5, "cannot be read as JSON"),
    ("[]", "holds a list, and not the options"),
    ("null", "holds a NoneType"),
    ('"text"', "holds a str"),
    ('{"peft_type": "LOHA"}', "trained with peft_type='LOHA'"),
    ('{"use_rslora": true}', "trained with use_rslora=True"),
    ('{"bias": "all"}', "trained with bias='all'"),
    ('{"init_lora_weights": "pissa_niter_4"}', "trained with init_lora_weights='pissa_niter_4'"),
    ('{"alpha_pattern": {"to_q": 2}}', "trained with alpha_pattern="),
    ('{"modules_to_save": ["proj_out"]}', "trained with modules_to_save="),
]


@pytest.mark.parametrize(("text", "message"), OPTIONS, ids=lambda value: value[:24])
@pytest.mark.parametrize("place", ["beside", "header"])
def test_odd_options_are_named(qwen, tmp_path, text, message, place):
    header = {"lora_adapter_metadata": text} if place == "header" else None
    save_file(tensors_of(qwen), tmp_path / FILE, header)
    if place == "beside":
        (tmp_path / PEFT_CONFIG).write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        qwen.started(tmp_path)
    assert (PEFT_CONFIG if place == "beside" else f"header of {FILE}") in str(
        raised.value
    ) or "options say" in message
    assert "\n" not in str(raised.value)


def test_a_file_of_options_that_is_no_text_is_named(qwen, tmp_path):
    save_file(tensors_of(qwen), tmp_path / FILE)
    (tmp_path / PEFT_CONFIG).write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match=r"adapter_config\.json .* JSON .*0xff"):
        qwen.started(tmp_path)


@pytest.mark.parametrize(
    "text", ["{}", '{"lora_alpha": null, "r": null}', '{"r": 4, "lora_alpha": 4, "bias": "none"}']
)
def test_without_an_alpha_the_scale_is_1_as_diffusers_takes_it(qwen, tmp_path, text):
    save_file(tensors_of(qwen), tmp_path / FILE)
    (tmp_path / PEFT_CONFIG).write_text(text)
    assert_same(qwen.started(tmp_path), qwen.updates)


def test_the_options_beside_it_scale_an_adapter(qwen, tmp_path):
    save_file(tensors_of(qwen), tmp_path / FILE)
    (tmp_path / PEFT_CONFIG).write_text(json.dumps({"r": RANK, "lora_alpha": 2.0 * RANK}))
    assert_same(qwen.started(tmp_path), {name: 2 * update for name, update in qwen.updates.items()})


@pytest.mark.parametrize(
    "name",
    [
        "blocks.0.to_q.lora_A.weight",
        "transformer.blocks.0.to_q.lora_A.weight",
        "module.base_model.model._orig_mod.blocks.0.to_q.lora_A.default.weight",
        "_orig_mod.module.base_model.model.blocks.0._orig_mod.to_q.lora_A.weight",
        "_fsdp_wrapped_module.blocks.0._fsdp_wrapped_module._checkpoint_wrapped_module.to_q.lora_A.policy.weight",
    ],
)
def test_names_that_wrappers_add_are_left_out(name):
    assert plain_name(name) == "blocks.0.to_q.lora_A.weight"


def test_a_file_saved_from_a_compiled_or_sharded_model_is_read(qwen, tmp_path):
    state = load_file(f"{qwen.folder}/{DIFFUSERS_FILE}")
    wrapper = "._orig_mod.attn._checkpoint_wrapped_module."
    wrapped = {name.replace(".attn.", wrapper): value for name, value in state.items()}
    assert wrapped.keys() != state.keys()
    save_file(wrapped, tmp_path / "wrapped.safetensors")
    pairs = read_adapter(str(tmp_path / "wrapped.safetensors"), qwen.layers, qwen.family.pipeline_class)
    assert pairs.keys() == read_adapter(qwen.folder, qwen.layers, qwen.family.pipeline_class).keys()
