"""Secrets are not shown, and files that may hold one are their owner's."""

import os

import pytest

from flowcorr.private import open_private, redact, redact_text, secrets_of


def test_redact_hides_secrets_and_nothing_else():
    config = {
        "hub_token": "t",
        "rollout_token_veto_threshold": 1e-4,
        "rollout_is": "token",
        "key": None,
        "reward": {"terms": [{"options": {"headers": {"Authorization": "Bearer x", "X-Api-Key": "y"}}}]},
    }
    assert redact(config) == {
        "hub_token": "***",
        "rollout_token_veto_threshold": 1e-4,
        "rollout_is": "token",
        "key": None,
        "reward": {"terms": [{"options": {"headers": {"Authorization": "***", "X-Api-Key": "***"}}}]},
    }
    assert config["hub_token"] == "t"


@pytest.mark.parametrize("name", ["apikey", "apiKey", "X-ApiKey"])
def test_redact_knows_api_keys_in_one_word(name):
    assert redact({name: "s3cret"}) == {name: "***"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://host/score?api_key=SECRET", "https://host/***"),
        ("HTTP://host:80?a=1&b=SECRET#top", "HTTP://host:80/***"),
        ("http://host/SECRET/score", "http://host/***"),
        ("http://host#SECRET", "http://host/***"),
        ("http://me:SECRET@host:80/", "http://***@host:80/"),
        (" http://host/SECRET", " http://host/***"),
        ("http://host/***", "http://host/***"),
        ("http://[::1]:8000/v1", "http://[::1]:8000/***"),
        ("http://host", "http://host"),
        ("http://host/", "http://host/"),
        ("http://host?", "http://host?"),
        ("what is https://host?", "what is https://host?"),
        ("runs/a?b=c", "runs/a?b=c"),
    ],
)
def test_of_an_address_the_host_is_left(text, shown):
    config = {"url": text, "terms": [{"options": {"urls": [text]}}]}
    assert redact(config) == {"url": shown, "terms": [{"options": {"urls": [shown]}}]}
    assert config["url"] == text


def test_a_message_is_shown_without_secrets():
    config = {
        "reward": {
            "terms": [{"options": {"api_key": "s3cret", "token": "no", "headers": {"Cookie": "s3cret2"}}}]
        }
    }
    secrets = secrets_of(config)
    assert secrets == {"s3cret", "s3cret2"}  # a shorter one would be found in many a word
    text = "401 for https://me:pw@host/v1/KEY?q=1, with s3cret2 and s3cret: no"
    assert redact_text(text, secrets) == "401 for https://***@host/*** with *** and ***: no"


def test_a_private_file_is_its_owners(tmp_path):
    path, old = tmp_path / "new", tmp_path / "old"
    old.write_text("kept\n")
    old.chmod(0o644)
    for file in (path, old):
        with open(file, "a", opener=open_private) as opened:
            opened.write("more\n")
        assert file.stat().st_mode & 0o777 == 0o600
    assert old.read_text() == "kept\nmore\n"


def test_a_device_keeps_its_mode():
    mode = os.stat("/dev/null").st_mode
    with open("/dev/null", "w", opener=open_private):
        assert os.stat("/dev/null").st_mode == mode
