"""How to write the resolved configuration of a script or a Python file, which are not read."""

from __future__ import annotations

import re
from pathlib import Path

from flowcorr.translate.resolved import printed_by

_PYTHON = re.compile(r"[\w./~-]+\.py:\w+")
_YAML = re.compile(r"\bff-train\s+['\"]?([\w./~-]+\.ya?ml)")


def of_script(path: Path, text: str) -> str:
    """The advice for a script that is refused."""
    code = "\n".join(line.partition("#")[0] for line in text.split("\n"))
    if "verl_omni.trainer" in code:
        return (
            f"a script is not read, as only verl-omni knows what it resolves to; write that, and translate it: "
            f'{printed_by(path)}. A script without "$@" needs the two options behind its overrides'
        )
    if match := _YAML.search(code):
        return f"it starts Flow-Factory; translate its YAML, {match[1]}"
    if match := _PYTHON.search(code):
        file, _, name = match[0].partition(":")
        return of_python(Path(file), name, "")
    return (
        "it starts no trainer whose configuration flowcorr translates: verl-omni's, flow_grpo's and Flow-Factory's are "
        "read as YAML or JSON"
    )


def of_python(path: Path, name: str, text: str) -> str:
    """The advice for a Python file, which is refused."""
    names = re.findall(r"^def (\w+)\(\)", text, re.MULTILINE)
    known = f"; NAME is one of {', '.join(names)}" if names and name not in names else ""
    name = name if name and not known else "NAME"
    return (
        f"a configuration of flow_grpo is code, which is not run here; write its values as JSON, and translate them: "
        f"python -c \"import runpy; print(runpy.run_path('{path}')['{name}']().to_json_best_effort())\" > {name}.json"
        f"{known}"
    )
