"""What a causal language model returns: transformers' output, and the token loss by itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.modeling_outputs import MoeCausalLMOutputWithPast


@dataclass
class CausalLMOutput(MoeCausalLMOutputWithPast):
    """``loss`` is what is differentiated; ``token_loss`` is its part without the router's loss, detached, for logs."""

    token_loss: Tensor | None = None
