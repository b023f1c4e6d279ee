"""Where a run's numbers and images go."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flowcorr.config import yaml_text

if TYPE_CHECKING:
    from PIL.Image import Image

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
REDACTED = "***"
_URL_QUERY = re.compile(r"(\s*https?://[^?#]*\?)[^#]+", re.IGNORECASE)


class Tracker(Protocol):
    """Start once, give the configuration, log each step once, finish."""

    def start(self, run_name: str, out_dir: Path, *, resume_step: int | None = None) -> None:
        """Open the tracker for a run.

        Args:
            run_name: what the run is called where runs are listed.
            out_dir: the run's folder; nothing is written outside of it.
            resume_step: the last step that counts of a run that is continued; what was logged for later
                steps is dropped. None for a new run, which replaces what an earlier one left behind.

        Raises:
            MissingExtraError: the tracker needs a package that is not installed.
        """

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Show the run's configuration, without its secrets."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log a training step's metrics; call it once a step."""

    def log_images(self, images: Mapping[str, Sequence[Image]], step: int) -> None:
        """Log named lists of images."""

    def finish(self) -> None:
        """Write what is pending and close; does nothing if the tracker was not started."""


def redact(config: Any) -> Any:
    """A copy of a configuration, to be shown: every text under a key such as `api_key` or `token` is `***`.

    A key counts if it, or its last word, is among the usual names of secrets: `hub_token` does,
    `rollout_token_veto_threshold` does not. The query of a text that is an http or https address, which may hold
    a key, becomes `***` too.
    """
    if isinstance(config, Mapping):
        return {key: REDACTED if _is_secret(key, value) else redact(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [redact(entry) for entry in config]
    if isinstance(config, str) and (match := _URL_QUERY.match(config)):
        return match[1] + REDACTED + config[match.end() :]
    return config


def redact_override(override: str) -> str:
    """An override `key=value` as it may be shown: `key=***` where its value holds a secret, see `redact`."""
    key, _, text = override.partition("=")
    values = {key.strip().rpartition(".")[2]: text, "": yaml_text.parse(text)}
    return override if redact(values) == values else f"{key}={REDACTED}"


def _is_secret(key: Any, value: Any) -> bool:
    last_word = str(key).lower().replace("-", "_").rpartition("_")[2]
    return isinstance(value, str) and last_word in _SECRET_KEYS
