"""Times that say nothing of how fast a worker is: broker or bucket were away, or the whole process stood still.

Pure: times are given, in seconds of one clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

STANDS_STILL_S: Final = 2.0
"""Between two looks that are to come several times a second: the process was stopped, or its machine was."""


@dataclass
class Outages:
    """What a worker knows of the outages it met, from looks several times a second.

    Args:
        looked: when it is made.
    """

    looked: float
    _was_away: float = -math.inf
    _stood_still: float = -math.inf

    def look(self, now: float, *, is_away: bool) -> None:
        """``is_away`` says that broker or bucket do not take what this worker has for them."""
        if now - self.looked >= STANDS_STILL_S:
            self._stood_still = now
        if is_away:
            self._was_away = now
        self.looked = now

    def stood_still(self, since: float, now: float) -> bool:
        """Whether this process did at any time between ``since`` and ``now``."""
        return self._stood_still >= since or now - self.looked >= STANDS_STILL_S

    def any(self, since: float, now: float) -> bool:
        """Whether there was an outage of any kind between ``since`` and ``now``."""
        return self._was_away >= since or self.stood_still(since, now)
