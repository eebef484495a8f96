"""Checks of ``spotgrpo doctor`` that ask the broker and the bucket."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from spotgrpo.cli.checks import Check, State
from spotgrpo.shared.config import Config, WorkerView
from spotgrpo.shared.errors import NotStored, SpotGRPOError, WireError
from spotgrpo.shared.ids import Keys
from spotgrpo.shared.manifest import Latest

DEFAULT_CONSUMER_TIMEOUT_S: Final = 1800.0
"""RabbitMQ's own since 3.8.15; a server tells nobody its setting over AMQP."""
MARGIN: Final = 2.0


def check_broker(config: Config | WorkerView) -> Iterator[Check]:
    """Reach the broker and try on scratch queues what a run needs of it."""
    from spotgrpo.shared.rabbitmq import inspect

    yield Check("broker", "ok", str(inspect(config.broker, config.run.id)))


def check_bucket(config: Config | WorkerView) -> Iterator[Check]:
    """Reach the bucket and try every kind of access on scratch objects, compare-and-swap included."""
    from spotgrpo.shared.s3 import inspect

    report = inspect(config.bucket)
    where = config.bucket.url + (
        f" at {config.bucket.endpoint_url}" if config.bucket.endpoint_url else ""
    )
    state: State = "fail" if report.reachable else "unreached"
    for problem in report.problems:
        yield Check(
            "bucket", state, problem.what.removesuffix(f": {problem.remedy}"), problem.remedy
        )
    if report.ok:
        yield Check(
            "bucket",
            "ok",
            f"{where}: reads, writes, deletes, honours compare-and-swap, answers 304",
        )
    if report.clock_skew_s is not None:
        yield Check("clock", "ok", f"{report.clock_skew_s:+.1f} s against the bucket's")


def check_run(config: Config | WorkerView) -> Check:
    """What the bucket has of this run id."""
    latest = _latest(config)
    if latest is None:
        return Check("run", "ok", f"{config.run.id} is new")
    state = "finished" if latest.finished else f"served by epoch {latest.epoch}"
    step = f", {latest.step_s:.1f} s a step" if latest.step_s else ""
    return Check(
        "run", "ok", f"{config.run.id} is at version {latest.serving.policy}, {state}{step}"
    )


def check_consumer_timeout(config: Config | WorkerView) -> Check:
    """Whether RabbitMQ's consumer timeout leaves time for what a delivery is held for.

    A worker holds a task while it samples and scores its group; a learner holds a group until the commit
    that settles it, which is ``max_staleness + 2`` steps later at most.
    """
    latest: Latest | None = None
    with contextlib.suppress(SpotGRPOError):  # the bucket's own check says what is wrong
        latest = _latest(config)
    staleness = config.train.max_staleness if isinstance(config, Config) else 0
    held = config.worker.reward_timeout_s + config.worker.drain_s
    if latest is not None:
        held = max(held, latest.step_s * (staleness + 2))
    need = max(MARGIN * held, DEFAULT_CONSUMER_TIMEOUT_S)
    default = f"RabbitMQ's default is {DEFAULT_CONSUMER_TIMEOUT_S:.0f} s"
    detail = f"a delivery may be held for {held:.0f} s or more; {default}"
    remedy = f"set consumer_timeout = {int(need * 1000)} in rabbitmq.conf (milliseconds), or higher"
    state: State = "warn" if MARGIN * held > DEFAULT_CONSUMER_TIMEOUT_S else "ok"
    return Check("consumer timeout", state, detail, remedy if state == "warn" else "")


def _latest(config: Config | WorkerView) -> Latest | None:
    from spotgrpo.shared.s3 import S3Store

    key = Keys(config.run.id).latest
    try:
        return Latest.from_bytes(S3Store(config.bucket).get(key).body)
    except NotStored:
        return None
    except WireError as exc:
        raise WireError(f"{key}: {exc}; another version of this package wrote it?") from exc
