#!/usr/bin/env bash
# Lint, types and tests.   bash scripts/test.sh [--full] [pytest arguments]
#   default: what CI runs; --full: the slow tests as well. GPU and NPU tests run where there is such a device.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
tier="not slow"
if [ "${1:-}" = --full ]; then
    tier="slow or not slow"
    shift
fi
ruff check .
ruff format --check .
mypy
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
python -m pytest -m "$tier" -n 2 --dist loadfile --durations 15 "$@"
