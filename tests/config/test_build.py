"""Plain mappings to the frozen dataclasses of the schema, and back."""

import pytest

from flowcorr.config import Config, ModelConfig, RewardConfig, RewardTerm, load, to_mapping, to_yaml
from flowcorr.config.build import build
from flowcorr.errors import ConfigError


def test_values_and_their_types(recipe):
    config = load(
        recipe(
            """
            model: {lora: {alpha: 8, targets: [to_q, to_k]}}
            actor: {lr: 1e-4, betas: [0, 0.5], clip_ratio: [1, 2e-4, 3e-4, 4e-4]}
            reward: {terms: [{name: ocr, weight: 2, options: {detect: false}}, {name: jpeg_compressibility}]}
            trainer: {total_steps: 7, seed: "${.total_steps}"}
            """
        )
    )
    assert config.model.lora.alpha == 8.0
    assert isinstance(config.model.lora.alpha, float)
    assert config.model.lora.targets == ("to_q", "to_k")
    assert config.actor.lr == 1e-4
    assert config.actor.betas == (0.0, 0.5)
    assert config.actor.clip_ratio == (1.0, 2e-4, 3e-4, 4e-4)
    assert all(isinstance(value, float) for value in config.actor.clip_ratio)
    assert load(recipe(to_yaml(config))) == config
    assert [(term.name, term.weight, dict(term.options)) for term in config.reward.terms] == [
        ("ocr", 2.0, {"detect": False}),
        ("jpeg_compressibility", 1.0, {}),
    ]
    assert config.trainer.seed == 7


def test_a_mapping_of_a_config_builds_it_again():
    config = Config(model=ModelConfig(path="x"), reward=RewardConfig(terms=(RewardTerm(name="http"),)))
    mapping = to_mapping(config)
    assert mapping["reward"]["terms"][0]["name"] == "http"
    assert mapping["sampling"]["sde_window_range"] == [0, 4]
    assert build(Config, mapping) == config


@pytest.mark.parametrize(
    ("section", "values", "named"),
    [
        (RewardTerm, {}, r"^term\.name "),
        (RewardTerm, {"name": "ocr", "wait": 1}, r"^key='term\.wait' .*term\.weight\?"),
        (RewardTerm, {"name": "ocr", "weight": "2"}, r"^term\.weight='2' "),
        (RewardTerm, {"name": "ocr", "tags": "a, b"}, r"^term\.tags='a, b' .*\[a, b\]$"),
        (RewardTerm, [], r"^term=\[\] .* name, weight, options, tags, normalize, frames$"),
    ],
)  # fmt: skip
def test_what_does_not_fit_names_its_dotted_key(section, values, named):
    with pytest.raises(ConfigError, match=named):
        build(section, values, "term")


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ("auto", "auto")])
def test_a_key_may_take_a_word_beside_true_and_false(recipe, text, value):
    assert load(recipe(f"trainer: {{doctor: {text}}}")).trainer.doctor == value
    with pytest.raises(ConfigError, match=r"trainer\.doctor='maybe' .*auto"):
        load(recipe("trainer: {doctor: maybe}"))
