#!/usr/bin/env bash
# Build a virtual environment in which the whole vllm-omni engine runs on a CPU, from PyPI alone: two minutes, 2 GB.
#
#   tests/rollout/vllm_omni/install.sh VENV     # then: VENV/bin/python -m pytest -m vllm_omni tests/rollout/vllm_omni
#
# PYTHON (python3), WHEELS (a folder or page with wheels, for a CPU build of torch) and VLLM_OMNI (0.30.0, or 0.32.0rc1)
# come from the environment.
set -euo pipefail

venv=${1:?usage: install.sh VENV}
here=$(cd "$(dirname "$0")" && pwd)
omni=${VLLM_OMNI:-0.30.0}
vllm=${omni%rc*}  # the release of vLLM that it belongs to
root=$(cd "$here/../../.." && pwd)
wheels=${WHEELS:-$("${PYTHON:-python3}" -m pip config get global.find-links 2>/dev/null || true)}

"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install --quiet uv
install() { "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" ${wheels:+--find-links "$wheels"} "$@"; }

# vLLM without compiled kernels: the engine's own Python, native torch operations.
install torch==2.13.0 numpy "setuptools>=77.0.3,<81" "setuptools-scm>=8" "setuptools-rust>=1.9" wheel jinja2 packaging
VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$vllm+cpu CARGO=/bin/false \
    install --no-build-isolation --no-deps --no-binary vllm "vllm==$vllm"

# What the diffusion engine never imports on a CPU.
overrides=$(mktemp)
trap 'rm -f "$overrides"' EXIT
echo "torch==2.13.0
vllm==$vllm+cpu" >"$overrides"
for name in triton fa3-fwd openai-whisper cosmos-guardrail s3tokenizer; do
    echo "$name ; sys_platform == 'never'" >>"$overrides"
done
install --overrides "$overrides" torch==2.13.0 "vllm==$vllm+cpu" "vllm-omni==$omni"
install --no-deps torchvision==0.28.0 peft

install omegaconf lazy_loader rich matplotlib jinja2 httpx2 rapidfuzz "rapidocr==3.10.*" onnxruntime "ray>=2.60,<3" pytest pytest-timeout pytest-xdist \
    hypothesis
install --no-deps --editable "$root" "$here/cpu_platform"
"$venv/bin/python" -c "import flowcorr, vllm_omni"
