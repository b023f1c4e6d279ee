import pytest

from flowcorr.plan.devices import GPUS, Utilisation
from flowcorr.plan.operations import Operation, busy_seconds

H100, USED = GPUS["h100-80gb"], Utilisation()


def operation(**changes):
    return Operation(**{"kind": "matmul", "half": True, "flops": 1e12, "moved": 1e6, **changes})


def test_arithmetic_or_memory_limits_an_operation():
    product = operation()
    assert product.seconds(H100, USED) == pytest.approx(1e12 / (989e12 * USED.matmul))
    moving = operation(moved=1e12)
    assert moving.seconds(H100, USED) == pytest.approx(1e12 / (3350e9 * USED.bandwidth))
    assert operation(kind="memory", flops=0.0, moved=1e12).seconds(H100, USED) == moving.seconds(H100, USED)


def test_attention_and_float32_take_longer():
    plain = operation().seconds(H100, USED)
    backward = operation(kind="attention_backward").seconds(H100, USED)
    assert plain < operation(kind="attention").seconds(H100, USED) < backward
    assert operation(half=False).seconds(H100, USED) == pytest.approx(plain * 989 / 67)


def test_operations_take_the_sum_of_their_times():
    assert busy_seconds({operation(): 3, operation(flops=2e12): 1}, H100, USED) == pytest.approx(
        5 * operation().seconds(H100, USED)
    )
