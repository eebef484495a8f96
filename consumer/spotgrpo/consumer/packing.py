"""Sequences laid out as micro-batches of tokens. Pure numpy: which token stands where, sees what and is trained how.

A row holds a tree: a prefix that several sequences have in common (the prompt of a group, a system prompt, the
first tokens of equal answers) is stored once, and each token sees only the tokens before it in its own sequence.
Rows are in depth-first order, so a token's descendants stand right behind it and one integer, where they end, says
who sees it. Where a model attends node by node, a micro-batch is one row of trees without a token of padding; where it
takes a mask, it is rows of similar length. Where a model can do neither, every sequence gets a row of its own. The
gradient of a step is the same however it was packed (up to rounding).

Shape suffixes: B rows, T tokens of a row, N predicted (completion) tokens of the micro-batch.
"""

# ruff: noqa: N815  (shape suffixes: the legend is above)

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
Float32Array: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

LONGEST_SHARED_ROW = 4096
"""Rows that are trees need a dense T × T mask; longer ones would pay more for it than they save."""
LEAST_FILLED = 0.75
"""A row is put under longer ones if it fills this much of their length; else padding costs more than another pass."""
LONGEST_NODE = 256
"""Longer runs of tokens are cut up: each piece attends to what stands before it, not to the masked rest of the run."""


@dataclass(frozen=True, eq=False)
class Sample:
    """A prompt with one completion to be trained; ``index`` is the caller's, to find it again.

    Attributes:
        prompt_ids: int32, at least one token.
        token_ids: int32 [n] completion tokens, at least one.
        behaviour: float32 [n] behaviour logprobs.
        mask: bool [n], True where a token is trained.
        advantage: of the whole completion.
    """

    index: int
    prompt_ids: Int32Array
    token_ids: Int32Array
    behaviour: Float32Array
    mask: BoolArray
    advantage: float

    def input_ids(self) -> Int32Array:
        """What goes through the model: nothing has to follow the last token."""
        return np.concatenate([self.prompt_ids, self.token_ids[:-1]])


@dataclass(frozen=True)
class Node:
    """Tokens ``start`` to ``stop`` of a row, without a branch; ``before`` are the nodes on the way from the root."""

    start: int
    stop: int
    before: tuple[int, ...]

    @property
    def size(self) -> int:
        """Tokens."""
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One forward and backward pass.

    Attributes:
        input_ids_BT: token ids; 0 at padding.
        position_ids_BT: place of each token in its own sequence.
        end_BT: a token is seen by those from itself up to (not including) this place of its row; 0 at padding.
        is_tree: True where a row is more than one plain sequence, so that ``allowed`` has to become the mask;
            False: right-padded sequences, for which causal attention is right as it is.
        source_N: index into the flattened [B·T] of the token that predicts each target; several may have the same.
        target_N: id of the predicted token.
        behaviour_N, advantage_N, mask_N: of the predicted token.
        owner_N: ``Sample.index`` it belongs to; tokens of a sample stand together and in order.
        nodes: of the only row, which they fill, for a model that attends node by node; none otherwise.
    """

    input_ids_BT: Int64Array
    position_ids_BT: Int64Array
    end_BT: Int64Array
    is_tree: bool
    source_N: Int64Array
    target_N: Int64Array
    behaviour_N: Float32Array
    advantage_N: Float32Array
    mask_N: BoolArray
    owner_N: Int64Array
    nodes: tuple[Node, ...] = ()

    @property
    def rows(self) -> int:
        """B."""
        return int(self.input_ids_BT.shape[0])

    @property
    def filled_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.end_BT > 0).sum())


@dataclass(frozen=True, eq=False)
class Packed:
    """The micro-batches of a step; ``over_budget`` counts single sequences that ran alone over the budget."""

    batches: tuple[MicroBatch, ...]
    over_budget: int


@dataclass
class _Tree:
    """Sequences in lexicographic order, as tokens in depth-first order. Grows by ``add``."""

    samples: list[Sample] = field(default_factory=list)
    paths: list[Int64Array] = field(default_factory=list)
    """For each sample, where in the row the tokens of its sequence stand."""
    fresh: list[Int32Array] = field(default_factory=list)
    ends: Int64Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    size: int = 0
    last: Int32Array = field(default_factory=lambda: np.zeros(0, dtype=np.int32))

    def add(self, sample: Sample, ids: Int32Array, common: int) -> None:
        """Add a sequence whose first ``common`` tokens are those of the sequence added last."""
        grown = np.arange(self.size, self.size + len(ids) - common, dtype=np.int64)
        before = self.paths[-1] if self.paths else grown[:0]
        self.ends = np.concatenate([self.ends, np.full(len(grown), self.size + len(grown))])
        path = np.concatenate([before[:common], grown])
        self.ends[path] = self.size + len(
            grown
        )  # the shared tokens are seen further; the others' ends stand
        self.samples.append(sample)
        self.paths.append(path)
        self.fresh.append(ids[common:])
        self.size += len(grown)
        self.last = ids

    @property
    def is_chain(self) -> bool:
        return bool((self.ends == self.size).all())


def pack(
    samples: Sequence[Sample], token_budget: int, *, share_worth: float, by_node: bool = False
) -> Packed:
    """Lay ``samples`` out in micro-batches of at most ``token_budget`` tokens, padding included.

    Sequences join a row in lexicographic order, so that common prefixes meet, as long as what sharing saves in
    linear layers is more than what the longer row costs in attention, which is computed for the whole T × T. Rows
    are then filled up and put together, longest first. A single sequence over the budget runs alone.

    Args:
        samples: in any order; the layout is a function of them alone.
        token_budget: tokens of a micro-batch.
        share_worth: pairs of attention that cost as much as one token's linear layers, about 6 × hidden size
            (2 · 12·L·d² against 4·L·d multiplications). 0: no sharing, each sequence has its own row.
        by_node: attention is computed node by node, so that a long row costs none: whatever is shared is worth it.

    Raises:
        ValueError: an empty prompt or completion: nothing would predict its first token.
    """
    if any(not len(sample.prompt_ids) or not len(sample.token_ids) for sample in samples):
        raise ValueError("a prompt and its completion must have at least one token each")
    if by_node:
        trees = _grow(samples, token_budget, math.inf)
    else:
        trees = _grow(samples, min(token_budget, LONGEST_SHARED_ROW), share_worth)
    trees.sort(key=lambda tree: -tree.size)
    batches = (
        [[row] for row in _one_row_each(trees, token_budget)]
        if by_node
        else _micro_batches(trees, token_budget, fill_up=share_worth > 0)
    )
    return Packed(
        batches=tuple(_lay_out(rows, by_node=by_node) for rows in batches),
        over_budget=sum(tree.size > token_budget for tree in trees),
    )


def allowed(batch: MicroBatch) -> BoolArray:
    """Bool [B, T, T]: may the token at (row, query) see the one at (row, key)?

    Padding sees itself, since a softmax over nothing is not a number.
    """
    place = np.arange(batch.end_BT.shape[1])
    causal = place[None, :] <= place[:, None]
    seen: BoolArray = causal & (place[None, :, None] < batch.end_BT[:, None, :])
    return seen | np.eye(len(place), dtype=np.bool_)


def _grow(samples: Sequence[Sample], longest: int, share_worth: float) -> list[_Tree]:
    sequences = [(sample.input_ids(), sample) for sample in samples]
    # Big-endian bytes sort as the numbers do.
    sequences.sort(key=lambda pair: (pair[0].astype(">u4").tobytes(), pair[1].index))
    trees: list[_Tree] = []
    for ids, sample in sequences:
        common = _common_prefix(trees[-1].last, ids) if trees else 0
        fresh = len(ids) - common
        if not trees or not _joins(trees[-1].size, common, fresh, longest, share_worth):
            trees.append(_Tree())
            common = 0
        trees[-1].add(sample, ids, common)
    return trees


def _joins(size: int, common: int, fresh: int, longest: int, share_worth: float) -> bool:
    """Whether a sequence should join a row of ``size`` tokens of which it has ``common`` and would add ``fresh``."""
    if fresh == 0:
        return True
    if common == 0:
        return False
    # (size + fresh)² pairs in one row, against size² and (common + fresh)² in two.
    pairs = (size + fresh) ** 2 - size**2 - (common + fresh) ** 2
    return size + fresh <= longest and common * share_worth > max(pairs, 0)


def _common_prefix(left: Int32Array, right: Int32Array) -> int:
    shorter = min(len(left), len(right))
    differ = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(differ[0]) if len(differ) else shorter


_Row: TypeAlias = list[_Tree]


def _one_row_each(trees: Iterable[_Tree], budget: int) -> list[_Row]:
    """Micro-batches of one row by first fit."""
    rows: list[_Row] = []
    room: list[int] = []
    for tree in trees:
        number = next((i for i, left in enumerate(room) if tree.size <= left), len(rows))
        if number == len(rows):
            rows.append([])
            room.append(budget)
        rows[number].append(tree)
        room[number] -= tree.size
    return rows


def _micro_batches(trees: Iterable[_Tree], budget: int, *, fill_up: bool) -> list[list[_Row]]:
    """Rows by first fit; ``trees`` come longest first, so a micro-batch's first one sets its row length."""
    batches: list[list[_Row]] = []
    for tree in trees:
        if not any(_place(batch, tree, budget, fill_up=fill_up) for batch in batches):
            batches.append([[tree]])
    return batches


def _place(batch: list[_Row], tree: _Tree, budget: int, *, fill_up: bool) -> bool:
    """Put ``tree`` into a row with room, or into a new row where the budget allows one."""
    width = batch[0][0].size
    if fill_up:  # the room is paid for, padded or not
        for row in batch:
            if sum(held.size for held in row) + tree.size <= width:
                row.append(tree)
                return True
    if tree.size >= LEAST_FILLED * width and (len(batch) + 1) * width <= budget:
        batch.append([tree])
        return True
    return False


def _nodes(trees: _Row) -> tuple[Node, ...]:
    """Of trees that stand one behind the other."""
    found: list[Node] = []
    at = 0
    for tree in trees:
        starts = _node_starts(tree)
        first = len(found)
        ways: dict[int, tuple[int, ...]] = {}
        for path in tree.paths:
            way = np.searchsorted(starts, path[np.isin(path, starts)]).tolist()
            ways |= {node: tuple(first + i for i in way[:depth]) for depth, node in enumerate(way)}
        stops = [*starts[1:].tolist(), tree.size]
        for node, (start, stop) in enumerate(zip(starts.tolist(), stops, strict=True)):
            found.append(Node(at + start, at + stop, ways[node]))
        at += tree.size
    return tuple(found)


def _node_starts(tree: _Tree) -> Int64Array:
    """Where sequences begin, part and go on, and every LONGEST_NODE tokens from there."""
    cuts = [np.zeros(1, dtype=np.int64)]
    for path in tree.paths:
        jumps = np.flatnonzero(np.diff(path) != 1)
        cuts += [path[jumps] + 1, path[jumps + 1], path[-1:] + 1]
    starts = np.unique(np.concatenate(cuts))
    starts = starts[starts < tree.size]
    stops = np.append(starts[1:], tree.size)
    runs = zip(starts.tolist(), stops.tolist(), strict=True)
    return np.concatenate([np.arange(start, stop, LONGEST_NODE) for start, stop in runs])


def _lay_out(rows: list[_Row], *, by_node: bool) -> MicroBatch:
    width = max(sum(tree.size for tree in row) for row in rows)
    ids, positions, ends = (np.zeros((len(rows), width), dtype=np.int64) for _ in range(3))
    sources: list[Int64Array] = []
    samples: list[Sample] = []
    for number, row in enumerate(rows):
        at = 0
        for tree in row:
            here = slice(at, at + tree.size)
            ids[number, here] = np.concatenate(tree.fresh)
            ends[number, here] = tree.ends + at
            for path, sample in zip(tree.paths, tree.samples, strict=True):
                positions[number, path + at] = np.arange(len(path))
                sources.append(path[len(sample.prompt_ids) - 1 :] + number * width + at)
            samples += tree.samples
            at += tree.size
    sizes = [len(sample.token_ids) for sample in samples]
    return MicroBatch(
        input_ids_BT=ids,
        position_ids_BT=positions,
        end_BT=ends,
        is_tree=any(len(row) > 1 or not row[0].is_chain for row in rows),
        source_N=np.concatenate(sources),
        target_N=np.concatenate([sample.token_ids for sample in samples]).astype(np.int64),
        behaviour_N=np.concatenate([s.behaviour for s in samples]).astype(np.float32),
        advantage_N=np.repeat([s.advantage for s in samples], sizes).astype(np.float32),
        mask_N=np.concatenate([sample.mask for sample in samples]).astype(np.bool_),
        owner_N=np.repeat([sample.index for sample in samples], sizes).astype(np.int64),
        nodes=_nodes(rows[0]) if by_node else (),
    )
