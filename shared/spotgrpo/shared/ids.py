"""The names of things: tasks, versions, bucket keys and queues. Everything that builds a name is here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import total_ordering

from spotgrpo.shared.errors import ConfigError, WireError

TOPOLOGY = 1
"""Version of the queue arguments; part of every queue name, since changed arguments would answer 406."""

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

FIRST_HELD_OUT = 10**11
"""Task indexes from here on are of held-out prompts: they are in no ledger, and no prompt order comes so far."""
MOST_HELD_OUT = 10_000
"""Held-out prompts of one evaluation."""
LAST_ATTEMPT = 9999
"""Ids of attempts beyond it cannot be spelled."""


def check_run_id(run: str) -> str:
    """Return ``run`` if it can be part of a queue name and a bucket key, else raise ConfigError."""
    if not RUN_ID.fullmatch(run):
        raise ConfigError(
            "run.id",
            run,
            "use 1 to 64 letters, digits, '-' or '_', starting with a letter or digit",
        )
    return run


@dataclass(frozen=True, order=True)
class TaskId:
    """One prompt to be turned into one group: its place in the run's prompt order, and the attempt (1, 2, …)."""

    index: int
    attempt: int = 1

    def __str__(self) -> str:
        return f"{self.index:08d}.{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> TaskId:
        match = re.fullmatch(r"([0-9]{8,12})\.([0-9]{1,4})", text)
        found = cls(int(match[1]), int(match[2])) if match else None
        # One task has one spelling: the broker, the bucket and the ledger compare names.
        if found is None or found.attempt < 1 or str(found) != text:
            raise WireError(f"task id {text[:60]!r} is not <index>.<attempt>")
        return found

    @property
    def is_held_out(self) -> bool:
        """Whether it asks a held-out prompt: outside the books."""
        return self.index >= FIRST_HELD_OUT

    def next_attempt(self) -> TaskId:
        return TaskId(self.index, self.attempt + 1)


@total_ordering
@dataclass(frozen=True)
class PolicyVersion:
    """A policy version, told apart across takeovers by its epoch. v0 is the base with a zero LoRA."""

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"v{self.number:08d}.e{self.epoch:04d}"

    def __lt__(self, other: PolicyVersion) -> bool:
        return (self.epoch, self.number) < (other.epoch, other.number)

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        match = re.fullmatch(r"v([0-9]{8,12})\.e([0-9]{4,9})", text)
        found = cls(epoch=int(match[2]), number=int(match[1])) if match else None
        if found is None or str(found) != text:
            raise WireError(f"policy version {text[:60]!r} is not v<number>.e<epoch>")
        return found


def held_out_task(version: PolicyVersion, prompt: int) -> TaskId:
    """The task that asks ``version`` the ``prompt``-th held-out prompt: the same whichever learner evaluates it.

    Its epoch stands in the place of the attempt; so many takeovers apart, two of one number were given up long ago.
    """
    if not 0 <= prompt < MOST_HELD_OUT:
        raise ValueError(f"an evaluation has no prompt {prompt}")
    index = FIRST_HELD_OUT + version.number * MOST_HELD_OUT + prompt
    return TaskId(index, 1 + (version.epoch - 1) % LAST_ATTEMPT)


def held_out_prompt(task: TaskId) -> int:
    """Which of the held-out prompts a task asks."""
    return (task.index - FIRST_HELD_OUT) % MOST_HELD_OUT


def lineage_version(version: PolicyVersion, takeovers: Mapping[int, int]) -> int:
    """The number that ``version`` counts as today.

    A takeover with a later epoch may have given ``version`` up and resumed from an older one; the version then
    counts as the durable version that it grew from.

    Args:
        takeovers: epoch -> version number that its learner resumed from.
    """
    resumed = [number for epoch, number in takeovers.items() if epoch > version.epoch]
    return min([version.number, *resumed])


def version_on_line(number: int, takeovers: Mapping[int, int]) -> PolicyVersion:
    """The version of that number that was not given up: of the last epoch that began before it and made it.

    Args:
        takeovers: epoch -> version number that its learner resumed from, the first learner's 0 included.
    """
    made_by = [epoch for epoch, resumed in takeovers.items() if resumed < number]
    return PolicyVersion(max(made_by, default=min(takeovers)), number)


@dataclass(frozen=True, order=True)
class SkippedId:
    """A step that was skipped: the learner's epoch, the version that it left, and 1 for the first such in a row."""

    epoch: int
    version: int
    number: int

    def __str__(self) -> str:
        return f"{PolicyVersion(self.epoch, self.version)}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> SkippedId:
        version, _, number = text.rpartition(".")
        if not re.fullmatch(r"[1-9][0-9]{0,8}", number):
            raise WireError(f"skipped step {text[:60]!r} is not v<number>.e<epoch>.<n>")
        policy = PolicyVersion.parse(version)
        return cls(policy.epoch, policy.number, int(number))


@dataclass(frozen=True)
class Keys:
    """Bucket keys of one run, relative to the bucket's prefix."""

    run: str

    @property
    def run_json(self) -> str:
        return f"{self.run}/run.json"

    @property
    def latest(self) -> str:
        return f"{self.run}/latest.json"

    @property
    def versions(self) -> str:
        return f"{self.run}/versions/"

    def version(self, version: PolicyVersion, file: str) -> str:
        return f"{self.versions}{version}/{file}"

    def manifest(self, version: PolicyVersion) -> str:
        return self.version(version, "manifest.json")

    @property
    def states(self) -> str:
        return f"{self.run}/states/"

    def state(self, version: PolicyVersion) -> str:
        return f"{self.states}{version}.safetensors"

    @property
    def ledgers(self) -> str:
        return f"{self.run}/ledger/"

    def ledger(self, sequence: int, epoch: int) -> str:
        return f"{self.ledgers}{sequence:08d}.e{epoch:04d}.msgpack"

    @property
    def groups(self) -> str:
        return f"{self.run}/groups/"

    def group(self, task: TaskId, sha256: str) -> str:
        return f"{self.groups}{task}.{sha256}"

    @property
    def partials(self) -> str:
        return f"{self.run}/partials/"

    def partials_of(self, task: TaskId) -> str:
        """What the keys of all partials of ``task`` begin with, and no other's."""
        return f"{self.partials}{task}."

    def partial(self, task: TaskId, worker: str, number: int) -> str:
        return f"{self.partials_of(task)}{worker}.{number}"

    def task_of(self, key: str) -> TaskId:
        """The task that an object under ``groups`` or ``partials`` belongs to, or WireError."""
        return TaskId.parse(".".join(key.rpartition("/")[2].split(".")[:2]))

    @property
    def dead_letters(self) -> str:
        return f"{self.run}/dead/"

    def dead(self, task: TaskId | str) -> str:
        return f"{self.dead_letters}{task}"

    @property
    def requeues(self) -> str:
        return f"{self.run}/requeue/"

    def requeue(self, task: TaskId | str) -> str:
        return f"{self.requeues}{task}"

    @property
    def replays(self) -> str:
        return f"{self.run}/replay/"

    def replay(self, step: SkippedId, file: str) -> str:
        return f"{self.replays}{step}/{file}"

    def skipped_of(self, key: str) -> SkippedId:
        """The skipped step that an object under ``replays`` belongs to, or WireError."""
        if not key.startswith(self.replays):
            raise WireError(f"{key[:60]!r} is of no skipped step")
        return SkippedId.parse(key.removeprefix(self.replays).partition("/")[0])


@dataclass(frozen=True)
class Queues:
    """Broker names of one run."""

    run: str

    def _name(self, what: str) -> str:
        return f"spotgrpo.{self.run}.{what}.t{TOPOLOGY}"

    @property
    def tasks(self) -> str:
        return self._name("tasks")

    @property
    def rollouts(self) -> str:
        return self._name("rollouts")

    @property
    def leader(self) -> str:
        return self._name("leader")

    @property
    def dead(self) -> str:
        return self._name("dead")

    @property
    def versions(self) -> str:
        return self._name("versions")

    @property
    def telemetry(self) -> str:
        return self._name("telemetry")
