"""What ports.py promises of a broker, held against RabbitMQ and against the one in memory."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from spotgrpo.shared.config import BrokerConfig
from spotgrpo.shared.errors import BrokerUnavailable, ConfigError, Fenced, StoreUnavailable
from spotgrpo.shared.memory.broker import MemoryBroker, MemoryBrokerServer
from spotgrpo.shared.ports import Broker, Consumer, Delivery, Handle, Message, QueueDepth
from spotgrpo.shared.rabbitmq import RabbitMQBroker
from tests.tools.proxy import Proxy

WAIT_S = 20.0
BRIEFLY_S = 0.3


@dataclass
class World:
    """A broker under test: views of it for several roles, and a way to cut their connections."""

    make: Callable[..., Any]
    cut: Callable[[], None]


@pytest.fixture(params=["memory", "rabbitmq"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    run = f"c-{uuid.uuid4().hex[:10]}"
    made: list[Any] = []
    if request.param == "memory":
        server = MemoryBrokerServer()
        yield World(
            lambda **settings: _keep(made, MemoryBroker(server, run, **settings)),
            server.drop_connections,
        )
        _close(made)
        return
    rabbitmq = request.getfixturevalue("rabbitmq_server")
    with Proxy(rabbitmq.port) as proxy:
        url = rabbitmq.url.replace(f":{rabbitmq.port}/", f":{proxy.port}/")
        yield World(
            lambda **settings: _keep(made, RabbitMQBroker(BrokerConfig(url=url, **settings), run)),
            proxy.cut,
        )
        _close(made)


@pytest.fixture
def broker(world: World) -> Any:
    broker = world.make()
    broker.declare()
    return broker


def _keep(made: list[Any], broker: Any) -> Any:
    made.append(broker)
    return broker


def _close(made: list[Any]) -> None:
    for broker in made:
        broker.close()
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith("spotgrpo-")
    ]


def publish(broker: Any, *bodies: bytes, queue: str | None = None) -> None:
    publisher = broker.publisher()
    futures = [publisher.publish(queue or broker.queues.tasks, Message(body)) for body in bodies]
    for future in futures:
        future.result(WAIT_S)


def take(consumer: Consumer) -> Delivery:
    delivery = consumer.take(WAIT_S)
    assert delivery is not None, "no delivery came"
    return delivery


def bodies(consumer: Consumer, count: int) -> list[bytes]:
    return [take(consumer).message.body for _ in range(count)]


def until(condition: Callable[[], bool]) -> None:
    """Wait for a state that is reached on another thread."""
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.02)):
        if condition():
            return
        pause.wait(0.02)
    pytest.fail("the condition never held")


# ---- publishing and consuming -----------------------------------------------------------------------------------


def test_a_message_arrives_with_its_id_and_headers(broker: Broker) -> None:
    message = Message(b"\x00body\xff", "id-1", {"run": "r", "schema": 3})
    broker.publisher().publish(broker.queues.tasks, message).result(WAIT_S)
    delivery = take(broker.consumer(broker.queues.tasks, 4))
    assert delivery.message == message
    assert not delivery.redelivered


def test_an_empty_body_arrives_and_gets_an_id(broker: Broker) -> None:
    publish(broker, b"")
    message = take(broker.consumer(broker.queues.tasks, 4)).message
    assert message.body == b""
    assert message.message_id


def test_messages_arrive_in_the_order_they_were_published(broker: Broker) -> None:
    sent = [b"%d" % number for number in range(300)]
    consumer = broker.consumer(broker.queues.tasks, 512)
    publish(broker, *sent)
    assert bodies(consumer, 300) == sent


def test_several_threads_may_publish_at_once_through_a_small_window(broker: Broker) -> None:
    publisher = broker.publisher(window=2)

    def send(name: int) -> None:
        for number in range(25):
            publisher.publish(broker.queues.tasks, Message(b"%d.%d" % (name, number))).result(
                WAIT_S
            )

    threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    got = bodies(broker.consumer(broker.queues.tasks, 128), 100)
    assert sorted(got) == sorted(b"%d.%d" % (name, n) for name in range(4) for n in range(25))


def test_a_message_for_a_missing_queue_waits_for_the_queue(world: World) -> None:
    worker, learner = world.make(), world.make()
    publisher = worker.publisher()
    future = publisher.publish(worker.queues.rollouts, Message(b"early"))
    until(lambda: publisher.blocked)
    assert not future.done()
    learner.declare()
    future.result(WAIT_S)
    assert bodies(learner.consumer(learner.queues.rollouts, 1), 1) == [b"early"]
    until(lambda: not publisher.blocked)


def test_a_full_queue_holds_publishers_back_and_drops_nothing(world: World) -> None:
    broker = world.make(max_queued_groups=3)
    broker.declare()
    publisher = broker.publisher(window=8)
    futures = []
    # One by one: the limit is soft, and a burst is taken whole.
    while not publisher.blocked:
        assert len(futures) < 20, "the queue never refused"
        futures.append(publisher.publish(broker.queues.rollouts, Message(b"%d" % len(futures))))
        until(lambda: publisher.blocked or futures[-1].done())
    futures += [
        publisher.publish(broker.queues.rollouts, Message(b"late %d" % n)) for n in range(5)
    ]
    assert not any(future.done() for future in futures[-5:])
    consumer = broker.consumer(broker.queues.rollouts, 1)
    got = []
    for _ in futures:
        delivery = take(consumer)
        got.append(delivery.message.body)
        consumer.ack([delivery.handle])
    for future in futures:
        future.result(WAIT_S)
    assert len(set(got)) == len(futures)
    until(lambda: not publisher.blocked)


def test_publish_blocks_while_the_window_is_full(world: World) -> None:
    broker = world.make()
    publisher = broker.publisher(window=2)
    for _ in range(2):
        publisher.publish(broker.queues.tasks, Message(b"held"))
    third = threading.Thread(
        target=publisher.publish, args=(broker.queues.tasks, Message(b"third"))
    )
    third.start()
    third.join(BRIEFLY_S)
    assert third.is_alive()
    broker.declare()
    third.join(WAIT_S)
    assert not third.is_alive()
    consumer = broker.consumer(broker.queues.tasks, 8)
    assert sorted(bodies(consumer, 3)) == [b"held", b"held", b"third"]


def test_closing_a_publisher_fails_what_the_broker_never_confirmed(world: World) -> None:
    broker = world.make()
    publisher = broker.publisher()
    future = publisher.publish(broker.queues.tasks, Message(b"nowhere"))
    publisher.close(BRIEFLY_S)
    publisher.close(BRIEFLY_S)
    for one in (future, publisher.publish(broker.queues.tasks, Message(b"later"))):
        with pytest.raises(BrokerUnavailable):
            one.result(WAIT_S)


def test_closing_a_publisher_waits_for_confirms(broker: Broker) -> None:
    publisher = broker.publisher()
    futures = [publisher.publish(broker.queues.tasks, Message(b"x" * 100_000)) for _ in range(50)]
    publisher.close(WAIT_S)
    assert [future.exception(0) for future in futures] == [None] * 50


def test_a_future_that_is_done_may_publish_again_from_its_callback(broker: Broker) -> None:
    publisher = broker.publisher()
    sent = threading.Event()

    def again(_: object) -> None:
        publisher.publish(broker.queues.tasks, Message(b"second"))
        sent.set()

    publisher.publish(broker.queues.tasks, Message(b"first")).add_done_callback(again)
    assert sent.wait(WAIT_S)
    assert bodies(broker.consumer(broker.queues.tasks, 4), 2) == [b"first", b"second"]


# ---- settling ---------------------------------------------------------------------------------------------------


def test_prefetch_bounds_what_is_unsettled(broker: Broker) -> None:
    publish(broker, b"1", b"2", b"3")
    consumer = broker.consumer(broker.queues.tasks, 2)
    first, second = take(consumer), take(consumer)
    assert consumer.take(BRIEFLY_S) is None
    consumer.ack([second.handle])
    assert take(consumer).message.body == b"3"
    consumer.ack([first.handle])


def test_one_delivery_beyond_the_window_comes_when_it_is_asked_for(broker: Broker) -> None:
    publish(broker, b"1", b"2", b"3", b"4", b"5")
    consumer = broker.consumer(broker.queues.tasks, 2)
    got = [take(consumer) for _ in range(2)]
    assert consumer.take(BRIEFLY_S) is None
    for body in (b"3", b"4"):
        consumer.ask_beyond()
        got.append(take(consumer))
        assert (got[-1].message.body, got[-1].redelivered) == (body, False)
        assert consumer.take(BRIEFLY_S) is None
    consumer.ack([got[3].handle, got[1].handle, got[0].handle])  # the window has room again
    assert take(consumer).message.body == b"5"
    consumer.close()
    other = broker.consumer(broker.queues.tasks, 8)
    assert sorted(bodies(other, 2)) == [b"3", b"5"]
    assert other.take(BRIEFLY_S) is None


def test_asking_beyond_the_window_in_vain_changes_nothing(broker: Broker) -> None:
    consumer = broker.consumer(broker.queues.tasks, 1)
    consumer.ask_beyond()  # the window is open
    publish(broker, b"1")
    first = take(consumer)
    for _ in range(2):
        consumer.ask_beyond()  # the queue is empty
        assert consumer.take(BRIEFLY_S) is None
    publish(broker, b"2", b"3")
    assert consumer.take(BRIEFLY_S) is None
    consumer.ask_beyond()
    assert take(consumer).message.body == b"2"
    consumer.ask_beyond()
    consumer.cancel()  # what may be on its way goes back
    other = broker.consumer(broker.queues.tasks, 8)
    assert bodies(other, 1) == [b"3"]
    consumer.ack([first.handle])


def test_a_paused_consumer_is_sent_nothing_and_gives_back_what_it_did_not_take(
    broker: Broker,
) -> None:
    publish(broker, b"1", b"2", b"3")
    consumer = broker.consumer(broker.queues.tasks, 3)
    held = take(consumer)
    until(lambda: broker.depth(broker.queues.tasks) == QueueDepth(0, 1))
    for _ in range(2):
        consumer.pause()
    until(lambda: (broker.depth(broker.queues.tasks) or QueueDepth(0, 0)).ready == 2)
    publish(broker, b"4")
    assert consumer.take(BRIEFLY_S) is None
    consumer.ack([held.handle])
    other = broker.consumer(broker.queues.tasks, 3)
    assert sorted(bodies(other, 3)) == [b"2", b"3", b"4"]
    assert other.take(BRIEFLY_S) is None


def test_a_paused_consumer_gets_what_it_asks_for_and_all_once_it_resumes(broker: Broker) -> None:
    consumer = broker.consumer(broker.queues.tasks, 2)
    consumer.pause()
    until(lambda: broker.depth(broker.queues.tasks) == QueueDepth(0, 0))
    publish(broker, b"1", b"2", b"3", b"4", b"5")
    first = None
    while first is None:
        consumer.ask_beyond()
        first = consumer.take(BRIEFLY_S)
    assert (first.message.body, first.redelivered) == (b"1", False)
    assert consumer.take(BRIEFLY_S) is None
    for _ in range(2):
        consumer.resume()
    assert take(consumer).handle.generation == first.handle.generation
    consumer.ack([first.handle])
    consumer.close()
    other = broker.consumer(broker.queues.tasks, 8)
    assert sorted(bodies(other, 4)) == [b"2", b"3", b"4", b"5"]


def test_nothing_stays_with_a_consumer_that_pauses_while_messages_are_on_the_way(
    world: World,
) -> None:
    """One is worked on all the while; whatever else it was sent, asked for or gave back comes to another."""
    broker = world.make(delivery_limit=10_000)
    broker.declare()
    sent = [b"%d" % number for number in range(240)]
    fickle, publisher = broker.consumer(broker.queues.tasks, 4), broker.publisher()
    publish(broker, b"in work")
    in_work, seen = take(fickle), []
    other = broker.consumer(broker.queues.tasks, 4)
    for number, body in enumerate(sent):
        publisher.publish(broker.queues.tasks, Message(body))
        (fickle.pause, fickle.ask_beyond, fickle.resume)[number % 3]()
        if number % 5 == 0 and (delivery := fickle.take(0)) is not None:
            fickle.reject(delivery.handle, requeue=True)
        while (delivery := other.take(0)) is not None:
            seen.append(delivery.message.body)
            other.ack([delivery.handle])
    fickle.pause()
    for _ in range(int(WAIT_S / BRIEFLY_S)):
        if len(seen) == len(sent):
            break
        while (delivery := fickle.take(0)) is not None:  # asked for before it paused at last
            fickle.reject(delivery.handle, requeue=True)
        while (delivery := other.take(BRIEFLY_S)) is not None:
            seen.append(delivery.message.body)
            other.ack([delivery.handle])
    assert sorted(seen) == sorted(sent)
    fickle.ack([in_work.handle])
    fickle.close()
    assert other.take(BRIEFLY_S) is None, "the ack of what was in work was void"


def test_acked_messages_are_gone_and_others_come_back_in_order(broker: Broker) -> None:
    publish(broker, b"1", b"2", b"3", b"4", b"5")
    consumer = broker.consumer(broker.queues.tasks, 8)
    deliveries = [take(consumer) for _ in range(5)]
    consumer.ack([deliveries[0].handle, deliveries[3].handle])
    consumer.ack([deliveries[1].handle])
    consumer.close()
    other = broker.consumer(broker.queues.tasks, 8)
    again = [take(other) for _ in range(2)]
    assert [(one.message.body, one.redelivered) for one in again] == [(b"3", True), (b"5", True)]
    assert other.take(BRIEFLY_S) is None


def test_acking_twice_or_nonsense_harms_nothing(broker: Broker) -> None:
    publish(broker, b"1", b"2")
    consumer = broker.consumer(broker.queues.tasks, 8)
    first, second = take(consumer), take(consumer)
    consumer.ack([first.handle])
    consumer.ack([first.handle, Handle(first.handle.generation, 999), Handle(7, 1)])
    consumer.reject(first.handle, requeue=True)
    consumer.ack([second.handle])
    until(lambda: broker.depth(broker.queues.tasks) == QueueDepth(0, 1))
    publish(broker, b"3")
    assert take(consumer).handle.generation == first.handle.generation


def test_a_requeued_delivery_comes_again_and_a_rejected_one_is_a_dead_letter(
    broker: Broker,
) -> None:
    publish(broker, b"again", b"dead")
    consumer = broker.consumer(broker.queues.tasks, 1)
    consumer.reject(take(consumer).handle, requeue=True)
    again = take(consumer)
    assert (again.message.body, again.redelivered) == (b"again", True)
    consumer.ack([again.handle])
    consumer.reject(take(consumer).handle, requeue=False)
    dead = take(broker.consumer(broker.queues.dead, 1)).message
    assert dead.body == b"dead"
    assert dead.headers["x-first-death-reason"] == "rejected"
    assert dead.headers["x-first-death-queue"] == broker.queues.tasks


def test_a_message_over_its_delivery_limit_is_a_dead_letter(world: World) -> None:
    broker = world.make(delivery_limit=2)
    broker.declare()
    publish(broker, b"poison")
    consumer = broker.consumer(broker.queues.tasks, 1)
    counts = []
    for _ in range(3):
        delivery = take(consumer)
        counts.append(delivery.message.headers.get("x-delivery-count", 0))
        consumer.reject(delivery.handle, requeue=True)
    assert counts == [0, 1, 2]
    dead = take(broker.consumer(broker.queues.dead, 1)).message
    assert (dead.body, dead.headers["x-first-death-reason"]) == (b"poison", "delivery_limit")
    assert consumer.take(BRIEFLY_S) is None


def test_a_cancelled_consumer_takes_no_more_but_can_still_ack(broker: Broker) -> None:
    publish(broker, b"1", b"2", b"3")
    consumer = broker.consumer(broker.queues.tasks, 2)
    first = take(consumer)
    consumer.cancel()
    consumer.cancel()
    assert consumer.take(WAIT_S) is None
    other = broker.consumer(broker.queues.tasks, 8)
    assert sorted(bodies(other, 2)) == [b"2", b"3"]
    consumer.ack([first.handle])
    consumer.close()
    assert other.take(BRIEFLY_S) is None


def test_a_closed_consumer_wakes_who_waits_for_it(broker: Broker) -> None:
    consumer = broker.consumer(broker.queues.tasks, 2)
    results: list[Delivery | None] = []
    waiter = threading.Thread(target=lambda: results.append(consumer.take()))
    waiter.start()
    consumer.close()
    consumer.close()
    waiter.join(WAIT_S)
    assert results == [None]
    assert consumer.generation == 0


# ---- lost connections -------------------------------------------------------------------------------------------


def test_a_cut_connection_voids_handles_and_brings_the_deliveries_back(
    broker: Broker, world: World
) -> None:
    publish(broker, b"1", b"2", b"3")
    consumer = broker.consumer(broker.queues.tasks, 8)
    old = take(consumer)
    world.cut()
    again = take(consumer)
    # A delivery that was in the buffer when the line was cut may still come out; then the next one is new.
    while again.handle.generation == old.handle.generation:
        again = take(consumer)
    consumer.ack([old.handle])
    assert (again.message.body, again.redelivered) == (b"1", True)
    assert again.handle.generation > old.handle.generation
    assert consumer.generation == again.handle.generation
    rest = [take(consumer), take(consumer)]
    assert [one.message.body for one in rest] == [b"2", b"3"]
    consumer.ack([one.handle for one in rest])
    consumer.close()
    # The void handle named the same tag as "1" has now: it must not have settled it.
    assert bodies(broker.consumer(broker.queues.tasks, 8), 1) == [b"1"]


def test_publishing_goes_on_through_cut_connections(broker: Broker, world: World) -> None:
    publisher = broker.publisher(window=16)
    consumer = broker.consumer(broker.queues.tasks, 512)
    futures = []
    for number in range(120):
        if number % 40 == 20:
            world.cut()
        futures.append(
            publisher.publish(broker.queues.tasks, Message(b"%d" % number, f"id-{number}"))
        )
    for future in futures:
        future.result(WAIT_S)
    got = {take(consumer).message.message_id}
    while delivery := consumer.take(BRIEFLY_S):
        got.add(delivery.message.message_id)
    assert got == {f"id-{number}" for number in range(120)}


# ---- the leader -------------------------------------------------------------------------------------------------


def test_one_leads_and_the_standby_follows_when_it_goes(world: World) -> None:
    first, second = world.make(), world.make()
    first.declare()
    active = first.leader_consumer(4)
    assert active.lead(WAIT_S)
    standby = second.leader_consumer(4)  # each tries from its making on: the second only now
    assert not standby.lead(BRIEFLY_S)
    active.close()
    assert standby.lead(WAIT_S)


def test_a_leader_consumes_only_once_started_and_authorized(broker: Broker) -> None:
    publish(broker, b"group", queue=broker.queues.rollouts)
    leader = broker.leader_consumer(4)
    assert leader.lead(WAIT_S)
    assert leader.take(BRIEFLY_S) is None
    calls: list[int] = []
    leader.start(lambda: calls.append(1))
    delivery = take(leader)
    assert delivery.message.body == b"group"
    assert calls == [1]
    leader.ack([delivery.handle])


def test_a_leader_is_authorized_again_after_a_cut(broker: Broker, world: World) -> None:
    publish(broker, b"group", queue=broker.queues.rollouts)
    leader = broker.leader_consumer(4)
    calls: list[int] = []
    assert leader.lead(WAIT_S)
    leader.start(lambda: calls.append(1))
    old = take(leader)
    world.cut()
    new = take(leader)
    assert (new.message.body, new.redelivered) == (b"group", True)
    assert new.handle.generation > old.handle.generation
    assert len(calls) == 2


def test_a_fenced_leader_ends_and_frees_the_queue(world: World) -> None:
    broker = world.make()
    broker.declare()
    leader = broker.leader_consumer(4)

    def authorize() -> None:
        raise Fenced("epoch 2 took over")

    assert leader.lead(WAIT_S)
    leader.start(authorize)
    with pytest.raises(Fenced, match="epoch 2"):
        leader.take(WAIT_S)
    with pytest.raises(Fenced):
        leader.take(WAIT_S)
    assert world.make().leader_consumer(4).lead(WAIT_S)


def test_a_bucket_that_does_not_answer_delays_the_leader(broker: Broker) -> None:
    publish(broker, b"group", queue=broker.queues.rollouts)
    answers = [StoreUnavailable("no answer"), StoreUnavailable("no answer"), None]

    def authorize() -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    leader = broker.leader_consumer(4)
    assert leader.lead(WAIT_S)
    leader.start(authorize)
    assert take(leader).message.body == b"group"
    assert answers == []


# ---- the rest ---------------------------------------------------------------------------------------------------


def test_news_reach_every_subscriber_and_nobody_else_is_troubled(broker: Broker) -> None:
    subscribers = [broker.subscribe(broker.queues.versions) for _ in range(2)]
    deaf = broker.subscribe(broker.queues.telemetry)
    publisher = broker.publisher()
    publisher.broadcast(broker.queues.versions, Message(b"v7", headers={"run": "r"}))
    for subscriber in subscribers:
        assert subscriber is not None
        delivery = take(subscriber)
        assert (delivery.message.body, delivery.message.headers) == (b"v7", {"run": "r"})
        subscriber.ack([delivery.handle])
    assert deaf is not None
    assert deaf.take(BRIEFLY_S) is None


def test_a_broadcast_that_nobody_can_take_is_dropped_in_silence(world: World) -> None:
    broker = world.make()
    publisher = broker.publisher()
    publisher.broadcast(broker.queues.versions, Message(b"lost"))
    broker.declare()
    publisher.publish(broker.queues.tasks, Message(b"kept")).result(WAIT_S)
    subscriber = broker.subscribe(broker.queues.versions)
    assert subscriber is not None
    until(lambda: _heard(publisher, subscriber, broker.queues.versions))


def _heard(publisher: Any, subscriber: Consumer, exchange: str) -> bool:
    publisher.broadcast(exchange, Message(b"found"))
    delivery = subscriber.take(BRIEFLY_S)
    return delivery is not None and delivery.message.body == b"found"


def test_a_subscription_survives_a_cut(broker: Broker, world: World) -> None:
    subscriber, publisher = broker.subscribe(broker.queues.versions), broker.publisher()
    assert subscriber is not None
    world.cut()
    until(lambda: _heard(publisher, subscriber, broker.queues.versions))


def test_workers_wait_until_the_learner_has_declared(world: World) -> None:
    worker, learner = world.make(), world.make()
    assert worker.wait_until_declared(0.0) is False
    seen: list[bool] = []
    waiter = threading.Thread(target=lambda: seen.append(worker.wait_until_declared(WAIT_S)))
    waiter.start()
    learner.declare()
    waiter.join(WAIT_S)
    assert seen == [True]


def test_a_consumer_made_before_its_queue_begins_with_it(world: World) -> None:
    worker, learner = world.make(), world.make()
    consumer = worker.consumer(worker.queues.tasks, 4)
    assert consumer.take(BRIEFLY_S) is None
    learner.declare()
    publish(learner, b"at last")
    assert bodies(consumer, 1) == [b"at last"]


def test_declaring_again_is_fine_and_other_arguments_are_refused(world: World) -> None:
    world.make().declare()
    world.make().declare()
    with pytest.raises(ConfigError, match="stands with other arguments"):
        world.make(max_queued_groups=5).declare()


def test_depth_counts_what_is_ready_and_who_consumes(broker: Broker) -> None:
    assert broker.depth(broker.queues.tasks) == QueueDepth(0, 0)
    assert broker.depth("spotgrpo.nobody.tasks.t1") is None
    publish(broker, b"1", b"2", b"3")
    consumer = broker.consumer(broker.queues.tasks, 1)
    take(consumer)
    until(lambda: broker.depth(broker.queues.tasks) == QueueDepth(2, 1))


def test_a_closed_broker_gives_nothing_out(broker: Broker) -> None:
    consumer, publisher = broker.consumer(broker.queues.tasks, 1), broker.publisher()
    broker.close()
    broker.close()
    assert consumer.take(WAIT_S) is None
    with pytest.raises(BrokerUnavailable):
        publisher.publish(broker.queues.tasks, Message(b"x")).result(WAIT_S)
    with pytest.raises(BrokerUnavailable):
        broker.consumer(broker.queues.tasks, 1)
