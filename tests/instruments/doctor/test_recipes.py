"""The doctor accuses no family's recipe, in any precision and with a schedule of any length.

Each runs with the tiny random pipeline of its family in place of the model. All of them on the real engine, in
schedules of each length; `-m 'vllm_omni and not slow'` takes two lengths:

    pytest tests/instruments/doctor/test_recipes.py -m vllm_omni
"""

import pytest
import tiny_pipelines

from flowcorr.config import load, recipe_names
from flowcorr.instruments.doctor import diagnose
from flowcorr.models import DTYPES

# One of each model.
RECIPES = sorted(
    {load(name).model.path: name for name in recipe_names() if not name.startswith("tiny_")}.values()
)
MODELS = [(recipe, tiny_pipelines.of_recipe(recipe)) for recipe in RECIPES]
MODELS += [("wan_ocr_lora", tiny_pipelines.PIPELINES["wan22_ti2v"])]  # no recipe's model
of_each_model = pytest.mark.parametrize(
    ("recipe", "tiny"), MODELS, ids=[tiny.build.__name__.removeprefix("build_tiny_") for _, tiny in MODELS]
)
STEPS = (4, 8, 10, 20, 28)
SLOW_STEPS = (8, 20, 28)
FEW_STEPS = 6  # no window of a recipe lies further behind
STEPS_WITH_REFERENCES = (4, 20)  # a reference of a megapixel makes a step as long as ten others
HALF = "bfloat16"
# References beside those of the recipes above: with another recipe's model, or with another recipe's prompts.
WITH_REFERENCES = {
    "flux2_klein": ("flux2_klein_pickscore_lora", {"data.path": "recipes/sign_edits.jsonl"}),
    "qwen_image_edit": ("qwen_image_edit_plus_lora", {}),
}
IN_PROCESS = {"rollout.name": "in_process", "rollout.engine": "{}"}
ON_THE_ENGINE = {"rollout.name": "vllm_omni", "rollout.engine.distributed_executor_backend": "uni"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """`model(tiny, dtype)` is the overrides that put a tiny pipeline in place of a recipe's model."""
    root, built = tmp_path_factory.mktemp("models"), {}

    def get(tiny, dtype):
        if (tiny.build, dtype) not in built:
            built[tiny.build, dtype] = tiny.build(root / f"{tiny.build.__name__}_{dtype}", DTYPES[dtype])
        return tiny_pipelines.overrides(built[tiny.build, dtype], tiny.size, dtype, tiny.frames)

    return get


def report_on(recipe, overrides, steps=None, float32=None, **keys):
    keys |= {"rollout.n": 2}
    if steps is not None:
        keys |= {"sampling.num_inference_steps": steps}
    if steps == min(STEPS):
        size = min(3, load(recipe).sampling.sde_window_size)
        keys |= {"sampling.sde_window_range": "[0,3]", "sampling.sde_window_size": size}
    return diagnose(
        load(recipe, [*overrides, *(f"{key}={value}" for key, value in keys.items())]), float32=float32
    )


def assert_agrees(report):
    assert report.causes() == []
    levels = {finding.cause: finding.level for finding in report.findings}
    assert levels["timesteps"] == levels["guidance"] == "healthy"
    assert levels.get("float32", "healthy") == "healthy"


@of_each_model
def test_in_process(recipe, tiny, model):
    assert_agrees(report_on(recipe, model(tiny, HALF), FEW_STEPS, **IN_PROCESS))


@pytest.mark.parametrize("dtype", [HALF, "float32"])
@pytest.mark.parametrize("family", WITH_REFERENCES)
def test_with_reference_images(family, dtype, model):
    recipe, keys = WITH_REFERENCES[family]
    overrides = model(tiny_pipelines.FAMILIES[family], dtype)
    assert_agrees(report_on(recipe, overrides, min(STEPS), **keys, **IN_PROCESS))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [None, *STEPS], ids=str)  # None: the recipe's own
@pytest.mark.parametrize("dtype", [HALF, "float16", "float32"])
@of_each_model
def test_in_process_with_other_schedules(recipe, tiny, dtype, steps, model):
    assert_agrees(report_on(recipe, model(tiny, dtype), steps, **IN_PROCESS))


def test_an_actor_of_lower_precision_is_named_as_such(model):
    keys = {"rollout.name": "in_process", "rollout.dtype": "float32"}
    recipe, tiny = MODELS[0]
    report = report_on(recipe, model(tiny, HALF), min(STEPS), float32=False, **keys)
    assert report.causes() == []
    weights = next(finding for finding in report.findings if finding.cause == "weights")
    assert (weights.numbers["rollout.dtype"], weights.numbers["model.dtype"]) == ("float32", HALF)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [HALF, "float16"])
@of_each_model
def test_an_engine_of_lower_precision(recipe, tiny, dtype, model):
    keys = {**IN_PROCESS, "rollout.dtype": dtype}
    assert_agrees(report_on(recipe, model(tiny, "float32"), **keys))


@pytest.mark.vllm_omni
@pytest.mark.filterwarnings("ignore")  # of vLLM's own
@pytest.mark.parametrize(
    "steps", [pytest.param(steps, marks=pytest.mark.slow if steps in SLOW_STEPS else ()) for steps in STEPS]
)
@pytest.mark.parametrize("dtype", [HALF, "float32"])
@of_each_model
def test_on_the_real_engine(recipe, tiny, dtype, steps, model):
    if tiny.images and steps not in STEPS_WITH_REFERENCES:
        pytest.skip("of a model with reference images, two lengths are tried")
    assert_agrees(report_on(recipe, model(tiny, dtype), steps, **ON_THE_ENGINE))


@pytest.mark.vllm_omni
@pytest.mark.filterwarnings("ignore")  # of vLLM's own
@pytest.mark.parametrize("dtype", [HALF, "float32"])
@pytest.mark.parametrize("family", WITH_REFERENCES)
def test_reference_images_on_the_real_engine(family, dtype, model):
    recipe, keys = WITH_REFERENCES[family]
    overrides = model(tiny_pipelines.FAMILIES[family], dtype)
    assert_agrees(report_on(recipe, overrides, min(STEPS), **keys, **ON_THE_ENGINE))
