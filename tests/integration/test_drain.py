"""A drain, and a kill, over a real broker and a real bucket: header, redelivery and partials arrive as they must."""

from __future__ import annotations

import asyncio
import multiprocessing
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from spotgrpo.producer.engines.base import Chunk, GenerationRequest
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
from tests.loops.test_worker_loop import Bench, run, until, working
from tests.tools.loop_world import RUN


class ServedBench(Bench):
    """The bench of the loop tests over servers."""

    broker_config: BrokerConfig
    bucket_config: BucketConfig

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
        bench.broker_config, bench.bucket_config = BrokerConfig(url=rabbitmq_server.url), bucket
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


# ---- a kill -----------------------------------------------------------------------------------------------------


class Noting(Recording):
    """Appends time, seed and position of every token that it sampled to a file, which outlives a kill."""

    def __init__(self, token_s: float, path: Path) -> None:
        super().__init__(token_s)
        self.file = path.open("a", buffering=1)

    async def submit(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        position = len(request.prefix_ids)
        async for chunk in super().submit(request):
            for _ in chunk.token_ids:
                self.file.write(f"{time.time()} {request.seed} {position}\n")
                position += 1
            yield chunk


def work_until_killed(
    folder: Path, broker: BrokerConfig, bucket: BucketConfig, every_s: float
) -> None:
    """A worker in a process of its own."""

    async def story(bench: ServedBench) -> None:
        engine = Noting(0.01, folder / "sampled.txt")
        options = {"partial_every_s": every_s, "segment_tokens": 100, "inflight": "switch"}
        async with working(bench, engine, **options):
            await asyncio.sleep(3600)

    with closing(S3Store.connect(bucket)) as store:
        bench = ServedBench(folder, store=store)
        bench.broker_config, bench.bucket_config = broker, bucket
        asyncio.run(story(bench))


def noted(path: Path) -> tuple[list[float], Counter[tuple[str, int, int]]]:
    """When tokens were sampled, and which, as Recording counts them."""
    lines = [line.split() for line in path.read_text().splitlines()]
    which = Counter(("00000000.1", int(seed), int(position)) for _, seed, position in lines)
    return [float(at) for at, _, _ in lines], which


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_worker_killed_without_notice_loses_at_most_five_seconds_of_its_tokens(
    bench: ServedBench,
) -> None:
    every_s, tokens = 5.0, 2000
    bench.commit(0)
    bench.ask(0, tokens=tokens)
    process = multiprocessing.get_context("spawn").Process(
        target=work_until_killed,
        args=(bench.folder, bench.broker_config, bench.bucket_config, every_s),
    )
    process.start()

    async def story() -> None:
        await until(lambda: len(partials(bench)) == 1, 40.0)
        await asyncio.sleep(0.85 * every_s)  # the next one is near
        process.kill()
        await asyncio.to_thread(process.join)
        kept = partials(bench)[-1]
        times, first = noted(bench.folder / "sampled.txt")
        recent = sum(at > max(times) - every_s for at in times)
        second = Recording()
        (group,), worker = await finished(bench, second)
        both = first + second.sampled
        twice = sum(count == 2 for count in both.values())
        assert len(both) == 2 * tokens
        assert 0 < twice == first.total() - kept.tokens <= recent < first.total()
        assert worker._values()["tokens_resumed"] == kept.tokens
        for seed in (0, 1):
            expect_scripted(group, [VersionRun(V0, tokens)], seed)

    try:
        run(story)
    finally:
        process.kill()
        process.join()
