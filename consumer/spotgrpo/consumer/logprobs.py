"""Log-probabilities of sampled tokens under the current policy, without a (tokens × vocabulary) matrix of a row.

Hidden states are computed for the whole micro-batch; only those that predict a completion token go through the
output head, in chunks that the backward pass computes again.

Shape suffixes: B rows, T tokens of a row, N predicted tokens, D hidden size, V vocabulary.
"""

# ruff: noqa: N803, N806, N815  (shape suffixes: the legend is above)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spotgrpo.consumer.packing import (
    PADDING,
    Float32Array,
    MicroBatch,
    PromptSamples,
    Sample,
    allowed,
    pack,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Head: TypeAlias = Callable[[Tensor], Tensor]

CHUNK_ELEMENTS = 1 << 25
"""Logits that are held at once: 128 MiB of float32."""
EXACT = 1e-3
"""Largest difference in float32 logprobs that two layouts of the same tokens may show."""
NOISE = 0.1
"""In half precision: largest part of what an ignored mask would do that may be rounding."""


@dataclass(frozen=True)
class TokenScores:
    """float32 [N] each: logprobs (with gradient), and the entropy of the distribution (detached), in nats."""

    logprobs_N: Tensor
    entropy_N: Tensor


def output_head(model: PreTrainedModel) -> Head:
    """Hidden states [.., D] to float32 logits [.., V], with the model's own scaling and soft cap."""
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite

    def logits(hidden: Tensor) -> Tensor:
        found: Tensor = head(hidden).float() * scale if scale != 1.0 else head(hidden).float()
        return cap * torch.tanh(found / cap) if cap else found

    return logits


def token_scores(
    head: Head, hidden_ND: Tensor, target_N: Tensor, temperature: float
) -> TokenScores:
    """Log-softmax(head(h) / temperature)[target] for each of N hidden states.

    Exact to float32: chunking changes no row. One chunk is held in memory; more are computed again in backward.
    """
    width = head(hidden_ND[:1].detach()).shape[-1]
    size = max(1, CHUNK_ELEMENTS // width)

    def chunk(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(hidden) / temperature
        total = torch.logsumexp(logits, dim=-1)
        logprobs = logits.gather(-1, target[:, None])[:, 0] - total
        with torch.no_grad():
            plain = logits.detach()
            entropy = total - (torch.softmax(plain, dim=-1) * plain).sum(-1)
        return logprobs, entropy.detach()

    if len(target_N) <= size:
        return TokenScores(*chunk(hidden_ND, target_N))
    parts = [
        checkpoint(chunk, hidden, target, use_reentrant=False)
        for hidden, target in zip(_chunks(hidden_ND, size), _chunks(target_N, size), strict=True)
    ]
    return TokenScores(
        torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    )


def batch_scores(model: PreTrainedModel, batch: MicroBatch, temperature: float) -> TokenScores:
    """Scores of every completion token of ``batch``, in its order, at ``temperature``."""
    hidden_BTD = _hidden(model, batch, _mask(batch, model.device, model.dtype))
    source_N = torch.from_numpy(batch.source_N).to(model.device)
    target_N = torch.from_numpy(batch.target_N).to(model.device)
    return token_scores(
        output_head(model), hidden_BTD.flatten(0, 1)[source_N], target_N, temperature
    )


def per_sample(batch: MicroBatch, values_N: Tensor) -> dict[int, Float32Array]:
    """``values_N`` cut up by the sample they belong to: ``Sample.index`` → float32 array in token order."""
    values = values_N.detach().cpu().numpy().astype(np.float32)
    return {int(owner): values[batch.owner_N == owner] for owner in np.unique(batch.owner_N)}


def shares_prompts(model: PreTrainedModel, context: int) -> bool:
    """Whether this model heeds a mask that lets completions share one prompt in a row.

    Decided by trying: two groups in one row against each sequence in a row of its own. In half precision, where
    layouts differ by rounding, the difference is held against what ignoring the mask would do.

    Args:
        model: the base, on its device.
        context: longest sequence that will be trained, in tokens.
    """
    if not _windows_hold(model, context):
        return False
    groups = _trial_groups(model.config.get_text_config().vocab_size)
    plain = _trial_logprobs(model, groups, share=False, heed_mask=True)
    try:
        shared = _trial_logprobs(model, groups, share=True, heed_mask=True)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return False  # an attention kernel that takes no such mask says so in its own way
    difference = float(np.abs(shared - plain).max())
    if model.dtype == torch.float32:
        return difference <= EXACT
    ignored = _trial_logprobs(model, groups, share=True, heed_mask=False)
    return difference <= NOISE * float(np.abs(ignored - plain).max())


def head_is_faithful(model: PreTrainedModel) -> bool:
    """Whether ``output_head`` gives the logits that the model's own forward gives."""
    token_ids = _trial_groups(model.config.get_text_config().vocab_size)[0].prompt_ids
    ids = torch.from_numpy(token_ids.astype(np.int64))[None].to(model.device)
    with torch.no_grad():
        own = model(input_ids=ids, use_cache=False).logits.float()
        ours = output_head(model)(
            model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        )
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.05
    return bool((own - ours).abs().max() <= tolerance * (1.0 + own.abs().max()))


def _chunks(values: Tensor, size: int) -> list[Tensor]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def _hidden(model: PreTrainedModel, batch: MicroBatch, mask: Tensor) -> Tensor:
    """Last hidden states [B, T, D]."""
    ids = torch.from_numpy(batch.input_ids_BT).to(model.device)
    positions = torch.from_numpy(batch.position_ids_BT).to(model.device)
    output = model.base_model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


def _mask(batch: MicroBatch, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[B, 1, T, T], added to attention scores, where rows are shared; else [B, T], 1 where there is a token."""
    if not batch.shared:
        return torch.from_numpy((batch.group_BT != PADDING).astype(np.int64)).to(device)
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


def _trial_groups(vocabulary: int) -> list[PromptSamples]:
    random = np.random.default_rng(0)

    def tokens(count: int) -> npt.NDArray[np.int32]:
        return random.integers(0, vocabulary, count, dtype=np.int32)

    def sample(index: int, count: int) -> Sample:
        zeros = np.zeros(count, dtype=np.float32)
        return Sample(index, tokens(count), zeros, np.ones(count, dtype=np.bool_), advantage=0.0)

    shapes = [(9, (6, 4, 5)), (5, (3, 7))]
    index = iter(range(8))
    return [
        PromptSamples(tokens(prompt), tuple(sample(next(index), count) for count in counts))
        for prompt, counts in shapes
    ]


def _trial_logprobs(
    model: PreTrainedModel, groups: list[PromptSamples], *, share: bool, heed_mask: bool
) -> Float32Array:
    found: dict[int, Float32Array] = {}
    with torch.no_grad():
        for batch in pack(groups, 64, share_prompts=share).batches:
            mask = _mask(batch, model.device, model.dtype)
            if not heed_mask:
                mask = torch.ones(batch.input_ids_BT.shape, dtype=torch.long, device=model.device)
            hidden = _hidden(model, batch, mask).flatten(0, 1)
            source = torch.from_numpy(batch.source_N).to(model.device)
            target = torch.from_numpy(batch.target_N).to(model.device)
            scores = token_scores(output_head(model), hidden[source], target, 1.0)
            found |= per_sample(batch, scores.logprobs_N)
    return np.concatenate([found[index] for index in sorted(found)])
