from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

import pytest
from pydantic import SecretStr

from spotgrpo.shared.config import BrokerConfig, Config, WorkerView
from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.loading import load_config, option_table, redacted, secrets_of
from spotgrpo.shared.log import redact, redact_url
from spotgrpo.shared.rabbitmq import redact as server_redact
from spotgrpo.shared.rabbitmq.server import Server

README = Path(__file__).parents[2] / "README.md"

FULL = """
[run]
id = "r1"
[broker]
url = "amqp://user:hunter22@broker.example/vhost"
[bucket]
url = "s3://bucket/prefix"
access_key_id = "AK"
secret_access_key = "topsecret"
[model]
name = "org/model"
[data]
path = "prompts.jsonl"
[[rewards]]
function = "rewards.py:exact"
[train]
max_steps = 7
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(FULL)
    return path


def refusal(path: Path | None, *sets: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, sets, environ=environ)
    message = str(caught.value)
    assert "hunter22" not in message
    assert "topsecret" not in message
    return message


def test_a_set_wins_over_the_environment_and_that_over_the_file(toml: Path) -> None:
    environ = {"SPOTGRPO_TRAIN__MAX_STEPS": "8", "SPOTGRPO_LORA__RANK": "4", "HOME": "/"}
    assert load_config(toml, environ={}).train.max_steps == 7
    assert load_config(toml, environ=environ).train.max_steps == 8
    config = load_config(toml, ["train.max_steps=9"], environ=environ)
    assert (config.train.max_steps, config.lora.rank) == (9, 4)


@pytest.mark.parametrize(
    ("item", "section", "key", "value"),
    [
        ("sampling.temperature=0.7", "sampling", "temperature", 0.7),
        ('sampling.stop=["\\n", "x=y"]', "sampling", "stop", ["\n", "x=y"]),
        ("train.betas=[0.8, 0.99]", "train", "betas", (0.8, 0.99)),
        ("run.id=007", "run", "id", "007"),
        ("run.id=true", "run", "id", "true"),
        ('run.id="quoted"', "run", "id", "quoted"),
        ("train.refill_flat=true", "train", "refill_flat", True),
        ("lora.target_modules=all-linear", "lora", "target_modules", "all-linear"),
        ("lora.target_modules=['q_proj']", "lora", "target_modules", ["q_proj"]),
        ("worker.vllm={block_size=16}", "worker", "vllm", {"block_size": 16}),
        ("worker.vllm.dtype=half", "worker", "vllm", {"dtype": "half"}),
        ("worker.notices=none", "worker", "notices", "none"),
        (
            "worker.notice_url=http://[fd00:ec2::254]",
            "worker",
            "notice_url",
            "http://[fd00:ec2::254]",
        ),
        ("worker.notice_url=http://h.x:8/v", "worker", "notice_url", "http://h.x:8/v"),
        ("train={max_steps=3}", "train", "max_steps", 3),
        ("data.name=1 \nx = 2", "data", "name", "1 \nx = 2"),
    ],
)
def test_values_are_read_as_in_toml_and_else_as_text(
    toml: Path, item: str, section: str, key: str, value: object
) -> None:
    assert getattr(getattr(load_config(toml, [item], environ={}), section), key) == value


def test_an_element_of_a_list_is_named_by_its_index(toml: Path) -> None:
    sets = ["rewards.0.weight=2", "rewards.1.function=pkg.mod:other"]
    rewards = load_config(toml, sets, environ={}).rewards
    assert [(r.function, r.weight) for r in rewards] == [
        ("rewards.py:exact", 2.0),
        ("pkg.mod:other", 1.0),
    ]
    assert "rewards.2" in refusal(toml, "rewards.2.function=a:b")


def test_a_table_given_by_set_keeps_what_it_does_not_name(toml: Path) -> None:
    config = load_config(toml, ["bucket={region='eu'}"], environ={})
    assert (config.bucket.region, config.bucket.url) == ("eu", "s3://bucket/prefix")


@pytest.mark.parametrize(
    ("item", "right"),
    [
        ("sampling.temprature=0.7", "did you mean sampling.temperature?"),
        ("sampling.learning_rate=1", "did you mean train.learning_rate?"),
        ("trian.max_steps=1", "did you mean train.max_steps?"),
        ("model.nmae=x", "did you mean model.name?"),
        ("rewards.0.functoin=a:b", "did you mean rewards.*.function?"),
        ("group_size=4", "did you mean sampling.group_size?"),
        ("zzz.qqq=1", "README"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_right_one(
    toml: Path, item: str, right: str
) -> None:
    message = refusal(toml, item)
    assert message.startswith(item.partition("=")[0])
    assert item.partition("=")[2] in message
    assert "unknown" in message
    assert right in message


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("lora.use_dora=true", "lora.use_dora = True: not supported; leave it out: vLLM serves no"),
        ("lora.modules_to_save=['lm_head']", "lora.modules_to_save = ['lm_head']: not supported"),
        ("lora.bias=all", "lora.bias = 'all': not supported; leave it out: vLLM serves no biases"),
        ("sampling.top_p=0.9", "sampling.top_p = 0.9: not supported; leave it out: tokens are"),
    ],
)
def test_what_engines_do_not_serve_is_refused_by_its_name_with_what_to_do(
    toml: Path, item: str, message: str
) -> None:
    assert refusal(toml, item).startswith(message)


def test_an_unknown_key_in_the_file_is_refused_too(toml: Path) -> None:
    toml.write_text(FULL.replace("max_steps", "max_step") + "[sampling]\ntemprature = 0.7\n")
    assert refusal(toml).splitlines() == [
        "train.max_step = 7: unknown; did you mean train.max_steps?",
        "sampling.temprature = 0.7: unknown; did you mean sampling.temperature?",
    ]


def test_an_unknown_variable_is_refused_also_with_one_underscore_too_few(toml: Path) -> None:
    assert "broker.url" in refusal(toml, SPOTGRPO_BROKR__URL="amqp://u:hunter22@h")
    assert "SPOTGRPO_BROKER__URL" in refusal(toml, SPOTGRPO_BROKER_URL="amqp://u:hunter22@h")
    assert load_config(toml, environ={"SPOTGRPO_OF_SOMEBODY_ELSE": "1"}).run.id == "r1"


@pytest.mark.parametrize(
    ("item", "parts"),
    [
        ("sampling.group_size=1", ["sampling.group_size = 1", "greater than or equal to 2"]),
        ("train.max_steps=many", ["train.max_steps = 'many'", "integer"]),
        ("model.dtype=int8", ["model.dtype = 'int8'", "'bfloat16'"]),
        ("run.id=a b", ["run.id = 'a b'", "letters"]),
        ("bucket.url=bucket", ["bucket.url = 'bucket'", "s3://bucket/prefix"]),
        ("lora.target_modules=3", ["lora.target_modules = 3", "list", "all-linear"]),
        ("lora.dropout=0.1", ["lora.dropout = 0.1", "0"]),
        ("train=3", ["train = 3", "table"]),
        ("data.reasoning_gym=chain_sum", ["data = ", "exactly one of"]),
        ("rewards=[]", ["rewards = []", "at least 1"]),
        ("worker.notices=alibaba", ["worker.notices = 'alibaba'", "'none'", "'azure'"]),
        ("worker.notice_url=10.0.0.1", ["worker.notice_url = '10.0.0.1'", "http://host:port"]),
        ("worker.notice_url=https://h", ["worker.notice_url = 'https://h'", "http://host:port"]),
        ("worker.notice_url=http://h:99999", ["notice_url = 'http://h:99999'", "http://host:port"]),
        ("worker.drain_on_rebalance=maybe", ["drain_on_rebalance = 'maybe'", "boolean"]),
        ("worker.inflight=switch", ["worker.inflight = 'switch'", "set worker.segment_tokens"]),
        ("worker.inflight=stay", ["worker.inflight = 'stay'", "'finish'", "'switch'"]),
        ("worker.segment_tokens=0", ["worker.segment_tokens = 0", "greater than or equal to 1"]),
        ("worker.partial_every_s=0", ["worker.partial_every_s = 0", "greater than 0"]),
        ("nonsense", ["--set = 'nonsense'", "a.b=value"]),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_is_right(
    toml: Path, item: str, parts: list[str]
) -> None:
    message = refusal(toml, item)
    assert len(message.splitlines()) == 1
    for part in parts:
        assert part in message


def test_all_problems_are_listed_one_a_line(toml: Path) -> None:
    message = refusal(toml, "sampling.group_size=1", "train.max_steps=0", "lora.rnak=3")
    assert sorted(line.split(" = ")[0] for line in message.splitlines()) == [
        "lora.rnak",
        "sampling.group_size",
        "train.max_steps",
    ]


def test_what_is_missing_is_named_with_its_variable() -> None:
    lines = refusal(None).splitlines()
    keys = {line.split(":")[0].split(" = ")[0] for line in lines}
    assert keys == {"run.id", "broker.url", "bucket.url", "model.name", "data", "rewards"}
    assert any("SPOTGRPO_BROKER__URL" in line for line in lines)


@pytest.mark.parametrize(
    "line",
    [
        "[bucket]\nsecret_access_key = ['topsecret']",
        "[bucket]\nsecret_key = 'topsecret'",
        "[broker]\nurl = {password = 'hunter22'}",
        "[broker]\nuri = 'amqp://u:hunter22@h'",
        "[worker]\nvlm = {token = 'topsecret'}",
        "broker = 'amqp://u:hunter22@h'",
    ],
)
def test_a_refused_secret_is_not_shown(tmp_path: Path, line: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(line)
    assert line.partition("]\n")[2].partition(" ")[0] in refusal(path)


def test_broken_toml_and_missing_files_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    assert "no such file" in refusal(path)
    path.write_text("[run]\nid = \n")
    assert "line 2" in refusal(path)
    assert str(path) in refusal(path)
    path.write_bytes(b"id = '\xff'")
    assert "UTF-8" in refusal(path)
    assert "directory" in refusal(tmp_path)


def test_files_beside_the_toml_are_meant_wherever_one_stands(toml: Path) -> None:
    assert load_config(toml, environ={}).data.path == "prompts.jsonl"
    (toml.parent / "prompts.jsonl").touch()
    (toml.parent / "rewards.py").touch()
    (toml.parent / "org").mkdir()
    config = load_config(toml, environ={})
    assert config.data.path == str(toml.parent / "prompts.jsonl")
    assert config.rewards[0].function == "rewards.py:exact"  # goes into run.json
    assert config.model.name == "org/model"
    assert load_config(toml, ["data.path=prompts.jsonl"], environ={}).data.path == "prompts.jsonl"


def test_a_worker_reads_the_learners_file_and_passes_over_its_tables(toml: Path) -> None:
    view = load_config(toml, ["worker.max_inflight=3"], WorkerView, {})
    assert (view.run.id, view.worker.max_inflight) == ("r1", 3)
    toml.write_text(FULL.replace("max_steps = 7", "max_steps = 0"))
    assert load_config(toml, [], WorkerView, {}).run.id == "r1"
    toml.write_text(FULL.replace("max_steps", "max_step"))
    with pytest.raises(ConfigError, match=r"train\.max_step = 7: unknown"):
        load_config(toml, [], WorkerView, {})


def test_a_worker_starts_from_the_environment_alone() -> None:
    environ = {
        "SPOTGRPO_RUN__ID": "12",
        "SPOTGRPO_BROKER__URL": "amqp://u:p@h",
        "SPOTGRPO_BUCKET__URL": "s3://b",
        "SPOTGRPO_BUCKET__SECRET_ACCESS_KEY": "1234567890",
    }
    view = load_config(None, [], WorkerView, environ)
    assert (view.run.id, view.bucket.url, view.model) == ("12", "s3://b", None)
    assert view.bucket.secret_access_key is not None
    assert view.bucket.secret_access_key.get_secret_value() == "1234567890"


def test_a_redacted_configuration_shows_where_but_no_secret(toml: Path) -> None:
    config = load_config(toml, ["worker.vllm={hf_token='topsecret'}"], environ={})
    shown = redacted(config)
    assert shown["broker"]["url"] == "amqp://user:***@broker.example/vhost"
    assert shown["train"]["max_steps"] == 7
    assert "topsecret" not in str(shown)
    assert secrets_of(config) == ("hunter22", "topsecret")


@pytest.mark.parametrize(
    "password", ["12/hunter22", "12?hunter22", "12#hunter22", "hunter22@1/2", "a hunter22/b"]
)
def test_a_password_that_is_not_percent_encoded_is_refused_and_shown_nowhere(
    toml: Path, password: str
) -> None:
    url = f"amqp://user:{password}@broker.example/vhost"
    toml.write_text(FULL.replace("amqp://user:hunter22@broker.example/vhost", url))
    config = load_config(toml, environ={})
    assert redacted(config)["broker"]["url"] == "amqp://user:***@broker.example/vhost"
    assert secrets_of(config)[0] == password
    for text in (redact_url(url), server_redact(url), redact(f"to {url}!", secrets_of(config))):
        assert "hunter22" not in text
        assert "amqp://user:***@broker.example" in text
    with pytest.raises(ConfigError, match="percent-encode the password") as caught:
        Server(config.broker)
    assert caught.value.key == "broker.url"
    assert "hunter22" not in str(caught.value)
    Server(BrokerConfig(url=SecretStr(f"amqp://user:{quote(password, safe='')}@broker.example/v")))


def test_a_password_is_blacked_out_of_a_text_up_to_the_last_at() -> None:
    assert redact("cannot reach amqp://u:12/p@s/w@host now") == "cannot reach amqp://u:***@host now"
    assert redact("http://host:80/path and a@b") == "http://host:80/path and a@b"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("amqps://user:pw@host:5671/vh?x=pw#pw", "amqps://user:***@host:5671/vh"),
        ("amqp://host", "amqp://host"),
        ("user:pw@host", "user:***@host"),
        ("amqp://user:p@w@host", "amqp://user:***@host"),
    ],
)
def test_a_shown_url_keeps_user_host_and_virtual_host(url: str, shown: str) -> None:
    assert redact_url(url) == server_redact(url) == shown


def test_autocast_is_for_a_model_in_float32(toml: Path) -> None:
    assert load_config(toml, ["train.autocast=true"], environ={}).train.autocast
    message = refusal(toml, "train.autocast=true", "model.dtype=bfloat16")
    assert "train.autocast" in message
    assert "model.dtype is bfloat16" in message


def test_the_readme_lists_every_option_as_it_is() -> None:
    text = README.read_text(encoding="utf-8")
    if "<!-- options -->" not in text:
        pytest.skip("README has no option table yet")
    shown = text.partition("<!-- options -->")[2].partition("<!-- /options -->")[0]
    assert shown.strip() == option_table().strip()


def test_every_option_says_what_it_means() -> None:
    rows = option_table().splitlines()[2:]
    assert len(rows) > len(Config.model_fields)
    for row in rows:
        key, _default, meaning = (cell.strip() for cell in row.strip("|").split(" | "))
        assert meaning, key


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["worker.engine=vllm-server"], "needs worker.servers, at least one address"),
        (["worker.servers=['gpu1:8000']"], "should be http://host:port or https://host:port"),
        (["worker.servers=['http://u:p@gpu1']"], "should be http://host:port"),
        (["worker.servers=['http://a', 'http://a/v1/']"], "names a server twice"),
        (["worker.server_adapter_dir=/mnt/x"], "needs worker.cache_dir"),
    ],
)
def test_servers_that_no_worker_could_use_are_refused(
    toml: Path, sets: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(toml, sets, environ={})


def test_servers_are_given_as_to_other_clients_and_their_key_is_a_secret(toml: Path) -> None:
    sets = ["worker.servers=['http://gpu1:8000/v1', 'https://b.example/x/']"]
    config = load_config(toml, sets, environ={"SPOTGRPO_WORKER__SERVER_API_KEY": "topsecret"})
    assert config.worker.servers == ["http://gpu1:8000", "https://b.example/x"]
    assert "topsecret" in secrets_of(config)
    assert "topsecret" not in str(redacted(config))
