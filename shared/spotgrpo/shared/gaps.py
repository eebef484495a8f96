"""When a wait that takes long is named: again and again, and ever more rarely."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

LONGEST_GAP_S: Final = 600.0


def gaps(warn_s: float) -> Iterator[float]:
    """Seconds before each line: ``warn_s``, and then twice as long every time, up to ten minutes."""
    longest = max(warn_s, LONGEST_GAP_S)
    return (min(warn_s * 2.0 ** min(n, 32), longest) for n in itertools.count())
