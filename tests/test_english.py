"""First lines of docstrings say what is computed, and a variable is called by its content.

A first line that leans on *what*, *whose*, *those* or *who* names nothing, and has to be read twice. Some sentences
need such a word, so a number of them is allowed, and no line is judged by itself.
"""

import ast
import re
from pathlib import Path

import flowcorr

LEANING = re.compile(r"\b(what|whatever|whose|those|who|whoever)\b", re.IGNORECASE)
VAGUE = re.compile(r"\b(where|beside)\b", re.IGNORECASE)
MOST_LEANING, MOST_VAGUE, MOST_FOUND = 40, 45, 15


def test_first_lines_of_docstrings_name_things():
    lines = list(_first_lines())
    assert len(lines) > 2000
    leaning, vague = ([line for line in lines if words.search(line)] for words in (LEANING, VAGUE))
    assert len(leaning) <= MOST_LEANING, "\n".join(leaning)
    assert len(vague) <= MOST_VAGUE, "\n".join(vague)


def test_variables_are_called_by_their_content():
    assigned = [
        f"{path}:{node.lineno}"
        for path, tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == "found"
    ]
    assert len(assigned) <= MOST_FOUND, "\n".join(assigned)


def _first_lines():
    for path, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring:
                    yield f"{path}:{getattr(node, 'lineno', 1)}: {docstring.strip().splitlines()[0]}"


def _trees():
    package = Path(flowcorr.__file__).parent
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package), ast.parse(path.read_text(encoding="utf-8"))
