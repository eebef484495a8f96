"""How long a drain may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from spotgrpo.shared.stopping import Stopping

HAND_BACK_S: Final = 5.0
"""For stopping the engine, storing partials and handing tasks back, once running groups got theirs."""
RESERVE_S: Final = 1.0
"""Kept back of what the machine has left, for closing and leaving."""


class Patience:
    """``drain_s`` for what runs and HAND_BACK_S for the rest, or less where the machine is gone sooner.

    When that is may become known, or come nearer, at any time: both are to be asked anew when they are needed.
    """

    def __init__(
        self, drain_s: float, stopping: Stopping, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stopping, self._clock = stopping, clock
        self._patient_until = clock() + drain_s

    @property
    def finish_s(self) -> float:
        """Seconds that running groups still get, 0 or more."""
        left_s = self._patient_until - self._clock()
        gone_s = self._stopping.remaining_s
        if gone_s is not None:
            left_s = min(left_s, gone_s - HAND_BACK_S - RESERVE_S)
        return max(0.0, left_s)

    @property
    def hand_back_s(self) -> float:
        """Seconds for partials and tasks if that begins now; of a very short notice, half."""
        gone_s = self._stopping.remaining_s
        if gone_s is None:
            return HAND_BACK_S
        return min(HAND_BACK_S, max(gone_s - RESERVE_S, gone_s / 2))
