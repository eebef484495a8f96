"""When the thread of an engine takes an order: between two tokens, and those of an adoption without a token between."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from spotgrpo.producer.engines import threaded
from spotgrpo.producer.engines.base import Chunk, EngineSpec, GenerationRequest
from spotgrpo.producer.engines.ends import Ends
from spotgrpo.producer.engines.threaded import Running, ThreadedEngine
from spotgrpo.shared.ids import PolicyVersion
from spotgrpo.shared.wire import Float32Array, Sampling

OLD, NEW = PolicyVersion(1, 1), PolicyVersion(1, 2)


class Diarist(ThreadedEngine):
    """Samples token 1 for ever, and writes down what it does; ``token`` where it samples for what runs."""

    name = "diarist"

    def __init__(self) -> None:
        super().__init__(EngineSpec("none", 1, 1.0, ("q_proj",)))
        self.diary: list[str] = []

    def _open(self) -> Ends:
        return Ends(None, frozenset({0}), max_context=100_000, vocabulary=8)

    def _put_on(self, version: PolicyVersion, folder: Path) -> int:
        self.diary.append(f"load {version.number}")
        return 1

    def _take_off(self, version: PolicyVersion) -> None:
        self.diary.append(f"unload {version.number}")

    def _take(self, running: Running) -> None:
        self.diary.append(f"take {running.request.version.number}")

    def _drop(self, running: Running) -> None:
        pass

    def _sample(self) -> list[tuple[Running, Chunk]]:
        time.sleep(0.002)
        self.diary.append("token")
        return [(running, self._chunk(running)) for running in self._running.values()]

    def _chunk(self, running: Running) -> Chunk:
        running.completion.append(1)
        return Chunk((1,), (0.0,), self._ends.finish(running.request, running.completion))

    def _logprobs(self, version: PolicyVersion | None, token_ids: tuple[int, ...]) -> Float32Array:
        self.diary.append("score")
        return np.zeros(len(token_ids) - 1, dtype=np.float32)

    def _free(self) -> None:
        pass


def request(version: PolicyVersion, name: str = "long", tokens: int = 50_000) -> GenerationRequest:
    return GenerationRequest(f"{name} on {version}", (1,), Sampling(tokens), 0, version)


def test_no_token_of_others_is_sampled_between_a_load_its_probe_and_the_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threaded, "FOLLOW_UP_S", 5.0)  # however busy the machine is

    async def story() -> list[str]:
        engine = Diarist()
        await engine.start()
        await engine.load(OLD, Path())
        running = engine.submit(request(OLD))
        await anext(aiter(running))
        await engine.load(NEW, Path())
        await engine.score(NEW, (1, 2, 3))
        adopted = engine.submit(request(NEW))
        await anext(aiter(adopted))
        await engine.close()
        return engine.diary

    diary = asyncio.run(story())
    at = diary.index("load 2")
    assert diary[at : at + 4] == ["load 2", "score", "take 2", "token"]


def test_no_token_of_others_is_sampled_before_those_that_get_the_places_of_what_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threaded, "FOLLOW_UP_S", 5.0)  # however busy the machine is

    async def sample(engine: Diarist, name: str) -> None:
        async for _ in engine.submit(request(OLD, name, 3)):
            pass

    async def one_after_the_other(engine: Diarist, name: str) -> None:
        await sample(engine, f"{name} first")
        await sample(engine, f"{name} then")

    async def story() -> list[str]:
        engine = Diarist()
        await engine.start()
        await engine.load(OLD, Path())
        long = engine.submit(request(OLD))
        await anext(aiter(long))
        await asyncio.gather(*(one_after_the_other(engine, name) for name in ("a", "b")))
        await engine.close()
        return engine.diary

    diary = asyncio.run(story())
    places = [n for n, what in enumerate(diary) if what == "take 1"]
    assert len(places) == 5
    # Both begin together, end with the same token, and those that follow have the next one.
    assert [diary[n] for n in range(places[1], places[4] + 1)] == [
        *("take 1", "take 1"),
        *("token", "token", "token"),
        *("take 1", "take 1"),
    ]
