"""Reads the `ConfigDict` that a function of a Python file returns from its syntax, without executing the file.

The function may assign what follows from literals, names, arithmetic, comparisons, f-strings, and the results of other
functions of the same file, or of a file that it loads from the same folder. A value that does not follow, such as a
variable of the environment, is `Unread`. A statement that is no assignment is an error that names the line.
"""

from __future__ import annotations

import ast
import math
import operator
import tokenize
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from flowcorr.config.text_file import read_text
from flowcorr.errors import ConfigError, unknown_choice
from flowcorr.translate.unread import Unread, unread_in

_MAX_TOKENS, _MAX_LEVELS, _MAX_CALLS, _MAX_WORK, _MAX_TEXT = 2000, 60, 20, 100_000, 10_000
_MAX_NUMBER, _MAX_EXPONENT = 2**63, 64
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "round": round,
    "abs": abs,
    "min": min,
    "max": max,
}


def read_functions(path: Path) -> list[str]:
    """The functions of a file that take no argument and return a value.

    Raises:
        ConfigError: the file cannot be read, or has none.
    """
    names = [
        name
        for name, function in _File(path).functions.items()
        if not function.args.args and isinstance(function.body[-1], ast.Return)
    ]
    if not names:
        raise ConfigError("it defines no function without arguments that returns a configuration")
    return names


def read_config(path: Path, function: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the result of `function` in a file, and its other variables.

    Returns:
        The nested configuration, and the values that the function assigns to names.

    Raises:
        ConfigError: there is no such function, or one of its lines cannot be read.
    """
    file = _File(path)
    if not file.functions:
        raise ConfigError("it defines no function, and a configuration is one that returns a ConfigDict")
    if function not in file.functions:
        raise ConfigError(f"{unknown_choice('function', function, list(file.functions))} ({path})")
    reader = _Reader(file, _Budget())
    config = reader.run(file.functions[function])
    if not isinstance(config, dict):
        raise ConfigError(f"{function} returns no ConfigDict ({file.place(file.functions[function])})")
    reader.measure(config, file.functions[function])
    return config, {name: value for name, value in reader.names.items() if not isinstance(value, dict)}


class _File:
    """The syntax of a file: its functions, the variables of its module, and the files that it loads.

    Raises:
        ConfigError: it is no Python, or far more than a configuration.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        module = self._parsed(read_text(path))
        self.functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
        self.variables: dict[str, ast.expr] = {}
        self.loaded: dict[str, Path] = {}
        for node in module.body:
            match node:
                case ast.Assign(
                    targets=[ast.Name(id=name)], value=ast.Call(args=[ast.Constant(value=str(stem)), *_])
                ) if stem.isidentifier():
                    self.loaded[name] = path.with_name(f"{stem}.py")  # base = imp.load_source("base", ...)
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.variables[name] = value
                case ast.Import(names=names):
                    for alias in names:
                        stem = alias.name.rpartition(".")[2]
                        self.loaded[alias.asname or stem] = path.with_name(f"{stem}.py")

    def place(self, node: ast.AST) -> str:
        """Where a node stands, for messages."""
        return f"{self.path.name} line {getattr(node, 'lineno', 1)}"

    def _parsed(self, text: str) -> ast.Module:
        try:
            self._check_tokens(text)
            module = ast.parse(text)
        except ConfigError:
            raise
        except (SyntaxError, ValueError, tokenize.TokenError, MemoryError, RecursionError) as error:
            line = getattr(error, "lineno", None) or (error.args[1][0] if len(error.args) > 1 else 1)
            reason = error.args[0] if error.args else "nested too deeply"
            raise ConfigError(f"it is no Python: {reason} ({self.path.name} line {line})") from None
        levels: list[tuple[ast.AST, int]] = [(module, 0)]
        while levels:
            node, level = levels.pop()
            if level > _MAX_LEVELS:
                raise ConfigError(f"it is nested more than {_MAX_LEVELS} levels deep ({self.place(node)})")
            levels += [(child, level + 1) for child in ast.iter_child_nodes(node)]
        return module

    def _check_tokens(self, text: str) -> None:
        """Refuse a statement whose syntax could exhaust the parser."""
        number, begin = 0, 1
        for token in tokenize.generate_tokens(StringIO(text).readline):
            if not number:
                begin = token.start[0]
            ends = token.type == tokenize.NEWLINE or (token.type == tokenize.NL and not number)
            number = 0 if ends else number + 1
            if number > _MAX_TOKENS:
                raise ConfigError(
                    f"a statement of more than {_MAX_TOKENS} tokens ({self.path.name} line {begin})"
                )


class _Budget:
    """The work that reading one function may take, with all that it calls."""

    def __init__(self) -> None:
        self.left = _MAX_WORK
        self.calls = 0


class _Reader:
    """Reads the body of one function; `names` holds its variables."""

    def __init__(self, file: _File, budget: _Budget) -> None:
        self.file, self.budget = file, budget
        self.names: dict[str, Any] = {}

    def run(self, function: ast.FunctionDef) -> Any:
        """The value that a function without arguments returns."""
        if self.budget.calls == _MAX_CALLS:
            raise self.refused(function, f"calls itself, or others more than {_MAX_CALLS} deep")
        self.budget.calls += 1
        value = self.returned(function)
        self.budget.calls -= 1
        return value

    def returned(self, function: ast.FunctionDef) -> Any:
        """The value at the first `return`."""
        for statement in function.body:
            match statement:
                case ast.Assign(targets=targets, value=value):
                    found = self.value(value)
                    for target in targets:
                        self.assign(target, found)
                case ast.Return(value=ast.expr() as value):
                    return self.value(value)
                case ast.Assert(test=test):
                    if self.value(test) is False:
                        raise self.refused(statement, "does not hold")
                case ast.Pass() | ast.Expr(value=ast.Constant()) | ast.Import() | ast.ImportFrom():
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
                if any(part is section for part in self.walk(value, target)):
                    raise self.refused(target, "would hold itself")
                section[name] = value
            case _:
                raise self.refused(target, "is not a name or a field, and cannot be assigned to")

    def walk(self, value: Any, node: ast.AST) -> Iterator[Any]:
        """A value and all that lies in it.

        Raises:
            ConfigError: that is more than a configuration holds.
        """
        levels = [(value, 0)]
        while levels:
            part, level = levels.pop()
            self.spend(node)
            if level > _MAX_LEVELS:
                raise self.refused(node, f"holds more than {_MAX_LEVELS} levels")
            yield part
            if isinstance(part, dict | list | tuple):
                inner = part.values() if isinstance(part, dict) else part
                levels += [(value, level + 1) for value in inner]

    def measure(self, value: Any, node: ast.AST) -> None:
        """Refuse a value that holds more than a configuration."""
        deque(self.walk(value, node), maxlen=0)

    def value(self, node: ast.expr) -> Any:
        """The value of an expression, or `Unread`."""
        self.spend(node)
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return self.bounded(value, node)
            case ast.Name(id=name) if name in self.names:
                return self.names[name]
            case ast.Name(id=name) if name in self.file.variables:
                return _Reader(self.file, self.budget).module_value(name)
            case ast.Attribute(value=owner, attr=name):
                section = self.value(owner)
                if isinstance(section, dict) and name in section:
                    return section[name]
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                values = tuple(map(self.value, parts))
                self.measure(values, node)
                return list(values) if isinstance(node, ast.List) else values
            case ast.Dict(keys=keys, values=values):
                return self.mapping(node, keys, values)
            case ast.JoinedStr(values=parts):
                return self.computed(node, lambda *texts: "".join(map(str, texts)), parts)
            case ast.FormattedValue(value=inner, conversion=-1, format_spec=None):
                return self.computed(node, str, [inner])
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self.computed(node, operator.neg, [operand])
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self.computed(node, operator.not_, [operand])
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
                return self.computed(node, _OPERATORS[type(sign)], [left, right])
            case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in _OPERATORS:
                return self.computed(node, _OPERATORS[type(sign)], [left, right])
            case ast.IfExp(test=test, body=body, orelse=orelse):
                chosen = self.value(test)
                return chosen if isinstance(chosen, Unread) else self.value(body if chosen else orelse)
            case ast.Call():
                return self.call(node)
        return self.unread(node, "does not follow from the file, which is not executed; write its value")

    def module_value(self, name: str) -> Any:
        """The value of a variable of the module, which may use only what follows from the file itself."""
        if self.budget.calls == _MAX_CALLS:
            raise self.refused(self.file.variables[name], "uses itself")
        self.budget.calls += 1
        value = self.value(self.file.variables[name])
        self.budget.calls -= 1
        return value

    def call(self, node: ast.Call) -> Any:
        if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
            return self.unread(node, "is a call that cannot be read; write its value")
        match node.func:
            case ast.Name(id=name) if name in self.file.functions and not node.args:
                return _Reader(self.file, self.budget).run(self.file.functions[name])
            case ast.Name(id=name) if name in _FUNCTIONS:
                return self.computed(node, _FUNCTIONS[name], node.args)
            case ast.Attribute(attr="ConfigDict") if not node.args:
                return {}
            case ast.Attribute(attr="ConfigDict") if len(node.args) == 1:
                return self.value(node.args[0])
            case ast.Attribute(attr="join"):
                return self.joined(node)
            case ast.Attribute(value=ast.Name(id=name), attr=function) if (
                name in self.file.loaded and not node.args
            ):
                return self.loaded(node, self.file.loaded[name], function)
        return self.unread(node, "is a call that cannot be read; write its value")

    def loaded(self, node: ast.Call, path: Path, function: str) -> Any:
        """The result of a function of a loaded file."""
        if not path.is_file():
            return self.unread(node, f"is in {path.name}, which is not beside this file")
        file = _File(path)
        if function not in file.functions:
            raise self.refused(node, f"calls {function}, which {path.name} does not define")
        return _Reader(file, self.budget).run(file.functions[function])

    def joined(self, node: ast.Call) -> Any:
        """`os.path.join`; the working directory and the empty path are left out of it."""
        parts = [
            "" if isinstance(part, ast.Call) and ast.unparse(part.func) == "os.getcwd" else self.value(part)
            for part in node.args
        ]
        if unread := next(unread_in(parts), None):
            return unread
        if not all(isinstance(part, str) for part in parts):
            return self.unread(node, "joins what is not text")
        return self.bounded("/".join(part.rstrip("/") for part in parts if part), node)

    def mapping(self, node: ast.Dict, keys: Sequence[ast.expr | None], values: Sequence[ast.expr]) -> Any:
        names = [None if key is None else self.value(key) for key in keys]
        if not all(isinstance(name, str) for name in names):
            return self.unread(node, "has a key that is not text")
        found = dict(zip(names, map(self.value, values), strict=True))
        self.measure(found, node)
        return found

    def computed(self, node: ast.expr, compute: Callable[..., Any], operands: Sequence[ast.expr]) -> Any:
        """The result of a computation on numbers and short texts, within bounds."""
        values = list(map(self.value, operands))
        if unread := next(unread_in(values), None):
            return unread
        try:
            if compute is operator.pow and not abs(values[1]) <= _MAX_EXPONENT:
                raise OverflowError("the exponent is too large")
            if compute is operator.mul and any(isinstance(value, str | tuple | list) for value in values):
                raise TypeError("only numbers are multiplied")
            return self.bounded(compute(*values), node)
        except (ArithmeticError, TypeError, ValueError) as error:
            reason = str(error) or type(error).__name__
            return self.unread(node, f"cannot be computed: {reason}")

    def bounded(self, value: Any, node: ast.expr) -> Any:
        if isinstance(value, str) and len(value) > _MAX_TEXT:
            return self.unread(node, f"makes more than {_MAX_TEXT} characters")
        if isinstance(value, complex) or (
            isinstance(value, int | float) and not (math.isfinite(value) and abs(value) < _MAX_NUMBER)
        ):
            return self.unread(node, "is beyond the numbers of a configuration")
        return value

    def spend(self, node: ast.AST) -> None:
        self.budget.left -= 1
        if self.budget.left < 0:
            raise self.refused(node, f"is read after {_MAX_WORK} others, and no configuration needs as many")

    def unread(self, node: ast.expr, reason: str) -> Unread:
        return Unread(_short(node), str(self.refused(node, reason)))

    def refused(self, node: ast.AST, reason: str) -> ConfigError:
        return ConfigError(f"`{_short(node)}` {reason} ({self.file.place(node)})")


def _short(node: ast.AST) -> str:
    text = ast.unparse(node).partition("\n")[0]
    return text if len(text) <= 80 else f"{text[:77]}..."
