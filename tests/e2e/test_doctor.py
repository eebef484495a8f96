"""The doctor against real servers: what is right is seen to be right, and what is wrong is named."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from spotgrpo.cli.checks import Check, exit_code, run_checks
from spotgrpo.cli.servers import check_consumer_timeout
from spotgrpo.shared.config import WorkerView
from spotgrpo.shared.errors import BrokerUnavailable, ConfigError
from spotgrpo.shared.services import PrivateRabbitMQ, PrivateS3

SPOTGRPO = Path(sysconfig.get_path("scripts")) / "spotgrpo"


def environment(broker: PrivateRabbitMQ, bucket: PrivateS3) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SPOTGRPO_", "AWS_"))}
    return kept | {
        "SPOTGRPO_RUN__ID": "doctor",
        "SPOTGRPO_BROKER__URL": broker.url,
        "SPOTGRPO_BROKER__START_DEADLINE_S": "5",
        "SPOTGRPO_BUCKET__URL": f"s3://{bucket.bucket}/doctor",
        "SPOTGRPO_BUCKET__ENDPOINT_URL": bucket.endpoint_url,
        "SPOTGRPO_BUCKET__ACCESS_KEY_ID": bucket.access_key_id,
        "SPOTGRPO_BUCKET__SECRET_ACCESS_KEY": bucket.secret_access_key,
    }


def doctor(environ: dict[str, str], *args: str) -> tuple[int, dict[str, Check]]:
    command = [str(SPOTGRPO), "doctor", "--worker", "--json", *args]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr
    for name in ("SPOTGRPO_BROKER__URL", "SPOTGRPO_BUCKET__SECRET_ACCESS_KEY"):
        secret = urlsplit(environ[name]).password or environ[name]
        assert secret not in result.stdout + result.stderr
    checks = [Check(**item) for item in json.loads(result.stdout)["checks"]]
    return result.returncode, {check.name: check for check in checks}


def test_working_servers_are_found_to_work_and_left_as_they_were(
    rabbitmq_server: PrivateRabbitMQ, s3_server: PrivateS3
) -> None:
    code, checks = doctor(environment(rabbitmq_server, s3_server))
    assert code == 0, checks
    for name in ("broker", "permissions", "queue arguments", "queues", "bucket", "clock", "run"):
        assert checks[name].state == "ok", checks[name]
    assert "RabbitMQ" in checks["broker"].detail
    assert "compare-and-swap" in checks["bucket"].detail
    assert "spotgrpo.doctor." not in rabbitmq_server.ctl("list_queues", "name")


def test_one_wrong_password_hides_no_other_finding(
    rabbitmq_server: PrivateRabbitMQ, s3_server: PrivateS3
) -> None:
    environ = environment(rabbitmq_server, s3_server)
    password = urlsplit(rabbitmq_server.url).password
    assert password is not None
    environ["SPOTGRPO_BROKER__URL"] = rabbitmq_server.url.replace(password, "wrong-password")
    code, checks = doctor(environ)
    assert code == 2
    assert checks["broker"].state == "fail"
    assert checks["broker"].remedy
    assert checks["bucket"].state == "ok"


def test_a_vllm_server_that_does_not_answer_is_a_finding(
    rabbitmq_server: PrivateRabbitMQ, s3_server: PrivateS3
) -> None:
    environ = environment(rabbitmq_server, s3_server) | {
        "SPOTGRPO_WORKER__ENGINE": "vllm-server",
        "SPOTGRPO_WORKER__SERVERS": "['http://127.0.0.1:1']",
    }
    code, checks = doctor(environ)
    assert code == 3
    assert checks["vllm server"].state == "unreached"
    assert "http://127.0.0.1:1: " in checks["vllm server"].detail
    assert checks["broker"].state == "ok"


def test_a_misspelt_variable_is_a_finding_beside_those_about_the_machine(
    rabbitmq_server: PrivateRabbitMQ, s3_server: PrivateS3
) -> None:
    environ = environment(rabbitmq_server, s3_server) | {"SPOTGRPO_BUCKET__REGOIN": "eu"}
    code, checks = doctor(environ)
    assert code == 2
    assert checks["configuration"].detail == "bucket.regoin = 'eu'"
    assert "did you mean bucket.region?" in checks["configuration"].remedy
    assert checks["installation"].state == "ok"


# ---- the parts ------------------------------------------------------------------------------------------------


def test_a_check_that_raises_is_a_finding_and_the_next_one_runs() -> None:
    def wrong() -> Check:
        raise ConfigError("a.b", 3, "use 4")

    def gone() -> Check:
        raise BrokerUnavailable("amqp://u:hunter22@h does not answer")

    def broken() -> Check:
        raise RuntimeError("oh")

    checks = run_checks(
        [
            ("one", wrong),
            ("two", gone),
            ("three", broken),
            ("four", lambda: Check("four", "ok", "")),
        ]
    )
    assert [(c.name, c.state) for c in checks] == [
        ("one", "fail"),
        ("two", "unreached"),
        ("three", "fail"),
        ("four", "ok"),
    ]
    assert checks[0] == Check("one", "fail", "a.b = 3", "use 4")
    assert "hunter22" not in checks[1].detail


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["ok", "warn"], 0),
        (["ok", "unreached"], 3),
        (["unreached", "fail", "ok"], 2),
        ([], 0),
    ],
)
def test_the_exit_code_is_that_of_the_worst_finding(states: list[str], code: int) -> None:
    assert exit_code(Check("x", state, "") for state in states) == code  # type: ignore[arg-type]


@pytest.mark.parametrize(("timeout_s", "state"), [(300, "ok"), (1200, "warn")])
def test_rewards_that_may_take_long_need_a_longer_consumer_timeout(
    timeout_s: int, state: str
) -> None:
    view = WorkerView.model_validate(
        {
            "run": {"id": "r"},
            "broker": {"url": "amqp://h"},
            "bucket": {"url": "s3://b"},
            "worker": {"reward_timeout_s": timeout_s, "drain_s": 20},
        }
    )
    check = check_consumer_timeout(view, None)
    assert check.state == state
    assert ("consumer_timeout = 2440000" in check.remedy) == (state == "warn")
