"""vllm-omni's entry point."""

import pytest

from flowcorr.config.families import FAMILIES
from flowcorr.imports import import_target
from flowcorr.models import resolve_family
from flowcorr.rollout.vllm_omni.plugin import PIPELINE, register


@pytest.mark.vllm_omni
@pytest.mark.filterwarnings("ignore")
def test_vllm_omni_loads_the_registered_class():
    from vllm_omni.diffusion.registry import DiffusionModelRegistry

    from flowcorr.rollout.vllm_omni.pipeline import FlowcorrPipeline

    register()
    assert DiffusionModelRegistry.models[PIPELINE].load_model_cls() is FlowcorrPipeline


@pytest.mark.vllm_omni
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_names_classes_of_the_engine(name):
    family = resolve_family(name)
    for path in (family.vllm_omni.transformer, family.vllm_omni.vae):
        assert isinstance(import_target("vllm_omni", path, "a class"), type)
