"""A drain over a real broker and a real bucket: the header, the redelivery and the partial arrive as they must."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from spotgrpo.shared.config import BrokerConfig, BucketConfig
from spotgrpo.shared.ports import Broker
from spotgrpo.shared.rabbitmq import RabbitMQBroker
from spotgrpo.shared.s3 import S3Store
from spotgrpo.shared.services.rabbitmq import PrivateRabbitMQ
from spotgrpo.shared.services.seaweedfs import PrivateS3
from spotgrpo.shared.steps import Step, observe
from spotgrpo.shared.wire import VersionRun
from tests.loops.test_partials import (
    TOKENS,
    V0,
    V1,
    Killed,
    Recording,
    drained,
    expect_scripted,
    finished,
    partials,
)
from tests.loops.test_worker_loop import Bench, run
from tests.tools.loop_world import RUN


class ServedBench(Bench):
    """The bench of the loop tests over servers."""

    broker_config: BrokerConfig

    def view(self) -> Broker:
        return RabbitMQBroker(self.broker_config, RUN)

    def ready(self, queue: str) -> int:
        depth = self.broker.depth(queue)
        assert depth is not None
        return depth.ready


@pytest.fixture
def bench(
    rabbitmq_server: PrivateRabbitMQ, s3_server: PrivateS3, tmp_path: Path
) -> Iterator[ServedBench]:
    bucket = BucketConfig(
        url=f"s3://{s3_server.bucket}/drain-{secrets.token_hex(4)}",
        endpoint_url=s3_server.endpoint_url,
        access_key_id=s3_server.access_key_id,
        secret_access_key=s3_server.secret_access_key,
    )
    with closing(S3Store.connect(bucket)) as store:
        bench = ServedBench(tmp_path, store=store)
        bench.broker_config = BrokerConfig(url=rabbitmq_server.url)
        bench.open()
        yield bench
        bench.broker.close()


def test_a_drained_group_carries_on_with_another_worker_and_version(bench: ServedBench) -> None:
    async def story() -> None:
        bench.commit(0)
        bench.ask(0, tokens=TOKENS)
        first, second = Recording(0.02), Recording()
        await drained(bench, first, after=12)
        (partial,) = partials(bench)
        assert partial.tokens == first.sampled.total()
        bench.commit(1)
        (group,), _ = await finished(bench, second)
        assert set((first.sampled + second.sampled).values()) == {1}
        for seed in (0, 1):
            k = len(partial.rollouts[seed].token_ids)
            expect_scripted(group, [VersionRun(V0, k), VersionRun(V1, TOKENS - k)], seed)

    run(story)


def test_a_redelivered_task_finds_the_partial_of_a_worker_that_died_before_it_handed_back(
    bench: ServedBench,
) -> None:
    def die(step: Step) -> None:
        if step is Step.WORKER_PARTIAL_STORED:
            raise Killed

    async def story() -> None:
        bench.commit(0)
        bench.ask(0, tokens=TOKENS)
        first, second = Recording(0.02), Recording()
        observe(die)
        with pytest.raises(Killed):
            await drained(bench, first, after=10)
        observe(None)
        (group,), _ = await finished(bench, second)
        expect_scripted(group, [VersionRun(V0, TOKENS)], 0)
        assert set((first.sampled + second.sampled).values()) == {1}

    try:
        run(story)
    finally:
        observe(None)
