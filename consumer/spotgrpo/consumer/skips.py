"""Steps that were skipped since their loss or gradient was not finite: counted, and their batches kept for a replay.

A skipped step makes no version, so its groups are settled without being trained: as dead. That is what a task is that
ended without a group that can be trained; its prompt is tried again up to ``train.max_attempts``, and beyond that where
a person asks for it, which stale tasks have not. Its body stays in the bucket, as those of all dead tasks do.

A batch is stored before its tasks are settled, ``step.json`` last: without it the record does not exist. A learner that
dies in between redoes the step, under an epoch of its own.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Field

from spotgrpo.consumer.progress import StepStats
from spotgrpo.shared.errors import IntegrityError, SpotGRPOError, StoreUnavailable
from spotgrpo.shared.ids import Keys, SkippedId, TaskId
from spotgrpo.shared.manifest import Count, Document, Durable, SchemaDocument, Sha256, sha256_hex
from spotgrpo.shared.ports import ObjectStore
from spotgrpo.shared.retry import retry
from spotgrpo.shared.steps import Step, reached
from spotgrpo.shared.wire import Group, GroupRef, encode_group, encode_group_ref

if TYPE_CHECKING:
    from spotgrpo.shared.config import Config

log = logging.getLogger(__name__)

MOST_IN_A_ROW: Final = 3
"""So many skipped steps in a row end the run: what is wrong will not pass."""
RECORD: Final = "step.json"


class SkippedGroup(Document):
    """A group of the batch: its body is the object of its task's name beside ``step.json``."""

    task: str
    worker: str
    size: Count
    sha256: Sha256


class SkippedStep(SchemaDocument):
    """``step.json``: a step that was not taken, and all that taking it again needs.

    Attributes:
        version: number of the version whose weights the gradient was taken at.
        epoch: of the learner that tried.
        number: 1 for the first skipped step in a row.
        state: key of the trainer state; ``manifest`` of the version. Both may be of an earlier epoch.
        loss, grad_norm: as Python writes floats, since JSON has no nan.
        settings: the tables ``loss``, ``train`` and ``sampling`` that it was computed with.
        groups: in the order in which the trainer had them.
        created_at: Unix seconds.
    """

    run: str
    version: Count
    epoch: Annotated[int, Field(ge=1)]
    number: Annotated[int, Field(ge=1)]
    state: str
    state_sha256: Sha256
    manifest: str
    manifest_sha256: Sha256
    loss: str
    grad_norm: str
    settings: dict[str, Any]
    groups: Annotated[list[SkippedGroup], Field(min_length=1)]
    created_at: float

    @property
    def id(self) -> SkippedId:
        return SkippedId(self.epoch, self.version, self.number)


class Skips:
    """A learner's skipped steps. Used by its main thread alone.

    Args:
        store: gives up (StoreUnavailable) once ``stopping`` is set.
        epoch: of this learner.

    Attributes:
        in_a_row: since the last step that was taken; kept in memory, so that a learner that takes over tries anew.
    """

    def __init__(
        self, store: ObjectStore, keys: Keys, config: Config, epoch: int, stopping: threading.Event
    ) -> None:
        self._store, self._keys, self._epoch, self._stopping = store, keys, epoch, stopping
        self._settings = settings_of(config)
        self._dtype = config.model.dtype
        self.in_a_row = 0
        self._last = self._likely = ""

    @property
    def are_too_many(self) -> bool:
        """Whether the run has to stop."""
        return self.in_a_row >= MOST_IN_A_ROW

    def stepped(self) -> None:
        """A step was taken."""
        self.in_a_row = 0

    def record(
        self, groups: Sequence[Group], stats: StepStats, version: int, durable: Durable
    ) -> bool:
        """Store the batch of a step that was skipped; False if told to stop before all of it is.

        Args:
            groups: as the trainer had them.
            version: number of the version that stays.
            durable: that version, its trainer state stored.
        """
        step = SkippedId(self._epoch, version, self.in_a_row + 1)
        try:
            self._store_batch(step, groups, stats, durable)
        except StoreUnavailable:
            if not self._stopping.is_set():
                raise
            return False
        self.in_a_row, self._last = step.number, str(step)
        self._likely = likely_cause(stats.loss, self._dtype)
        log.error(
            "the step after version %d is skipped, %d of at most %d in a row: loss %s, gradient norm %s; its %d groups "
            "count as dead, their prompts are tried again, and `spotgrpo replay CONFIG %s` shows what was not finite",
            version,
            step.number,
            MOST_IN_A_ROW,
            stats.loss,
            stats.grad_norm,
            len(groups),
            step,
        )
        reached(Step.LEARNER_SKIP_RECORDED)
        return True

    def give_up(self) -> SpotGRPOError:
        """What ends the run after too many in a row."""
        return SpotGRPOError(
            f"loss or gradient of {self.in_a_row} steps in a row was not finite, so the run stops; the weights stay "
            f"those of the last version, from where the same command goes on. Most likely {self._likely}. "
            f"`spotgrpo replay CONFIG {self._last}` takes the last of these steps again and names the group, rollout "
            "and token that were not finite; with --set it tries another setting on it"
        )

    def _store_batch(
        self, step: SkippedId, groups: Sequence[Group], stats: StepStats, durable: Durable
    ) -> None:
        entries = [self._store_group(step, group) for group in groups]
        record = SkippedStep(
            run=self._keys.run,
            version=step.version,
            epoch=step.epoch,
            number=step.number,
            state=durable.state,
            state_sha256=durable.state_sha256,
            manifest=durable.manifest,
            manifest_sha256=durable.manifest_sha256,
            loss=repr(stats.loss),
            grad_norm=repr(stats.grad_norm),
            settings=self._settings,
            groups=entries,
            created_at=time.time(),
        )
        self._create(self._keys.replay(step, RECORD), record.to_bytes())
        for entry in entries:
            self._refer(step, entry)

    def _store_group(self, step: SkippedId, group: Group) -> SkippedGroup:
        body, task = encode_group(group), str(group.task_id)
        self._create(self._keys.replay(step, task), body)
        return SkippedGroup(task=task, worker=group.worker, size=len(body), sha256=sha256_hex(body))

    def _refer(self, step: SkippedId, entry: SkippedGroup) -> None:
        """What is kept of a dead task, for people: here, where the batch has its body."""
        key = self._keys.replay(step, entry.task)
        ref = GroupRef(self._keys.run, TaskId.parse(entry.task), key, entry.sha256, entry.size)
        try:
            self._create(self._keys.dead(entry.task), encode_group_ref(ref))
        except IntegrityError:
            log.info("of task %s another body is kept already", entry.task)

    def _create(self, key: str, body: bytes) -> None:
        create = functools.partial(self._store.create, key, body)
        retry(f"storing {key}", create, stopping=self._stopping)


def settings_of(config: Config) -> dict[str, Any]:
    """The settings that a step is computed with, as JSON has them."""
    return {
        "loss": config.loss.model_dump(mode="json"),
        "train": config.train.model_dump(mode="json"),
        "sampling": config.sampling.model_dump(mode="json"),
    }


def likely_cause(loss: float, dtype: str) -> str:
    """In words, what makes a loss, or else the gradient of a finite one, not finite."""
    half = "model.dtype = 'float16' overflows, and 'bfloat16' would not"
    if math.isfinite(loss):
        found = "the gradient overflows: a weight in [loss] (kl, entropy) or train.learning_rate is far too large"
    else:
        found = (
            "weights have grown until the model's own numbers overflow: train.learning_rate is far too large "
            "(in a new run; these weights stay as they are), or the model's files hold such numbers"
        )
    return f"{half}, or {found}" if dtype == "float16" else found
