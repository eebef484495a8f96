"""When a wait that takes long is named, or something that keeps being wrong: again and again, and ever more rarely."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

LONGEST_GAP_S: Final = 600.0


def gaps(warn_s: float) -> Iterator[float]:
    """Seconds before each line: ``warn_s``, and then twice as long every time, up to ten minutes."""
    longest = max(warn_s, LONGEST_GAP_S)
    return (min(warn_s * 2.0 ** min(n, 32), longest) for n in itertools.count())


@dataclass
class Repeats:
    """When something that a step may show is said: at once, and then each time after twice as many steps that show it.

    Args:
        patience: steps in a row that have to show it before anything is said.
        gap: steps that show it between the first and the second time.
    """

    patience: int = 1
    gap: int = 10
    _row: int = 0
    _left: int = 0

    def is_due(self, shows: bool) -> bool:
        """Whether to say it now, after a step that ``shows`` it or not."""
        self._row = self._row + 1 if shows else 0
        if self._row < self.patience:
            return False
        if self._left:
            self._left -= 1
            return False
        self._left, self.gap = self.gap - 1, 2 * self.gap
        return True
