"""The kill matrix in short: every row once, against one run, whose weights are then those of a run without faults.

``make chaos`` plays every cell several times. The tests of this module follow one upon another in one world each.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator

import pytest

from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.steps import Step
from tests.chaos.cells import CELLS, EVALUATED, HELD_OUT, WIPED, Cell
from tests.chaos.mutants import MUTANTS
from tests.chaos.soak import WIPED_REISSUE_S, end, play
from tests.chaos.world import EVALUATES, World, reward_of

pytestmark = pytest.mark.timeout(240)
SHORT = [cell for cell in CELLS if cell.in_short]


def opened(world: World) -> Iterator[World]:
    """A world; skipped on a person's machine that has no servers, failed in CI."""
    try:
        world.__enter__()
    except ConfigError as exc:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(exc))
    try:
        yield world
    finally:
        world.__exit__()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A run in which whatever is lost is lost for good, with a standby and a worker that is never a target."""
    world = World(tmp_path_factory.mktemp("chaos") / "world")
    try:
        world.__enter__()
    except ConfigError as exc:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(exc))
    yield world
    world.__exit__()


def test_a_learner_that_dies_while_it_begins_a_run_is_followed_by_one_that_does(
    world: World,
) -> None:
    """Version 0 is stored under the names of an epoch that no other learner uses again."""
    witness = world.arm("learner", Step.LEARNER_BEGINNING, "SIGKILL")
    first = world.start("learner")
    assert world.witness(witness) is first
    world.wait_for_exit(first, -signal.SIGKILL)
    world.wait_for("version 1", lambda: world.version() >= 1)
    assert world.epoch() == 2


@pytest.mark.parametrize("cell", SHORT, ids=str)
def test_nothing_is_lost_or_doubled_by(cell: Cell, world: World) -> None:
    if cell.fault == "disk full" and not world.disk.is_mounted:
        pytest.skip("needs the right to mount a small file system")
    play(world, cell, random.Random(str(cell)))
    assert (world.books.lost(), world.books.duplicated()) == ([], [])
    world.note_size()


def test_after_all_that_the_weights_are_those_of_a_run_without_faults(world: World) -> None:
    """And nothing is left behind: no process, no unfinished object, no file or memory in the steady worker."""
    assert len(world.sizes) >= 9
    assert end(world) == ([], [])
    assert world.books.chain[-1].counts.duplicate, "no copy came: the faults met nothing"
    assert world.books.carried_on(), "no drained group was carried on"


@pytest.mark.parametrize("cell", WIPED, ids=str)
def test_a_lost_broker_disk_costs_no_task(cell: Cell, world: World) -> None:
    """What was in the queues is generated again, under the same ids, and trains once."""
    world.renew("wiped", WIPED_REISSUE_S)
    world.tend()
    world.wait_for("version 1", lambda: world.version() >= 1)
    play(world, cell, random.Random(0))
    assert end(world) == ([], [])


def test_an_evaluation_that_is_killed_counts_every_prompt_once(world: World) -> None:
    """Its answers are in no books: a learner that takes over asks all again, and finds the same."""
    world.renew("evaluating", sets=(*EVALUATES, f"eval.prompts={HELD_OUT}"))
    world.tend()
    world.wait_for("version 1", lambda: world.version() >= 1)
    for cell in EVALUATED:
        play(world, cell, random.Random(str(cell)))
    assert end(world) == ([], [])
    assert world.books.check_evaluations(HELD_OUT, reward_of) >= 2


def test_every_row_of_the_matrix_is_in_the_short_form() -> None:
    assert {cell.fault for cell in (*CELLS, *WIPED)} == {cell.fault for cell in (*SHORT, *WIPED)}


def test_every_mutant_names_cells_that_there_are() -> None:
    names = {str(cell) for cell in CELLS}
    assert all(set(mutant.cells) <= names for mutant in MUTANTS.values())
