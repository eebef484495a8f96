"""``spotgrpo learner`` from checked inputs to the summary: connects, loads the model, and runs the loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spotgrpo.consumer.learner import Learner, Wiring
from spotgrpo.consumer.losses.objective import Objective
from spotgrpo.consumer.progress import Progress
from spotgrpo.consumer.trainer import Trainer
from spotgrpo.shared.asked_store import PatientStore
from spotgrpo.shared.fingerprint import base_fingerprint, tokenizer_fingerprint
from spotgrpo.shared.ids import Queues
from spotgrpo.shared.manifest import (
    LoraIdentity,
    ModelIdentity,
    RewardIdentity,
    RunDocument,
    SamplingDocument,
)
from spotgrpo.shared.metrics import MetricsWriter, write_summary
from spotgrpo.shared.rabbitmq import RabbitMQBroker
from spotgrpo.shared.s3 import S3Store, require_compare_and_swap
from spotgrpo.shared.servable import vllm_rank
from spotgrpo.shared.wire import OLDEST_READABLE, SCHEMA

if TYPE_CHECKING:
    from spotgrpo.consumer.held_out import HeldOut
    from spotgrpo.consumer.prompts import PromptSource
    from spotgrpo.shared.config import Config
    from spotgrpo.shared.stopping import Stopping

log = logging.getLogger(__name__)


def run_learner(
    config: Config,
    prompts: PromptSource,
    tokenizer: Any,
    rewards: Sequence[RewardIdentity],
    stopping: Stopping,
    held_out: HeldOut | None = None,
) -> dict[str, object]:
    """Begin, resume or stand by for a run, until it is done or ``stopping`` is set; returns the summary.

    Raises:
        ConfigError: a server refuses, or the run id belongs to another model, adapter, data order or reward.
        TransientError: a server did not answer within its start deadline.
        Fenced: another learner took the run over.
    """
    if config.worker.engine in ("vllm", "vllm-server"):
        vllm_rank(config.lora.rank)
    bucket = S3Store.connect(config.bucket, stopping)
    require_compare_and_swap(bucket)
    broker = RabbitMQBroker(config.broker, config.run.id, stopping)
    folder = config.run.output_dir / config.run.id
    metrics = MetricsWriter(folder / "metrics.jsonl", "learner")
    try:
        broker.declare()
        trainer = Trainer(
            config.model,
            config.lora,
            config.train,
            config.sampling.temperature,
            config.run.seed,
            Objective.of(config),
        )
        wiring = Wiring(
            config=config,
            store=PatientStore(bucket),
            broker=broker,
            trainer=trainer,
            prompts=prompts,
            document=run_document(config, prompts, tokenizer, rewards, trainer),
            stopping=stopping,
            held_out=held_out,
        )
        progress = Progress(
            Queues(config.run.id), metrics, config.train.max_steps, config.log.stall_warn_s
        )
        summary = Learner(wiring, progress).run()
    finally:
        broker.close()
        metrics.close()
        bucket.close()
    summary |= {"run": config.run.id, "metrics": str(metrics.path)}
    write_summary(folder / "summary.json", summary)
    log.info("%s at version %s; summary in %s", summary["ended"], summary["versions"], folder)
    return summary


def run_document(
    config: Config,
    prompts: PromptSource,
    tokenizer: Any,
    rewards: Sequence[RewardIdentity],
    trainer: Trainer,
) -> RunDocument:
    """``run.json`` of this configuration."""
    sampling = config.sampling
    return RunDocument(
        run=config.run.id,
        model=ModelIdentity(
            name=config.model.name,
            revision=config.model.revision,
            base_sha256=base_fingerprint(config.model.name, config.model.revision),
            tokenizer_sha256=tokenizer_fingerprint(tokenizer),
        ),
        lora=LoraIdentity(
            rank=config.lora.rank,
            alpha=config.lora.alpha,
            target_modules=trainer.target_modules,
            use_rslora=config.lora.use_rslora,
        ),
        data=prompts.identity(),
        rewards=list(rewards),
        sampling=SamplingDocument(
            group_size=sampling.group_size,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            stop=sampling.stop,
            stop_token_ids=sampling.stop_token_ids,
        ),
        max_staleness=config.train.max_staleness,
        dtype=config.model.dtype,
        max_context=trainer.max_context,
        wire_schemas=(OLDEST_READABLE, SCHEMA),
        created_at=time.time(),
        evaluates=config.eval.every is not None,
    )
