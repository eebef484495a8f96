"""Stale groups and throughput with one worker that is ten times slower than the others.

Workers with an engine that is paced by the clock run against a real broker, a real bucket and a real learner at its
default pacing. First a fast worker alone; then all of them; then the slow one alone, since the others have left.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spotgrpo.shared.config import TrainConfig
from tests.chaos.metered import Meter
from tests.chaos.world import Failure, Member, World, kept_on_failure

GROUPS_PER_STEP: int = TrainConfig.model_fields["groups_per_step"].default
MAX_STALENESS: int = TrainConfig.model_fields["max_staleness"].default
GROUP_SIZE, ENGINE_TOKENS = 4, 16
LOOK_S = 0.1
END_S = 30.0
"""Longest that a worker may take to leave."""

REWARDS = """
import zlib

def letters(completions, **_):
    # Never the same twice in a group: a flat group would look like waste.
    return [zlib.crc32(text.encode()) / 2**32 for text in completions]
"""


@dataclass(frozen=True)
class Scene:
    """A fleet.

    Attributes:
        fast, slower: fast workers, and how many times slower the one other is.
        at_a_time: groups that every worker has places for.
        group_s: of the longest completion of a fast worker, when its places are full.
        shares: an engine's tokens come faster beside fewer sequences, as a processor's would.
        shortest: length of the shortest completion, as a share of the longest.
        alone_s, fleet_s, slow_s: how long each part is measured.
    """

    name: str
    fast: int = 3
    slower: float = 10.0
    at_a_time: int = 2
    group_s: float = 0.8
    shares: bool = False
    shortest: float = 1.0
    alone_s: float = 15.0
    fleet_s: float = 120.0
    slow_s: float = 25.0

    @property
    def settings(self) -> tuple[str, ...]:
        return (
            f"train.groups_per_step={GROUPS_PER_STEP}",
            f"train.max_staleness={MAX_STALENESS}",
            f"sampling.group_size={GROUP_SIZE}",
            f"sampling.max_new_tokens={ENGINE_TOKENS}",
            f"worker.max_inflight={GROUP_SIZE * self.at_a_time}",
            "worker.engine_stall_s=60",
            "worker.admission=true",
            "broker.heartbeat_s=10",
        )


SCENES = (
    Scene("one 10 times slower"),
    Scene("ragged lengths", shortest=0.25),
    Scene("twice the places", at_a_time=4, group_s=1.6),
    Scene("shared engines", shares=True),
    Scene("one 3 times slower", slower=3.0),
    Scene("one and one slow", fast=1),
    Scene(
        "all alike with more places than tasks", slower=1.0, at_a_time=8, group_s=3.2, shortest=0.5
    ),
)
QUICK = (Scene("one 10 times slower", group_s=0.6, alone_s=6.0, fleet_s=25.0, slow_s=19.0),)


@dataclass
class Fleet:
    """The worker processes of a scene, and what came of each."""

    world: World
    scene: Scene
    names: dict[int, str] = field(default_factory=dict)

    def add(self, name: str, slower: float = 1.0) -> Member:
        """Start a worker."""
        scene, world = self.scene, self.world
        member = world.start(
            "worker",
            f"broker.url={world.rabbitmq.url}",
            f"bucket.endpoint_url={world.s3.endpoint_url}",
            prepare="tests.chaos.metered:install",
            ready_at=0.0,
            token_s=slower * scene.group_s / ENGINE_TOKENS,
            shared_by=GROUP_SIZE * scene.at_a_time if scene.shares else None,
            shortest=scene.shortest,
        )
        self.names[member.pid] = name
        world.wait_for(f"{name} to begin", lambda: self._began(member.pid), tend=False)
        return member

    def _began(self, pid: int) -> bool:
        """Whether it has sampled; a slow one may well not take anything, so that its first report will do."""
        path = self.world.folder / "meters" / str(pid)
        log = self.world.member(pid)
        is_metered = path.exists() and bool(path.stat().st_size) and Meter.read(path).began_at
        return bool(is_metered) or bool(log and log.said("serving version"))

    def stop(self, members: list[Member]) -> None:
        """Tell workers to go, and wait until they have."""
        for member in members:
            self.world.tell_to_stop(member)
        deadline = time.monotonic() + END_S
        for member in members:
            while self.world.nursery.exit_code(member.pid) is None:
                if time.monotonic() > deadline:
                    raise Failure(f"{member.log.name} did not leave\n{self.world.tail(member.log)}")
                time.sleep(LOOK_S)
            self.world.members.remove(member)

    def confirmed(self) -> list[tuple[float, str, str]]:
        """When the broker confirmed each group, its worker and its task, in order of time."""
        found = []
        for pid, name in self.names.items():
            path = self.world.folder / "confirmed" / f"{pid}.log"
            lines = path.read_text().splitlines() if path.exists() else []
            found += [(float(at), name, task) for task, _, at in map(str.split, lines)]
        return sorted(found)

    def rate(self, start: float, end: float) -> float:
        """Groups a second that were confirmed between two times, from the first confirmation to the last."""
        times = [at for at, _, _ in self.confirmed() if start <= at <= end]
        first = sum(
            at - times[0] < self.scene.group_s / 4 for at in times
        )  # they come side by side
        if len(times) <= first:
            raise Failure(f"{len(times)} groups are too few to tell a rate from")
        return (len(times) - first) / (times[-1] - times[0])

    def is_countable(self, since: float, seconds: float) -> bool:
        """Whether the slow worker has ended groups again and again in the time ``since``, at least ``seconds``."""
        times = [at for at, name, _ in self.confirmed() if name == "slow" and at >= since]
        enough = len(times) >= 3 * self.scene.at_a_time
        return enough and time.time() >= since + seconds


@dataclass
class Part:
    """A stretch of the run: Unix seconds, and the version at either end."""

    start: float
    end: float
    versions: tuple[int, int]


def watch(world: World, seconds: float) -> Part:
    """From one commit to another, ``seconds`` later at least."""
    start, first = _next_commit(world)
    _look_on(world, lambda: time.time() >= start + seconds)
    end, last = _next_commit(world)
    return Part(start, end, (first, last))


def _look_on(world: World, until: Callable[[], bool]) -> None:
    """Nobody ends meanwhile."""
    while not until():
        for member in world.members:
            if world.nursery.exit_code(member.pid) is not None:
                raise Failure(f"{member.log.name} ended\n{world.tail(member.log)}")
        time.sleep(LOOK_S)


def _next_commit(world: World) -> tuple[float, int]:
    before = world.version()
    world.wait_for("the next version", lambda: world.version() > before, tend=False)
    return time.time(), world.version()


def run_scene(world: World, scene: Scene) -> dict[str, Any]:
    """All parts of one, and what came of them."""
    (world.folder / "rewards.py").write_text(REWARDS)
    world.books.max_staleness = MAX_STALENESS
    world.start(
        "learner",
        f"broker.url={world.rabbitmq.url}",
        f"bucket.endpoint_url={world.s3.endpoint_url}",
    )
    fleet = Fleet(world, scene)
    fast = [fleet.add("fast 1")]
    world.wait_for("the first versions", lambda: world.version() >= 1, tend=False)
    alone = watch(world, scene.alone_s)
    begun, first = time.time(), world.version()
    fleet.add("slow", scene.slower)
    fast += [fleet.add(f"fast {number}") for number in range(2, scene.fast + 1)]
    psutil.cpu_percent()
    together = watch(world, scene.fleet_s)
    busy_pct = psutil.cpu_percent()
    fleet.stop(fast)
    left_at = time.time()
    _look_on(world, lambda: fleet.is_countable(left_at, scene.slow_s))
    rates = (fleet.rate(alone.start, alone.end), fleet.rate(left_at, time.time()))
    fleet.add("the last")
    world.finish(steps=MAX_STALENESS + 1)
    world.books.check()
    if lost := world.books.lost() + world.books.unsettled() + world.books.duplicated():
        raise Failure(f"the books do not balance: {lost}")
    whole = Part(begun, together.end, (first, together.versions[1]))
    return result_of(fleet, whole, together, rates) | {"machine_busy_pct": busy_pct}


def result_of(
    fleet: Fleet, whole: Part, together: Part, rates: tuple[float, float]
) -> dict[str, Any]:
    """``whole`` has the start of the fleet in it; throughput is that of ``together``."""
    chain = {ledger.version: ledger.counts for ledger in fleet.world.books.chain}
    stale, trained = settled(fleet, whole)
    first, last = (chain[version] for version in together.versions)
    rate = (last.trained - first.trained) / (together.end - together.start)
    capacity = fleet.scene.fast * rates[0] + rates[1]
    return {
        "stale_pct": round(100 * stale.total() / (stale.total() + trained.total()), 2),
        "throughput_ratio": round(rate / capacity, 4),
        "groups_per_s": round(rate, 3),
        "fast_alone_per_s": round(rates[0], 3),
        "slow_alone_per_s": round(rates[1], 3),
        "trained_by_worker": dict(sorted(trained.items())),
        "stale_by_worker": dict(sorted(stale.items())),
    }


def settled(fleet: Fleet, part: Part) -> tuple[Counter[str], Counter[str]]:
    """Groups that were dropped as stale, and that were trained, by worker."""
    workers = {task: name for _, name, task in fleet.confirmed()}
    stale: Counter[str] = Counter()
    trained: Counter[str] = Counter()
    for ledger in fleet.world.books.chain:
        if part.versions[0] < ledger.version <= part.versions[1]:
            for counts, cause in ((stale, "stale"), (trained, "trained")):
                counts.update(workers[str(task)] for task in ledger.settled.get(cause, ()))
    return stale, trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one fleet, measured for 25 s")
    parser.add_argument("--scene", default="", help="only fleets with this in their name")
    parser.add_argument("--fleet-s", type=float, help="how long all of a fleet are measured")
    args = parser.parse_args()
    scenes = QUICK if args.quick else SCENES
    if args.fleet_s:
        scenes = tuple(replace(scene, fleet_s=args.fleet_s) for scene in scenes)
    results = []
    with kept_on_failure(Path(tempfile.mkdtemp(prefix="spotgrpo-heterogeneous-"))) as folder:
        for scene in (one for one in scenes if args.scene in one.name):
            where = folder / scene.name.replace(" ", "-")
            with World(where, run="heterogeneous", sets=scene.settings) as world:
                result = run_scene(world, scene)
            results.append(result)
            print(json.dumps({"fleet": scene.name, **result}), flush=True)
    main_one = {name: results[0][name] for name in ("stale_pct", "throughput_ratio")}
    worst = {
        "stale_pct_worst": max(result["stale_pct"] for result in results),
        "throughput_ratio_worst": min(result["throughput_ratio"] for result in results),
    }
    print(json.dumps(main_one | worst))


if __name__ == "__main__":
    main()
