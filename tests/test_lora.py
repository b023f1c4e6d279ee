import copy
import json
import weakref

import pytest
import torch
from safetensors import safe_open

from flowcorr import lora
from flowcorr.config import ModelConfig
from flowcorr.config.schema import LoraConfig
from flowcorr.errors import ConfigError
from flowcorr.models import Guidance, load_family
from flowcorr.models.adapter_files import write_adapter
from tests.prompts import prompts_of
from tests.tolerances import MEANS

RANK, ALPHA = 4, 12.0


def tiny_ocr(**keys):
    return load_family(ModelConfig(path="tiny_ocr", **keys))


@pytest.fixture
def family():
    return tiny_ocr(max_sequence_length=8)


def adapt(family, *, seed=0, **options):
    config = LoraConfig(**{"rank": RANK, "alpha": ALPHA, **options})
    lora.add_adapter(family.transformer, family, config, seed=seed)
    return family.transformer


def stir(transformer, seed=1):
    draw = torch.Generator().manual_seed(seed)
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=draw)
    return transformer


@torch.no_grad()
def velocity(family, transformer):
    draw = torch.Generator().manual_seed(2)
    latents, timesteps = torch.randn(2, 4, 8, 16, generator=draw), torch.tensor([900.0, 200.0])
    conditioning = family.encode(prompts_of(["cat", "dog"]), Guidance())
    return family.velocity(transformer, latents, timesteps, conditioning, Guidance())


def adapter_folder(tmp_path, transformer, family):
    folder = tmp_path / "adapter"
    write_adapter(str(folder), lora.adapter_state(transformer), lora.adapter_metadata(transformer))
    return folder


def test_only_the_adapter_is_trained_and_it_starts_as_nothing(family):
    before = velocity(family, family.transformer)
    transformer = adapt(family)
    trained = [name for name, parameter in transformer.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(".lora_" in name for name in trained)
    layers = {name.split(".lora_")[0].split(".", 2)[-1] for name in trained}
    assert layers == set(family.lora_targets)
    assert torch.equal(velocity(family, transformer), before)


def test_the_initial_adapter_depends_on_the_seed_alone():
    states = []
    for seed, noise in ((3, 1), (3, 2), (4, 2)):
        torch.manual_seed(noise)
        position = torch.get_rng_state()
        states.append(lora.adapter_state(adapt(tiny_ocr(max_sequence_length=8), seed=seed)))
        assert torch.equal(torch.get_rng_state(), position)
    first, again, other = states
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("init", ["gaussian", "kaiming"])
def test_initial_values(family, init):
    state = lora.adapter_state(adapt(family, init=init))
    down = torch.cat([value.flatten() for name, value in state.items() if "lora_A" in name])
    assert all(not value.any() for name, value in state.items() if "lora_B" in name)
    # N(0, 1 / rank^2) of peft's "gaussian"; U(-1, 1) / sqrt(96) of Kaiming's uniform.
    assert down.std().item() == pytest.approx(1 / RANK if init == "gaussian" else (3 * 96) ** -0.5, rel=0.05)


def test_targets_and_dtype_come_from_the_configuration(family):
    transformer = adapt(family, targets=("attn.to_q", "ff.net.2"), dtype="bfloat16")
    state = lora.adapter_state(transformer)
    assert {name.split(".lora_")[0].split(".", 2)[-1] for name in state} == {"attn.to_q", "ff.net.2"}
    assert {value.dtype for value in state.values()} == {torch.bfloat16}


@pytest.mark.parametrize("target", ["to_query", "attn", "tn.to_q", "norm1"])
def test_a_target_that_is_no_linear_layer_is_an_error(family, target):
    with pytest.raises(ConfigError, match=rf"^model\.lora\.targets: '{target}' .* attn\.to_q, "):
        adapt(family, targets=("attn.to_k", target))


def test_a_target_that_names_another_layer_too_is_an_error(family):
    """peft would adapt the convolution as well, whose weight cannot be merged as a product of two matrices."""
    named = r"'proj' .*pos_embed\.proj, .*Conv2d.* ff\.net\.0\.proj, ff_context\.net\.0\.proj$"
    with pytest.raises(ConfigError, match=rf"^model\.lora\.targets: {named}"):
        adapt(family, targets=("attn.to_k", "proj"))
    adapt(family, targets=("attn.to_k", "ff.net.0.proj"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_weights_are_those_that_peft_merges(dtype):
    family = tiny_ocr(dtype=dtype, max_sequence_length=8)
    transformer = stir(adapt(family))
    merged = dict(lora.merged_weights(transformer, {}))
    fused = copy.deepcopy(transformer)
    fused.fuse_lora()
    expected = {
        name.replace(".base_layer", ""): value
        for name, value in fused.state_dict().items()
        if ".lora_" not in name
    }
    assert merged.keys() == expected.keys() == tiny_ocr().transformer.state_dict().keys()
    for name, value in expected.items():
        torch.testing.assert_close(merged[name].to(value.dtype), value, msg=name)


def test_updates_below_the_grid_of_a_bfloat16_base_are_merged():
    family = tiny_ocr(dtype="bfloat16", max_sequence_length=8)
    transformer = adapt(family)
    name = "transformer_blocks.0.attn.to_q"
    tensors = {
        key: torch.full_like(parameter, 1e-3)
        for key, parameter in transformer.named_parameters()
        if parameter.requires_grad
    }
    base = transformer.state_dict()[f"{name}.base_layer.weight"].float()
    moved = dict(lora.merged_weights(transformer, tensors))[f"{name}.weight"] - base
    torch.testing.assert_close(
        moved, torch.full_like(moved, ALPHA / RANK * RANK * 1e-6), rtol=1e-2, atol=1e-8
    )


def test_a_transformer_with_merged_weights_computes_the_same(family):
    plain = copy.deepcopy(family.transformer)
    transformer = stir(adapt(family))
    before = velocity(family, plain)
    plain.load_state_dict(dict(lora.merged_weights(transformer, {})))
    after = velocity(family, plain)
    torch.testing.assert_close(after, velocity(family, transformer), rtol=1e-4, atol=1e-5)
    assert (after - before).abs().max() > 1e-2


def test_merging_takes_the_given_tensors_and_changes_nothing(family):
    transformer = adapt(family)
    kept = {name: value.clone() for name, value in transformer.state_dict().items()}
    tensors = {
        name: torch.full_like(parameter, 0.01)
        for name, parameter in transformer.named_parameters()
        if parameter.requires_grad
    }
    merged = dict(lora.merged_weights(transformer, tensors))
    name = "transformer_blocks.0.attn.to_q.weight"
    base = kept[name.replace("to_q", "to_q.base_layer")]
    torch.testing.assert_close(merged[name], base + ALPHA / RANK * RANK * 1e-4)
    assert all(torch.equal(value, kept[name]) for name, value in transformer.state_dict().items())


def test_the_adapter_multiplies_in_the_dtype_of_the_base():
    """As an engine in bfloat16 does; the weights still feel updates below its grid."""
    exact, coarse = (tiny_ocr(dtype="bfloat16", max_sequence_length=8) for _ in range(2))
    transformer, rounded = stir(adapt(exact)), stir(adapt(coarse))
    for parameter in rounded.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    assert torch.equal(velocity(exact, transformer), velocity(coarse, rounded))
    layer = transformer.transformer_blocks[0].attn.to_q
    layer(torch.ones(1, layer.in_features, dtype=torch.bfloat16)).sum().backward()
    assert layer.lora_B["default"].weight.grad.dtype == torch.float32


def test_one_merged_weight_is_in_memory_at_a_time(family):
    """All of them in float32 would need twice what a bfloat16 model does."""
    transformer = adapt(family)
    weights = lora.merged_weights(transformer, {})
    stored = {parameter.data_ptr() for parameter in transformer.parameters()}
    merged = None
    for name, weight in weights:
        if merged is not None:
            assert merged() is None
        merged = weakref.ref(weight) if weight.data_ptr() not in stored and "to_q" in name else None
        del weight


def test_a_saved_adapter_is_loaded_by_the_pipeline(family, tmp_path):
    transformer = stir(adapt(family))
    folder = adapter_folder(tmp_path, transformer, family)
    other = tiny_ocr(max_sequence_length=8)
    other.pipeline.load_lora_weights(str(folder))
    torch.testing.assert_close(
        velocity(other, other.transformer), velocity(family, transformer), rtol=1e-4, atol=1e-5
    )


def test_the_file_says_rank_alpha_and_targets_in_a_fixed_order(family, tmp_path):
    folder = adapter_folder(tmp_path, adapt(family), family)
    with safe_open(folder / "pytorch_lora_weights.safetensors", "pt") as file:
        metadata = json.loads(file.metadata()["lora_adapter_metadata"])
    assert metadata["transformer.r"] == RANK
    assert metadata["transformer.lora_alpha"] == RANK  # the scale is in the tensors
    assert metadata["transformer.target_modules"] == sorted(family.lora_targets)


def test_warm_start_from_a_diffusers_adapter(family, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    transformer = stir(adapt(family))
    folder = adapter_folder(tmp_path, transformer, family)
    expected = velocity(family, transformer)
    for path in (folder, folder / "pytorch_lora_weights.safetensors", f"~/{folder.relative_to(tmp_path)}"):
        other = tiny_ocr(max_sequence_length=8)
        started = adapt(other, warm_start=str(path), seed=9)
        torch.testing.assert_close(velocity(other, started), expected, **MEANS)


def test_warm_start_from_a_peft_adapter(family, tmp_path):
    import peft

    options = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(family.lora_targets))
    model = peft.get_peft_model(family.transformer, options)
    stir(model).save_pretrained(str(tmp_path))
    expected = velocity(family, model.base_model.model)
    other = tiny_ocr(max_sequence_length=8)
    started = adapt(other, warm_start=str(tmp_path))
    torch.testing.assert_close(velocity(other, started), expected, **MEANS)


@pytest.mark.parametrize(
    ("trained", "asked", "named"),
    [
        ({}, {"rank": 8}, r"model\.lora\.rank=8; .* 4$"),
        ({"targets": ("attn.to_q",)}, {}, r"model\.lora\.targets: .* attn\.to_q$"),
    ],
)
def test_a_warm_start_of_another_shape_is_an_error(family, tmp_path, trained, asked, named):
    folder = adapter_folder(tmp_path, adapt(family, **trained), family)
    with pytest.raises(ConfigError, match=rf"^model\.lora\.warm_start='{folder}' .*{named}"):
        adapt(tiny_ocr(), **asked, warm_start=str(folder))


@pytest.mark.parametrize(
    "options",
    [{"use_rslora": True}, {"use_dora": True}, {"alpha_pattern": {"to_q": 2}}, {"rank_pattern": {"to_q": 2}}],
    ids=str,
)
def test_a_warm_start_that_is_no_plain_lora_is_an_error(family, tmp_path, options):
    import peft

    targets = list(family.lora_targets)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, **options)
    model = peft.get_peft_model(family.transformer, config)
    model.save_pretrained(str(tmp_path))
    (name,) = options
    with pytest.raises(ConfigError, match=rf"adapter_config\.json .*{name}="):
        adapt(tiny_ocr(), warm_start=str(tmp_path))


def test_diffusers_metadata_of_no_plain_lora_is_an_error(family, tmp_path):
    transformer = adapt(family)
    metadata = {**lora.adapter_metadata(transformer), "use_rslora": True}
    write_adapter(str(tmp_path), lora.adapter_state(transformer), metadata)
    with pytest.raises(ConfigError, match=rf"^model\.lora\.warm_start='{tmp_path}' .*use_rslora=True"):
        adapt(tiny_ocr(), warm_start=str(tmp_path))


def test_a_warm_start_that_is_missing_or_broken_is_an_error(family, tmp_path):
    with pytest.raises(
        ConfigError, match=rf"^model\.lora\.warm_start='{tmp_path}' .*pytorch_lora_weights\.safetensors"
    ):
        adapt(family, warm_start=str(tmp_path))
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"nothing")
    with pytest.raises(
        ConfigError, match=rf"^model\.lora\.warm_start='{file}' .*adapter_model\.safetensors is not "
    ):
        adapt(tiny_ocr(), warm_start=str(file))
