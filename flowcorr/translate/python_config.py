"""Reads the `ConfigDict` that a function of a Python file returns from its syntax, without executing the file.

The function may assign literals, arithmetic on them, and the results of other functions of the same file, or of a file
that it loads from the same folder. Any other line is an error that names the line.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from flowcorr.errors import ConfigError, unknown_choice
from flowcorr.translate.shell import arithmetic


def read_functions(path: Path) -> list[str]:
    """The functions of a file that take no argument and return a value."""
    return [
        name
        for name, function in _functions(_parsed(path)).items()
        if not function.args.args and isinstance(function.body[-1], ast.Return)
    ]


def read_config(path: Path, function: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the result of `function` in a file, and its other variables.

    Returns:
        The nested configuration, and the numbers and strings that the function assigns to names.

    Raises:
        ConfigError: there is no such function, or one of its lines cannot be read.
    """
    module = _parsed(path)
    functions = _functions(module)
    if function not in functions:
        raise ConfigError(unknown_choice("function", function, list(functions)))
    reader = _Reader(path, functions, _loaded_files(path, module))
    config = reader.run(functions[function])
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: {function} returns no ConfigDict")
    return config, {name: value for name, value in reader.names.items() if not isinstance(value, dict)}


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as Python: {error}") from None


def _functions(module: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}


def _loaded_files(path: Path, module: ast.Module) -> dict[str, Path]:
    """Files of the same folder by the name under which they are loaded, as in `base = imp.load_source("base", ...)`."""
    files = {}
    for node in module.body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Call(args=[ast.Constant(value=str(stem)), *_])
            ):
                files[name] = path.with_name(f"{stem}.py")
            case ast.Import(names=names):
                files |= {alias.asname or alias.name: path.with_name(f"{alias.name}.py") for alias in names}
    return {name: file for name, file in files.items() if file.is_file()}


class _Reader:
    """Reads the body of one function; `names` holds its variables."""

    def __init__(self, path: Path, functions: dict[str, ast.FunctionDef], files: dict[str, Path]) -> None:
        self.path, self.functions, self.files = path, functions, files
        self.names: dict[str, Any] = {}

    def run(self, function: ast.FunctionDef) -> Any:
        for statement in function.body:
            match statement:
                case ast.Assign(targets=targets, value=value):
                    found = self.value(value)
                    for target in targets:
                        self.assign(target, found)
                case ast.Return(value=ast.expr() as value):
                    return self.value(value)
                case ast.Assert() | ast.Pass() | ast.Expr(value=ast.Constant()):
                    pass
                case _:
                    raise self.refused(statement, "is not an assignment")
        return None

    def assign(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name):
                self.names[name] = value
            case ast.Attribute(value=owner, attr=name):
                section = self.value(owner)
                if not isinstance(section, dict):
                    raise self.refused(target, "sets a field of a value that is not a ConfigDict")
                section[name] = value
            case _:
                raise self.refused(target, "is not a name or a field, and cannot be assigned to")

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Name(id=name) if name in self.names:
                return self.names[name]
            case ast.Attribute(value=owner, attr=name):
                section = self.value(owner)
                if isinstance(section, dict) and name in section:
                    return section[name]
            case ast.Call(func=ast.Name(id="int"), args=[inner]):
                return int(self.value(inner))
            case ast.Call(func=ast.Attribute(attr="ConfigDict"), args=[]):
                return {}
            case ast.Call(
                func=ast.Attribute(attr="join"), args=[ast.Call(func=ast.Attribute(attr="getcwd")), inner]
            ):
                return self.value(inner)  # a path relative to the working directory
            case ast.Call(func=ast.Name(id=name), args=[]) if name in self.functions:
                return _Reader(self.path, self.functions, self.files).run(self.functions[name])
            case ast.Call(func=ast.Attribute(value=ast.Name(id=file), attr=name), args=[]) if (
                file in self.files
            ):
                return read_config(self.files[file], name)[0]
            case ast.BinOp() | ast.UnaryOp():
                return self.number(node)
            case ast.JoinedStr(values=[ast.Constant(value=str(text))]):
                return text
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise self.refused(
                node, "is not a literal, and the file is not executed; write its value"
            ) from None

    def number(self, node: ast.expr) -> float:
        """The result of arithmetic on numbers, names and keys."""
        keys = [part for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute | ast.Call)]
        values: dict[str, float] = {}

        class Replace(ast.NodeTransformer):
            def generic_visit(replacer, part: ast.AST) -> ast.AST:
                if part in keys and isinstance(part, ast.expr):
                    name = f"v{len(values)}"
                    values[name] = self.value(part)
                    return ast.Name(id=name)
                return super().generic_visit(part)

        try:
            return arithmetic(Replace().visit(node), values)
        except (ValueError, TypeError, ZeroDivisionError):
            raise self.refused(node, "is not arithmetic on known numbers") from None

    def refused(self, node: ast.stmt | ast.expr, reason: str) -> ConfigError:
        return ConfigError(f"{self.path} line {node.lineno}: `{ast.unparse(node)}` {reason}")
