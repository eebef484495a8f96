"""Seconds from the end of the active learner to the next durable version, by the standby.

The active learner is killed (SIGKILL: the kernel closes its connections), or goes silent: all its packets, to broker
and bucket, vanish without a reset, as when its machine or network is lost. Then nobody knows until the broker misses
its heartbeats. Real broker, bucket and processes, with an engine that takes no core. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.chaos.world import HEARTBEAT_S, Failure, Member, Role, World, kept_on_failure
from tests.tools.proxy import Proxy

TIMES, QUICK_TIMES = 10, 3
SPARE_S = 60.0
"""Longer than heartbeats and a takeover: after that something is broken."""


@dataclass
class TakeoverWorld(World):
    """A world in which every learner has a line of its own to broker and bucket, so that one alone can go silent."""

    lines: dict[int, tuple[Proxy, Proxy]] = field(default_factory=dict)

    def start(self, role: Role, *sets: str, is_target: bool = True, **facts: object) -> Member:
        if role != "learner":
            return super().start(role, *sets, is_target=is_target, **facts)
        ports = self.rabbitmq.port, int(self.s3.endpoint_url.rpartition(":")[2])
        broker, bucket = (self._stack.enter_context(Proxy(port)) for port in ports)
        own = (
            f"broker.url={self.rabbitmq.url.replace(f':{ports[0]}/', f':{broker.port}/')}",
            f"bucket.endpoint_url=http://127.0.0.1:{bucket.port}",
        )
        member = super().start(role, *own, *sets, is_target=is_target, **facts)
        self.lines[member.pid] = broker, bucket
        return member

    def has_standby(self) -> bool:
        """Whether a learner has loaded everything and waits for the leader queue."""
        active = self._active()
        return active is not None and any(
            one is not active and one.said("standing by") for one in self.of("learner")
        )

    def durable_epoch(self) -> int:
        """Of the learner that committed the durable version."""
        latest = self.books.latest()
        return latest.durable.epoch if latest else 0


@dataclass(frozen=True)
class Takeover:
    """Seconds from the blow to ``latest.json`` in the standby's hands, and to its first durable version."""

    claimed_s: float
    durable_s: float


def killed(_world: TakeoverWorld, active: Member) -> None:
    os.kill(active.pid, signal.SIGKILL)


def silenced(world: TakeoverWorld, active: Member) -> None:
    for line in world.lines[active.pid]:
        line.stall()


Blow = Callable[[TakeoverWorld, Member], None]


def measure(world: TakeoverWorld, blow: Blow, rng: random.Random, heartbeat_s: float) -> Takeover:
    """One takeover, at a random moment of a run with a standby. Nothing is started until it is over."""
    world.wait_for("a standby", world.has_standby)
    version = world.version()
    world.wait_for("two more versions", lambda: world.version() >= version + 2)
    time.sleep(rng.uniform(0, heartbeat_s))
    active, epoch = world.active, world.epoch()
    active.fate = {-signal.SIGKILL}
    start = time.monotonic()
    blow(world, active)
    limit_s = 3 * heartbeat_s + SPARE_S
    world.wait_for("the claim", lambda: world.epoch() > epoch, limit_s, tend=False)
    claimed = time.monotonic()
    world.wait_for("a version", lambda: world.durable_epoch() > epoch, limit_s, tend=False)
    durable = time.monotonic()
    if blow is silenced:  # its machine does not come back
        os.kill(active.pid, signal.SIGKILL)
    world.wait_for_exit(active, -signal.SIGKILL)
    return Takeover(claimed - start, durable - start)


def series(world: TakeoverWorld, blow: Blow, args: argparse.Namespace) -> list[Takeover]:
    rng, found = random.Random(f"{blow.__name__} {args.seed}"), []
    for number in range(1, args.times + 1):
        found.append(measure(world, blow, rng, args.heartbeat))
        one = found[-1]
        print(
            f"{blow.__name__} {number}: claimed after {one.claimed_s:.2f} s, "
            f"durable after {one.durable_s:.2f} s",
            flush=True,
        )
    return found


def check_books(world: TakeoverWorld) -> None:
    world.wait_for("a standby", world.has_standby)  # one that can be told to stop by now
    world.finish()
    world.books.check()
    lost = world.books.lost() + world.books.unsettled()
    duplicated = world.books.duplicated()
    print(f"books at epoch {world.epoch()}: lost {lost} duplicated {duplicated}")
    if lost or duplicated:
        raise Failure("the books do not balance")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_TIMES} of each kind")
    parser.add_argument("--times", type=int, default=TIMES, help="takeovers of each kind")
    parser.add_argument("--heartbeat", type=int, default=HEARTBEAT_S, help="broker.heartbeat_s")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    if args.quick:
        args.times = QUICK_TIMES
    with kept_on_failure(Path(tempfile.mkdtemp(prefix="spotgrpo-takeover-"))) as folder:
        sets = (f"broker.heartbeat_s={args.heartbeat}",)
        with TakeoverWorld(folder, workers=2, run="takeover", sets=sets) as world:
            world.tend()
            after_kill = [one.durable_s for one in series(world, killed, args)]
            after_silence = [one.durable_s for one in series(world, silenced, args)]
            check_books(world)
    print(
        json.dumps(
            {
                "sigkill_median_s": round(statistics.median(after_kill), 2),
                "sigkill_worst_s": round(max(after_kill), 2),
                "silent_median_s": round(statistics.median(after_silence), 2),
                "silent_worst_s": round(max(after_silence), 2),
                "heartbeat_s": args.heartbeat,
            }
        )
    )


if __name__ == "__main__":
    main()
