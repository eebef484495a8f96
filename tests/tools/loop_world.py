"""A run in memory: broker, bucket, a trainer that writes down what it trained, and workers made of threads.

The trainer's weights are the list of task ids it was stepped on, so "what did this group do to the durable
weights" is a lookup in the state that the bucket names.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

from spotgrpo.consumer.audit import AuditReport, audit_run
from spotgrpo.consumer.breakdown import Moments
from spotgrpo.consumer.fit import Fit, group_fit
from spotgrpo.consumer.held_out import HeldOut
from spotgrpo.consumer.learner import Learner, Wiring
from spotgrpo.consumer.progress import Progress
from spotgrpo.consumer.prompts import PromptRow
from spotgrpo.shared.config import Config
from spotgrpo.shared.ids import Keys, PolicyVersion, Queues, TaskId
from spotgrpo.shared.manifest import (
    DataIdentity,
    Latest,
    LoraIdentity,
    ModelIdentity,
    Probe,
    RunDocument,
    SamplingDocument,
)
from spotgrpo.shared.memory.broker import MemoryBroker, MemoryBrokerServer
from spotgrpo.shared.memory.store import MemoryStore
from spotgrpo.shared.metrics import MetricsWriter
from spotgrpo.shared.ports import Delivery, Message, ObjectStore
from spotgrpo.shared.wire import (
    Float32Array,
    Group,
    Rollout,
    Task,
    VersionRun,
    decode_task,
    encode_group,
)

RUN = "loop"
VOCABULARY = 100


@dataclass(frozen=True)
class Stats:
    """What the bookkeeping trainer says of a step."""

    tokens: int
    loss: float = 0.0
    grad_norm: float = 1.0
    learning_rate: float = 1.0
    ratio_mean: float = 1.0
    ratio_max: float = 1.0
    effective_sample_size: float = 1.0
    clipped_fraction: float = 0.0
    clipped_low_fraction: float = 0.0
    clipped_high_fraction: float = 0.0
    masked_fraction: float = 0.0
    mismatch_kl: float = 0.0
    base_kl: float | None = None
    advantages: Mapping[TaskId, Moments] = field(default_factory=dict)
    entropy: float = 1.0
    over_budget: int = 0
    skipped: bool = False
    fits: Mapping[TaskId, Fit] = field(default_factory=dict)


class BookkeepingTrainer:
    """Weights that are a list: one entry a step, holding the ids of its tasks."""

    modules = 1
    vocabulary = VOCABULARY

    def __init__(self, before_step: Callable[[], None] = lambda: None) -> None:
        self.steps: list[list[str]] = []
        self._before_step = before_step

    def step(self, groups: Sequence[Group]) -> Stats:
        self._before_step()
        self.steps.append([str(group.task_id) for group in groups])
        fits = {group.task_id: group_fit(group, self.logprobs(group)) for group in groups}
        return Stats(tokens=sum(group.tokens for group in groups), fits=fits)

    def logprobs(
        self, group: Group, *, temperature: float | None = None, adapter: bool = True
    ) -> list[Float32Array]:
        """Those that :func:`answer` gives."""
        return [-np.arange(1, 1 + len(one.token_ids), dtype=np.float32) for one in group.rollouts]

    def adapter_files(self) -> dict[str, bytes]:
        weights = json.dumps(self.steps).encode()
        return {"adapter_config.json": b"{}", "adapter_model.safetensors": weights}

    def probe(self) -> Probe:
        return Probe(token_ids=[1, 2], version_logprobs=[-1.0], base_logprobs=[-1.0])

    def state(self) -> bytes:
        return json.dumps(self.steps).encode()

    def restore(self, state: bytes) -> None:
        self.steps = json.loads(state)


class Prompts:
    """An endless order of prompts of one token."""

    def __getitem__(self, index: int) -> PromptRow:
        return PromptRow(prompt=f"p{index}", prompt_ids=(1 + index % 9,), row={"index": index})


def config_of(**train: object) -> Config:
    """A configuration with quick defaults; keywords go to the train table."""
    options = {
        "max_steps": 6,
        "groups_per_step": 2,
        "max_staleness": 2,
        "reissue_after_s": 60.0,
        **train,
    }
    return Config.model_validate(
        {
            "run": {"id": RUN},
            "broker": {"url": "amqp://memory"},
            "bucket": {"url": "s3://memory"},
            "model": {"name": "none"},
            "data": {"path": "none.jsonl"},
            "rewards": [{"function": "none:none"}],
            "sampling": {"group_size": 2, "max_new_tokens": 4},
            "train": options,
        }
    )


def document_of(config: Config, *, name: str = "none", base: str = "0" * 64) -> RunDocument:
    """The run.json of :func:`config_of`."""
    return RunDocument(
        run=RUN,
        model=ModelIdentity(name=name, base_sha256=base, tokenizer_sha256="1" * 64),
        lora=LoraIdentity(rank=1, alpha=1.0, target_modules=["q_proj"]),
        data=DataIdentity(source="none", sha256="2" * 64, rows=1, shuffle_seed=0),
        rewards=[],
        sampling=SamplingDocument(group_size=2, max_new_tokens=4, temperature=1.0),
        max_staleness=config.train.max_staleness,
        dtype="float32",
        max_context=64,
        wire_schemas=(1, 1),
        created_at=time.time(),
        evaluates=config.eval.every is not None,
    )


def answer(
    task: Task, version: PolicyVersion, worker: str = "w", *, flat: bool = False, tokens: int = 2
) -> Group:
    """A group for ``task`` as a worker would publish it."""
    rollouts = tuple(
        Rollout(
            token_ids=np.arange(1, 1 + tokens, dtype=np.int32),
            logprobs=-np.arange(1, 1 + tokens, dtype=np.float32),
            loss_mask=np.ones(tokens, dtype=np.bool_),
            versions=(VersionRun(version, tokens),),
            reward=0.0 if flat else float(i),
            reward_parts={"r": 0.0 if flat else float(i)},
            finish="stop",
        )
        for i in range(task.group_size)
    )
    return Group(
        run=task.run,
        task_id=task.task_id,
        worker=worker,
        engine="none",
        engine_version="0",
        manifest_sha256="0" * 64,
        prompt_ids=np.array(task.prompt_ids, dtype=np.int32),
        row=task.row,
        sampling=task.sampling,
        rollouts=rollouts,
    )


def group_message(group: Group) -> Message:
    """``group`` as a message on the rollouts queue."""
    headers: dict[str, str | int] = {
        "run": group.run,
        "task": str(group.task_id),
        "worker": group.worker,
        "kind": "group",
    }
    return Message(
        encode_group(group), message_id=f"{group.task_id}/{group.worker}", headers=headers
    )


@dataclass
class World:
    """Servers that outlive learners and workers."""

    folder: Path
    server: MemoryBrokerServer = field(default_factory=MemoryBrokerServer)
    store: ObjectStore = field(default_factory=MemoryStore)
    keys: Keys = field(default_factory=lambda: Keys(RUN))
    queues: Queues = field(default_factory=lambda: Queues(RUN))
    writers: list[MetricsWriter] = field(default_factory=list)

    def close(self) -> None:
        """Close the files of all learners."""
        for writer in self.writers:
            writer.close()

    def learner(
        self,
        config: Config,
        trainer: BookkeepingTrainer | None = None,
        stopping: threading.Event | None = None,
        store: ObjectStore | None = None,
        document: RunDocument | None = None,
        stall_warn_s: float = 30.0,
        held_out: HeldOut | None = None,
    ) -> Learner:
        """A learner process, in a thread of the test's choosing."""
        self.writers.append(MetricsWriter(self.folder / "metrics.jsonl"))
        progress = Progress(self.queues, self.writers[-1], config.train.max_steps, stall_warn_s)
        return Learner(
            Wiring(
                config=config,
                store=store or self.store,
                broker=MemoryBroker(self.server, RUN),
                trainer=trainer or BookkeepingTrainer(),
                prompts=Prompts(),  # type: ignore[arg-type]
                document=document or document_of(config),
                stopping=stopping or threading.Event(),
                held_out=held_out,
            ),
            progress,
        )

    def latest(self) -> Latest:
        return Latest.from_bytes(self.store.get(self.keys.latest).body)

    def durable_steps(self) -> list[list[str]]:
        """What the durable weights were trained on, step by step."""
        steps: list[list[str]] = json.loads(self.store.get(self.latest().durable.state).body)
        return steps

    def audit(self) -> AuditReport:
        return audit_run(self.store, self.keys)

    def ready(self, queue: str) -> int:
        return len(self.server.queues[queue].ready)


class ThreadWorker:
    """Answers tasks with the newest serving version until the block ends.

    Args:
        act: what to do with a task; gets the worker, task and delivery, returns the groups to publish.
    """

    def __init__(
        self,
        world: World,
        act: Callable[[ThreadWorker, Task], Sequence[Group]] | None = None,
        prefetch: int = 4,
    ) -> None:
        self._world, self._act, self._prefetch = world, act, prefetch
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.answered: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def serving(self) -> PolicyVersion:
        return self._world.latest().serving.policy

    def _run(self) -> None:
        broker = MemoryBroker(self._world.server, RUN, may_declare=False)
        while not broker.wait_until_declared(0.1):
            if self._stopping.is_set():
                return
        publisher = broker.publisher()
        consumer = broker.consumer(self._world.queues.tasks, self._prefetch)
        while not self._stopping.is_set():
            delivery = consumer.take(0.05)
            if delivery is not None:
                self._answer(delivery, publisher, consumer)
        broker.close()

    def _answer(self, delivery: Delivery, publisher: object, consumer: object) -> None:
        task = decode_task(delivery.message.body)
        groups = self._act(self, task) if self._act else [answer(task, self.serving())]
        for group in groups:
            publisher.publish(self._world.queues.rollouts, group_message(group)).result(5)  # type: ignore[attr-defined]
        consumer.ack([delivery.handle])  # type: ignore[attr-defined]
        self.answered.append(str(task.task_id))


def flatten(steps: Sequence[Sequence[str]]) -> list[str]:
    """All task ids of all steps."""
    return [task for step in steps for task in step]
