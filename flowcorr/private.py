"""Secrets in configurations and messages, and files that may hold one: only the owner of a run may see them."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

REDACTED = "***"
_SECRET_KEYS = (
    "key",
    "apikey",
    "token",
    "secret",
    "password",
    "passwd",
    "authorization",
    "credential",
    "credentials",
    "cookie",
)
# Scheme, user and password, host and port, and all that follows: a path, query or fragment may hold a key.
_ADDRESS = re.compile(r"(https?://)([^\s/?#@'\"]*@)?([^\s/?#'\"]*)([/?#][^\s'\"]*)?", re.IGNORECASE)
_SHORTEST = 4  # characters of a secret that is looked for in a text


def redact(config: Any) -> Any:
    """A copy of a configuration, to be shown: every text under a key such as `api_key` or `token` is `***`.

    A key counts if it, or its last word, is among the usual names of secrets: `hub_token` does,
    `rollout_token_veto_threshold` does not. Of a text that is an http or https address only scheme and host are left,
    since all else may hold a key.
    """
    if isinstance(config, Mapping):
        return {key: REDACTED if _is_secret(key, value) else redact(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [redact(entry) for entry in config]
    if isinstance(config, str) and _ADDRESS.match(config.strip()):
        return redact_text(config)
    return config


def redact_text(text: str, secrets: Iterable[str] = ()) -> str:
    """A message, to be shown: `***` stands for `secrets`, and for all of an http or https address but its host."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return _ADDRESS.sub(_host, text)


def secrets_of(config: Any) -> set[str]:
    """The texts that `redact` hides because of their keys, for `redact_text`."""
    return {secret for secret in _secrets(config) if len(secret) >= _SHORTEST}


def names_secret(text: str) -> bool:
    """Whether a text holds one of the usual names of secrets as a word."""
    return not {*re.findall("[a-z]+", text.lower())}.isdisjoint(_SECRET_KEYS)


def open_private(path: str, flags: int) -> int:
    """An `opener` for `open`: only the owner can read the file, also one that was there before."""
    descriptor = os.open(path, flags, 0o600)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        with contextlib.suppress(PermissionError):  # it is another user's
            os.fchmod(descriptor, 0o600)
    return descriptor


def _host(match: re.Match[str]) -> str:
    scheme, user, host, rest = match.groups(default="")
    hidden = f"/{REDACTED}" if rest.strip("/?#") else rest
    return f"{scheme}{REDACTED + '@' if user else ''}{host}{hidden}"


def _secrets(config: Any) -> Iterator[str]:
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from [value] if _is_secret(key, value) else _secrets(value)
    elif isinstance(config, (list, tuple)):
        for entry in config:
            yield from _secrets(entry)


def _is_secret(key: Any, value: Any) -> bool:
    last_word = str(key).lower().replace("-", "_").rpartition("_")[2]
    return isinstance(value, str) and last_word in _SECRET_KEYS
