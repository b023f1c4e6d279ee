"""Code of the user's own, named as `package.module:name`."""

from __future__ import annotations

import importlib
from typing import Any

from flowcorr.errors import ConfigError


def import_target(key: str, path: str, what: str) -> Any:
    """The object at `path`, `package.module:name`.

    Args:
        key: the configuration key that named it, for messages.
        path: where it is.
        what: what it should be, for messages.

    Raises:
        ConfigError: there is no such module, or no such name in it. An error inside the module itself, such as
            a missing import of its own, is passed on as it is.
    """
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks something that it imports itself
        raise _no_module(key, path, error.name) from error
    except ValueError as error:
        raise _no_module(key, path, module_name) from error
    if not attribute or not hasattr(module, attribute):
        raise ConfigError(f"{key}={path!r}: the module {module_name} has no {attribute!r}; name {what} in it")
    return getattr(module, attribute)


def _no_module(key: str, path: str, name: str) -> ConfigError:
    return ConfigError(
        f"{key}={path!r}: there is no module {name!r} on the Python path; check its spelling, "
        "install it, or add its folder to PYTHONPATH"
    )
