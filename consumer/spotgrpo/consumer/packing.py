"""Groups laid out as micro-batches of tokens. Pure numpy: which token stands where, sees what and is trained how.

A row may hold a group with its prompt stored once: completion tokens see the prompt and their own past, never
each other, so that a group of G costs one prompt and G completions. Where a model cannot do that, every sequence
gets a row of its own. The gradient of a step is the same however it was packed (up to rounding).

Shape suffixes: B rows, T tokens of a row, N predicted (completion) tokens of the micro-batch.
"""

# ruff: noqa: N815  (shape suffixes: the legend is above)

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64Array: TypeAlias = npt.NDArray[np.int64]
Float32Array: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

LONGEST_SHARED_ROW = 4096
"""Rows that share prompts need a dense T × T mask; longer ones would pay more for it than they save."""
PADDING = -1


@dataclass(frozen=True, eq=False)
class Sample:
    """One completion to be trained; ``index`` is the caller's, to find it again.

    Attributes:
        token_ids: int32 [n] completion tokens.
        behaviour: float32 [n] behaviour logprobs.
        mask: bool [n], True where a token is trained.
        advantage: of the whole completion.
    """

    index: int
    token_ids: npt.NDArray[np.int32]
    behaviour: Float32Array
    mask: BoolArray
    advantage: float


@dataclass(frozen=True, eq=False)
class PromptSamples:
    """A prompt (int32, at least one token) and its completions."""

    prompt_ids: npt.NDArray[np.int32]
    samples: tuple[Sample, ...]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One forward and backward pass.

    Attributes:
        input_ids_BT: token ids; 0 at padding.
        position_ids_BT: place of each token in its own sequence.
        group_BT: number of the group in its row; PADDING at padding.
        segment_BT: 0 for prompt tokens, k for those of the group's k-th completion in this row.
        shared: True where a row holds more than one sequence, so that ``allowed`` has to become the mask;
            False: plain right-padded sequences, for which causal attention is right as it is.
        source_N: index into the flattened [B·T] of the token that predicts each target.
        target_N: id of the predicted token.
        behaviour_N, advantage_N, mask_N: of the predicted token.
        owner_N: ``Sample.index`` it belongs to; tokens of a sample stand together and in order.
    """

    input_ids_BT: Int64Array
    position_ids_BT: Int64Array
    group_BT: Int64Array
    segment_BT: Int64Array
    shared: bool
    source_N: Int64Array
    target_N: Int64Array
    behaviour_N: Float32Array
    advantage_N: Float32Array
    mask_N: BoolArray
    owner_N: Int64Array

    @property
    def rows(self) -> int:
        return int(self.input_ids_BT.shape[0])

    @property
    def filled_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.group_BT != PADDING).sum())


@dataclass(frozen=True)
class Piece:
    """A prompt with as many of its completions as go into one row."""

    prompt_ids: npt.NDArray[np.int32]
    samples: tuple[Sample, ...]

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + sum(_extra(sample) for sample in self.samples)


@dataclass(frozen=True, eq=False)
class Packed:
    """The micro-batches of a step; ``over_budget`` counts single sequences that ran alone over the budget."""

    batches: tuple[MicroBatch, ...]
    over_budget: int


def pack(
    groups: Sequence[PromptSamples], token_budget: int, *, share_prompts: bool = True
) -> Packed:
    """Lay ``groups`` out in micro-batches of at most ``token_budget`` tokens, padding included.

    Longest first, first fit; rows of a micro-batch are as long as its longest piece. A group that is bigger than
    the budget is split by completions (its prompt repeated); a single sequence over the budget runs alone.

    Raises:
        ValueError: an empty prompt or completion: nothing would predict its first token.
    """
    longest = min(token_budget, LONGEST_SHARED_ROW) if share_prompts else 0
    pieces = [piece for group in groups for piece in _split(group, longest)]
    pieces.sort(
        key=lambda piece: -piece.length
    )  # stable: the layout is a function of the groups alone
    batches = tuple(_lay_out(rows) for rows in _micro_batches(pieces, token_budget, share_prompts))
    return Packed(batches, sum(piece.length > token_budget for piece in pieces))


def allowed(batch: MicroBatch) -> BoolArray:
    """Bool [B, T, T]: may the token at (row, query) see the one at (row, key)?

    Earlier in the row, of the same group, and of the prompt or of the same completion. Padding sees itself, since
    a softmax over nothing is not a number.
    """
    group, segment = batch.group_BT, batch.segment_BT
    length = group.shape[1]
    causal = np.tri(length, dtype=np.bool_)
    same_group = group[:, :, None] == group[:, None, :]
    prompt_or_own = (segment[:, None, :] == 0) | (segment[:, :, None] == segment[:, None, :])
    seen: BoolArray = causal & same_group & prompt_or_own
    return seen


def _extra(sample: Sample) -> int:
    """Tokens a completion adds to a row: nothing has to follow its last token."""
    return len(sample.token_ids) - 1


def _split(group: PromptSamples, longest: int) -> list[Piece]:
    """Pieces of at most ``longest`` tokens, or of a single completion where even that is over it."""
    prompt = group.prompt_ids
    if not len(prompt) or any(not len(sample.token_ids) for sample in group.samples):
        raise ValueError("a prompt and its completions must have at least one token each")
    pieces: list[Piece] = []
    held: list[Sample] = []
    length = len(prompt)
    for sample in group.samples:
        if held and length + _extra(sample) > longest:
            pieces.append(Piece(prompt, tuple(held)))
            held, length = [], len(prompt)
        held.append(sample)
        length += _extra(sample)
    return [*pieces, Piece(prompt, tuple(held))] if held else pieces


Row: TypeAlias = list[Piece]


def _micro_batches(pieces: Iterable[Piece], budget: int, share: bool) -> list[list[Row]]:
    """Rows by first fit; ``pieces`` come longest first, so a micro-batch's first one sets its row length."""
    batches: list[list[Row]] = []
    for piece in pieces:
        if not any(_place(batch, piece, budget, share) for batch in batches):
            batches.append([[piece]])
    return batches


def _place(batch: list[Row], piece: Piece, budget: int, share: bool) -> bool:
    """Put ``piece`` into a row with room, or into a new row where the budget allows one."""
    width = batch[0][0].length
    if share:
        for row in batch:
            if sum(held.length for held in row) + piece.length <= width:
                row.append(piece)
                return True
    if (len(batch) + 1) * width <= budget:
        batch.append([piece])
        return True
    return False


def _lay_out(rows: list[Row]) -> MicroBatch:
    shape = (len(rows), max(sum(piece.length for piece in row) for row in rows))
    ids, positions, segments = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    groups = np.full(shape, PADDING, dtype=np.int64)
    sources: list[Int64Array] = []
    samples: list[Sample] = []
    for number, row in enumerate(rows):
        at = 0
        for group, piece in enumerate(row):
            here = slice(at, at + piece.length)
            groups[number, here] = group
            ids[number, here], positions[number, here], segments[number, here], found = _flatten(
                piece
            )
            sources += [source + number * shape[1] + at for source in found]
            samples += piece.samples
            at += piece.length
    sizes = [len(sample.token_ids) for sample in samples]
    return MicroBatch(
        input_ids_BT=ids,
        position_ids_BT=positions,
        group_BT=groups,
        segment_BT=segments,
        shared=any(sum(len(piece.samples) for piece in row) > 1 for row in rows),
        source_N=np.concatenate(sources),
        target_N=np.concatenate([sample.token_ids for sample in samples]).astype(np.int64),
        behaviour_N=np.concatenate([sample.behaviour for sample in samples]).astype(np.float32),
        advantage_N=np.repeat([sample.advantage for sample in samples], sizes).astype(np.float32),
        mask_N=np.concatenate([sample.mask for sample in samples]).astype(np.bool_),
        owner_N=np.repeat([sample.index for sample in samples], sizes).astype(np.int64),
    )


def _flatten(piece: Piece) -> tuple[Int64Array, Int64Array, Int64Array, list[Int64Array]]:
    """Ids, positions and segments of a piece, and for each completion where its predicting tokens stand."""
    prompt = len(piece.prompt_ids)
    ids = [piece.prompt_ids, *(sample.token_ids[:-1] for sample in piece.samples)]
    sizes = [prompt, *(_extra(sample) for sample in piece.samples)]
    positions = [np.arange(prompt), *(np.arange(prompt, prompt + size) for size in sizes[1:])]
    starts = np.cumsum([0, *sizes])[1:-1]
    sources = [
        np.concatenate([[prompt - 1], np.arange(start, start + size)]).astype(np.int64)
        for start, size in zip(starts, sizes[1:], strict=True)
    ]
    segments = np.repeat(np.arange(len(sizes)), sizes)
    return np.concatenate(ids).astype(np.int64), np.concatenate(positions), segments, sources
