"""Qwen3-MoE for causal language modelling, context parallel by construction.

B batch, T local tokens, H hidden, V vocabulary, E experts.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PretrainedConfig, Qwen3MoeConfig

from cp_core import SequenceContext
from cp_core.loss import mean_loss

from ..common.base import CPPreTrainedModel
from ..common.head import LMHead
from ..common.moe import load_balancing_loss
from ..common.norm import RMSNorm
from ..common.outputs import CausalLMOutput, refuse_outputs
from ..common.parallelize import CheckpointedLayer
from ..common.rope import RotaryEmbedding
from ..common.weights import WeightTable
from .config import check_config
from .layer import Qwen3MoeDecoderLayer
from .weights import weight_table


class Qwen3MoeModel(nn.Module):
    """Embedding, decoder layers, final norm."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(Qwen3MoeDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(
        self, hidden: Tensor, position_ids: Tensor, sequence: SequenceContext
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Embeddings ``[B, T, H]`` -> hidden states ``[B, T, H]`` and each MoE layer's router logits ``[B * T, E]``."""
        rope = self.rotary_emb(position_ids, sequence.max_position, hidden.dtype)
        router_logits = []
        for layer in self.layers:
            hidden, logits = layer(hidden, rope, sequence)
            if logits is not None:
                router_logits.append(logits)
        return self.norm(hidden), tuple(router_logits)


class Qwen3MoeForCausalLM(CPPreTrainedModel):
    """The model with its head and loss. Forward follows transformers' arguments and outputs."""

    config_class = Qwen3MoeConfig
    base_model_prefix = "model"
    _no_split_modules = ["Qwen3MoeDecoderLayer"]  # noqa: RUF012 - transformers' form
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - transformers' form

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__(config)
        check_config(config)
        self.model = Qwen3MoeModel(config)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.post_init()

    def cp_mixers(self) -> dict[str, str]:
        """See ``CPModel``."""
        return {f"model.layers.{index}.self_attn": "softmax" for index in range(len(self.model.layers))}

    def decoder_layers(self) -> list[CheckpointedLayer]:
        """See ``CPPreTrainedModel``."""
        return list(self.model.layers)

    @classmethod
    def weight_table(cls, config: PretrainedConfig) -> WeightTable:
        """See ``CPPreTrainedModel``."""
        assert isinstance(config, Qwen3MoeConfig)
        return weight_table(config)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        sequence: SequenceContext | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_router_logits: bool | None = None,
        return_logits: bool = True,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutput:
        """Collective over the cp axis (and over dp x cp with ``output_router_logits``).

        At cp > 1 call it with what ``shard_batch`` returned. At cp size 1 ``sequence`` may be left out: the input is
        then the whole sequence, ``labels`` are shifted here and ``attention_mask`` is the padding.

        Args:
            input_ids: ``[B, T]`` int64, or give ``inputs_embeds`` ``[B, T, H]``.
            attention_mask: ``[B, T]`` 0/1, without ``sequence`` only.
            position_ids: ``[B, T]`` int64; default: from ``sequence``.
            labels: ``[B, T]`` not shifted, cp size 1 only; ``shift_labels`` ``[B, T]``, shifted, wins.
            sequence: layout of the batch.
            num_items_in_batch: targets over all data ranks and accumulation steps; see ``cp_core.loss.mean_loss``.
            output_router_logits: also compute the load-balancing loss and add it to the loss; default: the config's.
            return_logits: make ``out.logits``; recipes pass False, and logits of all tokens never exist.
            use_cache, output_attentions, output_hidden_states, return_dict: accepted unless they ask for what is not
                there.

        Returns:
            ``loss`` (the CP group's mean, equal on its ranks; gradient: this rank's part), ``aux_loss``, ``logits``
            ``[B, T, V]`` of the local tokens, ``router_logits``, ``token_loss`` (the loss without the router's part,
            for logs); None for what was not asked for.

        Raises:
            ValueError: contradicting or missing inputs; an output that the zoo does not have.
        """
        refuse_outputs(
            return_dict,
            use_cache=use_cache,
            output_attentions=output_attentions or self.config.output_attentions,
            output_hidden_states=output_hidden_states or self.config.output_hidden_states,
        )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        hidden = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        sequence, positions, targets = self.local_batch(
            (hidden.shape[0], hidden.shape[1]),
            hidden.device,
            sequence,
            labels=labels,
            shift_labels=shift_labels,
            position_ids=position_ids,
            attention_mask=attention_mask,
        )
        hidden, router_logits = self.model(hidden, positions, sequence)
        logits, loss_sum, count = self.lm_head(hidden, targets, return_logits)
        loss = None if loss_sum is None else mean_loss(loss_sum, count, self.topology, num_items_in_batch)
        token_loss = None if loss is None else loss.detach()

        wanted = self.config.output_router_logits if output_router_logits is None else output_router_logits
        aux_loss = None
        if wanted and router_logits:
            targets_here = count if count is not None else sequence.valid.sum()
            aux_loss, targets_all = load_balancing_loss(
                router_logits, sequence.valid, self.config.num_experts_per_tok, self.topology, targets_here
            )
            if loss is not None:
                share = 1.0 if num_items_in_batch is None else targets_all / _at_least_one(num_items_in_batch, loss)
                loss = loss + self.config.router_aux_loss_coef * share * aux_loss
        return CausalLMOutput(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            router_logits=router_logits if wanted else None,
            token_loss=token_loss,
        )


def _at_least_one(number: Tensor | int, like: Tensor) -> Tensor:
    return like.new_tensor(float(number)).clamp_min(1) if not isinstance(number, Tensor) else number.clamp_min(1)
