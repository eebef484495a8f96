"""What a worker's places for sequences were used for, in seconds: taken, or empty for want of what. Pure.

The seconds are those of a whole engine: one in which half of the places were empty counts half a second to why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from spotgrpo.producer.activity import Activity, Stage

Cause = Literal["tasks", "version", "too_slow", "blocked"]
"""No task came; no version to sample with; none that it could finish in time; the broker takes no groups."""
CAUSES: tuple[Cause, ...] = get_args(Cause)


def why_empty(activity: Activity) -> Cause:
    """What would fill the places that are empty now."""
    stages = {task.stage for task in activity.tasks}
    if activity.is_blocked and Stage.PUBLISHING in stages:
        return "blocked"
    if activity.serves is None or Stage.ADOPTING in stages:
        return "version"
    return "too_slow" if activity.leaves_tasks else "tasks"


@dataclass
class Usage:
    """Sums since the worker began.

    Args:
        places: sequences that the engine may have.
        at: seconds on any clock.
    """

    places: int
    at: float
    busy_s: float = 0.0
    idle_s: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    _place_s: float = 0.0

    def note(self, now: float, place_s: float, cause: Cause) -> None:
        """``place_s`` seconds of places have been taken up to ``now``; what was not is for want of ``cause``."""
        passed_s, busy_s = now - self.at, (place_s - self._place_s) / self.places
        self.busy_s += busy_s
        self.idle_s[cause] += max(0.0, passed_s - busy_s)
        self.at, self._place_s = now, place_s
