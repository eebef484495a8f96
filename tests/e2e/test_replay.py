"""``spotgrpo replay`` as a user types it, on a real bucket: what was skipped is listed, taken again, and mended."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

pytest.importorskip("torch")
pytest.importorskip("peft")

from spotgrpo.cli import replay
from spotgrpo.shared.config import BucketConfig
from spotgrpo.shared.s3 import S3Store
from spotgrpo.shared.services import PrivateS3
from tests.integration.test_replay import (
    contents,
    one_thread,
    run_config,
    run_into_the_ground,
)
from tests.tools.loop_world import RUN, World
from tests.tools.tiny_model import build_tiny_model

__all__ = ["one_thread"]
pytestmark = pytest.mark.engine

SPOTGRPO = Path(sysconfig.get_path("scripts")) / "spotgrpo"
STEP = "v00000000.e0001.3"
TOML = """
[run]
id = "{run}"
[broker]
url = "amqp://me:x@127.0.0.1:1/"
[model]
name = "./model"
dtype = "bfloat16"
[lora]
rank = 4
alpha = 8.0
[data]
path = "prompts.jsonl"
[[rewards]]
function = "rewards.py:length"
[loss]
entropy = 0.5
[bucket]
{bucket}
"""


def spotgrpo(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SPOTGRPO_")}
    command = [str(SPOTGRPO), "replay", "run.toml", *args]
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, s3_server: PrivateS3) -> World:
    """A run that overflowing gradients ended; queues in memory, the bucket real."""
    folder = tmp_path_factory.mktemp("replay")
    settings = {
        "url": f"s3://{s3_server.bucket}/{folder.name}",
        "endpoint_url": s3_server.endpoint_url,
        "access_key_id": s3_server.access_key_id,
        "secret_access_key": s3_server.secret_access_key,
    }
    bucket = "\n".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())
    (folder / "run.toml").write_text(TOML.format(run=RUN, bucket=bucket))
    config = run_config(build_tiny_model(folder / "model"), {"entropy": 1e36})
    store = S3Store(BucketConfig.model_validate(settings))
    return run_into_the_ground(folder, config, store=store)


@pytest.fixture
def quiet_root() -> Iterator[None]:
    """The command sets logging up for its process."""
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]


def in_process(
    folder: Path, capsys: pytest.CaptureFixture[str], *sets: str, as_json: bool
) -> tuple[int, str]:
    """Exit code and what was printed, without another import of torch."""
    try:
        replay.command(folder / "run.toml", STEP, list(sets), as_json)
    except typer.Exit as exc:
        return exc.exit_code, capsys.readouterr().out
    return 0, capsys.readouterr().out


@pytest.mark.usefixtures("quiet_root")
def test_skipped_steps_are_listed_taken_again_and_mended(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, before = world.folder, contents(world)
    listed = spotgrpo(folder)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert listed.stdout.startswith(f"3 skipped steps of {RUN}")
    assert f"{STEP}  20" in listed.stdout
    steps = json.loads(spotgrpo(folder, "--json").stdout)["steps"]
    assert [one["step"] for one in steps][-1] == STEP
    assert {one["groups"] for one in steps} == {2}
    code, text = in_process(folder, capsys, "loss.entropy=0.01", as_json=False)
    assert code == 0
    assert "changed     loss.entropy: 1e+36 -> 0.01" in text
    assert ": finite" in text
    assert contents(world) == before


@pytest.mark.usefixtures("quiet_root")
def test_what_is_still_not_finite_exits_with_1(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the recorded settings and dtype, whatever the TOML has now."""
    code, text = in_process(world.folder, capsys, as_json=False)
    assert code == 1
    assert "still not finite" in text
    assert "lora_B.default.weight: its norm overflows" in text
    assert "likely      the gradient overflows" in text
    code, text = in_process(world.folder, capsys, as_json=True)
    report: dict[str, Any] = json.loads(text)
    assert (code, report["finite"], report["grad_norm"]) == (1, False, "inf")
    assert (report["dtype"], report["changed"]) == ("float32", {})
    code, text = in_process(
        world.folder, capsys, "model.dtype=bfloat16", "loss.entropy=0", as_json=True
    )
    report = json.loads(text)
    assert (code, report["finite"], report["dtype"]) == (0, True, "bfloat16")


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["v00000007.e0001.1"], "STEP = 'v00000007.e0001.1': the bucket keeps no such step"),
        (["seven"], f"name one of v00000000.e0001.1, v00000000.e0001.2, {STEP}"),
        ([STEP, "--set", "data.split=x"], "--set = 'data.split=x': changes nothing of a replay"),
        ([STEP, "--set", "loss.entropie=1"], "did you mean loss.entropy?"),
        ([STEP, "--set", "run.id=nobody"], "run.id = 'nobody'"),
        ([STEP, "--set", "model.name=./nowhere"], "model.name = './nowhere'"),
        ([STEP, "--set", "train.threads=0"], "train.threads = 0"),
    ],
)
@pytest.mark.usefixtures("quiet_root")
def test_wrong_input_is_refused(
    world: World, capsys: pytest.CaptureFixture[str], args: list[str], part: str
) -> None:
    step, sets = args[0], args[2:]
    with pytest.raises(typer.Exit) as caught:
        replay.command(world.folder / "run.toml", step, sets, as_json=False)
    assert caught.value.exit_code == 2
    shown = capsys.readouterr()
    assert part in shown.err
    assert shown.out == ""
