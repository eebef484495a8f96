"""How many tasks a worker takes: none that it could not finish while the learner would still train them.

It is sent tasks for as long as none begins too late. Once one does, it asks for them one by one, as many at a time as
it can finish within ``max_staleness`` (fewer at a time are each done sooner), and leaves the others to faster workers.
Whatever no other takes makes the next version late, so that the forecast lets it in: a slow worker alone works.
A group that was begun before this was known goes back early, while it is cheap. Pure: no clock, no queue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from spotgrpo.producer.forecast import Pace, Speed, Timing

MOST_TRUST: Final = 1.0
LEAST_TRUST: Final = -0.5
TRUST_GAINED: Final = 0.05
TRUST_LOST: Final = 0.2
"""Versions by which a forecast may be over the limit while a worker is sent tasks: workers that all are as slow hold
each other's versions up, so that none is late. Lost where more than one in five is late all the same."""
MARGIN: Final = 0.25
"""Versions by which a forecast must be under the limit for a worker that asks: it is known to be a slow one."""
LEAST_ROOM: Final = 0.25
"""Versions that a group may take at least, or an overdue one would never let anybody in."""
TRY_EVERY: Final = 32
"""Versions after which a worker that takes none tries one: it may have become faster."""
EARLY: Final = 0.25
"""Of a group's tokens: until then it is given back where it cannot be in time."""
FAR_OFF: Final = 1.0
"""Versions over the limit from which a running group is given back: forecasts are not exact."""


@dataclass(frozen=True)
class Running:
    """A group in the engine.

    Attributes:
        oldest: version number of its oldest tokens.
        tokens: of its longest completion so far.
        token_s: seconds a token of that.
        load: sequences in the engine since it began, on average.
        is_again: somebody had it before, and may have given it back.
    """

    oldest: int
    tokens: int
    token_s: float
    load: float
    is_again: bool = False


class Admission:
    """Decides; the worker takes, asks and gives back accordingly.

    Args:
        max_staleness: of the run.
        group_size: sequences of a group.
        most: groups that the engine has places for.

    Attributes:
        asks: tasks are asked for one by one, since not as many as there are places for could be in time.
        width: groups to have at a time while ``asks``.
        speed: of this worker.
    """

    def __init__(self, max_staleness: int, group_size: int, most: int) -> None:
        self._max_staleness, self._group_size, self._most = max_staleness, group_size, most
        self._trust = MOST_TRUST
        self._taken_at, self._begins_late = 0, False
        self.speed = Speed()
        self.asks = False
        self.width = most

    @property
    def limit(self) -> float:
        """Lag and fractions below which a group that is asked for is in time."""
        wanted = self._max_staleness + 1.0 - MARGIN + min(0.0, self._trust)
        return max(wanted, 1.0 + LEAST_ROOM)

    def began(self, pace: Pace, served: int) -> None:
        """A group begins on version number ``served``, among as many sequences as were there lately."""
        if pace.is_known and self.speed.is_known:
            lag = pace.lag_after(self.speed.group_s(self.speed.load), served)
            self._begins_late = lag >= self._max_staleness + 1.0 + self._trust

    def look(self, pace: Pace, served: int, tasks: int) -> None:
        """Judge anew; a group would begin on version number ``served``, beside ``tasks`` in hand."""
        if not (pace.is_known and self.speed.is_known):
            self.asks, self.width = False, self._most
            return
        if not self.asks:
            self.asks, self._begins_late = self._begins_late, False
            self._taken_at = pace.newest
        else:
            self.asks = not self._keeps_up_again(pace, served, tasks)
        self.width = self._width(pace, served) if self.asks else self._most
        if tasks:
            self._taken_at = pace.newest
        elif self.asks and pace.newest - self._taken_at >= TRY_EVERY:
            self.width = max(1, self.width)

    def _keeps_up_again(self, pace: Pace, served: int, tasks: int) -> bool:
        """Whether more than it had lately would be in time too, at the worst moment to begin one."""
        last_moment = replace(pace, age_s=pace.version_s)
        had = max(tasks, math.ceil(self.speed.load / self._group_size))
        return self._width(last_moment, served) >= min(self._most, had + 1)

    def _width(self, pace: Pace, served: int) -> int:
        """Groups at a time of which each would be in time; fewer are never slower."""
        fitting = (
            groups
            for groups in range(self._most, 0, -1)
            if pace.lag_after(self.speed.group_s(groups * self._group_size), served) < self.limit
        )
        return next(fitting, 0)

    def is_hopeless(self, group: Running, pace: Pace) -> bool:
        """Whether a group should go back to the queue now: it is far from done, and would be far too late.

        Never one that comes again, so that a task is given back once at most.
        """
        wanted = self.speed.tokens
        if group.is_again or not pace.is_known or not wanted or group.tokens > EARLY * wanted:
            return False
        left_s = group.token_s * (wanted - group.tokens) + self.speed.rest_s
        return pace.lag_after(left_s, group.oldest) >= self._max_staleness + 1 + FAR_OFF

    def gave_back(self, group: Running) -> None:
        """A hopeless group is in the queue again."""
        self.speed.note(Timing(group.load, group.token_s))
        self._begins_late = True

    def ended(self, lag: int) -> None:
        """A group is out, ``lag`` versions after its oldest token as far as this worker knows."""
        is_late = lag > self._max_staleness
        change = -TRUST_LOST if is_late else TRUST_GAINED
        self._trust = max(LEAST_TRUST, min(MOST_TRUST, self._trust + change))

    def why(self, pace: Pace) -> str:
        """In words, why it asks."""
        group_s = self.speed.group_s(self._group_size)
        return (
            f"a group takes this worker {group_s:.1f} s or more and a version comes every {pace.version_s:.1f} s, so "
            f"that not all it has places for would be within train.max_staleness = {self._max_staleness}"
        )
