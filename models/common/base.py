"""``CPPreTrainedModel``: what every model class of the zoo shares: building, binding, loading, saving.

The order is always: build on the meta device -> bind context parallelism -> parallelize -> make memory -> fill it, from
a checkpoint (``from_pretrained``) or by seeded random numbers (``from_config``). So nothing is read that a rank does
not keep, and no illegal combination survives to the first byte.
"""

from __future__ import annotations

import copy
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from cp_core import ContextParallelConfig, ResolvedCP, SequenceContext, Topology, bind_context_parallel, shard_batch
from cp_core.device import local_device
from cp_core.shard import shift_labels

from .checkpoint_files import read_json
from .checkpoint_io import load_weights, local_box, save_weights
from .checkpoint_reader import CheckpointReader
from .convert import parse_size
from .norm import RMSNorm
from .parallelize import CheckpointedLayer, ParallelConfig, parallelize
from .weights import LAYOUT_KEY, CheckpointError, WeightTable

_SIDE_FILES = ("generation_config.json",)


class CPPreTrainedModel(PreTrainedModel):
    """A causal language model that is context parallel by construction.

    Attributes:
        topology: the axes of the mesh that it was built for; one process if none.
        cp_report: how each mixer runs, one record a layer.
    """

    supports_gradient_checkpointing = True
    _supports_sdpa = True

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.topology = Topology()
        self.cp_report: tuple[ResolvedCP, ...] = ()
        self._source_dtypes: Mapping[str, torch.dtype] = {}
        self._source_folder: Path | None = None
        self._dtype_on_disk: torch.dtype | None = None  # what a checkpoint's config said, and a saved one says again

    # transformers asks every model which of its own kernels to use, and writes the answer into the config; the zoo has
    # its own kernels and takes any answer that a config carries.

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *_: Any, **__: Any) -> str:
        return attn_implementation or "sdpa"

    def _check_and_adjust_experts_implementation(self, experts_implementation: str | None) -> str:
        return experts_implementation or "eager"

    # What a family provides.

    def cp_mixers(self) -> dict[str, str]:
        """Every layer that mixes tokens: module path -> kind."""
        raise NotImplementedError

    def decoder_layers(self) -> list[CheckpointedLayer]:
        """The layers that are checkpointed and sharded one by one."""
        raise NotImplementedError

    @classmethod
    def weight_table(cls, config: PretrainedConfig) -> WeightTable:
        """How checkpoint tensors and parameters correspond."""
        raise NotImplementedError

    # Building.

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        mesh: DeviceMesh | None = None,
        cp: ContextParallelConfig | None = None,
        parallel: ParallelConfig | None = None,
        validate: bool = False,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        **refused: object,
    ) -> Self:
        """Load a checkpoint in the HF layout (or the native one of ``convert_checkpoint.py``), strictly.

        Args:
            pretrained_model_name_or_path: a folder, or a model id that ``huggingface_hub`` can fetch.
            mesh: axes ``dp_replicate, dp_shard, cp``; None: one process. Every rank of the mesh calls.
            cp: the strategies; None at cp size > 1: ``all_gather`` + ``sync``.
            parallel: FSDP2 and activation checkpointing; None: parameters stay whole on every rank.
            validate: must be False in this version.
            dtype: of the parameters; None or ``auto``: what the config says, else fp32.
            device: where parameters lie; None: the mesh's device, else the CPU.

        Raises:
            ValueError: an argument or combination that cannot be, before any weight is read.
            CheckpointError: every tensor that is missing, unexpected, doubled or mis-shaped.
        """
        if refused:
            raise ValueError(
                f"{cls.__name__}.from_pretrained does not take {', '.join(sorted(refused))}: the zoo loads by mesh=, "
                "cp=, parallel=, dtype= and device= (for device_map or quantization use transformers on an export)"
            )
        if validate:
            raise ValueError("validate=True is not available in this version; use validate=False")
        folder = resolve_folder(pretrained_model_name_or_path)
        with CheckpointReader(folder) as reader:
            assert cls.config_class is not None
            family = read_json(folder / "config.json").get("model_type")
            if family != cls.config_class.model_type:
                problem = f"this folder holds a {family!r} checkpoint; use the class of {family!r}"
                raise CheckpointError(folder, [problem])
            config = cls.config_class.from_pretrained(folder)
            if hasattr(config, LAYOUT_KEY):  # written by convert_checkpoint.py to-native; no setting of the model
                delattr(config, LAYOUT_KEY)
            on_disk = _resolve_dtype(None, config)
            model = cls._build(config, mesh, cp, parallel, dtype, device)
            report = load_weights(model, cls.weight_table(config), reader)
        model._source_dtypes, model._source_folder, model._dtype_on_disk = report.source_dtypes, folder, on_disk
        return model.eval()

    @classmethod
    def from_config(
        cls,
        config: PretrainedConfig,
        *,
        mesh: DeviceMesh | None = None,
        cp: ContextParallelConfig | None = None,
        parallel: ParallelConfig | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> Self:
        """A randomly initialised model; each parameter depends on ``seed`` and its name only, not on the mesh.

        Arguments and errors as in ``from_pretrained``.
        """
        model = cls._build(copy.deepcopy(config), mesh, cp, parallel, dtype, device)
        model.seeded_init(seed)
        return model

    @classmethod
    def _build(
        cls,
        config: PretrainedConfig,
        mesh: DeviceMesh | None,
        cp: ContextParallelConfig | None,
        parallel: ParallelConfig | None,
        dtype: torch.dtype | str | None,
        device: torch.device | str | None,
    ) -> Self:
        """Everything but the values: bound, parallelized, with memory full of NaN."""
        config.dtype = _resolve_dtype(dtype, config)
        topology = Topology.from_mesh(mesh)
        with torch.device("meta"):
            model = cls(config)
            nn.Module.to(model, config.dtype)
        model.topology = topology
        model.cp_report = bind_context_parallel(model, topology, cp)
        parallelize(model, model.decoder_layers(), topology, parallel or ParallelConfig())
        if device is None:
            device = "cpu" if mesh is None or mesh.device_type == "cpu" else local_device()
        _materialize(model, torch.device(device))
        return model

    # Values.

    def init_weights(self) -> None:
        """Called by transformers' ``post_init``: random values from torch's global generator; none on meta."""
        if all(p.device.type != "meta" for p in self.parameters()):
            self.seeded_init(int(torch.randint(2**31, ()).item()))

    @torch.no_grad()
    def seeded_init(self, seed: int) -> None:
        """Norm weights 1, biases 0, the rest normal with ``config.initializer_range``, by seed and name."""
        norms = {id(m.weight) for m in self.modules() if isinstance(m, RMSNorm)}
        for name, parameter in self.named_parameters():
            if id(parameter) in norms or name.endswith(".bias"):
                parameter.fill_(1.0 if id(parameter) in norms else 0.0)
                continue
            digest = hashlib.sha256(f"{seed}.{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            full = torch.empty(parameter.shape).normal_(0.0, self.config.initializer_range, generator=generator)
            target, box = local_box(parameter)
            target.copy_(full[tuple(slice(*span) for span in box)])

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | Path,
        *,
        is_main_process: bool | None = None,
        max_shard_size: int | str = 5 * 2**30,
        **refused: object,
    ) -> None:
        """Write the HF layout: config, weights under their HF names with the dtypes they had on disk, index.

        Every rank of the mesh calls; one writes. A random model is saved in its own dtype.

        Args:
            save_directory: the folder; made if missing.
            is_main_process: whether this rank writes; None: rank 0 does.
            max_shard_size: bytes of one file, or a size such as ``5GB``.

        Raises:
            ValueError: an argument that the zoo does not take, or a size that cannot be read.
        """
        if refused:
            raise ValueError(f"{type(self).__name__}.save_pretrained does not take {', '.join(sorted(refused))}")
        folder = Path(save_directory)
        if is_main_process is None:
            is_main_process = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        save_weights(
            self,
            self.weight_table(self.config),
            folder,
            dtypes=self._source_dtypes or None,
            max_shard_bytes=parse_size(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size,
            is_writer=is_main_process,
        )
        if is_main_process:
            config = copy.deepcopy(self.config)
            # FSDP2 puts a class of its own, FSDPQwen3Moe..., in front of the model's
            config.architectures = [next(c.__name__ for c in type(self).__mro__ if not issubclass(c, FSDPModule))]
            config.dtype = self._dtype_on_disk or config.dtype
            config.save_pretrained(folder)
            for name in _SIDE_FILES:
                if self._source_folder is not None and (self._source_folder / name).exists():
                    shutil.copyfile(self._source_folder / name, folder / name)
        if self.topology.dp_cp.group is not None:
            torch.distributed.barrier(self.topology.dp_cp.group)  # the folder is whole when any rank returns

    # Training switches, as transformers has them.

    def gradient_checkpointing_enable(  # type: ignore[override]
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Recompute every decoder layer in backward (never re-entrant).

        Raises:
            ValueError: ``use_reentrant=True``.
        """
        if (gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError("use_reentrant=True is not supported; leave gradient_checkpointing_kwargs out")
        for layer in self.decoder_layers():
            layer.gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        """Keep all activations."""
        for layer in self.decoder_layers():
            layer.gradient_checkpointing = False

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether any layer recomputes."""
        return any(layer.gradient_checkpointing for layer in self.decoder_layers())

    def generate(self, *args: object, **kwargs: object) -> None:
        """Not here.

        Raises:
            NotImplementedError: always; it says where to generate.
        """
        raise NotImplementedError(
            "the zoo trains and has no KV cache: save_pretrained(folder), then generate with "
            "transformers.AutoModelForCausalLM.from_pretrained(folder)"
        )

    prepare_inputs_for_generation = generate  # peft asks for it

    def resize_token_embeddings(self, *args: object, **kwargs: object) -> None:  # type: ignore[override]
        """Not here.

        Raises:
            NotImplementedError: always; it says where to resize.
        """
        raise NotImplementedError(
            "resize the vocabulary before training: load with transformers, resize_token_embeddings, save_pretrained, "
            "then load the folder here"
        )

    @classmethod
    def can_generate(cls) -> bool:
        """False."""
        return False

    def local_batch(
        self,
        shape: tuple[int, int],
        device: torch.device,
        sequence: SequenceContext | None,
        **given: Tensor | None,
    ) -> tuple[SequenceContext, Tensor, Tensor | None]:
        """Sequence, positions and targets of a forward call, whether or not ``shard_batch`` was called before.

        Args:
            shape: ``(B, T)`` of the input.
            device: of the input.
            sequence: from ``shard_batch``; at cp size 1 None takes the input as the whole sequence.
            given: ``labels``, ``shift_labels``, ``position_ids``, ``attention_mask`` of the call, or None.

        Raises:
            ValueError: a sequence missing at cp > 1, or one that does not fit; labels that are not shifted at cp > 1.
        """
        cp_size = self.topology.cp.size
        named = {key: value for key, value in given.items() if value is not None}
        if sequence is None:
            if cp_size > 1:
                raise ValueError(
                    f"the model is bound to cp size {cp_size} and cannot tell a shard from a whole row: call "
                    "shard_batch(batch, mesh) and pass what it returns, model(**local)"
                )
            whole = torch.zeros(shape, dtype=torch.int64)
            local = shard_batch({"input_ids": whole, **named}, device=device)
            return local["sequence"], local["position_ids"], local.get("shift_labels")
        if "attention_mask" in named:
            raise ValueError("attention_mask goes into shard_batch, which puts the padding into sequence")
        sequence.check(*shape, cp_size)
        targets = named.get("shift_labels")
        if targets is None and "labels" in named:
            if cp_size > 1:
                raise ValueError(
                    "labels must be shifted before the cut: pass the shift_labels of shard_batch, not labels"
                )
            targets = shift_labels(named["labels"].cpu(), sequence.rows).to(device)
        return sequence, named.get("position_ids", sequence.position_ids), targets


def resolve_folder(path: str | Path) -> Path:
    """The folder of a checkpoint; a model id is fetched by ``huggingface_hub`` (which honours its offline switch).

    Raises:
        ValueError: neither a folder nor something that can be fetched.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    text = str(path)
    if folder.is_absolute() or text.startswith(".") or text.count("/") != 1:
        raise ValueError(f"{text}: no such folder (and not a model id of the form 'owner/name')")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(text, allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"{text}: no such folder, and it could not be fetched as a model id: {error}") from error


def _resolve_dtype(dtype: torch.dtype | str | None, config: PretrainedConfig) -> torch.dtype:
    if dtype is None or dtype == "auto":
        dtype = getattr(config, "dtype", None) or torch.float32
    given = dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(f"dtype={given!r} is not one of float32, bfloat16, float16, float64")
    return dtype


def _materialize(model: nn.Module, device: torch.device) -> None:
    """Give every meta parameter memory on ``device``, full of NaN; a parameter shared by modules stays shared."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in made:
                memory = torch.empty_like(parameter, device=device)
                with torch.no_grad():
                    (memory.to_local() if isinstance(memory, DTensor) else memory).fill_(torch.nan)
                made[id(parameter)] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
        for name, _ in module.named_buffers(recurse=False):
            raise RuntimeError(f"buffer {name} of {type(module).__name__} would stay uninitialised on the meta path")
