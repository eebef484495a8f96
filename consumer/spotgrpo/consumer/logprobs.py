"""Log-probabilities of sampled tokens under the current policy, without a (tokens × vocabulary) matrix of a row.

Hidden states are computed for the whole micro-batch; only those that predict a completion token go through the
output head.

Shape suffixes: B rows, T tokens of a row, N predicted tokens.
"""

# ruff: noqa: N803, N806, N815  (shape suffixes: the legend is above)

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spotgrpo.consumer.head import output_head, sampled_logprobs
from spotgrpo.consumer.packing import Float32Array, MicroBatch, Node, Sample, allowed, pack
from spotgrpo.consumer.tree_attention import (
    KWARG,
    plan_attention,
    use_own_attention,
    use_tree_attention,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Layout: TypeAlias = Literal["nodes", "mask", "rows"]
"""How a model can see trees of sequences: attending node by node, by a mask, or not at all."""

EXACT = 1e-3
"""Largest difference in float32 logprobs that two layouts of the same tokens may show."""
ALWAYS = 1e9
NOISE = 0.1
"""In half precision: largest part of what an ignored mask would do that may be rounding."""


@dataclass(frozen=True)
class TokenScores:
    """float32 [N] each: logprobs (with gradient), and the entropy of the distribution, in nats.

    The entropy has a gradient only where it is asked for: it costs another product with the head.
    """

    logprobs_N: Tensor
    entropy_N: Tensor


def batch_scores(
    model: PreTrainedModel,
    batch: MicroBatch,
    temperature: float,
    *,
    heed_mask: bool = True,
    entropy_gradient: bool = False,
    autocast: bool = False,
) -> TokenScores:
    """Scores of every completion token of ``batch``, in its order, at ``temperature``.

    ``heed_mask`` False attends as a model would that ignores the mask of a tree; ``autocast`` computes hidden states,
    not logits, in bfloat16 where torch thinks that it can.
    """
    head = output_head(model)
    if head is None:
        raise ValueError("the output head is no linear layer")
    device = model.device
    ids, positions, source_N, target_N = (
        torch.from_numpy(array).to(device)
        for array in (batch.input_ids_BT, batch.position_ids_BT, batch.source_N, batch.target_N)
    )
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        output = model.base_model(
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
            **_attention(model, batch, heed_mask=heed_mask),
        )
    order = torch.argsort(source_N, stable=True)
    rows, row_N = torch.unique_consecutive(source_N[order], return_inverse=True)
    found = sampled_logprobs(
        head,
        output.last_hidden_state.flatten(0, 1)[rows],
        row_N,
        target_N[order],
        temperature,
        entropy_gradient=entropy_gradient,
    )
    back = torch.argsort(order)
    return TokenScores(*(values[back] for values in found))


def per_sample(batch: MicroBatch, values_N: Tensor) -> dict[int, Float32Array]:
    """``values_N`` cut up by the sample they belong to: ``Sample.index`` → float32 array in token order."""
    values = values_N.detach().cpu().numpy().astype(np.float32)
    return {int(owner): values[batch.owner_N == owner] for owner in np.unique(batch.owner_N)}


def layout_of(model: PreTrainedModel, context: int) -> Layout:
    """How ``model`` can be given sequences that share a prefix in a row. It is left attending that way.

    Decided by trying: two prompts and five completions in one row against each sequence in a row of its own. In
    half precision, where layouts differ by rounding, the difference is held against what ignoring the tree would do.

    Args:
        model: the base, on its device.
        context: longest sequence that will be trained, in tokens.
    """
    if not _windows_hold(model, context):
        return "rows"
    plain = _trial(model, "rows")
    if use_tree_attention(model):
        if _is_right(model, "nodes", plain):
            return "nodes"
        use_own_attention(model)
    return "mask" if _is_right(model, "mask", plain) else "rows"


def _is_right(model: PreTrainedModel, layout: Layout, plain: Float32Array) -> bool:
    try:
        shared = _trial(model, layout)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return False  # an attention kernel that takes no such mask says so in its own way
    difference = float(np.abs(shared - plain).max())
    if model.dtype == torch.float32:
        return difference <= EXACT
    ignored = _trial(model, layout, heed_mask=False)
    return difference <= NOISE * float(np.abs(ignored - plain).max())


def head_is_faithful(model: PreTrainedModel) -> bool:
    """Whether the model's own forward gives the logits that :class:`Head` gives."""
    head = output_head(model)
    if head is None:
        return False
    sample = _trial_samples(model.config.get_text_config().vocab_size)[0]
    ids = torch.from_numpy(sample.input_ids().astype(np.int64))[None].to(model.device)
    with torch.no_grad():
        own = model(input_ids=ids, use_cache=False).logits.float()
        ours = head.logits(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.05
    return bool((own - ours).abs().max() <= tolerance * (1.0 + own.abs().max()))


def _attention(model: PreTrainedModel, batch: MicroBatch, *, heed_mask: bool) -> dict[str, Any]:
    """What tells the model who sees whom."""
    if not batch.nodes:
        tree = batch.is_tree and heed_mask
        return {"attention_mask": _mask(batch, model.device, model.dtype, tree=tree)}
    # A mask of four dimensions is handed down as it is, and none is made in its place.
    unused = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)
    nodes = batch.nodes if heed_mask else (Node(0, batch.input_ids_BT.shape[1], ()),)
    return {"attention_mask": unused, KWARG: plan_attention(nodes, model.device, model.dtype)}


def _mask(batch: MicroBatch, device: torch.device, dtype: torch.dtype, *, tree: bool) -> Tensor:
    """[B, 1, T, T], added to attention scores, for trees; else [B, T], 1 where there is a token."""
    if not tree:
        return torch.from_numpy((batch.end_BT > 0).astype(np.int64)).to(device)
    seen = torch.from_numpy(allowed(batch)).to(device)[:, None]
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(
        ~seen, torch.finfo(dtype).min
    )


def _windows_hold(model: PreTrainedModel, context: int) -> bool:
    """A given mask replaces a sliding window's own: the same only for sequences that fit into the window."""
    config = model.config.get_text_config()
    if getattr(config, "use_sliding_window", True) is False:
        return True
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return all(window is None or window >= context for window in windows)


def _trial_samples(vocabulary: int) -> list[Sample]:
    """Two prompts with three and two completions."""
    random = np.random.default_rng(0)

    def tokens(count: int) -> npt.NDArray[np.int32]:
        return random.integers(0, vocabulary, count, dtype=np.int32)

    def sample(index: int, prompt: npt.NDArray[np.int32], count: int) -> Sample:
        zeros = np.zeros(count, dtype=np.float32)
        return Sample(index, prompt, tokens(count), zeros, zeros == 0.0, advantage=0.0)

    prompts = [tokens(9), tokens(5)]
    shapes = [(0, 6), (0, 4), (0, 5), (1, 3), (1, 7)]
    return [sample(i, prompts[which], count) for i, (which, count) in enumerate(shapes)]


def _trial(model: PreTrainedModel, layout: Layout, *, heed_mask: bool = True) -> Float32Array:
    """Logprobs of the trial samples, in their order; all in one row where the layout shares."""
    found: dict[int, Float32Array] = {}
    samples = _trial_samples(model.config.get_text_config().vocab_size)
    packed = pack(
        samples, 1024, share_worth=0.0 if layout == "rows" else ALWAYS, by_node=layout == "nodes"
    )
    with torch.no_grad():
        for batch in packed.batches:
            scores = batch_scores(model, batch, 1.0, heed_mask=heed_mask)
            found |= per_sample(batch, scores.logprobs_N)
    return np.concatenate([found[index] for index in sorted(found)])
