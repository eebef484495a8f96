"""Batched sampling on a transformers model: prefill, then a token at a time for every row.

Rows of a batch share a version and a cache, nothing else: each has its own temperature and random stream,
and rows join (:meth:`Decoder.merge`) and leave between any two tokens. Sequences are padded on the left.

Shapes: B rows, D distinct sequences, T tokens so far (padding included), V vocabulary.
"""

# Shape suffixes are upper case.
# ruff: noqa: N803, N806, N815

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotgrpo.producer.engines.ends import Ends
    from spotgrpo.producer.engines.threaded import Running

COMPACT_BELOW: Final = 0.75
"""Share of live rows under which the cache is copied without the dead ones."""
MAX_PREFILL_TOKENS: Final = 16_384
"""Padded tokens of one prefill; more would make the logits and the attention mask the biggest tensors."""


@dataclass(frozen=True)
class Sampled:
    """A row's new token, its logprob, and why the row is over, if it is."""

    row: Running
    token_id: int
    logprob: float
    finish: str | None


@dataclass(eq=False)
class Batch:
    """Completions in lockstep, a row each. A dead row is None until the cache is compacted.

    ``mask_BT`` is 1 where the cache holds a token of the row; ``logits_BV`` are for the token to come.
    """

    rows: list[Running | None]
    cache: DynamicCache
    mask_BT: torch.Tensor
    logits_BV: torch.Tensor

    @property
    def has_live_rows(self) -> bool:
        """Whether any row still wants tokens."""
        return any(row is not None for row in self.rows)

    def drop(self, row: Running) -> None:
        """Let a row leave; its part of the cache goes with the next compaction."""
        self.rows[self.rows.index(row)] = None


class Decoder:
    """Runs batches on one model. Not thread-safe; call it under ``torch.inference_mode``.

    Args:
        model: a causal language model of transformers, or peft's wrapper of one.
        ends: says when a completion is over.
        max_context: positions beyond are never asked for.
    """

    def __init__(self, model: Any, ends: Ends, max_context: int) -> None:
        self._model = model
        self._ends = ends
        self._max_context = max_context
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        accepted = inspect.signature(base.forward).parameters
        self._has_positions = "position_ids" in accepted
        self._keeps_logits = "logits_to_keep" in accepted

    def start(self, rows: Sequence[Running]) -> Batch:
        """Prefill ``rows``; sequences that several rows share are computed once."""
        distinct = list(dict.fromkeys(row.sequence for row in rows))
        place = {sequence: index for index, sequence in enumerate(distinct)}
        ids_DT, mask_DT = self._left_padded(distinct)
        cache = DynamicCache(config=self._model.config)
        logits_DV = self._forward(ids_DT, mask_DT, cache)
        batch = Batch([None] * len(distinct), cache, mask_DT, logits_DV)
        _select(batch, [place[row.sequence] for row in rows])
        batch.rows = list(rows)
        return batch

    def advance(self, batch: Batch) -> list[Sampled]:
        """Sample one token for every live row, and compute what comes after those that go on."""
        tokens_B, logprobs_B = sample(batch.logits_BV, batch.rows)
        ids, logprobs = tokens_B.tolist(), logprobs_B.tolist()
        sampled = []
        for index, row in enumerate(batch.rows):
            if row is None:
                continue
            row.completion.append(ids[index])
            finish = self._ends.finish(row.request, row.completion)
            sampled.append(Sampled(row, ids[index], logprobs[index], finish))
            if finish is not None:
                batch.rows[index] = None
        self._feed(batch, tokens_B)
        return sampled

    def _feed(self, batch: Batch, tokens_B: torch.Tensor) -> None:
        keep = [index for index, row in enumerate(batch.rows) if row is not None]
        if not keep:
            return
        if len(keep) < COMPACT_BELOW * len(batch.rows):
            _select(batch, keep)
            batch.rows = [batch.rows[index] for index in keep]
            tokens_B = tokens_B[keep]
        one_B1 = batch.mask_BT.new_ones(len(batch.rows), 1)
        batch.mask_BT = torch.cat([batch.mask_BT, one_B1], dim=1)
        batch.logits_BV = self._forward(tokens_B[:, None], batch.mask_BT, batch.cache)

    def can_merge(self, batch: Batch) -> bool:
        """Whether rows can join: caches of sliding windows or recurrent states cannot be padded."""
        return all(type(layer) is DynamicLayer for layer in batch.cache.layers)

    def merge(self, one: Batch, other: Batch) -> Batch:
        """Both batches as one; the shorter cache is padded on the left."""
        length = max(one.mask_BT.shape[1], other.mask_BT.shape[1])
        for batch in (one, other):
            _pad_left(batch, length)
        for into, layer in zip(one.cache.layers, other.cache.layers, strict=True):
            into.keys = torch.cat([into.keys, layer.keys])
            into.values = torch.cat([into.values, layer.values])
        mask_BT = torch.cat([one.mask_BT, other.mask_BT])
        logits_BV = torch.cat([one.logits_BV, other.logits_BV])
        return Batch(one.rows + other.rows, one.cache, mask_BT, logits_BV)

    def score(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logprobs at temperature 1 of ``token_ids[1:]``, float32 [T-1]."""
        ids_1T = torch.tensor([list(token_ids)], device=self._model.device)
        logits_TV = self._model(input_ids=ids_1T, use_cache=False).logits[0, :-1]
        logprobs_TV = torch.log_softmax(logits_TV.float(), dim=-1)
        return logprobs_TV.gather(1, ids_1T[0, 1:, None])[:, 0]

    def _left_padded(
        self, sequences: Sequence[tuple[int, ...]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        length = max(len(sequence) for sequence in sequences)
        pads = [length - len(sequence) for sequence in sequences]
        ids = [[0] * pad + list(ids) for pad, ids in zip(pads, sequences, strict=True)]
        mask = [[0] * pad + [1] * (length - pad) for pad in pads]
        device = self._model.device
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

    def _forward(
        self, ids: torch.Tensor, mask_BT: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        """Append ``ids`` [B, n] to the cache; logits [B, V] after the last of them."""
        options: dict[str, Any] = {"logits_to_keep": 1} if self._keeps_logits else {}
        if self._has_positions:
            # A dead row counts on until it is compacted away, but never past the last position.
            positions_BT = (mask_BT.cumsum(dim=1) - 1).clamp(0, self._max_context - 1)
            options["position_ids"] = positions_BT[:, -ids.shape[1] :]
        output = self._model(
            input_ids=ids, attention_mask=mask_BT, past_key_values=cache, use_cache=True, **options
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits


def prefill_share(rows: Sequence[Running]) -> int:
    """How many of ``rows``, from the first, fit one prefill; at least one."""
    distinct: set[tuple[int, ...]] = set()
    longest = 0
    for count, row in enumerate(rows):
        distinct.add(row.sequence)
        longest = max(longest, len(row.sequence))
        if count and longest * len(distinct) > MAX_PREFILL_TOKENS:
            return count
    return len(rows)


def _select(batch: Batch, keep: list[int]) -> None:
    """Keep these rows of every tensor, in this order (repeats allowed); cut padding they all share."""
    index_B = torch.tensor(keep, device=batch.mask_BT.device)
    batch.cache.batch_select_indices(index_B)
    batch.mask_BT = batch.mask_BT[index_B]
    batch.logits_BV = batch.logits_BV[index_B.to(batch.logits_BV.device)]
    if all(type(layer) is DynamicLayer for layer in batch.cache.layers):
        padding = int(batch.mask_BT.argmax(dim=1).min())
        batch.mask_BT = batch.mask_BT[:, padding:]
        for layer in batch.cache.layers:
            layer.keys, layer.values = layer.keys[:, :, padding:], layer.values[:, :, padding:]


def _pad_left(batch: Batch, length: int) -> None:
    missing = length - batch.mask_BT.shape[1]
    if missing == 0:
        return
    batch.mask_BT = torch.nn.functional.pad(batch.mask_BT, (missing, 0))
    for layer in batch.cache.layers:
        layer.keys = torch.nn.functional.pad(layer.keys, (0, 0, missing, 0))
        layer.values = torch.nn.functional.pad(layer.values, (0, 0, missing, 0))


def sample(
    logits_BV: torch.Tensor, rows: Sequence[Running | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token for each row from softmax(logits / temperature), by inverting its cumulative sum.

    Returns token ids int64 [B] and their logprobs float32 [B] at the row's temperature (1 where it is
    0 and the token is the most likely one). What a row draws depends on its seed, the number of tokens
    it has and its logits, never on the other rows.
    """
    device = logits_BV.device
    temperatures = [1.0 if row is None else row.request.sampling.temperature for row in rows]
    greedy_B = torch.tensor([temperature == 0 for temperature in temperatures], device=device)
    scale_B = torch.tensor([temperature or 1.0 for temperature in temperatures], device=device)
    logprobs_BV = torch.log_softmax(logits_BV.float() / scale_B[:, None], dim=-1)
    tokens_B = logprobs_BV.argmax(dim=-1)
    if not bool(greedy_B.all()):
        # float64: in float32 the tail of a large vocabulary is lost to rounding.
        cumulative_BV = logprobs_BV.exp().cumsum(dim=-1, dtype=torch.float64)
        uniform_B = torch.tensor([_uniform(row) for row in rows], device=device).double()
        threshold_B1 = uniform_B[:, None] * cumulative_BV[:, -1:]
        drawn_B = torch.searchsorted(cumulative_BV, threshold_B1, right=True)[:, 0]
        tokens_B = torch.where(greedy_B, tokens_B, drawn_B.clamp(max=logits_BV.shape[1] - 1))
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]


def _uniform(row: Running | None) -> float:
    """A number in [0, 1) made of the seed and the position: a partial goes on where it stopped."""
    if row is None:
        return 0.0
    text = f"{row.request.seed}:{len(row.completion)}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
