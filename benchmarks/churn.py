"""Trained tokens a second while workers are killed and replaced, as a ratio to no kills.

Four workers with an engine that is paced by the clock run against a real broker, a real bucket and a real learner.
Time is compressed: one second here stands for FACTOR seconds, in the pace of tokens, the start-up of a worker and
the rate of kills alike. The last line is one JSON object; its seconds are those that are stood for.
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.chaos.metered import Meter
from tests.chaos.world import Failure, Member, World, kept_on_failure

FACTOR, QUICK_FACTOR = 6.0, 15.0
"""What takes real processor time here (starting a process, adopting a version) is inflated by it."""
WORKERS = 4
STARTUP_S = 60.0
"""From the order for a machine to a worker that can take a task: image, weights, CUDA graphs, first version."""
ADOPTION_S = 3.0
"""The end of it, for what a worker here really does then: fetching and adopting its first version."""
TOKENS, TOKEN_S = 512, 0.02
"""Of a completion: the default of sampling.max_new_tokens, at 50 tokens a second."""
ENGINE_TOKENS = 16
"""The paced engine gives a completion in so many pieces: a sleep for every token would cost the processor."""
GROUP_SIZE, GROUPS_IN_FLIGHT = 2, 2
GROUP_TOKENS = GROUP_SIZE * ENGINE_TOKENS
GROUPS_PER_STEP, MAX_STALENESS = 16, 3
WINDOW_GROUPS = 3
"""The throughput around a kill is that of a sliding window of three group times."""
RECOVERED = 0.95
LOOK_S = 0.1

REWARDS = """
import zlib

def letters(completions, **_):
    # Never the same twice in a group: a flat group would look like waste.
    return [zlib.crc32(text.encode()) / 2**32 for text in completions]
"""


@dataclass(frozen=True)
class Clock:
    """Seconds that are stood for, in seconds here."""

    factor: float
    startup_s: float

    def here(self, seconds: float) -> float:
        return seconds / self.factor

    @property
    def group_s(self) -> float:
        return self.here(TOKENS * TOKEN_S)

    @property
    def start_up(self) -> float:
        return self.here(self.startup_s)

    @property
    def window(self) -> float:
        return WINDOW_GROUPS * self.group_s


@dataclass
class Life:
    """A worker process: up from when its start-up should be over, or from its first request, until it is killed."""

    member: Member
    up_at: float
    killed_at: float | None = None
    lost_tokens: int = 0
    began_at: float = 0.0

    def up_between(self, start: float, end: float) -> float:
        return max(0.0, min(end, self.killed_at or end) - max(start, self.up_at))


@dataclass
class Fleet:
    """Keeps WORKERS machines: who is killed is ordered anew at once, and is up after the start-up time."""

    world: World
    clock: Clock
    lives: list[Life] = field(default_factory=list)

    def begin(self) -> None:
        for _ in range(WORKERS):
            self._order(time.time())

    def _order(self, up_at: float) -> None:
        direct = (
            f"broker.url={self.world.rabbitmq.url}",
            f"bucket.endpoint_url={self.world.s3.endpoint_url}",
        )
        member = self.world.start(
            "worker",
            *direct,
            prepare="tests.chaos.metered:install",
            ready_at=up_at - self.clock.here(ADOPTION_S),
        )
        self.lives.append(Life(member, up_at))

    def up(self) -> list[Life]:
        now = time.time()
        return [life for life in self.lives if life.killed_at is None and life.up_at <= now]

    def kill(self, life: Life) -> None:
        os.kill(life.member.pid, signal.SIGKILL)
        life.killed_at = time.time()
        self._order(life.killed_at + self.clock.start_up)
        while self.world.nursery.exit_code(life.member.pid) is None:
            time.sleep(0.001)
        self.world.members.remove(life.member)
        life.lost_tokens = self.unfinished(life)

    def check(self) -> None:
        """Nobody ends but by our hand."""
        for member in self.world.members:
            if self.world.nursery.exit_code(member.pid) is not None:
                raise Failure(f"{member.log.name} ended\n{self.world.tail(member.log)}")

    def meter(self, life: Life) -> Meter | None:
        path = self.world.folder / "meters" / str(life.member.pid)
        return Meter.read(path) if path.exists() and path.stat().st_size else None

    def note_beginnings(self) -> None:
        """Whoever came up before its time counts as up from then on."""
        for life in self.lives:
            meter = self.meter(life)
            life.began_at = meter.began_at if meter else 0.0
            if life.began_at:
                life.up_at = min(life.up_at, life.began_at)

    def generated(self) -> int:
        return sum(meter.tokens for life in self.lives if (meter := self.meter(life)))

    def unfinished(self, life: Life) -> int:
        """Tokens of a worker that no confirmed group holds."""
        meter = self.meter(life)
        return meter.tokens - GROUP_TOKENS * len(self.deliveries_of(life)) if meter else 0

    def deliveries_of(self, life: Life) -> list[tuple[float, str]]:
        """When the broker confirmed each of its groups, and the task."""
        path = self.world.folder / "confirmed" / f"{life.member.pid}.log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(float(at), task) for task, _, at in map(str.split, lines)]

    def deliveries(self) -> list[tuple[float, str]]:
        """Of all workers, in order of time."""
        return sorted(one for life in self.lives for one in self.deliveries_of(life))

    def copies(self) -> list[float]:
        """When groups came of tasks that a group had come of before."""
        found, seen = [], set()
        for at, task in self.deliveries():
            if task in seen:
                found.append(at)
            seen.add(task)
        return found


@dataclass
class Phase:
    """What one rate of kills came to. Times are Unix seconds; ``commits`` are (time, version) as they were seen."""

    kills_per_hour: float
    begun: float = 0.0
    start: float = 0.0
    end: float = 0.0
    over: float = 0.0
    kills: list[Life] = field(default_factory=list)
    commits: list[tuple[float, int]] = field(default_factory=list)
    generated: int = 0
    machine_busy_pct: float = 0.0


def gaps(rate: float, seed: int) -> Iterator[float]:
    """Seconds (stood for) between kills: exponential, for ever."""
    rng = random.Random(f"gaps {seed} {rate}")
    while rate:
        yield rng.expovariate(rate / 3600)


def run_phase(fleet: Fleet, rate: float, minutes: float, seed: int) -> Phase:
    """Kill at ``rate``; measured from two start-ups on, so that the share of workers that are up is a steady one."""
    clock, phase = fleet.clock, Phase(rate)
    before = fleet.generated()
    psutil.cpu_percent()
    phase.begun = time.time()
    phase.start = phase.begun + (2 * clock.start_up if rate else 0.0)
    phase.end = phase.start + clock.here(60 * minutes)
    rng, at = random.Random(f"whom {seed} {rate}"), phase.begun
    for gap in gaps(rate, seed):
        at += clock.here(gap)
        if at > phase.end:
            break
        look_until(fleet, phase, at)
        if up := fleet.up():
            phase.kills.append(rng.choice(up))
            fleet.kill(phase.kills[-1])
    # Until the last ones killed are up again, and for the time in which a recovery shows.
    look_until(fleet, phase, phase.end + (clock.start_up + 2 * clock.window if rate else 0.0))
    while phase.commits[-1][0] < phase.end:
        look_until(fleet, phase, time.time() + LOOK_S)
    phase.over = time.time()
    phase.generated = fleet.generated() - before
    phase.machine_busy_pct = psutil.cpu_percent()
    return phase


def look_until(fleet: Fleet, phase: Phase, until: float) -> None:
    """Note every commit."""
    while (left := until - time.time()) > 0:
        version = fleet.world.version()
        if not phase.commits or version > phase.commits[-1][1]:
            phase.commits.append((time.time(), version))
            fleet.check()
        time.sleep(min(left, LOOK_S))


# ---- what came of it --------------------------------------------------------------------------------------------


def trained_per_s(world: World, phase: Phase) -> float:
    """Groups trained a second, from the first commit in the measured time to the first one after it."""
    trained = {ledger.version: ledger.counts.trained for ledger in world.books.chain}
    times = [at for at, _ in phase.commits]
    (t0, v0), (t1, v1) = (
        phase.commits[bisect.bisect_left(times, at)] for at in (phase.start, phase.end)
    )
    return (trained[v1] - trained[v0]) / (t1 - t0)


def busy(fleet: Fleet, phase: Phase) -> float:
    """Tokens that were generated, as a share of what the workers that were up could have."""
    up = sum(life.up_between(phase.begun, phase.over) for life in fleet.lives)
    pace = GROUP_TOKENS * GROUPS_IN_FLIGHT / fleet.clock.group_s
    return phase.generated / (up * pace)


def time_left(fleet: Fleet, phase: Phase) -> float:
    up = sum(life.up_between(phase.start, phase.end) for life in fleet.lives)
    return up / (WORKERS * (phase.end - phase.start))


def wasted(fleet: Fleet, phase: Phase) -> int:
    """Tokens that killed workers left unfinished, and those of groups that were settled untrained or came twice."""
    versions = [version for _, version in phase.commits]
    chain = {ledger.version: ledger.counts for ledger in fleet.world.books.chain}
    first, last = chain[versions[0]], chain[versions[-1]]
    groups = sum(getattr(last, cause) - getattr(first, cause) for cause in ("stale", "flat"))
    groups += sum(phase.begun <= at <= phase.over for at in fleet.copies())
    return sum(life.lost_tokens for life in phase.kills) + GROUP_TOKENS * groups


def recovery(killed_at: float, over: float, deliveries: Sequence[float], window: float) -> float:
    """Seconds to the end of the first window after the kill with 95% of the groups of the window before it."""

    def groups_until(at: float) -> int:
        return bisect.bisect_right(deliveries, at) - bisect.bisect_right(deliveries, at - window)

    wanted = RECOVERED * groups_until(killed_at)
    first = bisect.bisect_left(deliveries, killed_at + window)
    for at in (killed_at + window, *deliveries[first:]):
        if at < over and groups_until(at) >= wanted:
            return at - killed_at
    return float("nan")


def recoveries(fleet: Fleet, phase: Phase) -> list[float]:
    """Of every kill in the measured time, in seconds here."""
    deliveries = [at for at, _ in fleet.deliveries()]
    found = [
        recovery(life.killed_at, phase.over, deliveries, fleet.clock.window)
        for life in phase.kills
        if life.killed_at is not None and phase.start <= life.killed_at <= phase.end
    ]
    return [seconds for seconds in found if seconds == seconds]


def take_ups(fleet: Fleet, phase: Phase) -> list[float]:
    """From the end of the start-up to the first request, of the workers that came up in this phase."""
    return [
        life.began_at - life.up_at
        for life in fleet.lives
        if phase.start <= life.up_at <= phase.end and life.began_at
    ]


def result_of(fleet: Fleet, phase: Phase, rate_of_none: float) -> dict[str, Any]:
    factor, rate = fleet.clock.factor, trained_per_s(fleet.world, phase)
    found, take_up = recoveries(fleet, phase), take_ups(fleet, phase)
    return {
        "kills_per_hour": phase.kills_per_hour,
        "kills": len(phase.kills),
        "trained_groups_per_s": round(rate, 3),
        "goodput": round(rate / rate_of_none, 4),
        "worker_time_left": round(time_left(fleet, phase), 4),
        "wasted_tokens_pct": round(100 * wasted(fleet, phase) / phase.generated, 2),
        "recovery_s": round(factor * statistics.median(found), 1) if found else None,
        "recovery_worst_s": round(factor * max(found), 1) if found else None,
        "recovery_here_s": round(statistics.median(found), 2) if found else None,
        "take_up_s": round(factor * statistics.median(take_up), 2) if take_up else None,
        "take_up_mean_s": round(factor * statistics.mean(take_up), 2) if take_up else None,
        "take_up_worst_s": round(factor * max(take_up), 2) if take_up else None,
        "busy": round(busy(fleet, phase), 4),
        "machine_busy_pct": phase.machine_busy_pct,
    }


def reconcile(fleet: Fleet) -> dict[str, int]:
    """Where every generated token went. ``difference`` is 0, or −1 group for each confirmed after its worker died."""
    counts = fleet.world.books.chain[-1].counts
    parts = {
        "trained": GROUP_TOKENS * counts.trained,
        "killed": sum(life.lost_tokens for life in fleet.lives),
        "copies": GROUP_TOKENS * len(fleet.copies()),
        "stale": GROUP_TOKENS * counts.stale,
        "flat": GROUP_TOKENS * counts.flat,
        "cut_at_the_end": sum(
            fleet.unfinished(life) for life in fleet.lives if life.killed_at is None
        ),
    }
    generated = fleet.generated()
    return {"generated": generated, **parts, "difference": generated - sum(parts.values())}


# ---- the run ----------------------------------------------------------------------------------------------------


def settings(clock: Clock, folder: Path) -> tuple[str, ...]:
    """Enough tasks outstanding that all workers are always busy, and steps that the learner does with time to spare."""
    return (
        f"train.groups_per_step={GROUPS_PER_STEP}",
        f"train.max_staleness={MAX_STALENESS}",
        f"train.reissue_after_s={clock.here(600)}",
        f"sampling.group_size={GROUP_SIZE}",
        f"sampling.max_new_tokens={ENGINE_TOKENS}",
        f"worker.max_inflight={GROUP_SIZE * GROUPS_IN_FLIGHT}",
        "worker.engine_stall_s=30",
        "broker.heartbeat_s=10",
        f"worker.cache_dir={folder / 'caches'}",  # a killed worker leaves its own behind
    )


def measure(world: World, clock: Clock, rates: Sequence[float], args: Any) -> list[dict[str, Any]]:
    (world.folder / "rewards.py").write_text(REWARDS)
    world.books.max_staleness = MAX_STALENESS
    world.start(
        "learner",
        f"broker.url={world.rabbitmq.url}",
        f"bucket.endpoint_url={world.s3.endpoint_url}",
    )
    fleet = Fleet(world, clock)
    fleet.begin()
    world.wait_for("the first versions", lambda: world.version() >= 2, tend=False)
    phases = []
    for rate in rates:
        phases.append(run_phase(fleet, rate, args.minutes, args.seed))
        print(f"{rate:g} kills an hour: {len(phases[-1].kills)} kills", flush=True)
    world.finish(steps=MAX_STALENESS + 1)  # what is outstanding then is enough for so many
    world.books.check()
    fleet.note_beginnings()
    lost = world.books.lost() + world.books.unsettled()
    duplicated = world.books.duplicated()
    rate_of_none = trained_per_s(world, phases[0])
    results = [result_of(fleet, phase, rate_of_none) for phase in phases]
    for result in results:
        print(json.dumps(result))
    print(f"tokens: {reconcile(fleet)}")
    print(f"books: lost {lost} duplicated {duplicated}")
    if lost or duplicated:
        raise Failure("the books do not balance")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="0 and 120 kills an hour, 2 minutes each, compressed more",
    )
    parser.add_argument("--rates", default="0,6,30,120", help="kills an hour; the first must be 0")
    parser.add_argument("--minutes", type=float, default=60.0, help="of each rate, as stood for")
    parser.add_argument("--startup-s", type=float, default=STARTUP_S, help="of a worker")
    parser.add_argument("--factor", type=float, default=FACTOR, help="of the compression")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    args = parser.parse_args()
    if args.quick:
        args.rates, args.minutes = "0,120", 2.0
        args.factor = QUICK_FACTOR
    rates = [float(rate) for rate in args.rates.split(",")]
    clock = Clock(args.factor, args.startup_s)
    with kept_on_failure(Path(tempfile.mkdtemp(prefix="spotgrpo-churn-"))) as folder:
        token_s = clock.group_s / ENGINE_TOKENS
        sets = settings(clock, folder)
        with World(folder, token_s=token_s, run="churn", sets=sets) as world:
            results = measure(world, clock, rates, args)
    names = ("kills_per_hour", "goodput", "worker_time_left", "wasted_tokens_pct", "recovery_s")
    print(json.dumps({name: [result[name] for result in results] for name in names}))


if __name__ == "__main__":
    main()
