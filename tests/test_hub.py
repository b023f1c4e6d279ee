"""Whether the hub answers: a closed port and a server that says nothing, each in bounded time."""

import socket

import pytest
from huggingface_hub import constants

from flowcorr import hub
from flowcorr.config import ModelConfig
from flowcorr.errors import ConfigError
from flowcorr.models import load_family


@pytest.fixture
def hub_at(monkeypatch):
    """Names another address of the hub."""

    def set_address(port):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setattr(hub, "TIMEOUT", 0.2)
        hub.unreachable.cache_clear()

    yield set_address
    hub.unreachable.cache_clear()


@pytest.mark.parametrize("listens", [False, True])
def test_a_hub_that_gives_no_answer_is_told_once(hub_at, listens):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen()
        hub_at(server.getsockname()[1])
        assert hub.only_cached("someone/model")
        reason = hub.unreachable()
    assert constants.ENDPOINT in reason
    assert hub.unreachable() is reason
    assert "hf download someone/model" in hub.why_not_found("someone/model")


def test_a_folder_needs_no_hub(hub_at, tmp_path):
    hub_at(9)
    assert not hub.only_cached(str(tmp_path))
    assert hub.why_not_found(str(tmp_path)) == ""


def test_a_model_that_is_not_cached_is_refused_with_the_reason(hub_at):
    hub_at(9)
    with pytest.raises(ConfigError, match="hf download someone/model") as refused:
        load_family(ModelConfig(path="someone/model"), "cpu")
    assert "\n" not in str(refused.value)
