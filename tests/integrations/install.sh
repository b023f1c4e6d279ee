#!/usr/bin/env bash
# Build a virtual environment in which the training side of a verl-omni source tree runs on a CPU, without vllm.
#
#   tests/integrations/install.sh VENV PATH     # then: VERL_OMNI=PATH VENV/bin/python -m pytest -m verl_omni tests/integrations
#
# VERL (a source tree of verl; by default the commit that verl-omni pins, from GitHub), PYTHON (python3) and WHEELS (a
# folder or page with wheels, for a CPU build of torch) come from the environment.
set -euo pipefail

venv=${1:?usage: install.sh VENV PATH} omni=${2:?usage: install.sh VENV PATH}
root=$(cd "$(dirname "$0")/../.." && pwd)
wheels=${WHEELS:-$("${PYTHON:-python3}" -m pip config get global.find-links 2>/dev/null || true)}

"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install --quiet uv
install() { "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" ${wheels:+--find-links "$wheels"} "$@"; }

# What verl-omni pins, and what it and verl import.
install torch==2.13.0 "diffusers>=0.40" transformers==5.14.1 tensordict==0.10.0 TransferQueue==0.1.8 "pyarrow<25" \
    hydra-core codetiming torchdata datasets pandas dill cachetools aiohttp orjson fastapi uvicorn opentelemetry-api \
    "ray>=2.60,<3" pytest pytest-timeout hypothesis
install --no-deps "${VERL:-git+https://github.com/verl-project/verl@$(cat "$omni/.github/verl_pin.txt")}"
install --editable "$root"
