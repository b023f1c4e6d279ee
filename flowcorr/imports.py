"""Code of the user's own, named as `package.module:name`."""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from flowcorr.errors import ConfigError

_OWN_NAME = re.compile(r"[\w.]{1,100}:[\w.]{1,100}")


def is_own_name(name: str) -> bool:
    """Whether a name is that of code of one's own, `package.module:name`."""
    return _OWN_NAME.fullmatch(name) is not None


def import_target(key: str, path: str, what: str) -> Any:
    """The object at `path`, `package.module:name`.

    Args:
        key: the configuration key that named it, for messages.
        path: where it is.
        what: what it should be, for messages.

    Raises:
        ConfigError: there is no such module, or no such name in it, or the module cannot be imported. Its `__cause__`
            is then the module's own error.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or module_name.startswith("."):
        raise _no_module(key, path, module_name)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the module's code may raise anything
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise _no_module(key, path, error.name) from error
        raise ConfigError(
            f"{key}={path!r}: {_importing(module_name, error)}: {type(error).__name__}: {error}"
        ) from error
    if not attribute or not hasattr(module, attribute):
        raise ConfigError(f"{key}={path!r}: the module {module_name} has no {attribute!r}; name {what} in it")
    return getattr(module, attribute)


def source_of(path: str) -> str:
    """The file that `import_target` would import, found without importing anything; empty if there is none."""
    name, _, parts = path.partition(":")[0].partition(".")
    spec = _spec(name, None)
    for part in filter(None, parts.split(".")):
        places = None if spec is None else spec.submodule_search_locations
        name = f"{name}.{part}"
        spec = None if places is None else _spec(name, places)
    return "" if spec is None else spec.origin or ""


def _spec(name: str, places: Sequence[str] | None) -> ModuleSpec | None:
    specs = (finder.find_spec(name, places) for finder in sys.meta_path)
    return next(filter(None, specs), None) if name else None


def _no_module(key: str, path: str, name: str | None) -> ConfigError:
    file, _, attribute = path.partition(":")
    if file.endswith(".py"):
        return ConfigError(
            f"{key}={path!r} names a file; name the module, without folder and .py: {Path(file).stem}:{attribute} "
            "(its folder must be the current one, or be on PYTHONPATH)"
        )
    return ConfigError(
        f"{key}={path!r}: there is no module {name!r} on the Python path; check its spelling, "
        "install it, or add its folder to PYTHONPATH"
    )


def _importing(module_name: str, error: BaseException) -> str:
    """The place of a failed import: the last line that ran in the module, or in a package that holds it."""
    lines = [
        f"importing {frame.f_code.co_filename} failed at line {line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if f"{module_name}.".startswith(f"{frame.f_globals.get('__name__')}.")
    ]
    return lines[-1] if lines else f"importing {module_name} failed"  # a SyntaxError names its file and line
