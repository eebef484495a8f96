"""Attention over a row that holds trees of sequences, node by node: nothing is computed that is masked out later.

A node is a run of tokens without a branch: a prompt, the rest of a completion. Its tokens see the nodes on their way
from the root, and of their own node what stands before them.

Shape suffixes: B rows (one), H heads, T tokens, D head size.
"""

# ruff: noqa: N803  (shape suffixes: the legend is above)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from spotgrpo.consumer.packing import Node

NAME = "spotgrpo_tree"
"""In transformers' registry of attention functions."""
OWN = "sdpa"
"""The default of transformers, whose results a node's are."""
KWARG = "tree"
"""Of a model's forward, handed down to each attention layer; without it the layer attends as with ``sdpa``."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The nodes of a row, and their masks, made once for all layers.

    Attributes:
        nodes: in the order of the row, which they fill.
        masks: by (queries, tokens before): 0 where a key may be seen, −inf elsewhere, [queries, before + queries].
    """

    nodes: tuple[Node, ...]
    masks: dict[tuple[int, int], Tensor]


def plan_attention(nodes: Sequence[Node], device: torch.device, dtype: torch.dtype) -> Plan:
    """``dtype`` is that of the queries."""
    sizes = [node.size for node in nodes]
    shapes = {(node.size, sum(sizes[i] for i in node.before)) for node in nodes}
    masks = {
        (own, before): torch.full(
            (own, before + own), -torch.inf, dtype=dtype, device=device
        ).triu_(before + 1)
        for own, before in shapes
        if before and own > 1
    }
    return Plan(tuple(nodes), masks)


def use_tree_attention(model: PreTrainedModel) -> bool:
    """Let ``model`` attend node by node where it is told to; False where it has an attention of its own choice."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    if _attends_with(model) != OWN:
        return False
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    try:
        model.set_attn_implementation(NAME)
    except (ValueError, KeyError, AttributeError):
        return False
    return _attends_with(model) == NAME


def leave_uncompiled() -> None:
    """Let compiled layers call the attention as it is: its work differs from one micro-batch to the next."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, torch.compiler.disable(_attention))  # type: ignore[no-untyped-call]


def use_own_attention(model: PreTrainedModel) -> None:
    """Undo :func:`use_tree_attention`."""
    model.set_attn_implementation(OWN)


def _attends_with(model: PreTrainedModel) -> str:
    return str(model.config._attn_implementation)  # noqa: SLF001  (transformers has no other way to ask)


def _attention(
    module: Any,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The interface of attention functions in transformers; returns [B, T, H, D]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    plan: Plan | None = kwargs.pop(KWARG, None)
    if plan is None:
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module,
            query_BHTD,
            key_BHTD,
            value_BHTD,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            **kwargs,
        )
        return found
    unknown = [
        name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None
    ]
    if unknown or dropout:
        raise ValueError(f"tree attention has no {', '.join(unknown) or 'dropout'}")
    return _by_node(plan, query_BHTD, key_BHTD, value_BHTD, scaling), None


def _by_node(
    plan: Plan, query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, scaling: float | None
) -> Tensor:
    sizes = [node.size for node in plan.nodes]
    queries, keys, values = (
        torch.split(each, sizes, dim=2) for each in (query_BHTD, key_BHTD, value_BHTD)
    )
    grouped = query_BHTD.shape[1] != key_BHTD.shape[1]
    found = []
    for number, node in enumerate(plan.nodes):
        seen = (*node.before, number)
        before = sum(sizes[i] for i in node.before)
        mask = plan.masks.get((node.size, before))
        found.append(
            scaled_dot_product_attention(
                queries[number],
                keys[number] if not before else torch.cat([keys[i] for i in seen], dim=2),
                values[number] if not before else torch.cat([values[i] for i in seen], dim=2),
                attn_mask=mask if mask is None else mask.to(query_BHTD.dtype),  # autocast's own
                is_causal=not before,
                scale=scaling,
                enable_gqa=grouped,
            )
        )
    return torch.cat(found, dim=2).transpose(1, 2).contiguous()
