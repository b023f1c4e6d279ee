"""vllm-omni's entry point."""

import pytest

from flowcorr.models import FAMILIES
from flowcorr.rollout.vllm_omni.plugin import PIPELINES, register


def test_pipelines_are_of_model_families():
    assert PIPELINES.keys() <= FAMILIES.keys()


@pytest.mark.vllm_omni
@pytest.mark.filterwarnings("ignore")
def test_vllm_omni_loads_the_registered_classes():
    from vllm_omni.diffusion.registry import DiffusionModelRegistry

    from flowcorr.rollout.vllm_omni import pipelines

    register()
    for family, name in PIPELINES.items():
        found = DiffusionModelRegistry.models[name].load_model_cls()
        assert found is getattr(pipelines, name)
        assert found.family_class is FAMILIES[family]
