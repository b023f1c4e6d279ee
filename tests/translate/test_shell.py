"""Overrides read from a script."""

import pytest

from flowcorr.errors import ConfigError
from flowcorr.translate.shell import read_command
from flowcorr.translate.unread import Unread

SCRIPT = r"""#!/bin/bash
# python3 -m trainer.main commented=1
set -x
HOME_DIR=${WORKSPACE:-$HOME}
gpus=4; echo "$gpus"
NUM=4
TP=2
NAME="a 'b' \"c\""   # a comment
if nvidia-smi; then
    ENGINE=one
else
    ENGINE=two
fi
helper() {
    ENGINE=three
}
for ENGINE in four five; do
    ENGINE=$ENGINE
done
broken="$(cd "$(dirname "$0")" && pwd)"
MORE=(
    extra.one=1
    extra.two=$TP
)
python3 - <<PY
NUM=100
python3 -m trainer.main wrong=1
PY
CUDA_VISIBLE_DEVICES=0 python3 -m trainer.main_diffusion \
    data.path=$HOME_DIR/train.parquet \
    model.names="['to_q','to_k']" \
    'plain.text={a: $NUM}' \
    +workers=$((NUM / TP)) \
    half=$(( ${NUM} * 2 + 1 )) \
    name="$NAME" \
    engine=${ENGINE} \
    other=${MISSING:-x_$TP} \
    unset=$UNSET \
    "${MORE[@]}" \
    last=true "$@" 2>&1 | tee log
"""


MODULE = "trainer.main"
RUN = "python3 -m trainer.main "


def values(script):
    """The words behind the module; one that is unread as its reason."""
    words = read_command(script, MODULE).words
    return [word.reason if isinstance(word, Unread) else word for word in words]


def test_what_a_script_would_pass_on():
    command = read_command(SCRIPT, MODULE)
    assert (command.module, command.line, command.not_read) == ("trainer.main_diffusion", 29, ())
    assert values(SCRIPT) == [
        "data.path=~/train.parquet",
        "model.names=['to_q','to_k']",
        "plain.text={a: $NUM}",
        "+workers=2",
        "half=9",
        "name=a 'b' \"c\"",
        "line 17: only a shell could tell the value of $ENGINE",
        "other=x_2",
        "line 38: the script does not assign $UNSET",
        "extra.one=1",
        "extra.two=2",
        "last=true",
    ]


@pytest.mark.parametrize(
    ("before", "value"),
    [
        ("X=1", "1"),
        ("X=1; X=2", "2"),
        ("X=1\nX+=2", "12"),
        ("export X=1 Y=2", "1"),
        ("declare -r X=1", "1"),
        ("Y=1 X=2 other", "line 2: the script does not assign $X"),
        ("X=$HOME/a", "~/a"),
        ("X=1; unset X", "line 1: only a shell could tell the value of $X"),
        ("X=1; read -r X < f", "line 1: only a shell could tell the value of $X"),
        ("X=1; ((X += 1))", "line 1: only a shell could tell the value of $X"),
        ("X=1; printf -v X %s 2", "line 1: only a shell could tell the value of $X"),
        ("X=$(date)", "line 1: only a shell could tell `$(date)`"),
        ("export PYTHONPATH=$PYTHONPATH:/a\nexport PYTHONPATH=$PYTHONPATH:/a\nX=1", "1"),
        # Branches that the script decides itself.
        ("Y=0\nif [ $Y = 1 ]; then X=1; else X=2; fi", "2"),
        ('if [[ "${Y:-1}" == 1 ]]\nthen\n X=1\nelse\n X=2\nfi', "1"),
        ("X=1; if [ 3 -lt 2 ]; then X=2; elif [ 3 -gt 2 ]; then X=3; else X=4; fi", "3"),
        ("X=1; if ! test -n ''; then X=2; fi", "2"),
        ("X=1; [ a = b ] && X=2", "1"),
        ("X=1; [ -z '' ] && X=2 || X=3", "2"),
        ("X=1; false || X=2", "2"),
        ("X=1; if false; then if unknown; then X=2; fi; fi", "1"),
        ("X=1; (X=2; cd a); { Y=1; }", "1"),
        ("f() { X=2; }; X=1", "1"),
        # Branches that it does not.
        *(
            (f"X=1; {branch}", "line 1: only a shell could tell the value of $X")
            for branch in (
                "if nvidia-smi; then X=2; fi",
                "if [ -f file ]; then true; else X=2; fi",
                'if [ "$Y" = 1 ]; then X=2; fi',
                "for X in a b; do echo; done",
                "while read Y; do X=$Y; done < file",
                "case $Y in a|b) X=2;; *) X=3;; esac",
                "unknown && X=2",
                "f() { local Y=2; X=3; }; f",
            )
        ),
        ("X=1; if unknown; then X=1; fi", "1"),
        ("X=1; for Y in a; do\n Z=2\ndone\ncase a in a) ;; esac", "1"),
    ],
)
def test_the_value_of_a_variable(before, value):
    found = values(f"{before}\n{RUN}x=$X")
    assert found == [value if value.startswith("line") else f"x={value}"]


def test_what_an_array_may_hold_is_unread():
    script = f'A=(a=1)\nif unknown; then A+=(b=2); fi\nif [ 1 = 2 ]; then A+=(c=3); fi\n{RUN}"${{A[@]}}"'
    assert values(script) == ["a=1", "line 2: only a shell could tell whether the array A holds it"]


def test_a_command_in_a_variable_or_behind_others():
    assert values('CMD="python3 -m trainer.main a=1"\n$CMD b=2') == ["a=1", "b=2"]
    assert values("X=1 nohup torchrun -n 2 -m trainer.main a=1 | tee log") == ["a=1"]
    assert values(f"exec > >(tee log)\n{RUN}a=1\nexit 0\n{RUN}a=2") == ["a=1"]


def test_the_current_folder_is_known_until_the_script_leaves_it():
    command = read_command(f"A=$PWD/a B=$(pwd)\n{RUN} $A $B", MODULE)
    assert command.words[-2:] == ["./a", "."]
    command = read_command(f"cd /runs\nA=$PWD/a\n{RUN} $A", MODULE)
    assert command.words[-1] == Unread("$PWD/a", "line 1: only a shell could tell the value of $PWD")
    assert command.not_read == ("line 1: cd /runs",)


def test_what_may_assign_variables_and_is_not_read_is_listed():
    assert read_command(f"source env.sh\n. $X/b.sh\n{RUN}", MODULE).not_read == (
        "line 1: source env.sh",
        "line 2: . $X/b.sh",
    )


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("bash other.sh a=1", "none of its commands runs python -m trainer.main"),
        (f"exit\n{RUN}", "none of its commands runs"),
        (f"{RUN}a=1\n{RUN}a=2", r"^lines 1, 2 all run python -m trainer\.main\.\.\.; leave the one"),
        (
            f"for X in 1 2; do\n{RUN}\ndone",
            r"^line 2: python -m trainer\.main\.\.\. runs in a condition, a loop",
        ),
        (
            f"main() {{\n{RUN}\n}}\nmain",
            r"^line 2: python -m trainer\.main\.\.\. runs in a condition, a loop or a func",
        ),
        ("if true; then", "^line 1: what begins here is not ended by fi$"),
        ("X=1\nfi", "^line 2: fi ends nothing here$"),
        ("X=1\nelse", "^line 2: else belongs to no if$"),
        ("a;" * 30_000, "^line 1: it has more than 20000 commands$"),
        ("( " * 60, "^line 1: it is nested more than 50 levels deep$"),
        ("A=aaaa\n" + 'A="$A$A"\n' * 40 + RUN, "^line 16: its variables make more than 100000 characters$"),
        (
            "A=" + "a" * 50_000 + "\n" + "B=$A\n" * 100,
            "^line 40: the values of the script make more than 2000000",
        ),
        (f"{RUN}x='a", "^line 1: a quote or a parenthesis is not closed$"),
    ],
)
def test_a_script_that_cannot_be_read_is_refused_with_its_line(script, message):
    with pytest.raises(ConfigError, match=message):
        read_command(script, MODULE)
