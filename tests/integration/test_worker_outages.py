"""A worker whose broker or bucket is away for a while: few tries, few lines, nothing lost or doubled."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from spotgrpo.shared.config import BrokerConfig, BucketConfig
from spotgrpo.shared.ids import TaskId
from spotgrpo.shared.ports import Broker
from spotgrpo.shared.rabbitmq import RabbitMQBroker
from spotgrpo.shared.s3 import S3Store
from spotgrpo.shared.services.rabbitmq import PrivateRabbitMQ
from spotgrpo.shared.services.seaweedfs import PrivateS3
from tests.integration.test_drain import ServedBench
from tests.loops.test_worker_loop import run, serves, until, working
from tests.tools.faulty_s3 import FaultyS3, Swallow
from tests.tools.loop_world import RUN
from tests.tools.proxy import Proxy
from tests.tools.scripted_engine import ScriptedEngine

OUTAGE_S = 8.0
TRIES_AT_ONCE = 8
"""While the pauses between the tries of a connection grow to seconds."""
TRIES_PER_S = 0.6
TASKS = 40


class Outage(ServedBench):
    """The learner's side goes to the servers, the worker's through proxies."""

    worker_broker: BrokerConfig

    def view(self) -> Broker:
        return RabbitMQBroker(self.worker_broker, RUN)


@pytest.fixture
def bucket(s3_server: PrivateS3) -> BucketConfig:
    return BucketConfig(
        url=f"s3://{s3_server.bucket}/outage-{secrets.token_hex(4)}",
        endpoint_url=s3_server.endpoint_url,
        access_key_id=s3_server.access_key_id,
        secret_access_key=s3_server.secret_access_key,
    )


@pytest.fixture
def line(rabbitmq_server: PrivateRabbitMQ) -> Iterator[Proxy]:
    with Proxy(rabbitmq_server.port) as proxy:
        yield proxy


@pytest.fixture
def bench(
    rabbitmq_server: PrivateRabbitMQ, bucket: BucketConfig, line: Proxy, tmp_path: Path
) -> Iterator[Outage]:
    direct = RabbitMQBroker(BrokerConfig(url=rabbitmq_server.url), RUN)
    direct.declare()
    with closing(direct), closing(S3Store.connect(bucket)) as store:
        bench = Outage(tmp_path, store=store)
        bench.worker_broker = BrokerConfig.model_validate({"url": rabbitmq_server.url})
        bench.open()
        url = rabbitmq_server.url.replace(f":{rabbitmq_server.port}/", f":{line.port}/")
        bench.worker_broker = BrokerConfig.model_validate({"url": url})
        yield bench
        bench.broker.close()


def said(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [message for message in caplog.messages if part in message]


def test_a_broker_that_is_away_costs_few_tries_two_lines_and_no_memory(
    bench: Outage, line: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "spotgrpo")

    async def story() -> None:
        bench.commit(0)
        engine = ScriptedEngine(token_s=0.2)
        async with working(bench, engine, stall_warn_s=3 / 8 * OUTAGE_S) as (worker, _, _):
            for index in range(TASKS):
                bench.ask(index, tokens=5)
            await until(lambda: len(engine.served) >= 8)
            caplog.clear()
            accepted, connections = line.accepted, len(line._pairs)
            line.refusing = True
            line.cut()
            await asyncio.sleep(OUTAGE_S)
            assert not worker._submitted
            assert 0 < len(worker._jobs) <= worker._prefetch
            tries = line.accepted - accepted
            assert tries <= connections * (TRIES_AT_ONCE + TRIES_PER_S * OUTAGE_S)
            assert len(said(caplog, "no connection: ")) == 1
            stalls = said(caplog, "nothing done for")
            assert len(stalls) == 1
            assert f"waiting for {bench.queues.rollouts} to confirm the group, which" in stalls[0]
            line.refusing = False
            engine.token_s = 0.0
            groups = await bench.answers(TASKS)
            await until(lambda: bool(said(caplog, "going on after")))
            await until(
                lambda: bool(said(caplog, "connected to")), seconds=12.0
            )  # the last of three
            await until(lambda: not worker._jobs)
        assert sorted(group.task_id for group in groups) == [TaskId(i) for i in range(TASKS)]
        assert bench.rollouts.take(0.5) is None  # each of them once
        assert len(engine.served) == 2 * TASKS  # and sampled once
        assert len(said(caplog, "connected to")) == 1
        assert len(said(caplog, "going on after")) == 1
        await until(lambda: bench.ready(bench.queues.tasks) == 0)

    run(story)


def test_a_bucket_that_is_away_costs_few_tries_and_two_lines_and_no_generation(
    bench: Outage, bucket: BucketConfig, s3_server: PrivateS3, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "spotgrpo")

    async def story(proxy: FaultyS3, store: S3Store) -> None:
        bench.commit(0)
        async with working(bench, ScriptedEngine(), store=store) as (worker, _, _):
            await until(lambda: serves(worker, 0))
            caplog.clear()
            proxy.play(Swallow(forward=False), times=1 << 30)
            before = proxy.count()
            bench.commit(1)
            await asyncio.sleep(OUTAGE_S)
            bench.ask(0)
            (group,) = await bench.answers(1)
            assert group.rollouts[0].versions[0].version.number == 0
            assert proxy.count() - before <= TRIES_AT_ONCE + 5 * OUTAGE_S
            assert len(said(caplog, "going on with v00000000.e0001")) == 1
            proxy.behave()
            await until(lambda: serves(worker, 1), seconds=35.0)
        troubles = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(troubles) == 1
        assert len(said(caplog, "new versions can be had again")) == 1

    server = s3_server
    with FaultyS3(server.endpoint_url, server.access_key_id, server.secret_access_key) as proxy:
        away = bucket.model_copy(update={"endpoint_url": proxy.url})
        with closing(S3Store(away)) as store:
            run(lambda: story(proxy, store))
