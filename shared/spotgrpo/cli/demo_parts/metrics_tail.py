"""Following ``metrics.jsonl`` while the learner writes it: what is shown where no report comes through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class MetricsTail:
    """Reads the lines that were added to ``path`` since the last look; a line not yet whole waits."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_records(self) -> list[dict[str, Any]]:
        """The learner's records since the last call; none while there is no file."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return []
        whole = added[: added.rfind(b"\n") + 1]
        self._offset += len(whole)
        records = [json.loads(line) for line in whole.splitlines() if line.strip()]
        return [record for record in records if record.get("role") == "learner"]
