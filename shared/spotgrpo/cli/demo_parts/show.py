"""The middle of the demo: watch learner and workers, and kill one worker halfway."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from spotgrpo.cli.demo_parts.children import Crew, Interrupted, Process
from spotgrpo.cli.demo_parts.feed import Feed, worker_of
from spotgrpo.cli.demo_parts.screen import Picture, Screen
from spotgrpo.shared.stopping import Stopping
from spotgrpo.shared.wire import Report

POLL_S: Final = 0.25
QUEUES_EVERY_S: Final = 1.0


@dataclass(frozen=True)
class Kill:
    """A worker that was killed: with how many sequences in mid-generation, at which policy version."""

    worker: str
    inflight: int
    version: int


class Show:
    """Watches the run from its first task to its last commit.

    Args:
        kill_at: version from which a worker may be killed; None: never.
        start_worker: starts another worker.
    """

    def __init__(
        self,
        crew: Crew,
        feed: Feed,
        picture: Picture,
        *,
        kill_at: int | None,
        start_worker: Callable[[], Process],
        stopping: Stopping,
    ) -> None:
        self._crew, self._feed, self._picture = crew, feed, picture
        self._kill_at, self._start_worker, self._stopping = kill_at, start_worker, stopping
        self._began = time.monotonic()
        self._queues_due = 0.0
        self.kill: Kill | None = None

    def run(self, learner: Process, screen: Screen) -> None:
        """Until the learner is done.

        Raises:
            ChildFailed: a process ended that should not have.
            Interrupted: a person wants to stop.
        """
        with screen:
            while learner.status is None:
                if self._stopping.is_set():
                    raise Interrupted(self._stopping.reason)
                for report in self._feed.poll(POLL_S):
                    self._take(report, screen)
                self._look_after_workers()
                self._look_at_queues()
                screen.update()
            for report in self._feed.poll(POLL_S):  # what came with the last step
                self._take(report, screen)
            screen.update()
        if learner.status != 0:
            raise learner.failure()

    def _take(self, report: Report, screen: Screen) -> None:
        progress = self._picture.progress
        if report.role == "learner":
            progress.apply_learner(report.values, report.at)
            return
        pids = {process.pid: name for name, process in self._crew.processes.items()}
        name = worker_of(report, pids)
        if name is not None:
            progress.apply_worker(name, report)
            self._kill_if_due(name, screen)

    def _kill_if_due(self, name: str, screen: Screen) -> None:
        """Kill ``name``, which said just now that it is in mid-generation."""
        progress = self._picture.progress
        worker, process = progress.workers[name], self._crew.processes[name]
        is_due = self._kill_at is not None and progress.version >= self._kill_at and not self.kill
        if not (is_due and worker.inflight > 0 and process.is_running):
            return
        process.kill()
        self.kill = Kill(name, worker.inflight, progress.version)
        worker.lost()
        other = self._start_worker()
        screen.say(
            f"killed {name} (kill -9) with {self.kill.inflight} sequences in mid-generation; "
            f"started {other.name}. The broker hands its tasks to the others."
        )

    def _look_after_workers(self) -> None:
        """A worker leaves by itself, with status 0, only when the run is over."""
        killed = self.kill.worker if self.kill else None
        for name, worker in self._picture.progress.workers.items():
            process = self._crew.processes[name]
            if name != killed and process.status not in (None, 0):
                raise process.failure()
            if name != killed and process.status == 0:
                worker.state, worker.inflight, worker.tokens_per_s = "left", 0, 0.0

    def _look_at_queues(self) -> None:
        self._picture.elapsed_s = time.monotonic() - self._began
        if self._picture.elapsed_s >= self._queues_due:
            self._picture.tasks, self._picture.rollouts = self._feed.depths()
            self._queues_due = self._picture.elapsed_s + QUEUES_EVERY_S
