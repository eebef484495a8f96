"""Notices of AWS, GCP and Azure over real HTTP, each against a server that speaks that cloud's API."""

from __future__ import annotations

import http.client
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from spotgrpo.producer.clouds import Azure
from spotgrpo.producer.notices import FAILURES_BEFORE_WORD, NoticeWatch
from spotgrpo.shared.config import WorkerConfig
from spotgrpo.shared.stopping import Stopping
from tests.tools.metadata_servers import (
    AwsMetadata,
    AzureMetadata,
    GcpMetadata,
    MetadataServer,
    serving,
)

POLL_S = 0.02
SECOND_S = 1.1
"""Stated times and Date headers are cut to seconds."""


@pytest.fixture
def aws() -> Iterator[AwsMetadata]:
    with serving(AwsMetadata()) as server:
        yield server


@pytest.fixture
def gcp() -> Iterator[GcpMetadata]:
    with serving(GcpMetadata()) as server:
        yield server


@pytest.fixture
def azure() -> Iterator[AzureMetadata]:
    with serving(AzureMetadata()) as server:
        yield server


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.DEBUG, "spotgrpo.producer"):
        yield


def watching(
    server: MetadataServer,
    notices: str,
    stopping: Stopping,
    *,
    timeout_s: float = 5.0,
    **options: object,
) -> AbstractContextManager[NoticeWatch]:
    config = WorkerConfig.model_validate({"notices": notices, "notice_url": server.url, **options})
    return NoticeWatch(config, stopping, poll_s=POLL_S, timeout_s=timeout_s, again_s=POLL_S)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def looks(server: MetadataServer, count: int = 4) -> None:
    """Wait until the server was asked ``count`` more times."""
    before = len(server.requests)
    until(lambda: len(server.requests) >= before + count)


def remaining_s(stopping: Stopping) -> float:
    assert stopping.wait(10)
    assert stopping.remaining_s is not None
    return stopping.remaining_s


def test_an_aws_interruption_drains_with_the_time_that_is_left(
    aws: AwsMetadata, caplog: pytest.LogCaptureFixture
) -> None:
    stopping = Stopping()
    with watching(aws, "aws", stopping) as watch:
        looks(aws)
        assert not stopping.is_set()
        aws.interrupt(in_s=80)
        assert remaining_s(stopping) == pytest.approx(80, abs=SECOND_S)
        watch.join(10)
        assert not watch.is_watching
    assert "AWS takes this machine back in " in caplog.text
    assert stopping.reason == "AWS takes this machine back"


@pytest.mark.parametrize(
    ("in_s", "left_s"), [(-30, 0), (0, 0), (4000, 120)], ids=["over", "now", "hours"]
)
def test_what_aws_states_is_never_less_than_none_nor_more_than_two_minutes(
    aws: AwsMetadata, in_s: float, left_s: float
) -> None:
    stopping = Stopping()
    aws.interrupt(in_s)
    with watching(aws, "aws", stopping):
        assert remaining_s(stopping) == pytest.approx(left_s, abs=SECOND_S)


@pytest.mark.parametrize("ahead_s", [-7200, 7200])
def test_a_wrong_clock_of_this_machine_changes_nothing(aws: AwsMetadata, ahead_s: float) -> None:
    aws.clock_ahead_s = ahead_s
    aws.interrupt(in_s=80)
    stopping = Stopping()
    with watching(aws, "aws", stopping):
        assert remaining_s(stopping) == pytest.approx(80, abs=SECOND_S)


def test_without_a_date_in_the_answer_this_machines_clock_is_taken(aws: AwsMetadata) -> None:
    aws.says_date = False
    aws.interrupt(in_s=80)
    stopping = Stopping()
    with watching(aws, "aws", stopping):
        assert remaining_s(stopping) == pytest.approx(80, abs=SECOND_S)


@pytest.mark.parametrize(
    "body", ["", "null", "[]", "{}", '{"time": 3}', '{"time": "soon"}', "<html>", '{"action'],
)  # fmt: skip
def test_an_aws_interruption_that_cannot_be_read_drains_all_the_same(
    aws: AwsMetadata, body: str, caplog: pytest.LogCaptureFixture
) -> None:
    aws.instance_action = body
    stopping = Stopping()
    with watching(aws, "aws", stopping):
        assert remaining_s(stopping) == pytest.approx(120, abs=SECOND_S)
    assert caplog.text.count("cannot be read") == 1


def test_expired_tokens_are_renewed(aws: AwsMetadata, caplog: pytest.LogCaptureFixture) -> None:
    aws.token_life_s = 3 * POLL_S
    stopping = Stopping()
    with watching(aws, "aws", stopping):
        until(lambda: aws.tokens >= 3)
        aws.interrupt(in_s=80)
        assert remaining_s(stopping) == pytest.approx(80, abs=SECOND_S)
    assert "trying again" not in caplog.text


def test_a_living_token_is_used_again(aws: AwsMetadata) -> None:
    with watching(aws, "aws", Stopping()):
        looks(aws, 10)
    assert aws.tokens == 1


def test_a_rebalance_recommendation_drains_without_an_end_that_may_come_later(
    aws: AwsMetadata, caplog: pytest.LogCaptureFixture
) -> None:
    stopping = Stopping()
    with watching(aws, "aws", stopping) as watch:
        aws.recommend()
        assert stopping.wait(10)
        assert stopping.remaining_s is None
        looks(aws, 6)
        aws.interrupt(in_s=100)
        watch.join(10)
        assert remaining_s(stopping) == pytest.approx(100, abs=SECOND_S)
    assert caplog.text.count("rebalance recommendation") == 1


def test_a_rebalance_recommendation_can_be_passed_over(aws: AwsMetadata) -> None:
    stopping = Stopping()
    aws.recommend()
    with watching(aws, "aws", stopping, drain_on_rebalance=False):
        looks(aws, 6)
        assert not stopping.is_set()
        aws.interrupt(in_s=60)
        assert remaining_s(stopping) == pytest.approx(60, abs=SECOND_S)
    assert not any("rebalance" in request for request in aws.requests)


def test_a_gcp_preemption_drains_within_its_thirty_seconds(
    gcp: GcpMetadata, caplog: pytest.LogCaptureFixture
) -> None:
    stopping = Stopping()
    with watching(gcp, "gcp", stopping):
        looks(gcp)
        assert not stopping.is_set()
        gcp.preempted = "TRUE"
        assert remaining_s(stopping) == pytest.approx(30, abs=SECOND_S)
    assert "GCP takes this machine back in 30 s: draining" in caplog.text


def test_a_shutdown_that_came_by_sigterm_gets_its_end_from_the_notice(gcp: GcpMetadata) -> None:
    stopping = Stopping()
    with watching(gcp, "gcp", stopping) as watch:
        stopping.ask("SIGTERM")
        assert stopping.remaining_s is None
        gcp.preempted = "TRUE"
        watch.join(10)
        assert remaining_s(stopping) == pytest.approx(30, abs=SECOND_S)
    assert stopping.reason == "SIGTERM"


@pytest.mark.parametrize("kind", Azure.ENDS)
def test_an_azure_event_of_this_machine_drains_until_it_may_start(
    azure: AzureMetadata, kind: str
) -> None:
    stopping = Stopping()
    with watching(azure, "azure", stopping):
        looks(azure)
        assert not stopping.is_set()
        azure.schedule(kind, "other", azure.machine.swapcase(), in_s=45)
        assert remaining_s(stopping) == pytest.approx(45, abs=SECOND_S)
    assert kind in stopping.reason
    assert not any(request.startswith("POST") for request in azure.requests)


def test_azure_events_of_others_and_those_that_a_machine_survives_do_not_drain(
    azure: AzureMetadata,
) -> None:
    azure.schedule("Preempt", "Vmss_30", "other", in_s=30)
    for kind in ("Freeze", "Reboot", "Redeploy"):
        azure.schedule(kind, in_s=900)
        azure.schedule(kind)
    azure.events += [3, {"EventType": "Preempt", "Resources": None}, {}]
    stopping = Stopping()
    with watching(azure, "azure", stopping) as watch:
        looks(azure)
        assert not stopping.is_set()
        assert watch.is_watching


def test_an_azure_event_that_has_started_leaves_no_time(azure: AzureMetadata) -> None:
    azure.schedule("Terminate", in_s=600)
    azure.schedule("Preempt")
    stopping = Stopping()
    with watching(azure, "azure", stopping):
        assert remaining_s(stopping) == 0


@pytest.mark.parametrize("not_before", ["soon", 17])
def test_an_azure_event_whose_time_cannot_be_read_drains_within_the_least_notice(
    azure: AzureMetadata, not_before: object
) -> None:
    azure.schedule("Preempt", not_before=not_before)
    stopping = Stopping()
    with watching(azure, "azure", stopping):
        assert remaining_s(stopping) == pytest.approx(30, abs=SECOND_S)


def test_azure_gets_the_time_it_takes_to_switch_its_events_on(azure: AzureMetadata) -> None:
    azure.first_delay_s = 0.8  # more than any later request may take
    azure.schedule("Preempt", in_s=45)
    stopping = Stopping()
    with watching(azure, "azure", stopping, timeout_s=0.4):
        assert remaining_s(stopping) == pytest.approx(45, abs=SECOND_S + 1)
    assert sum("scheduledevents" in request for request in azure.requests) == 1


@pytest.mark.parametrize("document", ["", "<html>", "[]", "null", "{}", '{"Events": 3'])
def test_azure_garbage_is_said_once_and_asked_again(
    azure: AzureMetadata, document: str, caplog: pytest.LogCaptureFixture
) -> None:
    azure.document = document or " "
    stopping = Stopping()
    with watching(azure, "azure", stopping):
        looks(azure, 3 * FAILURES_BEFORE_WORD)
        assert not stopping.is_set()
        assert caplog.text.count("trying again") == 1
        azure.document = None
        azure.schedule("Preempt", in_s=45)
        assert remaining_s(stopping) == pytest.approx(45, abs=SECOND_S)
    assert "works again" in caplog.text


def test_gcp_garbage_is_said_once_and_asked_again(
    gcp: GcpMetadata, caplog: pytest.LogCaptureFixture
) -> None:
    gcp.preempted = "perhaps"
    stopping = Stopping()
    with watching(gcp, "gcp", stopping):
        looks(gcp, 3 * FAILURES_BEFORE_WORD)
        assert not stopping.is_set()
        gcp.preempted = "TRUE"
        assert stopping.wait(10)
    assert caplog.text.count("trying again") == 1


@pytest.mark.parametrize(
    ("kind", "notices"), [(AwsMetadata, "aws"), (GcpMetadata, "gcp"), (AzureMetadata, "azure")]
)
@pytest.mark.parametrize("trouble", ["gone", "500", "slow"])
def test_a_server_that_dies_and_comes_back_is_said_twice_and_heard_again(
    kind: type[MetadataServer], notices: str, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    stopping = Stopping()
    timeout_s = 0.3 if trouble == "slow" else 5.0
    with (
        serving(kind()) as server,
        watching(server, notices, stopping, timeout_s=timeout_s) as watch,
    ):
        looks(server)
        if trouble == "gone":
            server.stop()
        elif trouble == "500":
            server.status = 500
        else:
            server.delay_s = 0.5
        until(lambda: "trying again" in caplog.text)
        time.sleep(3 * POLL_S)
        server.status, server.delay_s = None, 0.0
        if trouble == "gone":
            server.start()
        until(lambda: "works again" in caplog.text)
        assert watch.is_watching
        assert not stopping.is_set()
        notify(server)
        assert stopping.wait(10)
    assert caplog.text.count("trying again") == 1
    assert caplog.text.count("works again") == 1


def notify(server: MetadataServer) -> None:
    if isinstance(server, AwsMetadata):
        server.interrupt(in_s=100)
    elif isinstance(server, GcpMetadata):
        server.preempted = "TRUE"
    elif isinstance(server, AzureMetadata):
        server.schedule("Preempt", in_s=30)


@pytest.mark.parametrize("kind", [AwsMetadata, GcpMetadata, AzureMetadata])
def test_auto_finds_the_cloud_that_answers(
    kind: type[MetadataServer], caplog: pytest.LogCaptureFixture
) -> None:
    stopping = Stopping()
    with serving(kind()) as server, watching(server, "auto", stopping):
        until(lambda: "its notices drain this worker" in caplog.text)
        assert f"is {kind.__name__.removesuffix('Metadata').lower()}'s" in caplog.text.lower()
        notify(server)
        assert stopping.wait(10)
        assert stopping.remaining_s is not None


class Catchall(MetadataServer):
    """A web server that answers everything with a page, as a captive portal does."""

    def answer(self, request: object) -> tuple[int, str, dict[str, str]]:
        return 200, "<html>Welcome</html>", {}


@pytest.mark.parametrize("there_is", ["nothing", "a page", "an error"])
def test_auto_ends_in_silence_where_no_cloud_answers(
    there_is: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(Catchall()) as server:
        if there_is == "nothing":
            server.stop()
        if there_is == "an error":
            server.status = 503
        with watching(server, "auto", Stopping()) as watch:
            watch.join(10)
            assert not watch.is_watching
    assert "no cloud's metadata server answers" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}


def test_a_named_cloud_that_does_not_answer_is_said_once_and_asked_on(
    aws: AwsMetadata, caplog: pytest.LogCaptureFixture
) -> None:
    aws.stop()
    stopping = Stopping()
    with watching(aws, "aws", stopping) as watch:
        until(lambda: "trying again" in caplog.text)
        time.sleep(5 * POLL_S)
        assert watch.is_watching
        aws.interrupt(in_s=60)
        aws.start()
        assert stopping.wait(10)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 2
    assert "hop limit" in said[0]


def test_a_container_that_gets_no_token_is_found_to_be_on_aws_and_told_why(
    aws: AwsMetadata, caplog: pytest.LogCaptureFixture
) -> None:
    aws.loses_tokens = True
    with watching(aws, "auto", Stopping(), timeout_s=0.3):
        until(lambda: "metadata hop limit to 2" in caplog.text)
    assert "this machine is AWS's" in caplog.text


def test_no_request_is_made_where_notices_are_switched_off(aws: AwsMetadata) -> None:
    with watching(aws, "none", Stopping()) as watch:
        assert not watch.is_watching
        time.sleep(3 * POLL_S)
    assert not aws.requests


def test_proxies_of_the_environment_are_passed_over(
    aws: AwsMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    aws.interrupt(in_s=60)
    stopping = Stopping()
    with watching(aws, "auto", stopping):
        assert stopping.wait(10)


def test_neither_start_nor_exit_waits_for_a_slow_server(aws: AwsMetadata) -> None:
    aws.delay_s = 2.0
    aws.interrupt(in_s=60)
    stopping = Stopping()
    started = time.monotonic()
    config = WorkerConfig.model_validate({"notices": "aws", "notice_url": aws.url})
    with NoticeWatch(config, stopping, poll_s=POLL_S, timeout_s=5.0) as watch:
        until(lambda: bool(aws.requests))
    assert time.monotonic() - started < 1
    aws.delay_s = 0.0
    watch.join(10)
    assert not watch.is_watching
    assert not stopping.is_set()  # what comes after the end is not passed on


def test_the_servers_are_as_strict_as_the_real_ones(
    aws: AwsMetadata, gcp: GcpMetadata, azure: AzureMetadata
) -> None:
    def status(
        server: MetadataServer, path: str, method: str = "GET", **headers: str
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=names)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer.status, body

    action = "/latest/meta-data/spot/instance-action"
    assert status(aws, "/latest/api/token", "PUT")[0] == 400
    assert status(aws, "/latest/api/token")[0] == 405
    assert status(aws, action)[0] == 401
    ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    code, token = status(aws, "/latest/api/token", "PUT", **ttl)
    assert code == 200
    assert status(aws, action, **{"X-aws-ec2-metadata-token": token})[0] == 404
    assert status(gcp, "/computeMetadata/v1/instance/preempted")[0] == 403
    events = "/metadata/scheduledevents"
    assert status(azure, f"{events}?api-version=2020-07-01")[0] == 400
    assert status(azure, events, Metadata="true")[0] == 400
    code, body = status(azure, f"{events}?api-version=2020-07-01", Metadata="true")
    assert (code, json.loads(body)) == (200, {"DocumentIncarnation": 1, "Events": []})
