"""``AutoModelForCausalLM``: the zoo's class for a checkpoint or config, by its ``model_type``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from .common.base import CPPreTrainedModel, resolve_folder
from .common.checkpoint_files import read_json
from .qwen3_moe.model import Qwen3MoeForCausalLM

FAMILIES: dict[str, type[CPPreTrainedModel]] = {"qwen3_moe": Qwen3MoeForCausalLM}


class AutoModelForCausalLM:
    """Finds the class; arguments are those of ``CPPreTrainedModel.from_pretrained`` and ``from_config``."""

    def __init__(self) -> None:
        raise TypeError("use AutoModelForCausalLM.from_pretrained(...) or .from_config(...)")

    @staticmethod
    def from_pretrained(pretrained_model_name_or_path: str | Path, **arguments: Any) -> CPPreTrainedModel:
        """Load a checkpoint with the class of its ``config.json``.

        Raises:
            ValueError: a model type that the zoo does not have.
        """
        folder = resolve_folder(pretrained_model_name_or_path)
        family = read_json(folder / "config.json").get("model_type")
        return _find(family, str(folder)).from_pretrained(folder, **arguments)

    @staticmethod
    def from_config(config: PretrainedConfig, **arguments: Any) -> CPPreTrainedModel:
        """A randomly initialised model of the config's family.

        Raises:
            ValueError: a model type that the zoo does not have.
        """
        return _find(config.model_type, type(config).__name__).from_config(config, **arguments)


def _find(family: object, where: str) -> type[CPPreTrainedModel]:
    if family not in FAMILIES:
        raise ValueError(f"{where}: model_type {family!r} is not in the zoo; it has {' | '.join(FAMILIES)}")
    return FAMILIES[str(family)]
