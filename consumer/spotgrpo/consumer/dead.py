"""Dead tasks as a person sees them: the bodies that the bucket keeps, and what can be done about each.

Reads and writes the bucket alone, so a learner need not run; what issues is the learner (``requeue``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from spotgrpo.consumer.audit import read_latest, read_newest
from spotgrpo.consumer.requeue import Fate, Past, encode_request, requested
from spotgrpo.shared.errors import ConfigError, NotStored, WireError
from spotgrpo.shared.ids import LAST_ATTEMPT, Keys, SkippedId, TaskId
from spotgrpo.shared.manifest import sha256_hex
from spotgrpo.shared.ports import ObjectInfo, ObjectStore
from spotgrpo.shared.wire import Prompt, decode_group, decode_group_ref, decode_task

SHOWN: Final = 60
"""Characters of a prompt."""

Stands = Literal[
    "can be requeued", "requeue asked for", "tried again", "not settled as dead", "no task"
]


@dataclass(frozen=True)
class DeadTask:
    """A body that the bucket keeps.

    Attributes:
        task: its id, or ``unknown.<hash>`` where that could not be read.
        at: Unix seconds at which the body was stored.
        size: bytes.
        what: what the body is, and what is wrong with it.
        stands: whether a later attempt was issued, is asked for, or can be.
    """

    task: str
    at: float
    size: int
    what: str
    stands: Stands


@dataclass(frozen=True)
class Listing:
    """All bodies, and the ledger's own count: it stays when bodies are dropped."""

    run: str
    dead: int
    finished: bool
    tasks: tuple[DeadTask, ...]


@dataclass(frozen=True)
class Asked:
    """Tasks that the run's learner is asked to try again; a finished run has to be resumed for that."""

    tasks: tuple[str, ...]
    finished: bool


def list_dead(store: ObjectStore, keys: Keys) -> Listing:
    """Every body under ``dead/``. Raises ConfigError where the bucket holds no such run."""
    latest = read_latest(store, keys)
    newest = read_newest(store, latest)
    bodies, asked = _bodies(store, keys), set(requested(store, keys))
    past = Past(store, newest)
    past.read([task for task in map(_task, bodies) if task])
    tasks = []
    for name, info in bodies.items():
        try:
            what = describe(store, keys, store.get(info.key).body)
        except NotStored:
            continue  # dropped, or tried again, just now
        stands = _stands(past, name, is_asked=name in asked)
        tasks.append(DeadTask(name, info.modified, info.size, what, stands))
    return Listing(keys.run, newest.counts.dead, latest.finished, tuple(tasks))


def ask_again(store: ObjectStore, keys: Keys, names: Sequence[str] | None) -> Asked:
    """Ask the learner to try tasks again: those named, or (None) all that can be.

    Raises:
        ConfigError: one of ``names`` cannot be tried again; nothing is asked for then.
    """
    latest = read_latest(store, keys)
    past = Past(store, read_newest(store, latest))
    chosen = _bodies(store, keys) if names is None else names
    tasks = [task for task in map(_task, dict.fromkeys(chosen)) if task]
    past.read(tasks)
    if names is None:
        tasks = [task for task in tasks if past.fate(task) == "dead"]
    else:
        for name in names:
            _check_can_requeue(past, name)
    for task in tasks:
        store.create(keys.requeue(task), encode_request(task))
    return Asked(tuple(map(str, tasks)), latest.finished)


def drop(store: ObjectStore, keys: Keys, names: Sequence[str] | None) -> tuple[str, ...]:
    """Delete bodies: those named, or (None) all; returns their names. The books keep their count.

    Raises:
        ConfigError: no body of one of ``names`` is kept; nothing is deleted then.
    """
    read_latest(store, keys)
    bodies = _bodies(store, keys)
    for name in names or ():
        if name not in bodies:
            raise ConfigError(
                "TASK",
                name,
                "the bucket keeps no such body; `spotgrpo dead list` shows those there are",
            )
    chosen = tuple(bodies) if names is None else tuple(dict.fromkeys(names))
    store.delete([keys.dead(name) for name in chosen])
    return chosen


def describe(store: ObjectStore, keys: Keys, body: bytes) -> str:
    """What a body is: a task with the start of its prompt, or a group with what is wrong with it."""
    step = _skipped(keys, body)
    if step is not None:
        return f"a group of a step that was skipped, not finite: `spotgrpo replay CONFIG {step}`"
    try:
        task = decode_task(body)
    except WireError:
        return _describe_group(store, body)
    return (
        f"a task that ran over the delivery limit, or that a worker refused: {_start(task.prompt)}"
    )


def _describe_group(store: ObjectStore, body: bytes) -> str:
    try:
        group = decode_group(_whole(store, body))
    except WireError as exc:
        return f"a malformed group: {exc}"
    return (
        f"a group of worker {group.worker[:SHOWN]!r} that can be read: it does not fit the run (the learner's log has "
        "the reason), or ran over the delivery limit"
    )


def _whole(store: ObjectStore, body: bytes) -> bytes:
    """The group's own bytes, where ``body`` refers to them."""
    try:
        ref = decode_group_ref(body)
    except WireError:
        return body
    try:
        found = store.get(ref.key).body
    except NotStored as exc:
        raise WireError(f"{ref.key!r}, which it refers to, is not in the bucket") from exc
    if len(found) != ref.size or sha256_hex(found) != ref.sha256:
        raise WireError(f"{ref.key!r} does not have the size and sha256 of its reference")
    return found


def _skipped(keys: Keys, body: bytes) -> SkippedId | None:
    """The skipped step whose record holds the group, where ``body`` refers to one."""
    try:
        return keys.skipped_of(decode_group_ref(body).key)
    except WireError:
        return None


def _start(prompt: Prompt) -> str:
    """The start of a prompt on one line; of a chat's last message."""
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
    line = " ".join(text.split())
    return repr(line if len(line) <= SHOWN else line[:SHOWN] + "…")


def _stands(past: Past, name: str, *, is_asked: bool) -> Stands:
    task = _task(name)
    if task is None:
        return "no task"
    stands: dict[Fate | None, Stands] = {
        "dead": "requeue asked for" if is_asked else "can be requeued",
        "retried": "tried again",
        "requeued": "tried again",
    }
    return stands.get(past.fate(task), "not settled as dead")


def _check_can_requeue(past: Past, name: str) -> None:
    task = _task(name)
    if task is None:
        remedy = (
            "this is no task id, so there is nothing to try again; `spotgrpo dead list` shows dead tasks, and "
            "`spotgrpo dead drop` deletes a body"
        )
    elif past.fate(task) in ("retried", "requeued"):
        remedy = f"it was tried again already, as {task.next_attempt()}; `spotgrpo dead drop` deletes its body"
    elif past.fate(task) == "dead":
        return
    else:
        remedy = (
            "no committed ledger of the run has it as dead; `spotgrpo dead list` shows the tasks that are "
            "(one that has just died is settled by the learner's next commit)"
        )
    raise ConfigError("TASK", name, remedy)


def _bodies(store: ObjectStore, keys: Keys) -> dict[str, ObjectInfo]:
    prefix = keys.dead_letters
    return {info.key.removeprefix(prefix): info for info in store.list(prefix)}


def _task(name: str) -> TaskId | None:
    try:
        task = TaskId.parse(name)
    except WireError:
        return None
    return task if task.attempt < LAST_ATTEMPT else None
