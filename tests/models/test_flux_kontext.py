"""FLUX.1 Kontext without a reference image; tests of all families are in `test_families.py`."""

from dataclasses import replace

from flowcorr.models import Guidance
from tests.models.families import KONTEXT, assert_is_the_pipelines_own_call, by_guidance_scale


def test_it_draws_from_text_alone_as_its_pipeline_does(tiny_folders):
    height, width = KONTEXT.tiny.size
    alone = replace(
        KONTEXT,
        asked=lambda *asked: by_guidance_scale(*asked) | {"max_area": height * width},
        changes={"images": 0},
    )
    family = alone.load(tiny_folders("flux_kontext"))
    assert "references" not in family.encode(alone.prompts, Guidance())
    assert_is_the_pipelines_own_call(alone, family, alone.guided, 1)
