"""Calling other people's functions so that none of them can stop the worker.

A plain function runs in a daemon thread, one at a time (such functions share parsers and tokenizers that are not
made for threads). A coroutine runs in an event loop of its own thread: one that blocks stops no heartbeat of ours.
What does not answer in time is left behind; its thread does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

RESPONSE_S: Final = 1.0
"""How long a loop that runs coroutines may take to answer before it counts as blocked."""


class NoAnswer(Exception):
    """A function did not answer within its time."""


@dataclass(frozen=True)
class Outcome:
    """What a call came to. Never passed as a future's exception: futures treat some of them as their own."""

    value: Any = None
    error: BaseException | None = None

    def result(self) -> Any:
        """The value, or the error raised; one that would end the worker (SystemExit) as a RuntimeError."""
        if isinstance(self.error, Exception) and not isinstance(self.error, StopIteration):
            raise self.error
        if self.error is not None:
            raise RuntimeError(f"{type(self.error).__name__}: {self.error}") from self.error
        return self.value


class Caller:
    """Calls functions and coroutine functions with a time limit."""

    def __init__(self) -> None:
        self._turns: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(
        self, function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float
    ) -> Any:
        """``function(**arguments)``, awaited where it gives something to await.

        Raises:
            NoAnswer: none within ``timeout_s`` seconds of its start.
            Exception: whatever the function raised.
        """
        if _is_coroutine_function(function):
            return await self._await(function(**arguments), timeout_s)
        async with self._turn():
            value = (await _within(_in_thread(function, arguments), timeout_s)).result()
        return await self._await(value, timeout_s) if inspect.isawaitable(value) else value

    def _turn(self) -> asyncio.Lock:
        loop = asyncio.get_running_loop()
        if self._turns is None or self._turns[0] is not loop:  # a lock belongs to one loop
            self._turns = (loop, asyncio.Lock())
        return self._turns[1]

    def close(self) -> None:
        """End the loop of coroutines; those still running are cancelled."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    async def _await(self, awaitable: Any, timeout_s: float) -> Any:
        loop = self._loop = self._loop or start_loop()
        try:
            return (
                await _within(asyncio.run_coroutine_threadsafe(_finish(awaitable), loop), timeout_s)
            ).result()
        except NoAnswer:
            if self._loop is loop and not await _answers(loop):
                self._loop = None  # blocked: the next coroutine gets a loop that lives
            raise


def start_loop() -> asyncio.AbstractEventLoop:
    """An event loop that runs in a daemon thread; ``loop.stop`` ends and closes it."""
    loop = asyncio.new_event_loop()

    def work() -> None:
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    threading.Thread(target=work, name="reward-loop", daemon=True).start()
    return loop


def run_blocking(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, waited for in a thread that may or may not have a running loop of its own."""
    loop = start_loop()
    try:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)


def _is_coroutine_function(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


def _in_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Future[Outcome]:
    running: Future[Outcome] = Future()
    running.set_running_or_notify_cancel()  # from here on nobody can cancel it, so the result always fits

    def work() -> None:
        try:
            outcome = Outcome(function(**arguments))
        except BaseException as exc:  # noqa: BLE001 - handed to the caller; a thread has nobody above it
            outcome = Outcome(error=exc)
        running.set_result(outcome)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return running


async def _finish(awaitable: Any) -> Outcome:
    try:
        return Outcome(await awaitable)
    except BaseException as exc:  # noqa: BLE001 - handed to the caller; SystemExit would end the loop
        return Outcome(error=exc)


async def _within(running: Future[Outcome], timeout_s: float) -> Outcome:
    # Not wait_for: until Python 3.12 it may take a cancellation for the answer, and a drain would wait for the rest.
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(running)
    except TimeoutError as exc:
        raise NoAnswer(f"no answer within {timeout_s:g} s") from exc


async def _answers(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        await asyncio.wait_for(
            asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)),
            RESPONSE_S,
        )
    except TimeoutError:
        return False
    return True
