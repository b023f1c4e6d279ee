"""Overrides read from a script."""

import pytest

from flowcorr.errors import ConfigError
from flowcorr.translate.shell import read_command, words_of

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


def test_what_a_script_would_pass_on():
    module, words = read_command(SCRIPT, "trainer.main")
    assert module == "trainer.main_diffusion"
    assert words == [
        "data.path=$HOME/train.parquet",
        "model.names=['to_q','to_k']",
        "plain.text={a: $NUM}",
        "+workers=2",
        "half=9",
        "name=a 'b' \"c\"",
        "engine=two",
        "other=x_2",
        "unset=$UNSET",
        "extra.one=1",
        "extra.two=2",
        "last=true",
    ]


def test_a_script_without_such_a_command():
    with pytest.raises(ConfigError, match="none of its commands runs python -m trainer.main"):
        read_command("bash other.sh a=1", "trainer.main")


@pytest.mark.parametrize("text", ['a="b', "a='b", "a=$((1 + 2"])
def test_an_open_quotation_is_refused(text):
    with pytest.raises(ConfigError, match="a quote is not closed"):
        words_of(text, {})
