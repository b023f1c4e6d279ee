"""Methods that run in an engine may read no more than it has."""

import pytest

from flowcorr.errors import ConfigError
from tests.models.adapters import compared


def reads(name, read):
    """A method that reads more than an engine has."""

    def method(self, *inputs):
        read(self)
        return getattr(super(type(self), self), name)(*inputs)

    return {name: method}


@pytest.mark.parametrize(
    ("methods", "lacking"),
    [
        (reads("decode", lambda self: self.pipeline.image_processor), r"self\.pipeline\.image_processor"),
        (
            reads("predict", lambda self: self.pipeline.prepare_latents),
            r"self\.pipeline\.prepare_latents",
        ),
        (reads("predict", lambda self: self.transformer.dtype), r"self\.transformer\.dtype"),
        (reads("guide", lambda self: self.pipeline.scheduler), r"self\.pipeline\.scheduler"),
    ],
)
def test_what_an_engine_lacks_is_named(adapter_of, methods, lacking):
    with pytest.raises(ConfigError, match=rf"model\.family=.*:Wrong: .* {lacking}, .*engine"):
        compared(adapter_of("sd3", **methods), "sd3")
    in_process = adapter_of("sd3", vllm_omni=None, **methods)
    assert compared(in_process, "sd3").differences == ()
