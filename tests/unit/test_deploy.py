"""deploy/ holds together: what the compose file and the images name exists, and the servers take their settings.

Docker does not run here. What a container would do is tried with the same servers and commands outside of one.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import socket
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from spotgrpo.shared.config import BrokerConfig, Config
from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.ids import Queues
from spotgrpo.shared.loading import load_config
from spotgrpo.shared.ports import Message
from spotgrpo.shared.rabbitmq import RabbitMQBroker
from spotgrpo.shared.services import PrivateRabbitMQ, PrivateS3

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = ("Dockerfile.producer", "Dockerfile.consumer")
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+(\.\d+)?[\w.-]*")


def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return document


def instructions(name: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, continued lines joined."""
    text = (DEPLOY / name).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"deploy_{name}", DEPLOY / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- the compose file -------------------------------------------------------------------------------------


def test_every_image_is_pinned_and_every_volume_and_dependency_exists() -> None:
    document = compose()
    services = document["services"]
    assert set(services) == {"broker", "s3", "bucket", "learner", "worker"}
    for name, service in services.items():
        assert PINNED.fullmatch(service["image"]), name
        assert set(service.get("depends_on", {})) <= set(services)
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), volume
            elif not source.startswith("$"):
                assert source in document["volumes"], volume


def test_every_long_running_service_has_a_healthcheck() -> None:
    for name, service in compose()["services"].items():
        if "build" in service and name != "bucket":
            dockerfile = Path(service["build"]["dockerfile"]).name
            assert "HEALTHCHECK" in dict(instructions(dockerfile)), name
        else:
            assert "healthcheck" in service, name


def test_every_setting_that_the_containers_get_is_one_of_the_configuration() -> None:
    for service in compose()["services"].values():
        for key in service.get("environment", {}):
            if key.startswith("SPOTGRPO_"):
                section, name = key.removeprefix("SPOTGRPO_").lower().split("__")
                table = Config.model_fields[section].annotation
                assert table is not None
                assert name in table.model_fields, key  # type: ignore[attr-defined]


def test_every_variable_of_the_compose_file_is_in_the_example_of_dotenv_or_has_a_default() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    shown = set(
        re.findall(r"^(?:# )?([A-Z_]+)=", (DEPLOY / ".env.example").read_text(), re.MULTILINE)
    )
    required = set(re.findall(r"\$\{([A-Z_]+):\?", text))
    assert required == {"RABBITMQ_PASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    assert required <= shown
    assert not re.findall(r"\$\{[A-Z_]+\}(?!@|\})", text), "a variable without default or check"


def test_servers_listen_on_this_machine_only() -> None:
    for service in compose()["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_the_containers_configuration_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {
        key: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value).replace("${RABBITMQ_PASSWORD}", "pw")
        for key, value in compose()["services"]["learner"]["environment"].items()
        if not key.startswith("AWS_") and key != "<<"
    }
    config = load_config(DEPLOY / "examples/max/run.toml", environ=environment)
    assert config.broker.url.get_secret_value() == "amqp://spotgrpo:pw@broker:5672/%2F"
    assert config.bucket.endpoint_url == "http://s3:8333"
    assert config.run.id == "max"


# ---- the images -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_is_pinned_checks_its_health_and_does_not_run_as_root(name: str) -> None:
    found = instructions(name)
    bases = [value for key, value in found if key == "FROM"]
    assert all("${PYTHON_IMAGE}" in base for base in bases)
    default = next(value for key, value in found if key == "ARG" and "PYTHON_IMAGE" in value)
    assert PINNED.fullmatch(default.split("=")[1])
    users = [value for key, value in found if key == "USER"]
    assert users
    assert users[-1] not in {"root", "0"}
    assert [value for key, value in found if key == "HEALTHCHECK"]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_copies_what_exists_and_what_dockerignore_lets_through(name: str) -> None:
    let_through = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    for key, value in instructions(name):
        if key == "COPY" and not value.startswith("--from"):
            for source in shlex.split(value)[:-1]:
                path = Path(source)
                assert (ROOT / path).exists(), source
                assert {str(path), *map(str, path.parents)} & let_through, source


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_installs_extras_that_exist(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    defaults = dict(
        value.split("=") for key, value in instructions(name) if key == "ARG" and "=" in value
    )
    install = next(value for _, value in instructions(name) if "pip install" in value)
    wanted = re.search(r"\.\[(.*?)\]", install)
    assert wanted is not None
    extras = wanted[1].replace("${EXTRA}", defaults.get("EXTRA", "")).split(",")
    assert set(extras) <= set(project["optional-dependencies"])
    assert (ROOT / defaults["CONSTRAINTS"]).is_file()


def test_the_producers_image_has_nothing_of_the_consumer() -> None:
    copied = [value for key, value in instructions("Dockerfile.producer") if key == "COPY"]
    assert not any("consumer" in value for value in copied)


# ---- the scripts in them ----------------------------------------------------------------------------------


def test_a_container_is_healthy_while_both_servers_take_connections() -> None:
    healthcheck = load_script("healthcheck")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        both = {
            "SPOTGRPO_BROKER__URL": f"amqp://u:p@127.0.0.1:{port}/%2F",
            "SPOTGRPO_BUCKET__ENDPOINT_URL": f"http://127.0.0.1:{port}",
        }
        assert healthcheck.unreachable(both) == []
    assert healthcheck.unreachable(both) == list(both)


def test_the_bucket_is_made_once(s3_server: PrivateS3, monkeypatch: pytest.MonkeyPatch) -> None:
    make_bucket = load_script("make_bucket").make_bucket
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_access_key)
    where = {
        "SPOTGRPO_BUCKET__URL": "s3://made-by-deploy/runs",
        "SPOTGRPO_BUCKET__ENDPOINT_URL": s3_server.endpoint_url,
    }
    assert make_bucket(where)
    assert not make_bucket(where)


# ---- RabbitMQ's settings ----------------------------------------------------------------------------------


def test_a_server_takes_the_example_users_and_a_worker_may_only_work(
    rabbitmq_server: PrivateRabbitMQ,
) -> None:
    rabbitmq_server.ctl("import_definitions", str(DEPLOY / "rabbitmq/definitions.example.json"))
    _, _, address = rabbitmq_server.url.partition("@")

    def broker_of(user: str) -> RabbitMQBroker:
        url = f"amqp://{user}:change-me-{user}@{address}"
        return RabbitMQBroker(BrokerConfig.model_validate({"url": url}), "deploy-users")

    learner, worker, queues = broker_of("learner"), broker_of("worker"), Queues("deploy-users")
    try:
        learner.declare()
        assert worker.wait_until_declared(5)
        learner.publisher().publish(queues.tasks, Message(b"task")).result(10)
        taken = worker.consumer(queues.tasks, prefetch=1)
        delivery = taken.take(10)
        assert delivery is not None
        publisher = worker.publisher()
        publisher.publish(queues.rollouts, Message(b"group")).result(10)
        publisher.publish(queues.tasks, delivery.message).result(10)  # what a drain does
        assert worker.subscribe(queues.versions) is None
        with pytest.raises(ConfigError):
            worker.declare()
    finally:
        worker.close()
        learner.close()


def test_the_servers_settings_are_ones_that_rabbitmq_knows(
    rabbitmq_server: PrivateRabbitMQ, tmp_path: Path
) -> None:
    """Every key is one that the installed server's own schema files define."""
    assert rabbitmq_server.is_running
    schemas = list(Path("/usr/lib/rabbitmq").rglob("*.schema"))
    if not schemas:
        pytest.skip("this RabbitMQ keeps its schema files inside archives")
    defined = set(re.findall(r'\{mapping,\s*"([^"]+)"', "".join(p.read_text() for p in schemas)))
    lines = (DEPLOY / "rabbitmq/spotgrpo.conf").read_text().splitlines()
    keys = {
        line.lstrip("# ").split(" = ")[0] for line in lines if re.match(r"(# )?[a-z_.]+ = ", line)
    }
    assert keys
    assert keys <= defined


def test_the_example_users_have_the_permissions_that_the_readme_promises() -> None:
    document = json.loads((DEPLOY / "rabbitmq/definitions.example.json").read_text())
    worker = next(entry for entry in document["permissions"] if entry["user"] == "worker")
    assert worker["configure"] == "^$"
    queues = Queues("any-run_1")
    assert re.match(worker["read"], queues.tasks)
    assert not re.match(worker["read"], queues.rollouts)
