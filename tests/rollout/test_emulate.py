import pytest
import torch

from flowcorr.rollout.emulate import ROUNDINGS, round_weight


def round_weights(weights, emulate):
    return {name: round_weight(weight, emulate) for name, weight in weights.items()}


@pytest.fixture
def weights():
    draw = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(16, 64, generator=draw) * torch.logspace(-3, 2, 16)[:, None],
        "bias": torch.randn(16, generator=draw),
        "conv": torch.randn(4, 4, 2, 2, generator=draw),
    }


def test_none_changes_nothing(weights):
    rounded = round_weights(weights, "none")
    assert all(torch.equal(rounded[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("emulate", ROUNDINGS)
def test_only_matrices_are_rounded(weights, emulate):
    rounded = round_weights(weights, emulate)
    assert torch.equal(rounded["bias"], weights["bias"])
    assert torch.equal(rounded["conv"], weights["conv"])
    assert not torch.equal(rounded["matrix"], weights["matrix"])


@pytest.mark.parametrize("emulate", ROUNDINGS)
def test_rounding_twice_is_rounding_once(weights, emulate):
    once = round_weights(weights, emulate)
    torch.testing.assert_close(round_weights(once, emulate)["matrix"], once["matrix"], rtol=1e-6, atol=0)


@pytest.mark.parametrize(("emulate", "levels"), [("int8", 255), ("int4", 15)])
def test_integers_have_few_levels_a_row_and_a_small_error(weights, emulate, levels):
    matrix, rounded = weights["matrix"], round_weights(weights, emulate)["matrix"]
    assert max(len(row.unique()) for row in rounded) <= levels
    scale = matrix.abs().amax(1, keepdim=True) / (levels // 2)
    assert ((rounded - matrix).abs() <= scale * 0.5001).all()
    torch.testing.assert_close(rounded.abs().amax(1), matrix.abs().amax(1))


def test_fp8_has_three_mantissa_bits(weights):
    matrix, rounded = weights["matrix"], round_weights(weights, "fp8")["matrix"]
    large = matrix.abs() > matrix.abs().amax(1, keepdim=True) / 1000  # normal numbers of e4m3
    error = ((rounded - matrix).abs() / matrix.abs())[large]
    assert error.max() <= 2**-4 * 1.001
    assert error.max() > 2**-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("emulate", ROUNDINGS)
def test_a_row_of_zeros_stays_zero(emulate, dtype):
    zeros = torch.zeros(2, 3)
    assert torch.equal(round_weights({"w": zeros.to(dtype)}, emulate)["w"].float(), zeros)


def test_scales_are_not_rounded_to_the_dtype_of_the_weights():
    """100 / 127 is .7874, of which 62 make 48.82, in bfloat16 48.75; of .7891, its rounding, they make 48.92: 49."""
    row = torch.tensor([[100.0, 49.0]], dtype=torch.bfloat16)
    assert round_weight(row, "int8").tolist() == [[100.0, 48.75]]


def test_unknown_bfloat16_weights_keep_their_dtype():
    weights = {"w": torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).bfloat16()}
    for emulate in ROUNDINGS:
        rounded = round_weights(weights, emulate)["w"]
        assert rounded.dtype == torch.bfloat16
        assert rounded.isfinite().all()
