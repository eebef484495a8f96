"""``make chaos``: every cell of the kill matrix again and again, in an order drawn from a seed, against one run.

After every fault the system must recover and the books must balance; at the end the run is brought to its last step
and its weights are compared with those of a run without faults. The last line is ``lost N duplicated M``.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.cells import CELLS, DISK_FULL, EVALUATED, HELD_OUT, WIPED, Cell
from tests.chaos.mutants import MUTANTS, Mutant
from tests.chaos.world import EVALUATES, World, reward_of

REPEATS = 4
WIPED_REISSUE_S = 3.0
MUTANT_REPEATS = 3
PATIENCE_S = 25.0
NOT_CAUGHT = "NOT CAUGHT"


@dataclass
class Tried:
    """What came of a cell."""

    fault: str
    point: str
    times: int = 0
    lost: int = 0
    duplicated: int = 0
    recovery_s: list[float] = field(default_factory=list)


def schedule(cells: Sequence[Cell], repeats: int, seed: int) -> list[Cell]:
    """Every cell ``repeats`` times, in an order that the seed gives."""
    order = [cell for cell in cells for _ in range(repeats)]
    random.Random(seed).shuffle(order)
    return order


def soak(world: World, order: Sequence[Cell], seed: int, say: bool) -> list[Tried]:
    """Play ``order``; returns what came of each cell. Raises Failure, with the ends of the logs."""
    rng = random.Random(seed)
    tried: dict[str, Tried] = {}
    world.tend()
    world.wait_for("the first version", lambda: world.version() >= 1)
    for number, cell in enumerate(order, 1):
        row = tried.setdefault(str(cell), Tried(cell.fault, cell.point))
        seconds = play(world, cell, rng)
        row.times += 1
        row.recovery_s.append(seconds)
        row.lost += len(world.books.lost())
        row.duplicated += len(world.books.duplicated())
        world.note_size()
        if say:
            print(f"{number:4}/{len(order)}  {seconds:5.1f} s  {cell}", flush=True)
    return list(tried.values())


def play(world: World, cell: Cell, rng: random.Random) -> float:
    """One fault, the recovery from it and the check; seconds from its firing to everything settled."""
    world.wait_for("a learner to lead", lambda: world.active)
    before = world.outstanding()
    cell.play(world, rng)
    fired = time.monotonic()
    world.recover(before)
    seconds = time.monotonic() - fired
    world.books.check()
    return seconds


def end(world: World) -> tuple[list[str], list[str]]:
    """Bring the run to its end and check all of it; what was lost and what was duplicated."""
    world.finish()
    books = world.books
    books.check()
    books.check_bucket()
    books.check_weights(world.config)
    world.check_sizes()
    return books.lost() + books.unsettled(), books.duplicated()


def matrix(tried: Sequence[Tried]) -> str:
    """What came of every cell, as a Markdown table."""
    lines = [
        "| fault | point | times | lost | duplicated | seconds to recover: median | worst |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in tried:
        median, worst = statistics.median(row.recovery_s), max(row.recovery_s)
        lines.append(
            f"| {row.fault} | {row.point} | {row.times} | {row.lost} | {row.duplicated} "
            f"| {median:.1f} | {worst:.1f} |"
        )
    return "\n".join(lines)


def run(world: World, cells: Sequence[Cell], args: argparse.Namespace) -> list[Tried]:
    """A run, its faults and its end."""
    order = schedule(cells, args.repeats, args.seed)
    print(f"{world.run}, seed {args.seed}: {len(order)} faults in {len(cells)} cells", flush=True)
    tried = soak(world, order, args.seed, say=True)
    lost, duplicated = end(world)
    counts = world.books.chain[-1].counts
    print(
        f"{counts.settled} groups settled, {counts.duplicate} copies of groups told apart, "
        f"{world.books.carried_on()} rollouts carried on from partials\n"
    )
    tried[-1].lost += len(lost)
    tried[-1].duplicated += len(duplicated)
    return tried


def caught(name: str, mutant: Mutant) -> str | None:
    """What a broken rule is found out by; None where every fault passes."""
    cells = [cell for cell in CELLS if str(cell) in mutant.cells]
    assert len(cells) == len(mutant.cells), f"{name} names a cell that there is not"
    folder = Path(tempfile.mkdtemp(prefix=f"spotgrpo-mutant-{name}-"))
    try:
        with World(folder, mutant=name if mutant.install else "", patience_s=PATIENCE_S) as world:
            soak(world, cells * MUTANT_REPEATS, 0, say=False)
            lost, duplicated = end(world)
    except AssertionError as exc:
        return next(iter(str(exc).splitlines()), "an invariant")
    return f"lost {lost} duplicated {duplicated}" if lost or duplicated else None


def try_mutants(only: str) -> int:
    """Break every rule in turn; 0 where each was found out by what it breaks, and the unbroken ones were not."""
    wrong = 0
    for name, mutant in MUTANTS.items():
        if only in name:
            by = caught(name, mutant) or NOT_CAUGHT
            wrong += not re.search(mutant.symptom, by)
            print(f"| {mutant.what} | {by} |", flush=True)
    return 1 if wrong else 0


def main() -> int:
    """Run the soak; 0 where nothing was lost or duplicated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the order and of every fault")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="times that each cell fires")
    parser.add_argument("--only", default="", help="cells or mutants whose name contains this")
    parser.add_argument("--mutants", action="store_true", help="break the rules, one at a time")
    parser.add_argument("--matrix", type=Path, help="write the matrix here, as Markdown")
    args = parser.parse_args()
    if args.mutants:
        return try_mutants(args.only)
    tried: list[Tried] = []
    folder = Path(tempfile.mkdtemp(prefix="spotgrpo-chaos-"))
    print(f"logs in {folder}")
    with World(folder) as world:
        chosen = [cell for cell in CELLS if args.only in str(cell)]
        if not world.disk.is_mounted:
            print("no right to mount a small file system here: disk full is not tried")
            chosen = [cell for cell in chosen if cell.fault != DISK_FULL]
        if chosen:
            tried += run(world, chosen, args)
        if wiped := [cell for cell in WIPED if args.only in str(cell)]:
            world.renew("wiped", WIPED_REISSUE_S)
            tried += run(world, wiped, args)
        if evaluated := [cell for cell in EVALUATED if args.only in str(cell)]:
            world.renew("evaluating", sets=(*EVALUATES, f"eval.prompts={HELD_OUT}"))
            tried += run(world, evaluated, args)
            world.books.check_evaluations(HELD_OUT, reward_of)
    every = enumerate((*CELLS, *WIPED, *EVALUATED))
    places = {(cell.fault, cell.point): place for place, cell in every}
    found = matrix(sorted(tried, key=lambda row: places[row.fault, row.point]))
    if args.matrix is not None:
        args.matrix.write_text(found + "\n")
    print(f"{found}\n\n{sum(row.times for row in tried)} faults")
    lost, duplicated = sum(row.lost for row in tried), sum(row.duplicated for row in tried)
    print(f"lost {lost} duplicated {duplicated}")
    return 1 if lost or duplicated else 0


if __name__ == "__main__":
    sys.exit(main())
