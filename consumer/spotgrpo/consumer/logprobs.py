"""Log-probabilities of sampled tokens under the current policy, without a (tokens × vocabulary) matrix of a row.

Hidden states are computed for the whole micro-batch; only those that predict a completion token go through the
output head, in chunks that the backward pass computes again.

Shape suffixes: B rows, T tokens of a row, M tokens that predict, N predicted tokens, D hidden size, V vocabulary.
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

from spotgrpo.consumer.packing import Float32Array, MicroBatch, Sample, allowed, pack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Head: TypeAlias = Callable[[Tensor], Tensor]

CHUNK_ELEMENTS = 1 << 25
"""Logits that are held at once: 128 MiB of float32."""
EXACT = 1e-3
"""Largest difference in float32 logprobs that two layouts of the same tokens may show."""
ALWAYS = 1e9
NOISE = 0.1
"""In half precision: largest part of what an ignored mask would do that may be rounding."""


@dataclass(frozen=True)
class TokenScores:
    """float32 [N] each: logprobs (with gradient), and the entropy of the distribution, in nats.

    The entropy has a gradient only where it is asked for: it holds another chunk of logits.
    """

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
    head: Head,
    hidden_MD: Tensor,
    row_N: Tensor,
    target_N: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
) -> TokenScores:
    """Log-softmax(head(h[row]) / temperature)[target] for each of N pairs of a hidden state and a token.

    A hidden state that predicts several tokens goes through the head once. Exact to float32: chunking changes
    nothing. One chunk is held in memory; more are computed again in backward.
    """
    size = max(1, CHUNK_ELEMENTS // head(hidden_MD[:1].detach()).shape[-1])

    def chunk(hidden: Tensor, row: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(hidden) / temperature
        total = torch.logsumexp(logits, dim=-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = total - (torch.softmax(logits, dim=-1) * logits).sum(-1)
        return logits[row, target] - total[row], entropy[row]

    if len(hidden_MD) <= size:
        return TokenScores(*chunk(hidden_MD, row_N, target_N))
    order = torch.argsort(row_N, stable=True)
    row_N, target_N = row_N[order], target_N[order]
    parts = []
    for start in range(0, len(hidden_MD), size):
        mine = slice(
            *torch.searchsorted(row_N, torch.tensor([start, start + size]).to(row_N)).tolist()
        )
        here = (hidden_MD[start : start + size], row_N[mine] - start, target_N[mine])
        parts.append(checkpoint(chunk, *here, use_reentrant=False))
    back = torch.argsort(order)
    logprobs, entropy = (torch.cat(values)[back] for values in zip(*parts, strict=True))
    return TokenScores(logprobs, entropy)


def batch_scores(
    model: PreTrainedModel,
    batch: MicroBatch,
    temperature: float,
    *,
    heed_mask: bool = True,
    entropy_gradient: bool = False,
) -> TokenScores:
    """Scores of every completion token of ``batch``, in its order, at ``temperature``.

    ``heed_mask`` False attends as a model would that ignores the mask of a tree.
    """
    device = model.device
    ids, positions, source_N, target_N = (
        torch.from_numpy(array).to(device)
        for array in (batch.input_ids_BT, batch.position_ids_BT, batch.source_N, batch.target_N)
    )
    mask = _mask(batch, device, model.dtype, tree=batch.is_tree and heed_mask)
    output = model.base_model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
    )
    rows, row_N = torch.unique(source_N, return_inverse=True)
    hidden_MD = output.last_hidden_state.flatten(0, 1)[rows]
    return token_scores(
        output_head(model),
        hidden_MD,
        row_N,
        target_N,
        temperature,
        entropy_gradient=entropy_gradient,
    )


def per_sample(batch: MicroBatch, values_N: Tensor) -> dict[int, Float32Array]:
    """``values_N`` cut up by the sample they belong to: ``Sample.index`` → float32 array in token order."""
    values = values_N.detach().cpu().numpy().astype(np.float32)
    return {int(owner): values[batch.owner_N == owner] for owner in np.unique(batch.owner_N)}


def shares_prompts(model: PreTrainedModel, context: int) -> bool:
    """Whether this model heeds a mask that lets sequences share a prefix in a row.

    Decided by trying: two prompts and five completions in one row against each sequence in a row of its own. In
    half precision, where layouts differ by rounding, the difference is held against what ignoring the mask would do.

    Args:
        model: the base, on its device.
        context: longest sequence that will be trained, in tokens.
    """
    if not _windows_hold(model, context):
        return False
    plain = _trial(model, share_worth=0.0)
    try:
        shared = _trial(model, share_worth=ALWAYS)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return False  # an attention kernel that takes no such mask says so in its own way
    difference = float(np.abs(shared - plain).max())
    if model.dtype == torch.float32:
        return difference <= EXACT
    ignored = _trial(model, share_worth=ALWAYS, heed_mask=False)
    return difference <= NOISE * float(np.abs(ignored - plain).max())


def head_is_faithful(model: PreTrainedModel) -> bool:
    """Whether ``output_head`` gives the logits that the model's own forward gives."""
    sample = _trial_samples(model.config.get_text_config().vocab_size)[0]
    ids = torch.from_numpy(sample.input_ids().astype(np.int64))[None].to(model.device)
    with torch.no_grad():
        own = model(input_ids=ids, use_cache=False).logits.float()
        ours = output_head(model)(
            model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        )
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.05
    return bool((own - ours).abs().max() <= tolerance * (1.0 + own.abs().max()))


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


def _trial(model: PreTrainedModel, *, share_worth: float, heed_mask: bool = True) -> Float32Array:
    """Logprobs of the trial samples, in their order; all in one row where sharing is worth anything."""
    found: dict[int, Float32Array] = {}
    samples = _trial_samples(model.config.get_text_config().vocab_size)
    with torch.no_grad():
        for batch in pack(samples, 1024, share_worth=share_worth).batches:
            scores = batch_scores(model, batch, 1.0, heed_mask=heed_mask)
            found |= per_sample(batch, scores.logprobs_N)
    return np.concatenate([found[index] for index in sorted(found)])
