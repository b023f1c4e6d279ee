import pytest

from flowcorr.instruments.audit import audit

SHORT = {"num_inference_steps": 3, "sde_window_range": (0, 2)}


@pytest.fixture
def small(make_config):
    """`small(**sections)` makes the configuration of a short audit."""
    data = {"path": "tiny_words", "num_train": 8}
    return lambda **sections: make_config(**{"sampling": SHORT, "data": data, **sections})


@pytest.fixture
def shared(small):
    """The audit of one model for rollout and training."""
    return audit(small())
