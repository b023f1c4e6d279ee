#!/usr/bin/env bash
# Build a virtual environment in which the training loops of flow_grpo and Flow-Factory run on a CPU, on a tiny
# Stable Diffusion 3.
#
#   tests/integrations/real_loops/install.sh VENV
#   FLOW_GRPO=PATH FLOW_FACTORY=PATH VENV/bin/python -m pytest -m real_loops tests/integrations/test_real_loops.py
#
# PYTHON (python3) and WHEELS (a folder or page with wheels, for a CPU build of torch) come from the environment.
set -euo pipefail

venv=${1:?usage: install.sh VENV}
root=$(cd "$(dirname "$0")/../../.." && pwd)
wheels=${WHEELS:-$("${PYTHON:-python3}" -m pip config get global.find-links 2>/dev/null || true)}

"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install --quiet uv
install() { "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" ${wheels:+--find-links "$wheels"} "$@"; }

# What the loops import, in the versions that flowcorr takes; not torchvision, which is built for other torches.
install ml_collections contextlib2 accelerate datasets imageio einops aiohttp sentencepiece pytest pytest-timeout hypothesis
install --editable "$root"
