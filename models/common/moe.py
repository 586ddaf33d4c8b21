"""The mixture-of-experts block: softmax router, experts, and the load-balancing loss over all ranks.

B batch, T local tokens, H hidden, E experts, k choices a token, L MoE layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cp_core.collectives import sum_values
from cp_core.loss import value_with_gradient_of
from cp_core.topology import Topology

from .experts import Experts


class TopKRouter(nn.Module):
    """Chooses k experts a token by softmax score. Scores are fp32 or wider.

    Args:
        num_experts: E.
        hidden_size: H.
        top_k: k.
        norm_topk_prob: divide the chosen scores by their sum.
    """

    def __init__(self, num_experts: int, hidden_size: int, top_k: int, norm_topk_prob: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.top_k = top_k
        self.norm_topk_prob = norm_topk_prob

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``x [tokens, H]`` -> logits ``[tokens, E]``, weights ``[tokens, k]``, chosen experts ``[tokens, k]``."""
        logits = F.linear(x, self.weight)
        weights, chosen = router_scores(logits).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen


def router_scores(logits: Tensor) -> Tensor:
    """Softmax over the experts, fp32 or wider."""
    return logits.softmax(-1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)


class SparseMoeBlock(nn.Module):
    """Router and experts."""

    def __init__(self, router: TopKRouter, experts: Experts) -> None:
        super().__init__()
        self.gate = router
        self.experts = experts

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, T, H]`` -> output ``[B, T, H]`` and router logits ``[B * T, E]``."""
        flat = x.flatten(0, 1)
        logits, weights, chosen = self.gate(flat)
        return self.experts(flat, chosen, weights).view_as(x), logits


def load_balancing_loss(
    router_logits: Sequence[Tensor], valid: Tensor, top_k: int, topology: Topology, num_targets: Tensor
) -> tuple[Tensor, Tensor]:
    """``E * sum_e (share of choices that fell on e) * (mean score of e)`` (Fedus et al., arXiv 2101.03961, eq. 4-6).

    Statistics are sums over the valid tokens of all layers and of all ranks of dp x cp; one collective over both axes.

    Args:
        router_logits: L tensors ``[B * T, E]``.
        valid: ``[B, T]`` bool; padding does not count.
        top_k: k.
        topology: whose ranks hold the micro-batch.
        num_targets: 0-dim integer, this rank's supervised tokens; summed along.

    Returns:
        The loss, 0-dim, equal on all ranks, whose gradient is this rank's part (to be summed over dp x cp); and the
        number of supervised tokens of all ranks.
    """
    scores = torch.stack([router_scores(logits) for logits in router_logits])  # [L, B * T, E]
    mask = valid.flatten()  # [B * T]
    score_sum = (scores * mask.unsqueeze(-1)).sum((0, 1))
    with torch.no_grad():
        chosen = scores.topk(top_k, dim=-1).indices  # [L, B * T, k]
        counted = mask.long()[:, None].expand_as(chosen[0]).expand_as(chosen)
        choices = torch.zeros_like(score_sum, dtype=torch.int64)  # fp32 would stop counting at 2^24
        choices.scatter_add_(0, chosen.flatten(), counted.flatten())
        rows = mask.sum() * len(router_logits)
        local = torch.cat([choices, rows.view(1), num_targets.view(1)]).to(scores.dtype)
        total = sum_values(torch.cat([local, score_sum]), topology.dp_cp.group)
        choices_all, rows_all, targets_all, scores_all = total.split([len(choices), 1, 1, len(score_sum)])
        rows_all = rows_all.clamp_min(1)
    mean_score = value_with_gradient_of(scores_all, score_sum) / rows_all
    return (choices_all / rows_all * mean_score).sum() * scores.shape[-1], targets_all.squeeze()
