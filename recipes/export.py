"""The end of a run: an HF folder that transformers loads, and the proof that it computes the same.

The folder is written under a temporary name and renamed when it is whole.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from cp_core import shard_batch, unshard

from .progress import say

if TYPE_CHECKING:
    from .loop import Run

_CHECKED_TOKENS = 256
_TOLERANCE = (
    1e-3  # of the largest logit, for exports that hold the very parameters (fp32, fp64): else the export is wrong
)


def export_hf(run: Run) -> None:
    """Write ``export/`` in the run's folder (weights, index, config, generation config, tokenizer); collective.

    With ``export.verify`` the first rank loads it with transformers and prints the largest logit difference.

    Raises:
        RuntimeError: an export of fp32 or fp64 parameters computes something else. (Narrower dtypes turn experts over
            by rounding, so there the difference is only shown.)
    """
    first = dist.get_rank() == 0
    final = run.folder / "export"
    temporary = run.folder / "export.tmp"
    if first:
        shutil.rmtree(temporary, ignore_errors=True)
    dist.barrier()
    run.model.save_pretrained(temporary)
    if first:
        run.data.tokenizer.save_pretrained(temporary)
        if not (temporary / "generation_config.json").exists():
            config = run.model.config
            GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id).save_pretrained(
                temporary
            )
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
    dist.barrier()
    say(run.console, f"export   {final}")
    if run.recipe.export.verify:
        found = logit_difference(run, final)
        if found is not None:
            difference, scale, tokens = found
            where = f"{difference:.2e} over {tokens} tokens in {run.recipe.model.dtype}"
            if not difference <= _TOLERANCE * scale and _holds_the_parameters(run, final):
                raise RuntimeError(f"{final}: transformers computes other logits from it: {where}; do not use it")
            say(run.console, f"checked  transformers loads it; largest logit difference {where}")


@torch.no_grad()
def logit_difference(run: Run, folder: Path) -> tuple[float, float, int] | None:
    """Largest absolute difference between our logits and transformers' on the same tokens; collective.

    Returns:
        The difference, the largest logit, and the number of tokens compared on the first rank, None on the others.
    """
    rows = run.data.valid_rows or run.data.train_rows
    tokens = torch.tensor([rows[0].input_ids[:_CHECKED_TOKENS]])
    local = shard_batch({"input_ids": tokens}, run.mesh["cp"], device=run.device)
    run.model.eval()
    ours: Tensor = unshard(run.model(**local).logits, 1, local["sequence"])
    run.model.train()
    if dist.get_rank() != 0:
        return None
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=ours.dtype, experts_implementation="eager")
    theirs: Tensor = reference(input_ids=tokens).logits
    return float((ours.cpu() - theirs).abs().max()), float(theirs.abs().max()), tokens.numel()


def _holds_the_parameters(run: Run, folder: Path) -> bool:
    """Whether nothing was rounded on the way: parameters in fp32 or fp64, written in that dtype."""
    trained = next(run.model.parameters()).dtype
    saved = AutoConfig.from_pretrained(folder).dtype
    return trained in (torch.float32, torch.float64) and saved == trained
