"""The output head and the logprobs of sampled tokens, tile by tile: neither logits nor their gradient are ever kept.

The gradient of a token's logprob with respect to the hidden state that predicts it needs the logits only through one
vector as long as the hidden state. It is computed while the tile of logits is there, so that nothing is computed again
in the backward pass.

Shape suffixes: M hidden states, N pairs of a hidden state and a token, D hidden size, V vocabulary, R hidden states of
a tile.
"""

# ruff: noqa: N803, N806, N815  (shape suffixes: the legend is above)

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TILE_ELEMENTS = 1 << 22
"""Logits that are held at once on a CPU: 16 MiB of float32, and as much again for what is made of them."""
GPU_TILE_ELEMENTS = 1 << 26
"""On a GPU, which fewer and larger products keep busy: 256 MiB."""


@dataclass(frozen=True)
class Head:
    """Hidden states [.., D] to float32 logits [.., V]: l = cap · tanh(scale · (W h + b) / cap).

    Attributes:
        weight_VD: frozen, in the model's dtype. ``bias_V`` may be None.
        scale: 1 for most models; ``cap`` None for most.
    """

    weight_VD: Tensor
    bias_V: Tensor | None
    scale: float
    cap: float | None

    def logits(self, hidden: Tensor) -> Tensor:
        found = self.raw(hidden)
        if self.scale != 1.0:
            found.mul_(self.scale)
        return found if self.cap is None else found.div_(self.cap).tanh_().mul_(self.cap)

    def raw(self, hidden: Tensor) -> Tensor:
        """Before scale and cap; float32, and nobody else's."""
        return nn.functional.linear(
            hidden.to(self.weight_VD.dtype), self.weight_VD, self.bias_V
        ).float()


def output_head(model: PreTrainedModel) -> Head | None:
    """The head of ``model`` with its own scaling and soft cap; None where it is no plain linear layer."""
    module = model.get_output_embeddings()
    if not isinstance(module, nn.Linear) or not module.weight.is_floating_point():
        return None
    config = model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite
    return Head(module.weight, module.bias, scale, float(cap) if cap else None)


def sampled_logprobs(
    head: Head,
    hidden_MD: Tensor,
    row_N: Tensor,
    target_N: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """log-softmax(head(h[row]) / temperature)[target] and the entropy of h[row]'s distribution, float32 [N] each.

    Args:
        row_N: int64, not falling; every hidden state has at least one token.
        entropy_gradient: without it the entropy has none.
    """
    logprobs_N, entropy_M = _SampledLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_MD, head, row_N, target_N, temperature, entropy_gradient
    )
    return logprobs_N, entropy_M[row_N]


@dataclass
class _Tile:
    """What is kept of a tile.

    With p = softmax(l / T), d = ∂l/∂(W h) and t the first token of each hidden state:

    Attributes:
        slope_RD: T · ∂(−log p[t])/∂h = Σ_v (p_v − 1[v = t]) d_v W_v, where there is a gradient. The difference is taken
            before the sum: for a token that is nearly certain it would be lost in rounding after it.
        entropy_slope_RD: T · ∂H/∂h = −Σ_v p_v (log p_v + H) d_v W_v, where it is asked for.
        picked_d: d of the tokens, where there is a cap.
    """

    logprobs: Tensor
    entropy_R: Tensor
    slope_RD: Tensor | None = None
    entropy_slope_RD: Tensor | None = None
    picked_d: Tensor | None = None


class _SampledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        head: Head,
        row_N: Tensor,
        target_N: Tensor,
        temperature: float,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        wants = bool(ctx.needs_input_grad[0])
        elements = GPU_TILE_ELEMENTS if hidden_MD.is_cuda else TILE_ELEMENTS
        rows = max(1, elements // len(head.weight_VD))
        starts = [*range(0, len(hidden_MD), rows), len(hidden_MD)]
        cuts = torch.searchsorted(row_N, torch.tensor(starts, device=row_N.device)).tolist()
        tiles = [
            _tile(
                head,
                hidden_MD[first:last],
                row_N[begin:end] - first,
                target_N[begin:end],
                temperature,
                gradient=wants,
                entropy_gradient=wants and entropy_gradient,
            )
            for first, last, begin, end in zip(starts, starts[1:], cuts, cuts[1:], strict=False)
        ]
        ctx.head, ctx.temperature, ctx.dtype = head, temperature, hidden_MD.dtype
        kept = [_joined([getattr(tile, name) for tile in tiles]) for name in _KEPT]
        ctx.save_for_backward(row_N, target_N, *kept)
        entropy_M = torch.cat([tile.entropy_R for tile in tiles])
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_M)
        return torch.cat([tile.logprobs for tile in tiles]), entropy_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, grad_M: Tensor | None) -> tuple[Tensor | None, ...]:
        row_N, target_N, slope_MD, entropy_slope_MD, d_N = ctx.saved_tensors
        weight, scale = ctx.head.weight_VD, ctx.head.scale / ctx.temperature
        sums_M = grad_N.new_zeros(len(slope_MD)).index_add_(0, row_N, grad_N)
        found_MD = slope_MD * -sums_M[:, None]
        if entropy_slope_MD is not None and grad_M is not None:
            found_MD += entropy_slope_MD * grad_M[:, None]
        first_N = _firsts(row_N)
        more = (target_N != target_N[first_N]).nonzero()[:, 0]
        if len(
            more
        ):  # other tokens than the first after the same hidden state, as where completions part
            ones = d_N if d_N is not None else torch.ones_like(grad_N)
            apart = ones[more, None] * weight[target_N[more]]
            apart = apart - ones[first_N[more], None] * weight[target_N[first_N[more]]]
            found_MD.index_add_(0, row_N[more], grad_N[more, None] * apart)
        return (found_MD * scale).to(ctx.dtype), None, None, None, None, None


_KEPT = ("slope_RD", "entropy_slope_RD", "picked_d")


def _tile(
    head: Head,
    hidden_RD: Tensor,
    row: Tensor,
    target: Tensor,
    temperature: float,
    *,
    gradient: bool,
    entropy_gradient: bool,
) -> _Tile:
    """``row`` counts from the tile's first hidden state."""
    logits_RV = head.logits(hidden_RD)
    slopes_RV = None
    if head.cap is not None and gradient:
        slopes_RV = 1.0 - (logits_RV / head.cap).square_()
    if temperature != 1.0:
        logits_RV.div_(temperature)
    logits_RV -= logits_RV.amax(-1, keepdim=True)
    p_RV = logits_RV.exp()
    sum_R = p_RV.sum(-1)
    mean_R = torch.bmm(p_RV[:, None], logits_RV[:, :, None])[:, 0, 0] / sum_R
    tile = _Tile(logits_RV[row, target] - sum_R.log()[row], sum_R.log() - mean_R)
    if gradient:
        dtype = head.weight_VD.dtype
        if entropy_gradient:  # log p + H = l − Σ p l
            leaning_RV = (logits_RV - mean_R[:, None]).mul_(p_RV)
            leaning_RV = leaning_RV if slopes_RV is None else leaning_RV.mul_(slopes_RV)
            tile.entropy_slope_RD = -_projected(leaning_RV, head) / sum_R[:, None]
        del logits_RV
        first = _first_of_each(row, target, len(hidden_RD))
        p_RV[torch.arange(len(first), device=first.device), first] -= sum_R
        if slopes_RV is not None:
            p_RV *= slopes_RV
            tile.picked_d = slopes_RV[row, target]
        if dtype != torch.float32:
            p_RV /= sum_R[:, None]
            tile.slope_RD = _projected(p_RV, head)
        else:
            tile.slope_RD = _projected(p_RV, head) / sum_R[:, None]
    return tile


def _projected(values_RV: Tensor, head: Head) -> Tensor:
    return (values_RV.to(head.weight_VD.dtype) @ head.weight_VD).float()


def _firsts(row_N: Tensor) -> Tensor:
    """For each pair, the place of the first one with its hidden state; ``row_N`` does not fall."""
    return torch.searchsorted(row_N, row_N)


def _first_of_each(row: Tensor, target: Tensor, rows: int) -> Tensor:
    return target[torch.searchsorted(row, torch.arange(rows, device=row.device))]


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there) if there else None
