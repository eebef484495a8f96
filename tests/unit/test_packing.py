from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotgrpo.consumer import packing
from spotgrpo.consumer.packing import MicroBatch, Sample, allowed, pack

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6)  # few ids: prefixes meet often
groups = st.lists(
    st.tuples(tokens, st.lists(tokens, min_size=1, max_size=4)), min_size=1, max_size=4
)


def sample(index: int, prompt: list[int], completion: list[int]) -> Sample:
    ids = np.array(completion, dtype=np.int32)
    return Sample(
        index=index,
        prompt_ids=np.array(prompt, dtype=np.int32),
        token_ids=ids,
        behaviour=np.arange(len(ids), dtype=np.float32) - 10.0 * index,
        mask=np.arange(len(ids)) % 2 == 0,
        advantage=float(index),
    )


def samples_of(drawn: list[tuple[list[int], list[list[int]]]]) -> list[Sample]:
    pairs = [(prompt, completion) for prompt, completions in drawn for completion in completions]
    return [sample(index, *pair) for index, pair in enumerate(pairs)]


def context(batch: MicroBatch, source: int) -> list[int]:
    """Token ids that the token at a flat index sees, by their position in its sequence."""
    row, place = divmod(source, batch.input_ids_BT.shape[1])
    seen = np.flatnonzero(allowed(batch)[row, place])
    positions = batch.position_ids_BT[row, seen]
    assert positions.tolist() == list(range(len(seen))), "every position once, in order"
    return [int(token) for token in batch.input_ids_BT[row, seen]]


@settings(max_examples=60, deadline=None)
@given(groups, st.integers(4, 40), st.sampled_from([0.0, 30.0, 1e9]))
def test_every_token_is_predicted_from_its_own_past_and_nothing_else(
    drawn: list[tuple[list[int], list[list[int]]]], budget: int, worth: float
) -> None:
    samples = samples_of(drawn)
    met: list[int] = []
    for batch in pack(samples, budget, share_worth=worth).batches:
        for index in np.unique(batch.owner_N):
            one, mine = samples[index], batch.owner_N == index
            met.append(int(index))
            assert batch.target_N[mine].tolist() == one.token_ids.tolist()
            assert batch.behaviour_N[mine].tolist() == one.behaviour.tolist()
            assert batch.mask_N[mine].tolist() == one.mask.tolist()
            assert set(batch.advantage_N[mine].tolist()) == {one.advantage}
            for place, source in enumerate(batch.source_N[mine].tolist()):
                assert context(batch, source) == [*one.prompt_ids, *one.token_ids[:place]]
    assert sorted(met) == list(range(len(samples)))


@settings(max_examples=60, deadline=None)
@given(groups, st.integers(4, 40), st.sampled_from([0.0, 30.0, 1e9]))
def test_no_micro_batch_is_over_the_budget_but_for_single_sequences(
    drawn: list[tuple[list[int], list[list[int]]]], budget: int, worth: float
) -> None:
    packed = pack(samples_of(drawn), budget, share_worth=worth)
    over = [batch for batch in packed.batches if batch.input_ids_BT.size > budget]
    assert len(over) == packed.over_budget
    assert all(not batch.is_tree and batch.rows == 1 for batch in over)


@settings(max_examples=60, deadline=None)
@given(groups, st.integers(8, 40), st.integers(1, 3))
def test_nodes_show_a_token_what_the_mask_does(
    drawn: list[tuple[list[int], list[list[int]]]], budget: int, longest: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "LONGEST_NODE", longest)
        packed = pack(samples_of(drawn), budget, share_worth=0.0, by_node=True)
    for batch in packed.batches:
        width = batch.input_ids_BT.shape[1]
        assert batch.filled_tokens == width <= max(budget, 11), "no padding"
        seen = np.zeros((width, width), dtype=np.bool_)
        for node in batch.nodes:
            own = np.arange(node.start, node.stop)
            before = [np.arange(batch.nodes[i].start, batch.nodes[i].stop) for i in node.before]
            seen[np.ix_(own, np.concatenate([*before, own[:0]]))] = True
            seen[np.ix_(own, own)] = own[None, :] <= own[:, None]
        assert (seen == allowed(batch)[0]).all()
        assert [node.start for node in batch.nodes[1:]] == [n.stop for n in batch.nodes[:-1]]


def test_rows_of_very_different_length_do_not_share_a_micro_batch() -> None:
    samples = [sample(index, [1], [index] * (40 if index else 4)) for index in range(3)]
    batches = pack(samples, 1000, share_worth=0.0).batches
    assert [batch.input_ids_BT.shape for batch in batches] == [(2, 40), (1, 4)]


def test_a_group_costs_one_prompt_and_its_completions() -> None:
    prompt = list(range(10, 30))
    samples = [sample(index, prompt, [index, 5, 6]) for index in range(4)]
    (batch,) = pack(samples, 100, share_worth=1e9).batches
    assert batch.is_tree
    assert batch.filled_tokens == 20 + 4 * 2


def test_equal_completions_and_a_common_start_of_prompts_are_stored_once() -> None:
    samples = [sample(i, [7, 8, 9, 10 + i // 2], [3, 4, 5]) for i in range(4)]
    (batch,) = pack(samples, 100, share_worth=1e9).batches
    assert batch.filled_tokens == 3 + 2 * (1 + 2)
    assert len(batch.target_N) == 12


def test_without_sharing_rows_are_plain_sequences() -> None:
    samples = [sample(index, [1, 2, 3], [index, 9]) for index in range(3)]
    (batch,) = pack(samples, 100, share_worth=0.0).batches
    assert not batch.is_tree
    assert batch.rows == 3


def test_unrelated_groups_do_not_pay_for_each_others_attention() -> None:
    long = [[token] * 400 for token in (1, 2)]
    samples = [sample(i, long[i // 2], [5 + i, 6, 7]) for i in range(4)]
    (batch,) = pack(samples, 4096, share_worth=3000.0).batches
    assert batch.rows == 2


def test_the_layout_does_not_depend_on_the_order_of_the_samples() -> None:
    samples = [sample(i, [1, 2, i % 3], [i, 4]) for i in range(9)]
    first = pack(samples, 20, share_worth=1e9).batches
    second = pack(samples[::-1], 20, share_worth=1e9).batches
    assert [b.input_ids_BT.tolist() for b in first] == [b.input_ids_BT.tolist() for b in second]
    assert [b.owner_N.tolist() for b in first] == [b.owner_N.tolist() for b in second]


@pytest.mark.parametrize(("prompt", "completion"), [([], [1]), ([1], [])])
def test_nothing_predicts_the_first_token_of_nothing(
    prompt: list[int], completion: list[int]
) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        pack([sample(0, prompt, completion)], 10, share_worth=0.0)
