"""What learner and workers say while they run: from the telemetry exchange, and from ``metrics.jsonl``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from spotgrpo.cli.demo_parts.metrics_tail import MetricsTail
from spotgrpo.shared.errors import WireError
from spotgrpo.shared.ids import Queues
from spotgrpo.shared.ports import Broker, Consumer, QueueDepth
from spotgrpo.shared.wire import Report, decode_report

DECLARED_WAIT_S: Final = 0.5
WORKER_ID: Final = re.compile(r".*-(\d+)-[0-9a-f]+")


class Feed:
    """Reports as they come. The broker's exchange is there once the learner declared it; till then: nothing."""

    def __init__(self, broker: Broker, queues: Queues, metrics: Path) -> None:
        self._broker = broker
        self._queues = queues
        self._tail = MetricsTail(metrics)
        self._telemetry: Consumer | None = None
        self._declared = False

    def poll(self, timeout_s: float) -> list[Report]:
        """Reports since the last call; waits up to about ``timeout_s`` for one."""
        if not self._declared and self._broker.wait_until_declared(DECLARED_WAIT_S):
            self._declared = True
            self._telemetry = self._broker.subscribe(self._queues.telemetry)
        reports = self._take_all(timeout_s)
        reports += [
            Report("metrics.jsonl", "learner", record["time"], record)
            for record in self._tail.new_records()
        ]
        return reports

    def depths(self) -> tuple[QueueDepth | None, QueueDepth | None]:
        """Tasks and groups that wait."""
        if not self._declared:
            return None, None
        return self._broker.depth(self._queues.tasks), self._broker.depth(self._queues.rollouts)

    def _take_all(self, timeout_s: float) -> list[Report]:
        reports: list[Report] = []
        while self._telemetry is not None:
            delivery = self._telemetry.take(0.0 if reports else timeout_s)
            if delivery is None:
                break
            try:
                reports.append(decode_report(delivery.message.body))
            except WireError:
                continue  # telemetry is for looking at: what cannot be read is not shown
        return reports


def worker_of(report: Report, pids: Mapping[int, str]) -> str | None:
    """Which of our processes a worker's report is from; a worker's id is ``host-pid-random``."""
    match = WORKER_ID.fullmatch(report.source)
    return pids.get(int(match[1])) if match else None
