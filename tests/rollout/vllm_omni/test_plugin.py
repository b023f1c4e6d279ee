"""vllm-omni's entry point."""

import pytest

from flowcorr.models import FAMILIES
from flowcorr.rollout.vllm_omni.plugin import register


@pytest.mark.vllm_omni
@pytest.mark.filterwarnings("ignore")
def test_vllm_omni_loads_the_registered_classes():
    from vllm_omni.diffusion.registry import DiffusionModelRegistry

    from flowcorr.rollout.vllm_omni import pipelines

    register()
    for family in FAMILIES.values():
        name = family.vllm_omni.pipeline
        found = DiffusionModelRegistry.models[name].load_model_cls()
        assert found is getattr(pipelines, name)
        assert found.family_class is family
