"""Model families by the names of checkpoints."""

import diffusers
import pytest
import torch

from flowcorr.config import recipe_names
from flowcorr.config.families import FAMILIES
from flowcorr.errors import ConfigError
from flowcorr.translate.families import TRANSLATED, family_of, require_family, untranslated


@pytest.mark.parametrize(
    ("path", "family"),
    [
        ("stabilityai/stable-diffusion-3.5-medium", "sd3"),
        ("~/models/sd3.5_medium", "sd3"),
        ("Qwen/Qwen-Image", "qwen_image"),
        ("~/models/tiny-random/Qwen-Image", "qwen_image"),
        ("Qwen/Qwen-Image-2512", "qwen_image"),
        ("/data/stable-diffusion-3-medium-diffusers/", "sd3"),
        ("black-forest-labs/FLUX.1-dev", "flux"),
        ("black-forest-labs/FLUX.2-klein-base-9B", "flux2_klein"),
        ("Tongyi-MAI/Z-Image-Turbo", "z_image"),
        ("hub/snapshots/0123abc", None),
        ("deepseek-ai/deepseek-llm-7b-chat", None),
        ("Qwen/Qwen3-Omni-30B-A3B-Instruct", None),
        ("Qwen/Qwen-Image-Edit-2511", None),
        ("black-forest-labs/FLUX.1-Kontext-dev", None),
        ("black-forest-labs/FLUX.2-dev", None),
        ("runwayml/stable-diffusion-v1-5", None),
        ("Wan-AI/Wan2.2-TI2V-5B-Diffusers", None),
        ("ByteDance-Seed/BAGEL-7B-MoT", None),
        ("", None),
    ],
)
def test_the_family_that_a_name_tells(path, family):
    assert family_of(path) == family


def test_a_name_that_tells_none_is_named_with_its_key():
    assert require_family("model.path", "a/sd3", ("sd3",)) == "sd3"
    with pytest.raises(ConfigError, match=r"^model\.path=a/b .*: sd3;"):
        require_family("model.path", "a/b", ("sd3",))


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("hf_cache/Wan2.1-T2V-1.3B-Diffusers", "wan_ocr_lora"),
        ("Wan-AI/Wan2.2-TI2V-5B-Diffusers", "wan_ocr_lora"),
        ("wan2_t2v", "wan_ocr_lora"),
        ("black-forest-labs/FLUX.1-Kontext-dev", "flux_kontext_edit_lora"),
        ("flux1-kontext", "flux_kontext_edit_lora"),
        ("Qwen/Qwen-Image-Edit", "qwen_image_edit_plus_lora"),
        ("qwen-image-edit-plus", "qwen_image_edit_plus_lora"),
    ],
)
def test_a_model_that_is_not_translated_has_a_recipe_to_start_from(name, recipe):
    assert recipe in recipe_names()
    with pytest.raises(ConfigError, match=f"^model.path={name} .* recipe {recipe},"):
        require_family("model.path", name, ("sd3", "flux", "qwen_image"))


@pytest.mark.parametrize(
    "name", ["Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "hub/taiwan-t2v", "Qwen/Qwen-Image", "a/b"]
)
def test_other_models_have_none(name):
    assert untranslated(name) == ""


def test_families_have_the_names_of_models():
    assert TRANSLATED.keys() <= FAMILIES.keys()


def test_the_linear_layers_of_a_family():
    """The names match every linear layer of a transformer and nothing else, as peft compares them."""
    with torch.device("meta"):
        transformers = {
            "sd3": diffusers.SD3Transformer2DModel(
                num_layers=3,
                num_attention_heads=2,
                attention_head_dim=8,
                joint_attention_dim=16,
                caption_projection_dim=16,
                pooled_projection_dim=16,
                dual_attention_layers=(0,),
            ),
            "qwen_image": diffusers.QwenImageTransformer2DModel(
                num_layers=2,
                num_attention_heads=2,
                attention_head_dim=16,
                joint_attention_dim=16,
                axes_dims_rope=(4, 6, 6),
            ),
        }
    for name, transformer in transformers.items():
        ends = TRANSLATED[name].linear_layers
        for layer, module in transformer.named_modules():
            matches = any(layer == end or layer.endswith(f".{end}") for end in ends)
            assert matches == isinstance(module, torch.nn.Linear), layer
