#!/usr/bin/env bash
# Everything that needs a GPU, in one command and under 8 minutes: the tests, then the benchmarks, as JSON in
# benchmarks/results (RESULTS=FOLDER: there). Needs torch with CUDA and triton, and a GPU of 24 GB; with less than 48 GiB
# free no step of 32 sequences is timed. Uses .venv if it is there, else the python on the PATH (PYTHON=COMMAND: that
# one). A part that fails or runs out of time does not stop the others; gpu-DATE.json says how each ended.
# docs/use/gpu.md says what the figures are compared with, and what to send back.
#   gpu.sh --list      the parts: seconds each may take, name, command
#   gpu.sh --rehearse  the same commands at small sizes on the CPU, to see that they run
set -uo pipefail
cd "$(dirname "$0")/.."
python=python3; [ -x .venv/bin/python ] && python=.venv/bin/python
python=${PYTHON:-$python}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
results=${RESULTS:-benchmarks/results}
name=$results/gpu-$(date +%F)
mode=${1:-run}
case $mode in
  run|--list) device=cuda ;;
  --rehearse) device=cpu; name=$results/rehearsal-$(date +%F) ;;
  *) echo "gpu.sh: takes nothing, --list or --rehearse, got $mode" >&2; exit 2 ;;
esac

part() {  # SECONDS NAME COMMAND...: runs the command for so long at most, and notes how it ended
  local limit=$1 part=$2 begun=$SECONDS; shift 2
  if [ "$mode" = --list ]; then echo "$limit $part $*"; return; fi
  echo "== $part: $*" | tee -a "$name.txt"
  [ $device = cpu ] && limit=$((10 * limit))  # it is the commands that are rehearsed, not the time
  timeout -s INT -k 5 "$limit" "$@" 2>&1 | tee -a "$name.txt"
  printf '%s\t%s\t%s\n' "$part" "${PIPESTATUS[0]}" "$((SECONDS - begun))" >>"$name.parts"
}

if [ $device = cuda ]; then
  fast=(--device cuda --rounds 15 --results "$results")
  speed=(--cycles 2 --rows 32768,131072 --batch 1 --selector quest --selector quest:page=8,int8=True --selector lowbit
    --selector lowbit:bits=1,page=16 --selector saap --selector window)
  codes=(--cycles 2 --rows 32768,131072 --batch 1 --index-heads 8 --selector querypq --selector querypq:subspaces=8 --selector exact)
  batch=(--cycles 2 --rows 32768,131072 --selector quest --selector lowbit --selector saap) batches=8,32
  head=(--cycles 2 --rows 171008 --batch 1 --selector saap --selector quest)
  scaling=() nearest=(--device cuda) training=(--device cuda --repeats 5)
  generate=(--random 8b --layers 8 --tokens 32768 --budget 2048 --steps 16 --seal 256 --device cuda)
else
  tiny=(--heads 2 --group 2 --size 32 --seal 64 --evict 1 --copy 1 --buckets 16 --hidden 16)
  fast=(--device cpu --quick --fixed --results "$results" "${tiny[@]}")
  speed=(--rows 512,1024 --batch 1 --selector quest --selector quest:page=8,int8=True --selector lowbit
    --selector lowbit:bits=1,page=16 --selector saap --selector window --budget 64)
  codes=(--rows 512 --batch 1 --index-heads 2 --selector querypq --selector querypq:subspaces=8 --selector exact
    --budget 64)
  batch=(--rows 512 --selector quest --selector lowbit --selector saap --budget 64) batches=2,3
  head=(--rows 1024 --batch 1 --selector saap --budget 64)
  scaling=(--rows-sizes 512,1024 --batch-sizes 1,2 --budget-sizes 32,64 --rows 512 --batch-rows 512 --budget 64)
  nearest=(--device cpu --rows 1000 --queries 100 --size 32 --count 10)
  training=(--device cpu --repeats 1 --clusters 16 --hidden 16 --batch 16 --size 32)
  generate=(--random tiny --tokens 256 --budget 64 --steps 8 --seal 64 --device cpu)
fi

# Tests are many and small: as many processes as there are processors, where pytest-xdist is installed.
pytest=("$python" -m pytest -q --durations=10 -p no:benchmark)
workers=$(($(nproc) < 12 ? $(nproc) : 12))
"$python" -c 'import xdist' 2>/dev/null && pytest+=(-n "$workers")

parts() {
  part 140 tests "${pytest[@]}" -m gpu "--junitxml=$name.tests.xml" $(grep -rlE --include='test_*.py' 'mark\.gpu' tests)
  part 35 kernels "${pytest[@]}" -m "not gpu" "--junitxml=$name.kernels.xml" tests/kernels/test_*_gpu.py
  part 20 nearest "$python" -m benchmarks.nearest "${nearest[@]}" --results "$results"
  part 60 speed "$python" -m benchmarks.speed "${speed[@]}" "${fast[@]}"
  part 45 codes "$python" -m benchmarks.speed "${codes[@]}" "${fast[@]}" --name speed-codes
  part 45 batch "$python" -m benchmarks.speed "${batch[@]}" --batch "$batches" "${fast[@]}" --name speed-batch
  part 20 head "$python" -m benchmarks.speed "${head[@]}" "${fast[@]}" --heads 1 --name speed-head
  part 45 scaling "$python" -m benchmarks.scaling ${scaling[@]+"${scaling[@]}"} "${fast[@]}" \
    --out "$results/scaling-$device.png"
  part 20 training "$python" -m benchmarks.training heads "${training[@]}" --results "$results"
  part 45 generate "$python" -m benchmarks.generate "${generate[@]}" --results "$results"
}

if [ "$mode" = --list ]; then parts; exit; fi
if [ $device = cuda ]; then
  unset TRITON_INTERPRET
  if ! "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu.sh: torch sees no CUDA device here" >&2
    exit 2
  fi
  free=$("$python" -c 'import torch; print(torch.cuda.mem_get_info()[0] >> 30)')
  [ "$free" -ge 48 ] || batches=8
fi
mkdir -p "$results"
rm -f "$name.txt" "$name".*.xml "$name.parts"
parts
"$python" - "$name" <<'PYTHON'
import json, pathlib, sys
import xml.etree.ElementTree as tree
from sparseattn.cost_model.environment import kernels, machine, versions

name = sys.argv[1]
ended = [line.split("\t") for line in pathlib.Path(f"{name}.parts").read_text().splitlines()]
record = {"parts": {part: {"exit": int(code), "seconds": int(took)} for part, code, took in ended}, "tests": {}}
for part in ("tests", "kernels"):
    report = pathlib.Path(f"{name}.{part}.xml")
    if report.exists():
        suite = tree.parse(report).getroot().find("testsuite")
        bad = [case for case in suite if case.find("failure") is not None or case.find("error") is not None]
        counts = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
        failed = [f"{case.get('classname')}.{case.get('name')}" for case in bad]
        record["tests"][part] = counts | {"seconds": float(suite.get("time")), "failed": failed}
record |= {"versions": versions(), "machine": machine(), "kernels": kernels()}
pathlib.Path(f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
for part, end in record["parts"].items():
    print(f"{part}: exit {end['exit']} after {end['seconds']} s" + (" (out of time)" if end["exit"] in (124, 137) else ""))
for part, counts in record["tests"].items():
    print(f"{part}: {counts}")
sys.exit(any(end["exit"] for end in record["parts"].values()))
PYTHON
ended=$?
rm -f "$name.parts" "$name".*.xml
exit $ended
