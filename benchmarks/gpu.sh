#!/usr/bin/env bash
# Everything that needs a GPU, in one command: writes benchmarks/results/gpu-<date>.txt and .json. Needs torch with CUDA
# and triton; uses .venv if it is there, else the python on the PATH.
set -uo pipefail
cd "$(dirname "$0")/.."
python=python3; [ -x .venv/bin/python ] && python=.venv/bin/python
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if ! "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then
  echo "gpu.sh: torch sees no CUDA device here" >&2
  exit 2
fi
mkdir -p benchmarks/results
name=benchmarks/results/gpu-$(date +%F)
unset TRITON_INTERPRET
"$python" -c 'import json; from sparseattn.environment import *; print(json.dumps({"versions": versions(), "machine": machine(), "kernels": kernels()}, indent=1))' >"$name.json" || exit 1
timeout 420 "$python" -m pytest -m gpu -q --durations=10 2>&1 | tee "$name.txt"
timeout 50 "$python" -m benchmarks.training heads --device cuda --repeats 5 2>&1 | tee -a "$name.txt"
