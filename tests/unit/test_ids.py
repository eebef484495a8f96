"""Names: one spelling each, in an order that sorting keeps, and no two things of one name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotgrpo.shared.errors import ConfigError, WireError
from spotgrpo.shared.ids import (
    FIRST_HELD_OUT,
    MOST_HELD_OUT,
    Keys,
    PolicyVersion,
    Queues,
    TaskId,
    check_run_id,
    held_out_prompt,
    held_out_task,
)

task_ids = st.builds(TaskId, st.integers(0, 10**12 - 1), st.integers(1, 9999))
versions = st.builds(
    PolicyVersion, epoch=st.integers(1, 10**9 - 1), number=st.integers(0, 10**12 - 1)
)


@given(task_ids)
def test_a_task_id_is_read_back_from_its_text(task: TaskId) -> None:
    assert TaskId.parse(str(task)) == task


@given(versions)
def test_a_version_is_read_back_from_its_text(version: PolicyVersion) -> None:
    assert PolicyVersion.parse(str(version)) == version


def test_the_texts_are_those_of_the_bucket() -> None:
    assert str(TaskId(12, 3)) == "00000012.3"
    assert str(PolicyVersion(epoch=3, number=42)) == "v00000042.e0003"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12.1",
        "00000012",
        "00000012.",
        "00000012.0",
        "00000012.01",
        "000000012.1",
        "00000012.1 ",
        "00000012.1\n",
        "-0000012.1",
        "00000012.-1",
        "٠٠٠٠٠٠١٢.1",
        "0000001²2.1",
        "0000000000012.1",
        "00000012.1.1",
        "../00000012.1",
    ],
)
def test_another_spelling_of_a_task_id_is_a_wire_error(text: str) -> None:
    with pytest.raises(WireError, match="task id"):
        TaskId.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "v42.e3",
        "v00000042",
        "v00000042.e003",
        "v00000042.e00003",
        "v000000042.e0003",
        "V00000042.e0003",
        "v00000042.e0003/",
        "v٠٠٠٠٠٠٤٢.e0003",
        "v00000042.e0003\n",
    ],
)
def test_another_spelling_of_a_version_is_a_wire_error(text: str) -> None:
    with pytest.raises(WireError, match="policy version"):
        PolicyVersion.parse(text)


@given(st.text(max_size=20))
def test_what_is_read_as_a_name_is_written_the_same(text: str) -> None:
    for kind in (TaskId, PolicyVersion):
        try:
            found = kind.parse(text)
        except WireError:
            continue
        assert str(found) == text


@given(versions, versions)
def test_a_later_epoch_is_the_newer_version_whatever_its_number(
    one: PolicyVersion, other: PolicyVersion
) -> None:
    assert (one < other) == ((one.epoch, one.number) < (other.epoch, other.number))
    assert (one >= other) == (not one < other)
    assert PolicyVersion(one.epoch + 1, 0) > one


@given(st.integers(0, 99_999_999), st.integers(0, 99_999_999))
def test_names_of_one_epoch_sort_as_their_numbers(one: int, other: int) -> None:
    first, second = PolicyVersion(1, one), PolicyVersion(1, other)
    assert (str(first) < str(second)) == (first < second)
    assert (str(TaskId(one)) < str(TaskId(other))) == (TaskId(one) < TaskId(other))


def test_the_next_attempt_is_of_the_same_prompt_and_later() -> None:
    task = TaskId(7)
    assert task.next_attempt() == TaskId(7, 2)
    assert task < task.next_attempt() < TaskId(8)


@pytest.mark.parametrize("run", ["a", "A-1_b", "9" * 64])
def test_a_run_id_of_plain_characters_is_taken(run: str) -> None:
    assert check_run_id(run) == run


@pytest.mark.parametrize(
    "run", ["", "-a", "_a", "a" * 65, "a b", "a/b", "a.b", "ä", "a\n", "..", "a*", "a#"]
)
def test_a_run_id_that_cannot_be_part_of_names_is_a_config_error(run: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_run_id(run)
    assert caught.value.key == "run.id"


def test_the_keys_are_those_of_the_design() -> None:
    keys, version = Keys("r"), PolicyVersion(epoch=3, number=42)
    assert keys.run_json == "r/run.json"
    assert keys.latest == "r/latest.json"
    assert keys.manifest(version) == "r/versions/v00000042.e0003/manifest.json"
    assert (
        keys.version(version, "adapter_config.json")
        == "r/versions/v00000042.e0003/adapter_config.json"
    )
    assert keys.state(version) == "r/states/v00000042.e0003.safetensors"
    assert keys.ledger(57, 3) == "r/ledger/00000057.e0003.msgpack"
    assert keys.group(TaskId(1, 2), "ab") == "r/groups/00000001.2.ab"
    assert keys.dead(TaskId(1, 2)) == "r/dead/00000001.2"
    assert keys.state(version).startswith(keys.states)
    assert keys.ledger(57, 3).startswith(keys.ledgers)
    assert keys.manifest(version).startswith(keys.versions)


@given(versions, versions)
def test_two_versions_never_share_a_key(one: PolicyVersion, other: PolicyVersion) -> None:
    keys = Keys("r")
    assert (keys.manifest(one) == keys.manifest(other)) == (one == other)
    assert (keys.state(one) == keys.state(other)) == (one == other)


def test_every_queue_carries_the_run_and_a_name_of_its_own() -> None:
    names = [
        getattr(Queues("r"), what)
        for what in ("tasks", "rollouts", "leader", "dead", "versions", "telemetry")
    ]
    assert len(set(names)) == 6
    assert all(name.startswith("spotgrpo.r.") for name in names)
    assert set(names).isdisjoint(
        getattr(Queues("r2"), what)
        for what in ("tasks", "rollouts", "leader", "dead", "versions", "telemetry")
    )


@given(task_ids, st.text(st.characters(exclude_characters="/", exclude_categories=["Cs"])))
def test_an_object_of_a_task_says_whose_it_is(task: TaskId, worker: str) -> None:
    keys = Keys("r")
    assert keys.task_of(keys.partial(task, worker, 3)) == task
    assert keys.task_of(keys.group(task, "0" * 64)) == task
    assert keys.partial(task, worker, 3).startswith(keys.partials_of(task))


def test_the_partials_of_an_attempt_are_not_those_of_another() -> None:
    keys = Keys("r")
    assert not keys.partial(TaskId(7, 11), "w", 1).startswith(keys.partials_of(TaskId(7, 1)))


@pytest.mark.parametrize("name", ["", "junk", "00000007", "00000007.0.w.1", "7.1.w.1", ".1.w"])
def test_an_object_of_no_task_is_a_wire_error(name: str) -> None:
    with pytest.raises(WireError):
        Keys("r").task_of(f"r/partials/{name}")


evaluated = st.tuples(
    st.builds(PolicyVersion, epoch=st.integers(1, 9999), number=st.integers(0, 10**7)),
    st.integers(0, MOST_HELD_OUT - 1),
)


@given(evaluated, evaluated)
def test_a_held_out_task_has_an_id_of_its_own(
    one: tuple[PolicyVersion, int], other: tuple[PolicyVersion, int]
) -> None:
    task = held_out_task(*one)
    assert TaskId.parse(str(task)) == task
    assert task.is_held_out
    assert held_out_prompt(task) == one[1]
    assert (task == held_out_task(*other)) == (one == other)


def test_no_prompt_of_the_order_has_the_id_of_a_held_out_one() -> None:
    assert not TaskId(FIRST_HELD_OUT - 1).is_held_out
    assert held_out_task(PolicyVersion(1, 0), 0) == TaskId(FIRST_HELD_OUT)
    with pytest.raises(ValueError, match="no prompt"):
        held_out_task(PolicyVersion(1, 0), MOST_HELD_OUT)
