from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from spotgrpo.consumer.progress import Progress
from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.ids import Queues
from spotgrpo.shared.log import SecretsFilter, configure_logging, redact
from spotgrpo.shared.metrics import MetricsWriter, write_summary
from spotgrpo.shared.stopping import Stopping


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_record_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    with MetricsWriter(path, clock=lambda: 12.5) as writer:
        writer.write({"reward": 0.5, "loss": float("nan"), "norm": np.float32("inf")})
        writer.write({"n": np.int64(3), "a": np.array([1.0, np.nan])}, role="worker")
        assert records(path) == [
            {
                "schema": 1,
                "time": 12.5,
                "role": "learner",
                "reward": 0.5,
                "loss": None,
                "norm": None,
            },
            {"schema": 1, "time": 12.5, "role": "worker", "n": 3, "a": [1.0, None]},
        ]


@pytest.mark.parametrize("torn", ['{"n": 2, "te', '{"n": 2}', "x" * 200_000])
def test_a_torn_last_line_is_cut_off_on_reopening(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"n": 1})
    with path.open("a") as file:
        file.write(torn)
    with MetricsWriter(path) as writer:
        writer.write({"n": 3})
    assert [record["n"] for record in records(path)] == [1, 3]


def test_a_file_of_nothing_but_a_torn_line_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("{")
    MetricsWriter(path).close()
    assert path.read_text() == ""


def test_lines_of_many_threads_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:

        def write(number: int) -> None:
            for _ in range(50):
                writer.write({"n": number, "text": "y" * 500})

        threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(str(r["n"]) for r in records(path)) == sorted("0123" * 50)


def test_a_full_disk_costs_records_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with MetricsWriter(path) as writer:
        writer.write({"n": 1})
        writer.write({"n": 2})
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "No space left" in caplog.text


def test_a_summary_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, {"loss": float("inf"), "dir": tmp_path})
    assert json.loads(path.read_text()) == {"schema": 1, "loss": None, "dir": str(tmp_path)}
    write_summary(path, {"a": 1})
    assert json.loads(path.read_text()) == {"schema": 1, "a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_a_place_that_cannot_be_written_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run\.output_dir = .*file.*"):
        MetricsWriter(tmp_path / "file" / "metrics.jsonl")
    with pytest.raises(ConfigError, match=r"run\.output_dir = .*file.*"):
        write_summary(tmp_path / "file" / "summary.json", {})


# ---- logging --------------------------------------------------------------------------------------------------


def test_secrets_never_reach_a_log() -> None:
    record = logging.LogRecord(
        "x", logging.INFO, "f", 1, "%s and %s", ("amqp://u:pa55word@h/v", "key topsecret"), None
    )
    error = ValueError("topsecret in a traceback")
    record.exc_info = (ValueError, error, None)
    assert SecretsFilter(["topsecret"]).filter(record)
    text = logging.Formatter().format(record)
    assert "amqp://u:***@h/v and key ***" in text
    assert "ValueError: *** in a traceback" in text
    assert "topsecret" not in text


def test_short_secrets_do_not_black_out_words() -> None:
    assert redact("a guest at 10:30", ["a", ""]) == "a guest at 10:30"


def test_without_a_terminal_a_log_line_is_plain() -> None:
    stream = io.StringIO()
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        configure_logging("warning", ["topsecret"], stream)
        logging.getLogger("some.library").warning("the %s is out", "topsecret")
        logging.getLogger("some.library").info("not shown")
    finally:
        root.handlers[:], root.level = before
        logging.captureWarnings(capture=False)
    assert stream.getvalue().endswith(" WARNING some.library: the *** is out\n")
    assert stream.getvalue().count("\n") == 1


# ---- stopping -------------------------------------------------------------------------------------------------


def test_callbacks_are_called_once_even_when_added_late() -> None:
    stopping, calls = Stopping(), []
    stopping.add_callback(lambda: calls.append("early"))
    remove = stopping.add_callback(lambda: calls.append("removed"))
    remove()
    stopping.ask("first")
    stopping.ask("second")
    stopping.add_callback(lambda: calls.append("late"))
    assert calls == ["early", "late"]
    assert stopping.reason == "first"


async def test_an_event_loop_hears_of_a_stop_from_another_thread() -> None:
    stopping = Stopping()
    thread = threading.Timer(0.01, stopping.set)
    thread.start()
    await asyncio.wait_for(stopping.wait_async(), timeout=30)
    thread.join()
    await stopping.wait_async()  # at once: it was asked before


CHILD = """
import sys, time
from spotgrpo.shared.stopping import Stopping
with Stopping().on_signals() as stopping:
    print("ready", flush=True)
    stopping.wait()
    print("stopping:" + stopping.reason, flush=True)
    if sys.argv[1] == "stubborn":
        while True:
            time.sleep(0.05)
"""


def child(how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ},
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_to_stop(number: signal.Signals) -> None:
    with child("polite") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"stopping:{number.name}\n"
        assert process.wait(30) == 0


def test_the_second_interrupt_ends_at_once_and_a_second_sigterm_does_not() -> None:
    with child("stubborn") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "stopping:SIGINT\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == -signal.SIGINT
        assert "KeyboardInterrupt" in process.stderr.read()


def test_a_learner_names_a_long_wait_in_growing_gaps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    with closing(MetricsWriter(tmp_path / "metrics.jsonl")) as metrics:
        progress = Progress(Queues("r"), metrics, 5, 30.0, lambda: now)
        for _ in range(2):  # each wait anew
            caplog.clear()
            with progress.waiting_for_commit():
                for _ in range(600):
                    now += 1.0
                    progress.still_committing()
            assert caplog.text.count("for the commit") == 4  # after 30, 90, 210 and 450 s
