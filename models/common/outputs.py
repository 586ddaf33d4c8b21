"""What a causal language model returns: transformers' output, and the token loss by itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.modeling_outputs import MoeCausalLMOutputWithPast


@dataclass
class CausalLMOutput(MoeCausalLMOutputWithPast):
    """``loss`` is what is differentiated; ``token_loss`` is its part without the router's loss, detached, for logs."""

    token_loss: Tensor | None = None


def refuse_outputs(return_dict: bool | None, **asked: bool | None) -> None:
    """Refuse what transformers' models return and the zoo's do not.

    Raises:
        ValueError: the argument's name.
    """
    for name, value in asked.items():
        if value:
            raise ValueError(
                f"{name}=True is not available: the zoo trains, without a KV cache or collected activations"
            )
    if return_dict is False:
        raise ValueError("return_dict=False is not available; read the output's fields")
