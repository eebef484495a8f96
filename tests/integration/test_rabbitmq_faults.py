"""The RabbitMQ adapter when the network, the broker or its users fail it."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pika.adapters.utils import io_services_utils

from spotgrpo.producer.run import wait_for_queues
from spotgrpo.shared.config import BrokerConfig
from spotgrpo.shared.errors import BrokerUnavailable, ConfigError, SpotGRPOError
from spotgrpo.shared.ports import Consumer, Delivery, Message, QueueDepth
from spotgrpo.shared.rabbitmq import RabbitMQBroker, inspect, redact
from spotgrpo.shared.rabbitmq.link import Connection, Link
from spotgrpo.shared.services import PrivateRabbitMQ
from spotgrpo.shared.stopping import Stopping
from tests.tools.proxy import Proxy
from tests.tools.tls_front import TlsFront, self_signed

WAIT_S = 30.0
BRIEFLY_S = 0.3

Make = Callable[..., RabbitMQBroker]


@pytest.fixture
def run() -> str:
    return f"f-{uuid.uuid4().hex[:10]}"


@pytest.fixture
def make(run: str) -> Iterator[Make]:
    """Makes brokers, closes them, and sees to it that they leave neither thread nor socket."""
    made: list[RabbitMQBroker] = []
    before = _open_sockets()

    def broker(url: str, **settings: object) -> RabbitMQBroker:
        made.append(RabbitMQBroker(BrokerConfig.model_validate({"url": url, **settings}), run))
        return made[-1]

    yield broker
    for one in made:
        one.close()
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith("spotgrpo-")
    ]
    assert _open_sockets() - before == set()


@pytest.fixture
def proxy(rabbitmq_server: PrivateRabbitMQ) -> Iterator[Proxy]:
    with Proxy(rabbitmq_server.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def fragile_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateRabbitMQ]:
    """A broker of this module's own, to be restarted, alarmed, and impatient with unacked deliveries."""
    folder = tmp_path_factory.mktemp("fragile")
    server = PrivateRabbitMQ(folder, consumer_timeout_s=3, channel_tick_s=1)
    server.start()
    yield server
    server.stop()


def _open_sockets() -> set[str]:
    """Sockets of this process that are connected to another one, by address."""
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            if not str(fd.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(fd.name))) as sock:
                if sock.family == socket.AF_INET:
                    found.add(f"{sock.getsockname()} {_peer(sock)}")
        except OSError:
            continue
    return {one for one in found if "None" not in one}


def _peer(sock: socket.socket) -> object:
    try:
        return sock.getpeername()
    except OSError:
        return None


def through(proxy: Proxy, server: PrivateRabbitMQ) -> str:
    return server.url.replace(f":{server.port}/", f":{proxy.port}/")


def take(consumer: Consumer) -> Delivery:
    delivery = consumer.take(WAIT_S)
    assert delivery is not None, "no delivery came"
    return delivery


def drain(consumer: Consumer) -> list[Delivery]:
    found = [take(consumer)]
    while delivery := consumer.take(BRIEFLY_S):
        found.append(delivery)
    return found


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.02)):
        if condition():
            return
        pause.wait(0.02)
    pytest.fail("the condition never held")


def lines(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]


# ---- the network ------------------------------------------------------------------------------------------------


def test_a_lost_confirm_repeats_with_the_same_id(
    make: Make, proxy: Proxy, rabbitmq_server: PrivateRabbitMQ
) -> None:
    broker = make(through(proxy, rabbitmq_server))
    broker.declare()
    publisher = broker.publisher()
    proxy.confirms_to_swallow = 1
    publisher.publish(broker.queues.tasks, Message(b"once", "id-1")).result(WAIT_S)
    assert proxy.confirms_to_swallow == 0
    got = drain(broker.consumer(broker.queues.tasks, 8))
    assert [(one.message.body, one.message.message_id) for one in got] == [(b"once", "id-1")] * 2


def test_a_reset_on_every_connect_is_outlasted_and_told_in_two_lines(
    make: Make,
    proxy: Proxy,
    rabbitmq_server: PrivateRabbitMQ,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker = make(through(proxy, rabbitmq_server))
    broker.declare()
    publisher = broker.publisher()
    caplog.set_level(logging.INFO, "spotgrpo")
    proxy.refusing = True
    proxy.cut()
    future = publisher.publish(broker.queues.tasks, Message(b"later"))
    before = proxy.accepted
    until(lambda: proxy.accepted >= before + 3)
    assert publisher.blocked
    assert not future.done()
    proxy.refusing = False
    future.result(WAIT_S)
    assert len(lines(caplog, "publisher: no connection")) == 1
    assert len(lines(caplog, "publisher: connected")) == 1


def test_a_broker_that_closes_every_connection_it_opens_is_asked_less_and_less_often(
    make: Make, proxy: Proxy, rabbitmq_server: PrivateRabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Link._on_open
    opened: list[float] = []

    def open_and_close(link: Link, connection: Connection) -> None:
        plain(link, connection)
        opened.append(time.monotonic())
        link.call_later(0.01, connection.abort)

    monkeypatch.setattr(Link, "_on_open", open_and_close)
    broker = make(through(proxy, rabbitmq_server))
    broker.declare()
    broker.consumer(broker.queues.tasks, 1)
    time.sleep(6.0)
    monkeypatch.setattr(Link, "_on_open", plain)
    assert 2 <= len(opened) <= 12, "a growing pause, not a busy loop"


@pytest.fixture
def resets(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One reset in the moment of connecting for each True in it: pika raises ValueError there."""
    connector = io_services_utils._AsyncStreamConnector
    plain: Callable[..., None] = connector.__init__
    due: list[bool] = []

    def init(self: object, *args: object, **kwargs: object) -> None:
        if due and due.pop():
            raise ValueError("Expected connected socket, but getpeername() failed")
        plain(self, *args, **kwargs)

    monkeypatch.setattr(connector, "__init__", init)
    return due


def test_a_socket_reset_in_the_moment_of_connecting_is_a_lost_connection(
    make: Make, proxy: Proxy, rabbitmq_server: PrivateRabbitMQ, resets: list[bool]
) -> None:
    """It must not end the thread, and with it the process."""
    broker = make(through(proxy, rabbitmq_server))
    broker.declare()
    publisher, queue = broker.publisher(), broker.queues.tasks
    publisher.publish(queue, Message(b"before")).result(WAIT_S)
    resets += [True, True]
    proxy.cut()
    publisher.publish(queue, Message(b"after")).result(WAIT_S)
    assert not resets


def test_a_socket_reset_in_the_moment_of_first_contact_is_tried_again(
    make: Make, rabbitmq_server: PrivateRabbitMQ, resets: list[bool]
) -> None:
    resets += [True, True]
    make(rabbitmq_server.url).declare()
    assert not resets


def test_a_stalled_line_is_noticed_by_the_heartbeat(
    make: Make, proxy: Proxy, rabbitmq_server: PrivateRabbitMQ
) -> None:
    broker = make(through(proxy, rabbitmq_server), heartbeat_s=1)
    broker.declare()
    consumer = broker.consumer(broker.queues.tasks, 1)
    until(lambda: consumer.generation == 1)
    proxy.stall()
    until(lambda: consumer.generation == 0)
    proxy.cut()
    proxy.resume()
    until(lambda: consumer.generation == 2)


def test_a_stalled_line_does_not_hang_the_close(
    make: Make, proxy: Proxy, rabbitmq_server: PrivateRabbitMQ
) -> None:
    broker = make(through(proxy, rabbitmq_server))
    broker.declare()
    publisher, consumer = broker.publisher(), broker.consumer(broker.queues.tasks, 1)
    until(lambda: consumer.generation == 1)
    proxy.stall()
    future = publisher.publish(broker.queues.tasks, Message(b"never"))
    publisher.close(BRIEFLY_S)
    consumer.close(BRIEFLY_S)
    with pytest.raises(BrokerUnavailable):
        future.result(0)


def test_heartbeats_go_on_while_the_callers_thread_computes(
    make: Make, rabbitmq_server: PrivateRabbitMQ
) -> None:
    broker = make(rabbitmq_server.url, heartbeat_s=1)
    broker.declare()
    publisher, consumer = broker.publisher(), broker.consumer(broker.queues.tasks, 1)
    until(lambda: consumer.generation == 1)
    # Far beyond what the broker forgives (3 s), in pure Python, which holds the interpreter.
    deadline = os.times().elapsed + 5
    while os.times().elapsed < deadline:
        sum(itertools.islice(itertools.count(), 100_000))
    publisher.publish(broker.queues.tasks, Message(b"still there")).result(WAIT_S)
    assert take(consumer).handle.generation == 1


# ---- the broker -------------------------------------------------------------------------------------------------


def test_a_restarted_broker_loses_nothing_that_it_confirmed(
    make: Make, fragile_server: PrivateRabbitMQ
) -> None:
    broker = make(fragile_server.url)
    broker.declare()
    publisher = broker.publisher()
    for number in range(20):
        publisher.publish(broker.queues.tasks, Message(b"%d" % number, f"{number}")).result(WAIT_S)
    fragile_server.write_tables()
    fragile_server.kill()
    later = [
        publisher.publish(broker.queues.tasks, Message(b"%d" % number, f"{number}"))
        for number in range(20, 40)
    ]
    consumer = broker.consumer(broker.queues.tasks, 128)
    fragile_server.start()
    for future in later:
        future.result(WAIT_S)
    got = drain(consumer)
    assert {one.message.message_id for one in got} == {f"{number}" for number in range(40)}


def test_a_consumer_that_pauses_around_a_restart_keeps_nothing(
    make: Make, fragile_server: PrivateRabbitMQ
) -> None:
    """What it works on meanwhile comes again, as it would anyhow: the channel of its ack is gone."""
    broker = make(fragile_server.url)
    broker.declare()
    publisher, tasks = broker.publisher(), broker.queues.tasks
    fickle = broker.consumer(tasks, 4)
    sent = [b"%d" % number for number in range(60)]
    for body in sent[:20]:
        publisher.publish(tasks, Message(body)).result(WAIT_S)
    in_work = [take(fickle), take(fickle)]
    fickle.pause()
    fragile_server.restart()
    later = [publisher.publish(tasks, Message(body)) for body in sent[20:]]
    for turn in (fickle.resume, fickle.ask_beyond, fickle.pause, fickle.ask_beyond) * 5:
        turn()
        time.sleep(0.05)
    for future in later:
        future.result(WAIT_S)
    fickle.ack([one.handle for one in in_work])  # in vain
    other = broker.consumer(tasks, 8)
    seen: set[bytes] = set()
    while len(seen) < len(sent):
        if (asked := fickle.take(0)) is not None:
            fickle.reject(asked.handle, requeue=True)
        delivery = take(other)
        seen.add(delivery.message.body)
        other.ack([delivery.handle])
    assert seen == {*sent}


def test_a_delivery_held_too_long_comes_again_on_a_new_channel(
    make: Make, fragile_server: PrivateRabbitMQ, caplog: pytest.LogCaptureFixture
) -> None:
    broker = make(fragile_server.url)
    broker.declare()
    broker.publisher().publish(broker.queues.tasks, Message(b"slow")).result(WAIT_S)
    consumer = broker.consumer(broker.queues.tasks, 4)
    first = take(consumer)
    second = take(consumer)
    assert second.message.body == b"slow"
    assert second.redelivered
    assert second.handle.generation == first.handle.generation + 1
    consumer.ack([first.handle])
    consumer.ack([second.handle])
    until(lambda: broker.depth(broker.queues.tasks) == QueueDepth(0, 1))
    assert consumer.generation == second.handle.generation
    assert len(lines(caplog, "consumer: the channel was closed")) == 1


def test_an_alarm_blocks_publishers_but_neither_consumers_nor_close(
    make: Make, fragile_server: PrivateRabbitMQ
) -> None:
    broker = make(fragile_server.url)
    broker.declare()
    publisher = broker.publisher()
    publisher.publish(broker.queues.tasks, Message(b"before")).result(WAIT_S)
    consumer = broker.consumer(broker.queues.tasks, 4)
    fragile_server.ctl("set_vm_memory_high_watermark", "absolute", "1MB")
    try:
        # RabbitMQ blocks a connection at the first message that it sends under an alarm.
        held = [publisher.publish(broker.queues.tasks, Message(b"held")) for _ in range(3)]
        until(lambda: publisher.blocked)
        consumer.ack([take(consumer).handle])
        publisher.close(BRIEFLY_S)
        assert all(isinstance(one.exception(0), BrokerUnavailable) for one in held)
    finally:
        fragile_server.ctl("set_vm_memory_high_watermark", "0.8")


def test_a_deleted_queue_is_declared_again_by_the_leader(
    make: Make, fragile_server: PrivateRabbitMQ
) -> None:
    broker = make(fragile_server.url)
    broker.declare()
    leader, publisher = broker.leader_consumer(4), broker.publisher()
    worker = broker.consumer(broker.queues.tasks, 4)
    assert leader.lead(WAIT_S)
    calls: list[int] = []
    leader.start(lambda: calls.append(1))
    until(lambda: leader.generation == 1)
    for queue in (broker.queues.rollouts, broker.queues.tasks):
        fragile_server.ctl("delete_queue", queue)
    publisher.publish(broker.queues.rollouts, Message(b"group")).result(WAIT_S)
    publisher.publish(broker.queues.tasks, Message(b"task")).result(WAIT_S)
    assert take(leader).message.body == b"group"
    assert take(worker).message.body == b"task"
    assert len(calls) >= 2


def test_a_message_over_the_brokers_own_limit_is_refused_and_others_go_on(
    make: Make, rabbitmq_server: PrivateRabbitMQ
) -> None:
    broker = make(rabbitmq_server.url)
    broker.declare()
    publisher = broker.publisher()
    big = publisher.publish(broker.queues.tasks, Message(bytes((128 << 20) + 1)))
    small = publisher.publish(broker.queues.tasks, Message(b"small"))
    with pytest.raises(ConfigError, match="max_message_size"):
        big.result(WAIT_S)
    small.result(WAIT_S)


def test_an_error_that_nobody_foresaw_comes_out_of_take(
    make: Make, rabbitmq_server: PrivateRabbitMQ
) -> None:
    broker = make(rabbitmq_server.url)
    broker.declare()
    leader = broker.leader_consumer(4)
    assert leader.lead(WAIT_S)

    def authorize() -> None:
        raise ZeroDivisionError("a defect")

    leader.start(authorize)
    with pytest.raises(SpotGRPOError, match="a defect"):
        leader.take(WAIT_S)


# ---- users ------------------------------------------------------------------------------------------------------


def test_a_worker_that_may_not_configure_anything_does_its_work(
    make: Make, rabbitmq_server: PrivateRabbitMQ, run: str
) -> None:
    learner = make(rabbitmq_server.url)
    learner.declare()
    name = f"w{uuid.uuid4().hex[:8]}"
    rabbitmq_server.ctl("add_user", name, "secret")
    rabbitmq_server.ctl("set_permissions", name, "^$", ".*", ".*")
    url = f"amqp://{name}:secret@127.0.0.1:{rabbitmq_server.port}/%2F"
    worker = make(url)
    assert worker.wait_until_declared(WAIT_S)
    learner.publisher().publish(learner.queues.tasks, Message(b"task")).result(WAIT_S)
    tasks = worker.consumer(worker.queues.tasks, 1)
    delivery = take(tasks)
    worker.publisher().publish(worker.queues.rollouts, Message(b"group")).result(WAIT_S)
    tasks.ack([delivery.handle])
    assert worker.subscribe(worker.queues.versions) is None
    assert worker.depth(worker.queues.rollouts) == QueueDepth(1, 0)
    with pytest.raises(ConfigError, match="may not declare"):
        worker.declare()
    report = inspect(BrokerConfig.model_validate({"url": url}), run)
    assert (report.can_connect, report.can_declare) == (True, False)
    assert "declare" in report.refusals


def test_a_user_who_may_not_read_or_write_is_told_so(
    make: Make, rabbitmq_server: PrivateRabbitMQ
) -> None:
    learner = make(rabbitmq_server.url)
    learner.declare()
    name = f"w{uuid.uuid4().hex[:8]}"
    rabbitmq_server.ctl("add_user", name, "secret")
    rabbitmq_server.ctl("set_permissions", name, "^$", "^$", "^$")
    worker = make(f"amqp://{name}:secret@127.0.0.1:{rabbitmq_server.port}/%2F")
    with pytest.raises(ConfigError, match="may not use"):
        worker.consumer(worker.queues.tasks, 1).take(WAIT_S)
    publisher = worker.publisher()
    for _ in range(2):
        with pytest.raises(ConfigError, match="may not publish"):
            publisher.publish(worker.queues.rollouts, Message(b"group")).result(WAIT_S)


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (lambda url: url.replace("@", "wrong@"), "the user or the password"),
        (lambda url: url.replace("%2F", "nowhere"), "virtual host"),
        (lambda url: url.replace("amqp:", "amqps:"), "does not speak TLS"),
    ],
)
def test_a_refusal_ends_the_start_at_once_and_shows_no_password(
    make: Make,
    rabbitmq_server: PrivateRabbitMQ,
    change: Callable[[str], str],
    remedy: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "spotgrpo")
    url = change(rabbitmq_server.url)
    password = url.split(":")[2].partition("@")[0]
    broker = make(url, start_deadline_s=600)
    with pytest.raises(ConfigError, match=remedy) as refusal:
        broker.declare()
    assert refusal.value.exit_code == 2
    assert password not in str(refusal.value)
    assert password not in caplog.text
    assert not lines(caplog, "trying again")


@pytest.mark.parametrize("url", ["http://host/", "amqp://", "amqp://u:p@host:port/", "nonsense"])
def test_what_is_no_broker_url_is_refused_before_anything(url: str) -> None:
    with pytest.raises(ConfigError, match=r"broker\.url"):
        RabbitMQBroker(BrokerConfig.model_validate({"url": url}), "r")


def test_a_missing_ca_file_is_refused_before_anything(tmp_path: Path) -> None:
    settings = {"url": "amqps://u:p@host/", "ca_file": tmp_path / "none.pem"}
    with pytest.raises(ConfigError, match=r"broker\.ca_file"):
        RabbitMQBroker(BrokerConfig.model_validate(settings), "r")


def test_a_tls_broker_is_trusted_through_its_ca_file_and_not_without(
    make: Make, rabbitmq_server: PrivateRabbitMQ, tmp_path: Path
) -> None:
    certificate, key = self_signed(tmp_path)
    with TlsFront(rabbitmq_server.port, certificate, key) as front:
        url = rabbitmq_server.url.replace("amqp:", "amqps:")
        url = url.replace(f"127.0.0.1:{rabbitmq_server.port}", f"localhost:{front.port}")
        broker = make(url, ca_file=certificate)
        broker.declare()
        body = os.urandom(3 << 20)
        broker.publisher().publish(broker.queues.tasks, Message(body)).result(WAIT_S)
        assert take(broker.consumer(broker.queues.tasks, 1)).message.body == body
        broker.close()
        with pytest.raises(ConfigError, match=r"broker\.ca_file"):
            make(url, start_deadline_s=600).declare()


def test_a_redacted_url_keeps_what_helps_and_hides_what_harms() -> None:
    assert redact("amqps://user:s3cret@host:5671/vh?x=s3cret") == "amqps://user:***@host:5671/vh"
    assert redact("amqp://host") == "amqp://host"


def test_an_unreachable_broker_is_given_up_at_the_deadline(
    make: Make, proxy: Proxy, rabbitmq_server: PrivateRabbitMQ, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "spotgrpo")
    proxy.refusing = True
    broker = make(through(proxy, rabbitmq_server), start_deadline_s=2)
    with pytest.raises(BrokerUnavailable) as failure:
        broker.publisher()
    assert failure.value.exit_code == 3
    assert proxy.accepted >= 2
    assert len(caplog.records) == 1


def test_a_stop_is_heard_while_the_broker_is_away(
    proxy: Proxy, rabbitmq_server: PrivateRabbitMQ, run: str
) -> None:
    """A worker waits for its queues; the broker, which it has reached, goes away for longer than a stop may take."""
    config = BrokerConfig.model_validate({"url": through(proxy, rabbitmq_server)})
    stopping = Stopping()
    broker, found = RabbitMQBroker(config, run, stopping), list[bool]()

    def wait() -> None:
        found.append(wait_for_queues(broker, broker.queues, stopping, 30.0))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    until(lambda: proxy.accepted >= 2)
    proxy.refusing = True
    proxy.cut()
    until(lambda: proxy.accepted >= 5)
    stopping.set()
    waiting.join(5)
    assert found == [False]


def test_a_broker_that_comes_late_is_waited_for(
    make: Make, proxy: Proxy, rabbitmq_server: PrivateRabbitMQ, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "spotgrpo")
    proxy.refusing = True
    broker = make(through(proxy, rabbitmq_server))
    starting = threading.Thread(target=broker.declare)
    starting.start()
    until(lambda: proxy.accepted >= 2)
    proxy.refusing = False
    starting.join(WAIT_S)
    assert not starting.is_alive()
    assert broker.depth(broker.queues.tasks) == QueueDepth(0, 0)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_inspecting_says_what_the_broker_is_and_changes_nothing(
    make: Make, rabbitmq_server: PrivateRabbitMQ, run: str
) -> None:
    broker = make(rabbitmq_server.url)
    broker.declare()
    broker.publisher().publish(broker.queues.tasks, Message(b"kept")).result(WAIT_S)
    queues = rabbitmq_server.ctl("-q", "list_queues", "name")
    report = inspect(BrokerConfig.model_validate({"url": rabbitmq_server.url}), run)
    assert report.can_connect
    assert report.product == "RabbitMQ"
    assert report.heartbeat_s == 30
    assert (report.can_declare, report.arguments_accepted) == (True, True)
    assert (report.can_publish, report.can_consume) == (True, True)
    until(lambda: rabbitmq_server.ctl("-q", "list_queues", "name") == queues)
    assert set(report.depths) == {broker.queues.dead, broker.queues.tasks, broker.queues.rollouts}
    until(lambda: broker.depth(broker.queues.tasks) == QueueDepth(1, 0))


def test_inspecting_an_unreachable_broker_names_the_problem(proxy: Proxy) -> None:
    proxy.refusing = True
    report = inspect(
        BrokerConfig.model_validate({"url": f"amqp://u:p@127.0.0.1:{proxy.port}/"}), "r"
    )
    assert not report.can_connect
    assert isinstance(report.problem, BrokerUnavailable)
