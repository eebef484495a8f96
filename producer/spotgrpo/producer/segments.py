"""Long rollouts, a segment at a time: where each ends, and on which version the next is sampled.

A segment is a request of its own that goes on from the tokens that are there. Between two of them a rollout may move to
another version: always to the newest (``inflight = "switch"``), or only where its own is the oldest that the engine
holds and has to make room. A pinned task stays where it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from spotgrpo.producer.policy import Adopted, PolicyWatcher
from spotgrpo.shared.ids import PolicyVersion
from spotgrpo.shared.wire import Sampling, Task, VersionRun


def segment_of(whole: Sampling, tokens: int, segment_tokens: int | None) -> Sampling:
    """What the next request of a rollout that has ``tokens`` is to sample: engines count those too."""
    if segment_tokens is None or tokens + segment_tokens >= whole.max_new_tokens:
        return whole
    return replace(whole, max_new_tokens=tokens + segment_tokens)


def is_border(finish: str, tokens: int, segment: Sampling, whole: Sampling) -> bool:
    """Whether only a segment ended, not its rollout: one of fewer tokens met the end of the context."""
    return finish == "length" and tokens == segment.max_new_tokens < whole.max_new_tokens


def too_old(
    rollouts: Iterable[Sequence[VersionRun]], served: PolicyVersion, max_staleness: int
) -> int:
    """Rollouts with tokens so old that no learner of ``served`` or a later version trains them."""
    oldest = [min(run.version.number for run in runs) for runs in rollouts if runs]
    return sum(served.number - number > max_staleness for number in oldest)


@dataclass
class SegmentCounts:
    """For the worker's report, in rollouts.

    Attributes:
        switched: went on, between two segments, on another version.
        made_room: of those, the ones that were to stay, and had to go.
        stale: ended with tokens that are too old to be trained.
    """

    switched: int = 0
    made_room: int = 0
    stale: int = 0


class GroupVersions:
    """Keeps loaded what a group is sampled on, while the block runs, and moves it between segments.

    Args:
        adopted: what the first segments are sampled on.
        switches: whether it moves to the newest version.

    Attributes:
        adopted: what the next segments are sampled on.
    """

    def __init__(
        self,
        policy: PolicyWatcher,
        task: Task,
        adopted: Adopted,
        counts: SegmentCounts,
        *,
        switches: bool,
    ) -> None:
        self._policy, self._task, self._counts = policy, task, counts
        self._switches = switches
        self.adopted = adopted

    def __enter__(self) -> Self:
        self._policy.hold(self.adopted)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._policy.release(self.adopted)

    @contextlib.contextmanager
    def segment(self, before: PolicyVersion | None) -> Iterator[PolicyVersion]:
        """The version of a rollout's next segment; ``before`` is that of its last one here.

        Each rollout holds its own, since the others may be on the version that the group has left.
        """
        if before is not None:
            self._move()
        with self._policy.using(self.adopted) as version:
            if before is not None and before != version:
                self._counts.switched += 1
                self._counts.made_room += not self._switches
            yield version

    def _move(self) -> None:
        newest = self._policy.serves(self._task.min_version)
        if newest is None or newest is self.adopted or self._task.pinned is not None:
            return
        if self._switches or self._policy.must_go(self.adopted):
            self._policy.hold(newest)
            self._policy.release(self.adopted)
            self.adopted = newest
