"""``spotgrpo dead`` on a bucket in memory: what is shown, asked for, dropped and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from spotgrpo.cli.main import app
from spotgrpo.consumer.ledger import Ledger, encode_ledger
from spotgrpo.shared.ids import Keys, PolicyVersion, TaskId
from spotgrpo.shared.manifest import Durable, Latest, Serving, sha256_hex
from spotgrpo.shared.memory.store import MemoryStore
from spotgrpo.shared.s3 import S3Store
from spotgrpo.shared.wire import (
    GroupRef,
    Sampling,
    Task,
    encode_group,
    encode_group_ref,
    encode_task,
)
from tests.tools.loop_world import answer

KEYS = Keys("r")
RETRIED, DEAD, MALFORMED, OPEN = (TaskId(i) for i in range(4))
LOST = TaskId(4)
TOML = """
[run]
id = "r"
[broker]
url = "amqp://me:secret@127.0.0.1:1/"
[bucket]
url = "s3://bucket/prefix"
"""


def task(task_id: TaskId, prompt: str) -> Task:
    return Task("r", task_id, (1, 2), prompt, {}, Sampling(8), seeds=(1, 2))


def group(task_id: TaskId) -> bytes:
    return encode_group(answer(task(task_id, "p"), PolicyVersion(1, 0), "w7"))


def store_chain(store: MemoryStore, *, finished: bool = False) -> None:
    """Task 0 died and was retried; 1, 2 and 4 died; 3 is outstanding."""
    first = Ledger.first(epoch=1, issue=5)
    shared = {"version": 0, "issue": 0, "duplicates": 0}
    second = first.next(
        settled={"dead": (RETRIED,)}, max_attempts=2, parent=KEYS.ledger(0, 1), **shared
    )
    third = second.next(
        settled={"dead": (DEAD, MALFORMED, LOST)},
        max_attempts=1,
        parent=KEYS.ledger(1, 1),
        **shared,
    )
    for ledger in (first, second, third):
        store.create(KEYS.ledger(ledger.sequence, 1), encode_ledger(ledger))
    point_at(store, third, finished=finished)


def point_at(store: MemoryStore, ledger: Ledger, *, finished: bool) -> None:
    key = KEYS.ledger(ledger.sequence, 1)
    digest = "0" * 64
    durable = Durable(
        version=0,
        epoch=1,
        manifest="m",
        manifest_sha256=digest,
        state="s",
        state_sha256=digest,
        ledger=key,
        ledger_sha256=sha256_hex(encode_ledger(ledger)),
    )
    serving = Serving(version=0, epoch=1, manifest="m", sha256=digest)
    latest = Latest(
        epoch=1, writer="w", nonce="a" * 32, serving=serving, durable=durable, finished=finished
    )
    stored = store.compare_and_swap(KEYS.latest, latest.to_bytes(), None)
    assert stored


def store_bodies(store: MemoryStore) -> None:
    long = "Say which is larger:\n" + "9" * 200
    store.create(KEYS.dead(RETRIED), encode_task(task(RETRIED, "tried")))
    store.create(KEYS.dead(DEAD), encode_task(task(DEAD, long)))
    store.create(KEYS.dead(MALFORMED), group(MALFORMED)[:-1])
    store.create(KEYS.dead(OPEN), encode_task(task(OPEN, "open")))
    store.create(KEYS.dead("unknown.abc"), b"\x00nonsense")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    store = MemoryStore()
    monkeypatch.setattr(S3Store, "connect", lambda _config: store)
    return store


@pytest.fixture
def spotgrpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """``spotgrpo dead VERB CONFIG ARGS...``; logging is the whole process's, so it is left alone."""
    monkeypatch.setattr("spotgrpo.cli.options.configure_logging", lambda *_: None)
    config = tmp_path / "run.toml"
    config.write_text(TOML)

    def run(verb: str, *args: str) -> Result:
        return CliRunner().invoke(app, ["dead", verb, str(config), *args])

    return run


def there(store: MemoryStore, prefix: str) -> list[str]:
    return [info.key.removeprefix(prefix) for info in store.list(prefix)]


def test_list_says_of_every_body_what_it_is_and_how_the_task_stands(
    store: MemoryStore, spotgrpo: Callable[..., Result]
) -> None:
    store_chain(store)
    store_bodies(store)
    assert spotgrpo("requeue", str(MALFORMED)).exit_code == 0
    result = spotgrpo("list", "--json")
    assert result.exit_code == 0, result.output
    listing = json.loads(result.stdout)
    assert listing["dead"] == 4, "the ledger's count, not that of the bodies"
    found = {one["task"]: one for one in listing["tasks"]}
    assert {name: one["stands"] for name, one in found.items()} == {
        str(RETRIED): "tried again",
        str(DEAD): "can be requeued",
        str(MALFORMED): "requeue asked for",
        str(OPEN): "not settled as dead",
        "unknown.abc": "no task",
    }
    assert "over the delivery limit" in found[str(DEAD)]["what"]
    assert "'Say which is larger: 999" in found[str(DEAD)]["what"]
    assert len(found[str(DEAD)]["what"]) < 200
    for name in (str(MALFORMED), "unknown.abc"):
        assert found[name]["what"].startswith("a malformed group: ")
    assert found[str(MALFORMED)]["what"] != found["unknown.abc"]["what"]
    assert found["unknown.abc"]["size"] == 9


def test_list_reads_well_for_people(store: MemoryStore, spotgrpo: Callable[..., Result]) -> None:
    store_chain(store)
    store_bodies(store)
    lines = spotgrpo("list").stdout.splitlines()
    assert lines[0] == "4 dead in the books of r; 5 bodies kept"
    assert any(line.startswith(str(DEAD)) and line.endswith("can be requeued") for line in lines)


def test_a_group_by_reference_is_decoded_anew_or_named_as_missing(
    store: MemoryStore, spotgrpo: Callable[..., Result]
) -> None:
    store_chain(store)
    body = group(DEAD)
    for name, bytes_ in ((DEAD, body), (LOST, b"never stored")):
        digest = sha256_hex(bytes_)
        key = KEYS.group(name, digest)
        ref = GroupRef("r", name, key, digest, len(bytes_))
        store.create(KEYS.dead(name), encode_group_ref(ref))
    store.create(KEYS.group(DEAD, sha256_hex(body)), body)
    what = {
        one["task"]: one["what"] for one in json.loads(spotgrpo("list", "--json").stdout)["tasks"]
    }
    assert "a group of worker 'w7' that can be read" in what[str(DEAD)]
    assert "is not in the bucket" in what[str(LOST)]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        (str(RETRIED), f"tried again already, as {RETRIED.next_attempt()}"),
        (str(OPEN), "no committed ledger of the run has it as dead"),
        (str(TaskId(500)), "no committed ledger of the run has it as dead"),
        ("unknown.abc", "no task id"),
        ("three", "no task id"),
        (str(TaskId(1, 9999)), "no task id"),
    ],
)
def test_what_cannot_be_tried_again_is_refused_and_nothing_is_asked(
    store: MemoryStore, spotgrpo: Callable[..., Result], name: str, remedy: str
) -> None:
    store_chain(store)
    store_bodies(store)
    result = spotgrpo("requeue", str(DEAD), name)
    assert result.exit_code == 2
    assert f"TASK = '{name}'" in result.stderr
    assert remedy in result.stderr
    assert "spotgrpo dead" in result.stderr
    assert there(store, KEYS.requeues) == []


def test_requeue_asks_once_however_often_it_is_typed(
    store: MemoryStore, spotgrpo: Callable[..., Result]
) -> None:
    store_chain(store)
    for _ in range(2):
        result = spotgrpo("requeue", str(DEAD), str(LOST), str(DEAD))
        assert result.exit_code == 0, result.output
    assert there(store, KEYS.requeues) == [str(DEAD), str(LOST)]
    assert result.stdout.startswith(f"2 to be tried again {DEAD} {LOST}\n")
    assert "if none runs now" in result.stdout


def test_requeue_all_takes_what_can_be_tried_again_and_passes_over_the_rest(
    store: MemoryStore, spotgrpo: Callable[..., Result]
) -> None:
    store_chain(store)
    store_bodies(store)
    result = spotgrpo("requeue", "--all", "--json")
    assert json.loads(result.stdout)["requeued"] == [str(DEAD), str(MALFORMED)]
    assert there(store, KEYS.requeues) == [str(DEAD), str(MALFORMED)]


def test_requeue_says_that_a_finished_run_has_to_be_resumed(
    store: MemoryStore, spotgrpo: Callable[..., Result]
) -> None:
    store_chain(store, finished=True)
    assert "higher train.max_steps" in spotgrpo("requeue", str(DEAD)).stdout
    assert json.loads(spotgrpo("requeue", str(DEAD), "--json").stdout)["finished"] is True


def test_drop_deletes_bodies_and_leaves_the_count(
    store: MemoryStore, spotgrpo: Callable[..., Result]
) -> None:
    store_chain(store)
    store_bodies(store)
    assert spotgrpo("drop", "unknown.abc", str(DEAD)).exit_code == 0
    assert there(store, KEYS.dead_letters) == [str(RETRIED), str(MALFORMED), str(OPEN)]
    assert spotgrpo("drop", str(RETRIED), str(DEAD)).exit_code == 2, "no body of the second is kept"
    assert str(RETRIED) in there(store, KEYS.dead_letters)
    assert spotgrpo("drop", "--all").stdout.startswith("3 dropped")
    assert there(store, KEYS.dead_letters) == []
    assert json.loads(spotgrpo("list", "--json").stdout)["dead"] == 4
    assert spotgrpo("drop", "--all").stdout == "0 dropped\n"


@pytest.mark.parametrize("verb", ["requeue", "drop"])
@pytest.mark.parametrize("args", [[], ["--all", str(DEAD)]])
def test_tasks_or_all_have_to_be_named(
    store: MemoryStore, spotgrpo: Callable[..., Result], verb: str, args: list[str]
) -> None:
    store_chain(store)
    result = spotgrpo(verb, *args)
    assert result.exit_code == 2
    assert "name tasks, or give --all" in result.stderr


@pytest.mark.parametrize("args", [("list",), ("requeue", "--all"), ("drop", "--all")])
def test_a_run_that_is_not_there_is_refused(
    store: MemoryStore, spotgrpo: Callable[..., Result], args: tuple[str, ...]
) -> None:
    del store
    result = spotgrpo(*args)
    assert result.exit_code == 2
    assert "run.id = 'r'" in result.stderr
