import pytest
import torch
from build_pipeline import build_pipeline
from fold_padding import fold_padding


@pytest.fixture(scope="module")
def transformer():
    transformer = build_pipeline(seed=0).transformer.double()
    generator = torch.Generator().manual_seed(0)
    for parameter in transformer.parameters():  # a new transformer answers zeros
        parameter.data.normal_(std=0.2, generator=generator)
    return transformer


@pytest.mark.parametrize("tokens", [1, 7, 256])
def test_one_folded_token_equals_many(transformer, tokens):
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 16, generator=generator, dtype=torch.float64),
        "pooled_projections": torch.randn(2, 64, generator=generator, dtype=torch.float64),
        "timestep": torch.tensor([20.0, 900.0], dtype=torch.float64),
    }
    text = torch.randn(2, 8, 64, generator=generator, dtype=torch.float64)

    def padded(count):
        return torch.nn.functional.pad(text, (0, 0, 0, count))

    with torch.no_grad():
        expected = transformer(encoder_hidden_states=padded(tokens), **inputs).sample
        with fold_padding(transformer) as padding:
            padding.tokens = tokens
            actual = transformer(encoder_hidden_states=padded(1), **inputs).sample

    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_processors_come_back(transformer):
    before = transformer.attn_processors
    with pytest.raises(RuntimeError, match="stop"), fold_padding(transformer):
        raise RuntimeError("stop")

    assert transformer.attn_processors == before
