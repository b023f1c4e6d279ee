"""Checks of rewards' options, with messages that name reward, option and value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from flowcorr.errors import ConfigError, unknown_choice

ClipDtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
"""Dtypes that rewards on CLIP compute in."""


def check_whole(reward: str, option: str, value: object, minimum: int) -> None:
    """Check a whole number of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(
            f"reward {reward}: {option}={_shown(value)} must be a whole number of at least {minimum}"
        )


def check_positive(reward: str, option: str, value: object) -> None:
    """Check a finite number above 0."""
    if not is_number(value) or not value > 0:  # type: ignore[operator]
        raise ConfigError(f"reward {reward}: {option}={_shown(value)} must be a number above 0")


def check_text(reward: str, option: str, value: object) -> None:
    """Check a text, such as the name of a model."""
    if not isinstance(value, str):
        raise ConfigError(f"reward {reward}: {option}={_shown(value)} must be text")


def check_choice(reward: str, option: str, value: object, choices: Sequence[str]) -> None:
    """Check one of several names."""
    if value not in choices:
        raise ConfigError(unknown_choice(f"reward {reward}: {option}", value, choices))


def check_clip_options(reward: str, dtype: str, batch_size: int, **texts: str) -> None:
    """Check the options of a reward on CLIP; `texts` holds its text options by name."""
    for option, text in texts.items():
        check_text(reward, option, text)
    check_choice(reward, "dtype", dtype, get_args(ClipDtype))
    check_whole(reward, "batch_size", batch_size, 1)


def _shown(value: object) -> str:
    """A number as it is; only the type of any other value, which may be a misplaced secret."""
    return repr(value) if isinstance(value, (int, float)) else f"<{type(value).__name__}>"


def is_number(value: object) -> bool:
    """Whether `value` is a finite number; booleans are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
