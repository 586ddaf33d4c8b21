#!/usr/bin/env bash
# Fine-tune a small Qwen3-MoE on real text over two context-parallel processes: stop half-way, resume, export.
#   bash scripts/quickstart.sh [a.b=c ...]      overrides go to the recipe
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
recipe=recipes/configs/qwen3_moe/quickstart.yaml
echo "== train the first half, then stop =="
python -m recipes run "$recipe" checkpoint.resume=never train.stop_after=50 "$@"
echo "== the same command again resumes from the checkpoint =="
python -m recipes run "$recipe" "$@"
