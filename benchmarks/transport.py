"""Publishing and consuming through our adapter, as a ratio to bare pika doing the same on the same bodies.

Bare pika is the fastest of BlockingConnection and SelectConnection with windows of 1, 8 and 64, found for each
size before the pairs are run. Both sides use one persistent quorum queue, mandatory messages, a confirm and an ack
for each. The last line is one JSON object; a ratio is the lower of publishing and consuming, 1.0 being bare pika.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pika

from spotgrpo.shared.config import BrokerConfig
from spotgrpo.shared.ports import Message
from spotgrpo.shared.rabbitmq import RabbitMQBroker
from spotgrpo.shared.services import PrivateRabbitMQ

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"64k": 64 * KIB, "1m": MIB, "8m": 8 * MIB}
COUNTS = {"64k": 800, "1m": 80, "8m": 16}
QUICK_COUNTS = {"64k": 200, "1m": 24, "8m": 5}
WINDOWS = (1, 8, 64)
PAIRS = 5
WAIT_S = 120.0


@dataclass(frozen=True)
class Job:
    """``count`` messages of ``body`` through ``queue``."""

    url: str
    queue: str
    body: bytes
    count: int

    @property
    def properties(self) -> pika.BasicProperties:
        return pika.BasicProperties(delivery_mode=pika.DeliveryMode.Persistent, message_id="x")


# ---- bare pika ----------------------------------------------------------------------------------------------------


def publish_blocking(job: Job) -> float:
    connection = pika.BlockingConnection(pika.URLParameters(job.url))
    channel = connection.channel()
    channel.confirm_delivery()
    start = time.perf_counter()
    for _ in range(job.count):
        channel.basic_publish("", job.queue, job.body, job.properties, mandatory=True)
    took = time.perf_counter() - start
    connection.close()
    return took


def consume_blocking(job: Job, window: int) -> float:
    connection = pika.BlockingConnection(pika.URLParameters(job.url))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=window)
    start = 0.0
    for seen, (method, _properties, body) in enumerate(channel.consume(job.queue), 1):
        start = start or time.perf_counter()
        assert len(body) == len(job.body)
        channel.basic_ack(method.delivery_tag)
        if seen == job.count:
            break
    took = time.perf_counter() - start
    connection.close()
    return took


class BareSelect:
    """The shortest program that publishes or consumes through SelectConnection."""

    def __init__(self, job: Job, window: int) -> None:
        self.job, self.window = job, window
        self.sent = self.done = 0
        self.start = self.end = 0.0

    def run(self, on_channel: Callable[[Any], None]) -> float:
        connection = pika.SelectConnection(
            pika.URLParameters(self.job.url),
            on_open_callback=lambda c: c.channel(on_open_callback=on_channel),
            on_close_callback=lambda c, _: c.ioloop.stop(),
        )
        self.connection = connection
        connection.ioloop.start()
        connection.ioloop.close()
        return self.end - self.start

    def begin_publishing(self, channel: Any) -> None:
        self.channel = channel
        channel.confirm_delivery(self.on_confirm, callback=self.on_selected)

    def on_selected(self, _frame: Any) -> None:
        self.start = time.perf_counter()
        self.send()

    def send(self) -> None:
        job = self.job
        while self.sent < job.count and self.sent - self.done < self.window:
            self.sent += 1
            self.channel.basic_publish("", job.queue, job.body, job.properties, mandatory=True)

    def on_confirm(self, frame: Any) -> None:
        assert isinstance(frame.method, pika.spec.Basic.Ack)
        self.done = frame.method.delivery_tag if frame.method.multiple else self.done + 1
        if self.done == self.job.count:
            self.finish()
        else:
            self.send()

    def begin_consuming(self, channel: Any) -> None:
        channel.basic_qos(prefetch_count=self.window)
        channel.basic_consume(self.job.queue, self.on_message)

    def on_message(self, channel: Any, method: Any, _properties: Any, body: bytes) -> None:
        self.start = self.start or time.perf_counter()
        assert len(body) == len(self.job.body)
        channel.basic_ack(method.delivery_tag)
        self.done += 1
        if self.done == self.job.count:
            self.finish()

    def finish(self) -> None:
        self.end = time.perf_counter()
        self.connection.close()


def publish_select(job: Job, window: int) -> float:
    bare = BareSelect(job, window)
    return bare.run(bare.begin_publishing)


def consume_select(job: Job, window: int) -> float:
    bare = BareSelect(job, window)
    return bare.run(bare.begin_consuming)


# ---- ours ---------------------------------------------------------------------------------------------------------


class Ours:
    """The adapter, with its default window."""

    def __init__(self, url: str) -> None:
        self.broker = RabbitMQBroker(BrokerConfig(url=url), f"bench-{uuid.uuid4().hex[:8]}")
        self.broker.declare()
        self.queue = self.broker.queues.tasks

    def publish(self, job: Job) -> float:
        publisher = self.broker.publisher()
        start = time.perf_counter()
        futures = [
            publisher.publish(job.queue, Message(job.body, f"{n}")) for n in range(job.count)
        ]
        for future in futures:
            future.result(WAIT_S)
        took = time.perf_counter() - start
        publisher.close()
        return took

    def consume(self, job: Job) -> float:
        consumer = self.broker.consumer(job.queue, 64)
        start = 0.0
        for _ in range(job.count):
            delivery = consumer.take(WAIT_S)
            start = start or time.perf_counter()
            assert delivery is not None
            assert len(delivery.message.body) == len(job.body)
            consumer.ack([delivery.handle])
        took = time.perf_counter() - start
        consumer.close()
        return took


# ---- the measurement ----------------------------------------------------------------------------------------------

Contender = Callable[[Job], float]


def publishers(ours: Ours) -> dict[str, Contender]:
    bare: dict[str, Contender] = {"blocking": publish_blocking}
    for window in WINDOWS:
        bare[f"select {window}"] = lambda job, window=window: publish_select(job, window)
    return {"ours": ours.publish, **bare}


def consumers(ours: Ours) -> dict[str, Contender]:
    bare: dict[str, Contender] = {}
    for window in WINDOWS:
        bare[f"blocking {window}"] = lambda job, window=window: consume_blocking(job, window)
        bare[f"select {window}"] = lambda job, window=window: consume_select(job, window)
    return {"ours": ours.consume, **bare}


def compare(
    contenders: dict[str, Contender], run: Callable[[Contender], float], finalists_count: int
) -> dict[str, Any]:
    """Ours against the fastest bare contender: medians of seconds, and the median ratio of five pairs."""
    first = {name: run(one) for name, one in contenders.items() if name != "ours"}
    finalists = sorted(first, key=lambda name: first[name])[:finalists_count]
    times: dict[str, list[float]] = {name: [] for name in ("ours", *finalists)}
    for turn in range(PAIRS):
        order = list(times) if turn % 2 else list(times)[::-1]
        for name in order:
            times[name].append(run(contenders[name]))
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min(finalists, key=lambda name: medians[name])
    pairs = zip(times[best], times["ours"], strict=True)
    return {
        "best": best,
        "ours_s": medians["ours"],
        "bare_s": medians[best],
        "ratio": statistics.median(bare / ours for bare, ours in pairs),
    }


def measure(url: str, counts: dict[str, int], finalists: int) -> dict[str, float]:
    ours = Ours(url)
    control = pika.BlockingConnection(pika.URLParameters(url))
    channel = control.channel()
    ratios = {}
    for name, size in SIZES.items():
        job = Job(url, ours.queue, os.urandom(size), counts[name])

        def publish(contender: Contender, job: Job = job) -> float:
            took = contender(job)
            channel.queue_purge(job.queue)
            return took

        def consume(contender: Contender, job: Job = job) -> float:
            publish_select(job, 8)
            return contender(job)

        results = {
            "publish": compare(publishers(ours), publish, finalists),
            "consume": compare(consumers(ours), consume, finalists),
        }
        for what, result in results.items():
            show(name, what, job, result)
        ratios[f"ratio_{name}"] = round(min(one["ratio"] for one in results.values()), 3)
    control.close()
    ours.broker.close()
    return ratios


def show(name: str, what: str, job: Job, result: dict[str, Any]) -> None:
    rates = [job.count / result[key] for key in ("ours_s", "bare_s")]
    mb = [rate * len(job.body) / 1e6 for rate in rates]
    print(
        f"{name:>3} {what}: ours {rates[0]:7.1f}/s {mb[0]:6.1f} MB/s, "
        f"bare ({result['best']}) {rates[1]:7.1f}/s {mb[1]:6.1f} MB/s, ratio {result['ratio']:.2f}",
        flush=True,
    )


@contextlib.contextmanager
def broker_url() -> Iterator[str]:
    """The broker of SPOTGRPO_BROKER__URL, or a private one."""
    url = os.environ.get("SPOTGRPO_BROKER__URL")
    if url:
        yield url
        return
    with tempfile.TemporaryDirectory() as folder, PrivateRabbitMQ(Path(folder)) as server:
        yield server.url


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer messages: under a minute")
    quick = parser.parse_args().quick
    with broker_url() as url:
        ratios = measure(url, QUICK_COUNTS if quick else COUNTS, finalists=2 if quick else 3)
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
