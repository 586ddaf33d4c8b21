"""The zoo: model classes that are context parallel by construction, under their Hugging Face names.

Names are imported on first use, so that ``import models`` costs nothing and a script that only converts weights does
not load every family.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .auto import AutoModelForCausalLM
    from .common.base import CPPreTrainedModel
    from .common.parallelize import ParallelConfig
    from .qwen3_moe.model import Qwen3MoeForCausalLM

_WHERE = {
    "AutoModelForCausalLM": ".auto",
    "CPPreTrainedModel": ".common.base",
    "ParallelConfig": ".common.parallelize",
    "Qwen3MoeForCausalLM": ".qwen3_moe.model",
}
__all__ = ["AutoModelForCausalLM", "CPPreTrainedModel", "ParallelConfig", "Qwen3MoeForCausalLM"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'models' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_WHERE[name], __name__), name)
