"""Answers of a family's methods that have another shape are refused, and name the method."""

import pytest

from flowcorr.errors import ConfigError
from flowcorr.models import CannotCompare
from tests.models.adapters import compared, with_conditioning, with_velocity


@pytest.mark.parametrize(
    ("name", "methods", "message"),
    [
        (
            "sd3",
            with_conditioning(lambda rows: {n: x for n, x in rows.items() if "neg" not in n}),
            "negative prompt",
        ),
        (
            "flux",
            {"distills_guidance": False},
            r"guidance_scale=3 would have no effect.*distills_guidance",
        ),
        (
            "wan",
            with_conditioning(lambda rows: {n: x[:1] for n, x in rows.items()}),
            r"embed .*prompt_embeds .*\(1, 48, 32\) .* 2 prompts",
        ),
        ("sd3", with_conditioning(lambda rows: tuple(rows.values())), r"embed .* tuple .* 2 prompts"),
        (
            "flux",
            with_velocity(lambda x: x.flatten(1, 2)),
            r"predict .*\(2, 24, 16\) .*\(2, 4, 6, 16\)",
        ),
        ("sd3", with_velocity(lambda x: (x,)), r"predict .* tuple .*\(2, 4, 8, 8\)"),
        (
            "wan",
            {"guide": lambda self, negative, positive, scale: positive[0]},
            r"guide .*\(16, 3, 4, 6\) .*\(2, 16, 3, 4, 6\)",
        ),
    ],
)
def test_answers_of_another_shape_are_refused(adapter_of, name, methods, message):
    family = adapter_of(name, **methods)
    with pytest.raises(ConfigError, match=rf"model\.family=[\w.]*:Wrong: .*{message}") as error:
        compared(family, name)
    assert not isinstance(error.value, CannotCompare)
