"""Checks of ``spotgrpo doctor`` that ask the broker and the bucket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, TypeAlias

from spotgrpo.cli.checks import Check, State, from_error, run_checks
from spotgrpo.shared.config import Config, WorkerView
from spotgrpo.shared.errors import NotStored
from spotgrpo.shared.ids import Keys
from spotgrpo.shared.manifest import Latest, RunDocument

if TYPE_CHECKING:
    from spotgrpo.shared.rabbitmq import BrokerReport

AnyConfig: TypeAlias = Config | WorkerView

DEFAULT_CONSUMER_TIMEOUT_S: Final = 1800.0
"""RabbitMQ's own since 3.8.17; a server tells nobody its setting over AMQP."""
MARGIN: Final = 2.0
PERMISSIONS: Final = (
    "let a learner's user configure, write and read '^(spotgrpo\\..*|amq\\.default)$', and a worker's write and "
    "read that (rabbitmqctl set_permissions)"
)


# ---- broker ---------------------------------------------------------------------------------------------------


def check_broker(config: AnyConfig) -> Iterator[Check]:
    """Reach the broker and try on a scratch queue what a run needs of it."""
    from spotgrpo.shared.rabbitmq import inspect

    report = inspect(config.broker, config.run.id)
    if report.problem is not None:
        yield from_error("broker", report.problem)
        return
    heartbeat = f"heartbeat {report.heartbeat_s} s" if report.heartbeat_s else "no heartbeat"
    detail = f"{report.product} {report.version} at {report.url}, {heartbeat}"
    if report.heartbeat_s:
        yield Check("broker", "ok", detail)
    else:
        yield Check(
            "broker", "warn", detail, "a dead link is never noticed: set heartbeat in rabbitmq.conf"
        )
    yield from _permissions(report, is_learner=isinstance(config, Config))
    yield _queues(report)


def _permissions(report: BrokerReport, *, is_learner: bool) -> Iterator[Check]:
    refused = "; ".join(f"{what}: {answer}" for what, answer in report.refusals.items())
    if not report.can_declare:
        state: State = "fail" if is_learner else "ok"
        detail = (
            f"may not declare queues ({refused})"
            if is_learner
            else "a worker's: no queue may be declared"
        )
        yield Check("permissions", state, detail, PERMISSIONS if is_learner else "")
    elif not (report.can_publish and report.can_consume):
        yield Check("permissions", "fail", f"may not publish or consume ({refused})", PERMISSIONS)
    else:
        yield Check("permissions", "ok", "declares, publishes and consumes")
    if report.arguments_accepted is False:
        remedy = (
            "use RabbitMQ 3.10 or newer with quorum queues, and look for policies that contradict"
        )
        yield Check("queue arguments", "fail", f"refused ({refused})", remedy)
    elif report.arguments_accepted:
        yield Check("queue arguments", "ok", "quorum, delivery limit, dead letters at least once")


def _queues(report: BrokerReport) -> Check:
    there = {name: depth for name, depth in report.depths.items() if depth is not None}
    if not there:
        return Check("queues", "ok", "none of this run yet: the learner declares them")
    shown = (
        f"{name}: {depth.ready} ready, {depth.consumers} consumers" for name, depth in there.items()
    )
    return Check("queues", "ok", "; ".join(shown))


# ---- bucket ---------------------------------------------------------------------------------------------------


def check_bucket(config: AnyConfig) -> Iterator[Check]:
    """Reach the bucket and try every kind of access on scratch objects; then what it has of the run."""
    from spotgrpo.shared.s3 import inspect

    report = inspect(config.bucket)
    state: State = "fail" if report.reachable else "unreached"
    for problem in report.problems:
        what = problem.what.removesuffix(f": {problem.remedy}")
        yield Check("bucket", state, what, problem.remedy)
    if report.ok:
        where = config.bucket.url + (
            f" at {config.bucket.endpoint_url}" if config.bucket.endpoint_url else ""
        )
        yield Check(
            "bucket", "ok", f"{where}: read, write, list, delete, compare-and-swap, ETag polling"
        )
    if report.clock_skew_s is not None:
        yield Check("clock", "ok", f"{report.clock_skew_s:+.1f} s against the bucket's")
    if not report.reachable or not report.can_list:
        yield check_consumer_timeout(config, None)
        return
    yield from run_checks([("run", lambda: _check_run(config))])


def _check_run(config: AnyConfig) -> Iterator[Check]:
    """What the bucket has of this run id, and what its pace means for the broker."""
    latest = _latest(config)
    if latest is None:
        yield Check("run", "ok", f"{config.run.id} is new")
    else:
        state = "finished" if latest.finished else f"epoch {latest.epoch}"
        step = f", {latest.step_s:.1f} s a step" if latest.step_s else ""
        yield Check(
            "run", "ok", f"{config.run.id} is at version {latest.serving.version}, {state}{step}"
        )
        yield from _check_same_run(config)
    yield check_consumer_timeout(config, latest)


def _check_same_run(config: AnyConfig) -> Iterator[Check]:
    """Whether a learner would be let into the run, as far as that can be told without loading its model."""
    if not isinstance(config, Config):
        return
    from spotgrpo.shared.s3 import S3Store

    document = RunDocument.from_bytes(S3Store(config.bucket).get(Keys(config.run.id).run_json).body)
    pairs = {
        "lora.rank": (config.lora.rank, document.lora.rank),
        "lora.alpha": (config.lora.alpha, document.lora.alpha),
        "lora.use_rslora": (config.lora.use_rslora, document.lora.use_rslora),
        "model.dtype": (config.model.dtype, document.dtype),
        "train.max_staleness": (config.train.max_staleness, document.max_staleness),
        "rewards": (
            [reward.function for reward in config.rewards],
            [reward.function for reward in document.rewards],
        ),
    }
    for key, (here, there) in pairs.items():
        if here != there:
            remedy = f"run.json of {config.run.id} has {there!r}: give that, or another run.id"
            yield Check("run", "fail", f"{key} = {here!r}", remedy)


def _latest(config: AnyConfig) -> Latest | None:
    from spotgrpo.shared.s3 import S3Store

    try:
        return Latest.from_bytes(S3Store(config.bucket).get(Keys(config.run.id).latest).body)
    except NotStored:
        return None


def check_consumer_timeout(config: AnyConfig, latest: Latest | None) -> Check:
    """Whether RabbitMQ's consumer timeout leaves time for what a delivery is held for.

    A worker holds a task while it samples and scores its group; a learner holds a group until the commit
    that settles it, ``max_staleness + 2`` steps later at most.
    """
    held = config.worker.reward_timeout_s + config.worker.drain_s
    if latest is not None and isinstance(config, Config):
        held = max(held, latest.step_s * (config.train.max_staleness + 2))
    default = f"RabbitMQ's default is {DEFAULT_CONSUMER_TIMEOUT_S:.0f} s"
    detail = f"a delivery may be held for {held:.0f} s, and the sampling beside; {default}"
    if MARGIN * held <= DEFAULT_CONSUMER_TIMEOUT_S:
        return Check("consumer timeout", "ok", detail)
    remedy = (
        f"set consumer_timeout = {MARGIN * held * 1000:.0f} or more (milliseconds) in rabbitmq.conf"
    )
    return Check("consumer timeout", "warn", detail, remedy)
