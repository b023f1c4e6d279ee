"""`flowcorr completion`: a script that lets a shell complete commands, options, recipes, files and keys."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from flowcorr.cli.command import Argument, Command
from flowcorr.errors import MissingExtraError

SHELLS = ("bash", "zsh", "tcsh")
_FILES = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}
_FOLDERS = {"bash": "_shtab_compgen_dirs", "zsh": "_files -/", "tcsh": "d"}
# shtab lets bash add a slash to folders where the function's name tells that it finds files.
_RECIPES = {"bash": "_flowcorr_recipe_files", "zsh": "_flowcorr_recipes", "tcsh": "$flowcorr_recipes"}
BY_METAVAR: Mapping[str, Mapping[str, str]] = {
    "RECIPE": _RECIPES,
    "PATH|RECIPE": _RECIPES,
    "key=value": {"bash": "_flowcorr_keys", "zsh": "_flowcorr_keys", "tcsh": "`echo $flowcorr_keys`"},
    "best|last|PATH": _FILES,
    "RUN_DIR": _FOLDERS,
    "DIR": _FOLDERS,
    "FILE|DIR": _FILES,
    "SOURCE": _FILES,
}
"""The pattern, or the function of the script, that completes an argument in each shell."""

_BASH = """\
_flowcorr_recipe_files() {{
  compgen -W "{recipes}" -- "$1"
  compgen -f -X '!*.y*ml' -- "$1"
  compgen -d -- "$1"
}}
_flowcorr_keys() {{
  compgen -W "{keys}" -- "$1"
}}"""
_BASH_END = """
# A key is followed by its value, not by a space; a value may be a file.
_flowcorr() {
  _shtab_flowcorr "$@"
  if [[ ${COMPREPLY-} == *= ]]; then compopt -o nospace 2>/dev/null; fi
}
complete -o bashdefault -o default -F _flowcorr flowcorr"""
_ZSH = """\
_flowcorr_recipes() {{
  compadd -- {recipes}
  _files -g '*.y*ml'
}}
_flowcorr_keys() {{
  compadd -S '' -- {keys}
}}"""
_TCSH = """\
set flowcorr_recipes = ({recipes})
set flowcorr_keys = ({keys})"""


def completion(arguments: argparse.Namespace) -> int:
    """Print a script that completes commands in a shell.

    Print a script by which bash, zsh or tcsh completes commands, options, files, names of recipes, and keys of the
    configuration. Print it again after an update of flowcorr.

    Examples:
      flowcorr completion bash > ~/.local/share/bash-completion/completions/flowcorr
      flowcorr completion zsh > ~/.zfunc/_flowcorr        # a folder of fpath
      flowcorr completion tcsh > ~/.flowcorr.tcsh         # and `source ~/.flowcorr.tcsh` in ~/.tcshrc
    """
    print(script(arguments.parser, arguments.shell))
    return 0


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script that completes the commands of a parser in a shell.

    Raises:
        MissingExtraError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise MissingExtraError("flowcorr completion", "shtab", "completion", error) from error
    from flowcorr.config import defaults, dotted, recipe_names

    lists = {"recipes": " ".join(recipe_names()), "keys": " ".join(f"{key}=" for key in dotted(defaults()))}
    preamble = {"bash": _BASH, "zsh": _ZSH, "tcsh": _TCSH}[shell].format(**lists)
    text = shtab.complete(parser, shell, preamble=preamble)
    if shell == "bash":
        text += _BASH_END
    if shell == "zsh":  # shtab's "(*)" completes only the first of several arguments
        text = text.replace('"(*)::', '"*:').replace('"(*):', '"*:')
    return text


COMMANDS: Sequence[Command] = (
    Command(name="completion", run=completion, arguments=(Argument("shell", choices=SHELLS),)),
)
