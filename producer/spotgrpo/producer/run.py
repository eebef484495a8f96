"""``spotgrpo worker`` from broker, bucket and run id to a running worker: the rest comes from ``run.json``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotgrpo.producer.cache import cache_folder
from spotgrpo.producer.engines.base import EngineSpec, ServersSpec
from spotgrpo.producer.engines.registry import make_engine
from spotgrpo.producer.notices import NoticeWatch
from spotgrpo.producer.policy import PolicyWatcher
from spotgrpo.producer.rewards import Rewards
from spotgrpo.producer.waiting import aloud
from spotgrpo.producer.worker import Wiring, Worker
from spotgrpo.shared.asked_store import PatientStore
from spotgrpo.shared.config import ModelConfig
from spotgrpo.shared.errors import BrokerUnavailable, ConfigError, NotStored, StoreUnavailable
from spotgrpo.shared.fingerprint import base_fingerprint, tokenizer_fingerprint
from spotgrpo.shared.ids import Keys, Queues
from spotgrpo.shared.manifest import LoraIdentity, RunDocument
from spotgrpo.shared.rabbitmq import RabbitMQBroker
from spotgrpo.shared.s3 import S3Store
from spotgrpo.shared.tokenizing import load_tokenizer
from spotgrpo.shared.wire import OLDEST_READABLE, SCHEMA

if TYPE_CHECKING:
    from spotgrpo.producer.engines.base import Engine
    from spotgrpo.shared.config import WorkerView
    from spotgrpo.shared.ports import Broker, ObjectStore
    from spotgrpo.shared.stopping import Stopping

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
LONGEST_PAUSE_S = 5.0
"""Between two looks for the queues: each makes a connection of its own."""


def run_worker(view: WorkerView, base_dir: Path, stopping: Stopping) -> None:
    """Work for a run until it is finished, ``stopping`` is set or the cloud takes the machine back.

    Waits for a learner that has not begun it yet.

    Args:
        base_dir: where relative reward files are looked for.

    Raises:
        ConfigError: a server refuses; model, tokenizer or reward code differ from the run's.
        TransientError: a server did not answer within its start deadline.
        SpotGRPOError: the engine died.
    """
    with NoticeWatch(view.worker, stopping):
        _run(view, base_dir, stopping)


def _run(view: WorkerView, base_dir: Path, stopping: Stopping) -> None:
    bucket = S3Store.connect(view.bucket, stopping)
    store, keys = PatientStore(bucket), Keys(view.run.id)
    broker = RabbitMQBroker(view.broker, view.run.id, stopping)
    try:
        # Refused credentials should be heard of now, not once a learner has begun.
        warn_s = view.log.stall_warn_s
        with contextlib.suppress(NotStored, StoreUnavailable):
            store.get(keys.run_json)
        document = (
            wait_for_run(store, keys, stopping, warn_s)
            if wait_for_queues(broker, Queues(view.run.id), stopping, warn_s)
            else None
        )
        if document is None:
            return
        check_lora(view, document)
        log.info("loading model, tokenizer and rewards of run %s", document.run)
        with aloud("the model's files, its tokenizer and the reward code to load", warn_s):
            model = model_of(view, document)
            rewards = Rewards.from_run(document.rewards, view.rewards, base_dir)
            tokenizer = _checked_tokenizer(model, document)
        with contextlib.closing(rewards), contextlib.ExitStack() as stack:
            folder = stack.enter_context(cache_folder(view.worker.cache_dir))
            if view.worker.engine == "vllm-server":
                folder.chmod(0o755)  # its servers may be another user's
            asyncio.run(
                _work(view, document, model, store, broker, rewards, tokenizer, folder, stopping)
            )
    finally:
        broker.close()
        bucket.close()


def wait_for_run(
    store: ObjectStore, keys: Keys, stopping: Stopping, warn_s: float
) -> RunDocument | None:
    """``run.json``, waiting for the learner to write it; None once ``stopping`` is set.

    Raises:
        ConfigError: the run speaks wire schemas that this worker does not.
    """
    why = ""
    with aloud(lambda: f"{keys.run_json}, which a learner writes ({why})", warn_s):
        while not stopping.is_set():
            try:
                document = RunDocument.from_bytes(store.get(keys.run_json).body)
            except (NotStored, StoreUnavailable) as exc:
                if not why:
                    log.info("waiting for a learner to begin run %s (%s)", keys.run, exc)
                why = str(exc)
                stopping.wait(LOOK_AGAIN_S)
                continue
            _check_schemas(document)
            return document
    return None


def _check_schemas(document: RunDocument) -> None:
    oldest, newest = document.wire_schemas
    if oldest > SCHEMA or newest < OLDEST_READABLE:
        raise ConfigError(
            "run.id",
            document.run,
            f"speaks wire schemas {oldest} to {newest}, this worker {OLDEST_READABLE} to {SCHEMA}: "
            "install the learner's version of spotgrpo",
        )


def wait_for_queues(broker: Broker, queues: Queues, stopping: Stopping, warn_s: float) -> bool:
    """Wait for the learner to declare its queues; False once ``stopping`` is set.

    Raises:
        BrokerUnavailable: the broker did not answer within its start deadline. Once it has, it may be away for long.
        ConfigError: it refuses.
    """
    was_reached, pause_s = False, LOOK_AGAIN_S
    why = "the broker has not answered yet"
    with aloud(lambda: f"{queues.tasks} and the run's other queues: {why}", warn_s):
        while not stopping.is_set():
            try:
                if broker.wait_until_declared(timeout_s=LOOK_AGAIN_S):
                    return True
                was_reached, why = True, "no learner has declared them: is the run id right?"
            except BrokerUnavailable as exc:
                if not was_reached and not stopping.is_set():
                    raise
                why = str(exc)
            stopping.wait(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
    return False


def check_lora(view: WorkerView, document: RunDocument) -> None:
    """Hold a worker's own ``lora`` table, as far as it has one, against the run's.

    Raises:
        ConfigError: they differ: it is another run's, or was changed after this one began.
    """
    lora = view.lora
    for name in sorted(lora.model_fields_set & LoraIdentity.model_fields.keys()) if lora else ():
        here, there = getattr(lora, name), getattr(document.lora, name)
        if isinstance(here, str):  # all-linear: the learner has found out which those are
            continue
        if isinstance(here, list):
            here = sorted({target.rsplit(".", 1)[-1] for target in here})
        if here != there:
            remedy = f"run.json of {document.run} has {there!r}: give that, or another run.id"
            raise ConfigError(f"lora.{name}", here, remedy)


def model_of(view: WorkerView, document: RunDocument) -> ModelConfig:
    """The base model: the worker's own ``model`` table where it has one, else what ``run.json`` names.

    Raises:
        ConfigError: its weights are not those that the run trains on.
    """
    model = view.model or ModelConfig.model_validate(
        {"name": document.model.name, "revision": document.model.revision, "dtype": document.dtype}
    )
    started = time.monotonic()
    found = base_fingerprint(model.name, model.revision)
    log.debug("fingerprint of %s took %.1f s", model.name, time.monotonic() - started)
    if found != document.model.base_sha256:
        raise ConfigError(
            "model.name",
            model.name,
            f"its weights hash to {found[:12]}…, run {document.run} trains {document.model.name} "
            f"with {document.model.base_sha256[:12]}…: give the same model and revision",
        )
    return model


def _checked_tokenizer(model: ModelConfig, document: RunDocument) -> Any:
    tokenizer = load_tokenizer(model)
    found = tokenizer_fingerprint(tokenizer)
    if found != document.model.tokenizer_sha256:
        raise ConfigError(
            "model.name",
            model.name,
            f"its tokenizer hashes to {found[:12]}…, the run's to {document.model.tokenizer_sha256[:12]}…: "
            "give the same model and revision",
        )
    return tokenizer


def engine_spec(view: WorkerView, document: RunDocument, model: ModelConfig) -> EngineSpec:
    """What the engine is made of."""
    worker = view.worker
    return EngineSpec(
        model=model.name,
        revision=model.revision,
        dtype=model.dtype,
        trust_remote_code=model.trust_remote_code,
        attn_implementation=model.attn_implementation,
        max_context=document.max_context,
        lora_rank=document.lora.rank,
        lora_alpha=document.lora.alpha,
        target_modules=tuple(document.lora.target_modules),
        max_versions=document.max_staleness + 2 + document.evaluates,
        max_inflight=worker.max_inflight,
        device=worker.device,
        threads=worker.threads,
        vllm=worker.vllm,
        servers=ServersSpec.of(worker),
    )


def _precision(spec: EngineSpec) -> str:
    """The dtype whose tolerances the engine's logprobs need; weights that were quantised are as coarse as bfloat16."""
    if spec.vllm.get("quantization"):
        return "bfloat16"
    return str(spec.vllm.get("dtype", spec.dtype))


async def has_started(engine: Engine, stopping: Stopping) -> bool:
    """Start ``engine``; False, and it is closed, where ``stopping`` is set first. Raises what its start raises."""
    starting = asyncio.create_task(engine.start())
    stopped = asyncio.create_task(stopping.wait_async())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
    if not starting.cancelled():
        starting.result()
        return True
    await engine.close()
    return False


async def _work(
    view: WorkerView,
    document: RunDocument,
    model: ModelConfig,
    store: ObjectStore,
    broker: RabbitMQBroker,
    rewards: Rewards,
    tokenizer: Any,
    folder: Path,
    stopping: Stopping,
) -> None:
    spec = engine_spec(view, document, model)
    engine = make_engine(view.worker.engine, spec)
    log.info("loading engine %s with %s (minutes for a big model)", engine.name, spec.model)
    started = time.monotonic()
    with aloud(f"engine {engine.name} to start", view.log.stall_warn_s):
        if not await has_started(engine, stopping):
            log.info("told to stop before engine %s had started", engine.name)
            return
    log.info(
        "engine %s %s is ready after %.1f s",
        engine.name,
        engine.engine_version,
        time.monotonic() - started,
    )
    policy = PolicyWatcher(
        store,
        Keys(document.run),
        engine,
        document,
        cache_dir=folder,
        poll_s=view.worker.poll_s,
        keep=spec.max_versions,
        dtype=_precision(spec),
    )
    wiring = Wiring(
        config=view.worker,
        document=document,
        store=store,
        broker=broker,
        engine=engine,
        policy=policy,
        rewards=rewards,
        tokenizer=tokenizer,
        stopping=stopping,
        stall_warn_s=view.log.stall_warn_s,
    )
    await Worker(wiring).run()
