"""Places of the engine: handed out in order, one by one, and none lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from spotgrpo.producer.room import Room


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 10))  # type: ignore[arg-type]


def test_a_group_gets_places_one_by_one_as_they_come_free() -> None:
    async def story() -> None:
        room = Room(4)
        with room.seats(3) as first, room.seats(3) as second:
            for _ in range(3):
                await first.take()
            assert (first.held, second.held, second.wanted) == (3, 1, 2)
            first.give_back()
            assert (first.held, second.held, second.wanted) == (2, 2, 1)
            assert room.used == 4
        assert room.used == 0

    run(story)


def test_who_asked_first_is_served_whole_before_the_next() -> None:
    async def story() -> None:
        room = Room(2)
        with room.seats(2) as first, room.seats(2) as second, room.seats(1) as third:
            first.give_back()
            assert (second.held, third.held) == (1, 0)
            first.give_back()
            assert (second.held, third.held) == (2, 0)
            second.give_back()
            assert third.held == 1

    run(story)


def test_a_group_of_more_sequences_than_places_uses_them_in_turn() -> None:
    async def story() -> None:
        room = Room(2)
        most, done = 0, 0

        async def one() -> None:
            nonlocal most, done
            most = max(most, room.used)
            await asyncio.sleep(0)
            done += 1
            seats.give_back()

        with room.seats(7) as seats:
            async with asyncio.TaskGroup() as group:
                for _ in range(7):
                    await seats.take()
                    group.create_task(one())
        assert (most, done, room.used) == (2, 7, 0)

    run(story)


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_who_leaves_while_it_still_asks_leaves_its_places_and_its_turn(taken: int) -> None:
    async def story() -> None:
        room = Room(2)
        with room.seats(1) as last:
            with room.seats(5) as big:
                for _ in range(taken and 1):
                    await big.take()
                assert (last.held, big.held) == (1, 1)
                if taken == 2:
                    big.give_back()
            assert room.used == 1
            with room.seats(1) as next_one:
                await next_one.take()
                assert room.used == 2
        assert room.used == 0

    run(story)


def test_somebody_waits_until_the_last_place_is_handed_out() -> None:
    async def story() -> None:
        room = Room(2)
        with room.seats(3) as seats:
            waiting = asyncio.create_task(room.nobody_waits())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not waiting.done()
            seats.give_back()
            await waiting

    run(story)
