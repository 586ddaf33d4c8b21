"""The recipe: what one fine-tuning run is, as strict data.

A recipe is YAML, never code: every key is declared here, an unknown one is an error (`loader.py` adds the line
and a suggestion), and nothing in it can import or execute anything. Rules that need more than one field stand in
`rules.py`. `seq_len` is always the length of the whole (global) sequence; `global_batch` counts such sequences
per optimizer step over all data ranks, so neither changes with the number of context-parallel ranks.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Algorithm = Literal["all_gather", "ulysses", "hybrid", "ring", "hybrid_ring"]
Beta = Annotated[float, Field(ge=0, lt=1)]
LinearAlgorithm = Literal["state_p2p", "state_gather", "state_alltoall", "ulysses", "auto"]


class Section(BaseModel):
    """A frozen section: unknown keys are refused, and numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """Which model, and where its weights come from."""

    family: Literal["qwen3_moe"] = Field(description="model family; it names the folder under models/")
    init: Literal["pretrained", "random"] = Field("pretrained", description="weights from `path`, or random ones")
    path: str | None = Field(None, description="folder with an HF checkpoint (init: pretrained)")
    config: dict[str, Any] = Field(default_factory=dict, description="HF config values (init: random)")
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        "float32",
        description="dtype of parameters and optimizer; in bfloat16 AdamW's small updates are rounded away",
    )
    output_router_logits: bool = Field(True, description="add the router's load-balancing loss (MoE models)")


class DataSection(Section):
    """Text in, packed sequences out."""

    source: str = Field(description="'pydoc_topics' (offline, from the standard library) or a .txt / .jsonl file")
    text_field: str = Field("text", description="the key that holds the text in a .jsonl file")
    tokenizer: str = Field("model", description="'model' (beside the weights), 'train_bpe', or a folder")
    vocab_size: int = Field(2048, ge=300, description="vocabulary of a tokenizer trained by 'train_bpe'")
    seq_len: int = Field(gt=1, description="tokens of one global sequence")
    packing: bool = Field(True, description="several documents in a sequence, isolated from each other")
    long_documents: Literal["split", "truncate", "error"] = Field(
        "split", description="a document longer than seq_len: cut into pieces, cut off, or refused"
    )
    valid_fraction: float = Field(0.1, ge=0.0, lt=1.0, description="share of the documents held out")


class CPSection(Section):
    """Context parallelism; the fields of cp_core.ContextParallelConfig, and the size of the cp axis."""

    size: int = Field(1, ge=1, description="ranks that share one sequence")
    algorithm: Algorithm = "all_gather"
    schedule: Literal["sync", "async"] = "sync"
    ulysses_degree: int | None = Field(None, ge=1)
    load_balance: bool = False
    async_fallback: Literal["error", "sync"] = "error"
    kv_head_policy: Literal["error", "repeat"] = "error"
    linear_attention: LinearAlgorithm = "state_p2p"
    kernel: Literal["sdpa", "flex", "npu_flash", "flash"] = "sdpa"
    per_layer: dict[str, dict[str, Any]] = Field(default_factory=dict)


class ParallelSection(Section):
    """The mesh. Unset dp_shard: what is left of the world after the other axes."""

    nproc: int | None = Field(
        None,
        ge=1,
        description="processes of a run on one machine; default: its devices, else what the mesh needs",
    )
    dp_replicate: int = Field(1, ge=1)
    dp_shard: int | None = Field(None, ge=1)
    cp: CPSection = CPSection()
    fsdp: bool = Field(True, description="shard parameters, gradients and optimizer over dp_shard x cp (FSDP2)")
    reshard_after_forward: bool = True
    activation_checkpointing: Literal["none", "full"] = "none"


class OptimSection(Section):
    """AdamW with warm-up and cosine decay."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    max_grad_norm: float | None = Field(1.0, gt=0, description="clip the global gradient norm; null: no clipping")
    warmup_steps: int = Field(0, ge=0)
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="the cosine ends at lr * min_lr_ratio")


class TrainSection(Section):
    """How long, how much at a time, how reproducible."""

    steps: int = Field(gt=0, description="optimizer steps")
    global_batch: int = Field(gt=0, description="sequences per optimizer step, over all data ranks")
    micro_batch: int = Field(1, gt=0, description="sequences per data rank and forward")
    eval_every: int = Field(0, ge=0, description="validate every n steps and at the end; 0: at the end only")
    stop_after: int | None = Field(None, ge=1, description="end this session after this step; a later run resumes")
    seed: int = Field(0, ge=0, lt=2**32)
    deterministic: bool = Field(False, description="torch.use_deterministic_algorithms")
    threads: int | None = Field(None, ge=1, description="CPU threads per process; default: cores // processes")


class CheckpointSection(Section):
    """Checkpoints to resume from (DCP)."""

    every: int = Field(0, ge=0, description="save every n steps, and at the end; 0: at the end only")
    keep: int = Field(2, ge=1, description="how many to keep")
    resume: Literal["auto", "never", "must"] = Field("auto", description="auto: from the latest, if there is one")


class ExportSection(Section):
    """The HF folder written at the end."""

    hf: bool = True
    verify: bool = Field(True, description="load it with transformers and compare logits")


class LogSection(Section):
    """What is shown while it runs."""

    every: int = Field(1, ge=1)
    plot: bool = Field(True, description="write the loss curve as a picture (needs the extra 'plot')")


class Recipe(Section):
    """One run: model, data, mesh, optimizer, and where its results go."""

    name: str = Field(description="letters, digits, '.', '_' and '-'; it names the folder of the results")
    run_dir: str = Field("runs/{name}", min_length=1, description="folder of the results; {name} is replaced")
    model: ModelSection
    data: DataSection
    parallel: ParallelSection = ParallelSection()
    optim: OptimSection
    train: TrainSection
    checkpoint: CheckpointSection = CheckpointSection()
    export: ExportSection = ExportSection()
    log: LogSection = LogSection()

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError("use letters, digits, '.', '_' and '-', for it names the folder of the results")
        return name
