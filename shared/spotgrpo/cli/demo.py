"""``spotgrpo demo``: from nothing to a trained adapter, with real servers, real processes and a kill halfway."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from rich.console import Console

from spotgrpo.cli.demo_parts import verdict
from spotgrpo.cli.demo_parts.children import Crew, Interrupted, Process
from spotgrpo.cli.demo_parts.cleanup import remove_old_servers
from spotgrpo.cli.demo_parts.feed import Feed
from spotgrpo.cli.demo_parts.folder import DemoFolder, find_example, write_run_toml
from spotgrpo.cli.demo_parts.model import find_gguf, is_prepared
from spotgrpo.cli.demo_parts.plot import Flow, PlotData, draw
from spotgrpo.cli.demo_parts.progress import Progress
from spotgrpo.cli.demo_parts.screen import Picture, make_screen
from spotgrpo.cli.demo_parts.servers import start_servers
from spotgrpo.cli.demo_parts.show import Kill, Show
from spotgrpo.cli.errors import complain, exit_on_errors
from spotgrpo.cli.extras import require
from spotgrpo.shared.config import Config
from spotgrpo.shared.ids import Keys, Queues
from spotgrpo.shared.loading import load_config, secrets_of
from spotgrpo.shared.log import configure_logging
from spotgrpo.shared.metrics import write_summary
from spotgrpo.shared.stopping import Stopping

EngineName = Literal["auto", "vllm", "transformers"]
WORKERS: Final = 2
REPORT_S: Final = 0.5
"""Workers report often, so that the kill hits one that is known to hold tasks."""
DRAIN_S: Final = 2.0
"""A person who stops a demo does not want to wait for its last groups."""
LEAVE_S: Final = 10.0
"""What workers get to leave by themselves at the end, and then to stop when told."""
GPU_SHARE: Final = 0.25
"""Of a GPU's memory for each worker, since both and the learner share it."""


@dataclass(frozen=True)
class Options:
    """What the command line says; ``steps`` None: what the example's TOML says."""

    engine: EngineName
    seed: int
    steps: int | None
    root: Path
    kill: bool


def command(
    engine: Annotated[
        EngineName, typer.Option(help="What generates; auto: vllm where it is installed.")
    ] = "auto",
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the run.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps; default: the example's.")
    ] = None,
    root: Annotated[Path, typer.Option("--dir", help="Folder for everything.")] = Path(".demo"),
    kill: Annotated[bool, typer.Option(help="Kill one worker halfway.")] = True,
) -> None:
    """Train a small real model through a private broker and bucket, kill a worker halfway, and tell how it went.

    Uses SPOTGRPO_BROKER__URL and SPOTGRPO_BUCKET__URL instead of private servers where they are set.
    """
    with exit_on_errors():
        configure_logging("error")  # what is looked for before it is there is no warning
        for extra in ("learner", "worker", "demo"):
            require(extra)
        with Stopping().on_signals() as stopping:
            stopping.add_callback(lambda: complain("stopping everything; Ctrl-C again: at once"))
            is_good = Demo(Options(engine, seed, steps, root, kill), Console(), stopping).run()
    if not is_good:
        raise typer.Exit(1)


class Demo:
    """One demo, from an empty folder to the verdict."""

    def __init__(self, options: Options, console: Console, stopping: Stopping) -> None:
        self._options, self._console, self._stopping = options, console, stopping
        self._began = time.monotonic()
        self._example = find_example()
        self._folder = DemoFolder.create(options.root, options.seed)

    def run(self) -> bool:
        """Run it; True when nothing was lost.

        Raises:
            SpotGRPOError: a server, the learner, a worker or the evaluation failed, or a person stopped it.
        """
        folder = self._folder
        self._say(f"{folder.run}: everything is in {folder.path}")
        remove_old_servers(folder)
        with ExitStack() as stack:
            servers = start_servers(folder.services, stack)
            self._say("broker and bucket are up" if servers else "using your broker and bucket")
            crew = stack.enter_context(Crew(folder, servers))
            self._prepare_model(crew)
            write_run_toml(folder, self._example, self._changes())
            config = load_config(folder.toml, environ=crew.env)
            configure_logging("error", secrets_of(config))
            progress, kill = self._train(crew, config)
            evaluation = self._evaluate(crew)
            books = _audit(config)
        return self._finish(config, progress, kill, evaluation, books)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _check_stop(self) -> None:
        if self._stopping.is_set():
            raise Interrupted(self._stopping.reason)

    def _prepare_model(self, crew: Crew) -> None:
        """The model is made once, and shared by all demos in the folder."""
        self._check_stop()
        if not is_prepared(self._folder.model):
            find_gguf()
            self._say("making a model folder of SmolLM2-135M (once, about half a minute)")
            module = "spotgrpo.cli.demo_parts.model"
            crew.finish(crew.start("model", module, self._folder.model), self._stopping)

    def _changes(self) -> dict[str, dict[str, object]]:
        """What the demo sets in the example's TOML."""
        options = self._options
        changes: dict[str, dict[str, object]] = {
            "run": {"seed": options.seed},
            "worker": {"engine": options.engine, "report_s": REPORT_S, "drain_s": DRAIN_S},
        }
        if options.steps is not None:
            changes["train"] = {"max_steps": options.steps}
        if shutil.which("nvidia-smi"):
            changes["worker"]["vllm"] = {"gpu_memory_utilization": GPU_SHARE}
        return changes

    def _train(self, crew: Crew, config: Config) -> tuple[Progress, Kill | None]:
        from spotgrpo.shared.rabbitmq import RabbitMQBroker

        steps = config.train.max_steps
        progress = Progress(steps)

        def start_worker() -> Process:
            name = f"worker-{len(progress.workers) + 1}"
            progress.add_worker(name)
            return crew.start_command(name, "worker")

        broker, queues = RabbitMQBroker(config.broker, config.run.id), Queues(config.run.id)
        try:
            learner = crew.start_command("learner", "learner")
            for _ in range(WORKERS):
                start_worker()
            picture = Picture(f"spotgrpo demo · SmolLM2-135M · {config.run.id}", progress)
            show = Show(
                crew,
                Feed(broker, queues, self._folder.metrics),
                picture,
                kill_at=max(1, steps // 2) if self._options.kill else None,
                start_worker=start_worker,
                stopping=self._stopping,
            )
            show.run(learner, make_screen(picture, self._console))
        finally:
            broker.close()
        crew.leave(LEAVE_S)
        return progress, show.kill

    def _evaluate(self, crew: Crew) -> dict[str, Any]:
        """Export the final version and ask base and it the same held-out prompts."""
        folder = self._folder
        self._say("exporting the final version, and asking it and the base the held-out prompts")
        crew.finish(crew.start_command("export", "export", "--out", folder.adapter), self._stopping)
        heldout = ("--heldout", self._example / "heldout.jsonl")
        answers = ("--adapter", folder.adapter, "--out", folder.evaluation)
        # The reference engine: an independent look at what another one sampled, and on a CPU twice as fast here.
        engine = ("--set", "worker.engine=transformers")
        module = "spotgrpo.producer.evaluate"
        crew.finish(
            crew.start("evaluate", module, folder.toml, *heldout, *answers, *engine), self._stopping
        )
        evaluation: dict[str, Any] = json.loads(folder.evaluation.read_text())
        return evaluation

    def _finish(
        self,
        config: Config,
        progress: Progress,
        kill: Kill | None,
        evaluation: Mapping[str, Any],
        books: Mapping[str, Any],
    ) -> bool:
        """Draw, write and say what came out."""
        folder = self._folder
        learner = json.loads(folder.summary.read_text())
        before, after = evaluation["base"], evaluation["adapter"]
        summary = verdict.Summary(
            run=folder.run,
            seed=config.run.seed,
            engine=progress.engine or evaluation["engine"],
            accuracy_before=before["accuracy"],
            accuracy_after=after["accuracy"],
            heldout_prompts=evaluation["prompts"],
            versions=books["version"],
            **{f"groups_{name}": books[name] for name in verdict.BOOKED},
            groups_lost=len(books["lost"]),
            workers_killed=int(kill is not None),
            killed_worker_inflight=kill.inflight if kill else 0,
            tokens_generated=max(progress.tokens, learner["tokens_generated"]),
            train_wall_s=learner["train_wall_s"],
            wall_s=time.monotonic() - self._began,
            adapter_dir=str(folder.adapter),
            metrics=str(folder.metrics),
            plot=str(folder.plot),
            bucket=config.bucket.url,
            examples=evaluation["examples"],
        )
        self._draw(summary, progress, kill)
        write_summary(folder.summary, {**learner, **summary.to_dict()})
        verdict.show(summary, folder.summary, self._console)
        if not books["balanced"]:
            complain(f"the books do not balance: {books}")
        return bool(books["balanced"]) and summary.groups_lost == 0

    def _draw(self, summary: verdict.Summary, progress: Progress, kill: Kill | None) -> None:
        steps = [progress.steps[version] for version in sorted(progress.steps)]
        rewarded = [step for step in steps if step.reward is not None]
        data = PlotData(
            title=f"SmolLM2-135M learns the larger of two numbers (seed {summary.seed})",
            versions=[step.version for step in rewarded],
            rewards=[step.reward or 0.0 for step in rewarded],
            accuracy_before=summary.accuracy_before,
            accuracy_after=summary.accuracy_after,
            killed_at=kill.version if kill else None,
            flow=[
                Flow(
                    step.version,
                    step.lag_mean,
                    step.lag_max,
                    step.learner_waited,
                    step.workers_idled,
                )
                for step in steps
            ],
        )
        draw(data, self._folder.plot)


def _audit(config: Config) -> dict[str, Any]:
    """The run's books, from the bucket alone."""
    from spotgrpo.consumer.audit import audit_run
    from spotgrpo.shared.s3 import S3Store

    return audit_run(S3Store.connect(config.bucket), Keys(config.run.id)).to_dict()
