"""Which of a worker's vLLM servers may serve, and which versions each of them has.

A server is away or up. It comes up only after it was checked and has every version that is held, and it is away
from the first lost answer on, so that a server that was restarted serves nothing before it was loaded again. One that
is wrong about a version while another is right is away too, until it was loaded again and proven.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from spotgrpo.producer.engines.base import RequestRefused
from spotgrpo.producer.engines.server_api import ServerLost, ServerRefused
from spotgrpo.producer.engines.server_check import check_server, refused_adapter
from spotgrpo.producer.probe import judge, noise_of
from spotgrpo.shared.errors import IntegrityError, SpotGRPOError, TransientError
from spotgrpo.shared.manifest import Probe

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from spotgrpo.producer.engines.server_api import ServerApi
    from spotgrpo.producer.engines.server_check import Demands
    from spotgrpo.shared.ids import PolicyVersion
    from spotgrpo.shared.wire import Float32Array

log = logging.getLogger(__name__)

CHECK_S: Final = 5.0
"""Between two looks at a server that is up."""
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 10.0
"""Between two looks at a server that is away."""
GOODBYE_S: Final = 2.0


@dataclass(eq=False)
class Server:
    """One server, as far as this worker knows.

    Attributes:
        base: what it calls its base model.
        names: what it calls the versions that it has.
        proven: those of the names under which it answered as it should; no name comes twice.
        uses: what it does for this worker now; each can be ended from outside.
        heard_at: when it last sent a token, or was last without work (monotonic).
        doubted: set where it should be looked at now.
        said: what was last logged of it.
    """

    api: ServerApi
    base: str = ""
    names: dict[PolicyVersion, str] = field(default_factory=dict)
    proven: set[str] = field(default_factory=set)
    uses: set[asyncio.Timeout] = field(default_factory=set)
    is_up: bool = False
    heard_at: float = 0.0
    doubted: asyncio.Event = field(default_factory=asyncio.Event)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    said: str = ""

    def hear(self) -> None:
        """It sent a token."""
        self.heard_at = time.monotonic()

    def say(self, level: int, text: str) -> None:
        """Once, however often it is found so."""
        if text != self.said:
            log.log(level, "%s", text)
            self.said = text


@dataclass(frozen=True, eq=False)
class Proof:
    """Token ids, and the logprobs of all but the first, as a server gives them that has the version."""

    token_ids: tuple[int, ...]
    scores: Float32Array


@dataclass
class Held:
    """A version that every server is to have.

    Attributes:
        path: its folder as servers see it.
        proof: what the first servers gave; one that has not given the same serves no request of this version.
    """

    path: str
    proof: Proof | None = None


@dataclass(frozen=True, eq=False)
class Answer:
    """The logprobs that a server gave under a name of its own."""

    server: Server
    name: str
    scores: Float32Array


class ServerPool:
    """Servers that answer for each other. Lives in the worker's event loop.

    Args:
        dtype: of the base model; says how near two servers' logprobs have to be.
        timeout_s: for a first server at start; and how long a server with work may send no token.
        on_failure: called with what ended a background task, which nothing should.
    """

    def __init__(
        self,
        apis: Sequence[ServerApi],
        demands: Demands,
        *,
        dtype: str,
        timeout_s: float,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._servers = [Server(api) for api in apis]
        self._demands, self._timeout_s = demands, timeout_s
        self._dtype, self._noise = dtype, noise_of(dtype)
        self._on_failure = on_failure
        self._held: dict[PolicyVersion, Held] = {}
        self._mark, self._numbers = f"spotgrpo-{secrets.token_hex(4)}-", itertools.count(1)
        self._changed = asyncio.Event()
        self._watches: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Wait for the first server; the others are waited for in the background.

        Raises:
            ConfigError: one of them cannot serve this run as it was started.
            TransientError: none answers within ``timeout_s``.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            tries = (self._look(server) for server in self._servers)
            troubles = await asyncio.gather(*tries, return_exceptions=True)
            for server, trouble in zip(self._servers, troubles, strict=True):
                if trouble is not None and not isinstance(trouble, ServerLost):
                    raise trouble
                if trouble is not None:
                    server.say(logging.WARNING, f"waiting for a server: {trouble}")
            if any(server.is_up for server in self._servers):
                break
            if time.monotonic() >= deadline:
                raise TransientError(f"no server of worker.servers answers: {troubles[0]}")
            await asyncio.sleep(FIRST_PAUSE_S)
        for server in self._servers:
            task = asyncio.create_task(self._watch(server))
            task.add_done_callback(self._ended)
            self._watches.append(task)

    async def versions(self) -> str:
        """Versions of vLLM on the servers that are up."""
        found: set[str] = set()
        for server in self._up():
            with contextlib.suppress(ServerLost, ServerRefused):
                found.add(await server.api.version())
        return ", ".join(sorted(found)) or "unknown"

    async def close(self) -> None:
        """Let the servers forget what was loaded, if they do so at once."""
        for task in self._watches:
            task.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await asyncio.gather(*(self.unload(version) for version in list(self._held)))
        for server in self._servers:
            await server.api.close()

    # ---- versions --------------------------------------------------------------------------------------

    async def load(self, version: PolicyVersion, path: str) -> None:
        """Load a version on every server that is up; the others get it before they serve.

        Raises:
            ConfigError: a server cannot read ``path``, or lacks room for the adapter.
            IntegrityError: the servers refuse the adapter for another reason. Where one takes it, those that do not
                are away instead.
            TransientError: no server is up.
        """
        held, servers = Held(path), self._up()
        tries = (self._load_or_lose(server, version, held) for server in servers)
        results = await asyncio.gather(*tries, return_exceptions=True)
        for server, result in zip(servers, results, strict=True):
            if isinstance(result, IntegrityError) and True in results:
                self._turn_out(server, str(result))
            elif isinstance(result, BaseException):
                await self._take_off(version)
                raise result
        if True not in results:
            raise self._nobody()
        self._held[version] = held
        self._tell()

    async def unload(self, version: PolicyVersion) -> None:
        """Take a version off every server that has it."""
        self._held.pop(version, None)
        await self._take_off(version)

    async def score(
        self, version: PolicyVersion | None, token_ids: tuple[int, ...]
    ) -> Float32Array:
        """Logprobs of ``token_ids[1:]`` at temperature 1, which every server that is up has to agree on.

        Raises:
            IntegrityError: they do not.
            TransientError: no server is up.
        """
        first, *others = answers = await self._answers(version, token_ids)
        for other in others:
            self._compare_answers(other, first)
        if version is not None:
            self._note_proof(version, Proof(token_ids, first.scores), answers)
        return first.scores

    async def score_probe(self, version: PolicyVersion, probe: Probe) -> Float32Array:
        """Logprobs of a probe's tokens by the server that fits it best, or by any where none fits.

        Where one fits, those that do not, or that differ from it, are away from now on.

        Raises:
            TransientError: no server is up.
        """
        answers = await self._answers(version, tuple(probe.token_ids))
        fitting = [one for one in answers if judge(probe, one.scores, self._dtype) != "fail"]
        if not fitting:
            return answers[0].scores
        best = min(fitting, key=lambda one: _gap(one.scores, probe.version_logprobs))
        well: list[Answer] = []
        wrong: list[tuple[Server, str]] = []
        for one in answers:
            try:
                self._compare_answers(one, best)
                if one not in fitting:
                    raise IntegrityError(f"{one.server.api.url} does not answer as {version}")
                well.append(one)
            except IntegrityError as exc:
                wrong.append((one.server, str(exc)))
        self._note_proof(version, Proof(tuple(probe.token_ids), best.scores), well)
        for server, why in wrong:
            self._turn_out(server, why)
        return best.scores

    async def _answers(
        self, version: PolicyVersion | None, token_ids: tuple[int, ...]
    ) -> list[Answer]:
        """Of the servers that are up and have ``version``, one at least."""
        servers = [s for s in self._up() if version is None or version in s.names]
        names = [s.base if version is None else s.names[version] for s in servers]
        asking = (self._score(s, name, token_ids) for s, name in zip(servers, names, strict=True))
        answers = [answer for answer in await asyncio.gather(*asking) if answer is not None]
        if not answers:
            raise self._nobody()
        return answers

    def _note_proof(self, version: PolicyVersion, proof: Proof, answers: Sequence[Answer]) -> None:
        """These fit ``proof``. A server that came, or came back, while they were asked has to show it now."""
        held = self._held.get(version)
        if held is None:
            return
        held.proof = held.proof or proof
        for answer in answers:
            answer.server.proven.add(answer.name)
        for server in self._servers:
            if version in server.names and not self._may_serve(server, version):
                server.doubted.set()
        self._tell()

    @contextlib.asynccontextmanager
    async def place(self, version: PolicyVersion) -> AsyncIterator[tuple[Server, str]]:
        """The least busy server that has ``version``, and its name there; waits until there is one.

        Raises:
            ServerLost: what was asked of the server failed, and it is away from now on.
            RequestRefused: the server is well and will not do this request.
        """
        while (server := self._least_busy(version)) is None:
            await self._changed.wait()
        async with self._using(server):
            yield server, server.names[version]

    # ---- one server ------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _using(self, server: Server) -> AsyncIterator[None]:
        """What fails in this block is the server's loss, unless it is the request's fault."""
        if not server.uses:
            server.hear()
        try:
            async with asyncio.timeout(None) as use:
                server.uses.add(use)
                try:
                    yield
                finally:
                    server.uses.discard(use)
        except TimeoutError as exc:
            raise ServerLost(f"{server.api.url} was given up") from exc
        except ServerLost as exc:
            self._lose(server, str(exc))
            raise
        except ServerRefused as exc:
            if exc.status in (400, 413, 422):
                raise RequestRefused(str(exc)) from exc
            self._lose(server, str(exc))
            raise ServerLost(str(exc), broke_off=exc.status >= 500) from exc

    async def _score(self, server: Server, name: str, token_ids: tuple[int, ...]) -> Answer | None:
        """None where the server is lost."""
        with contextlib.suppress(ServerLost):
            async with self._using(server):
                return Answer(server, name, await server.api.score(name, token_ids))
        return None

    async def _load_or_lose(self, server: Server, version: PolicyVersion, held: Held) -> bool:
        try:
            async with server.lock, self._using(server):
                if server.is_up:  # still
                    await self._put_on(server, version, held)
        except ServerLost:
            return False
        return version in server.names

    async def _put_on(self, server: Server, version: PolicyVersion, held: Held) -> None:
        """Load it where it is not, under a name that was never used, and see that it answers as it did elsewhere."""
        name = server.names.pop(version, None)  # it has none until it is proven
        if name is None:
            name = f"{self._mark}{version}-{next(self._numbers)}"
            try:
                await server.api.load(name, held.path)
            except ServerRefused as exc:
                raise refused_adapter(server.api.url, held.path, exc, self._demands) from exc
        if held.proof is not None:
            await self._prove(server, version, name, held.proof)
        server.names[version] = name

    async def _prove(self, server: Server, version: PolicyVersion, name: str, proof: Proof) -> None:
        """See that the server answers for ``name`` as others did, or it did before, and not as for its base model."""
        mine = await server.api.score(name, proof.token_ids)
        self._compare(server.api.url, mine, proof.scores, f"other servers did on {version}")
        base = await server.api.score(server.base, proof.token_ids)
        probe = Probe(
            token_ids=list(proof.token_ids),
            version_logprobs=proof.scores.tolist(),
            base_logprobs=base.tolist(),
            dtype=self._dtype,
        )
        if judge(probe, mine) == "fail":
            raise IntegrityError(f"{server.api.url} answers for {version} as for its base model")
        server.proven.add(name)

    async def _take_off(self, version: PolicyVersion) -> None:
        named = [(s, s.names.pop(version)) for s in self._servers if version in s.names]
        # One that does not answer is asked again when it is looked at.
        await asyncio.gather(*(_forget(server, name) for server, name in named if server.is_up))

    async def _take_off_strays(self, server: Server, present: set[str]) -> None:
        """What loads left there whose answer was lost, or whose proof failed, and what did not go when it was to."""
        known = set(server.names.values())
        strays = [name for name in present - known if name.startswith(self._mark)]
        await asyncio.gather(*(_forget(server, name) for name in strays))

    def _compare_answers(self, one: Answer, other: Answer) -> None:
        who = f"{other.server.api.url} does"
        self._compare(one.server.api.url, one.scores, other.scores, who)

    def _compare(self, url: str, mine: Float32Array, theirs: Float32Array, who: str) -> None:
        gap = _gap(mine, theirs)
        if not gap <= self._noise:
            raise IntegrityError(
                f"{url} gives other logprobs than {who} ({gap:.1g} nats apart): all servers need the same model, "
                f"dtype and flags"
            )

    # ---- coming and going ------------------------------------------------------------------------------

    async def _watch(self, server: Server) -> None:
        """One server's life: looked at every CHECK_S, or at once where it is in doubt, less often while it is away."""
        pause_s, failures = CHECK_S, 0
        while True:
            # Not wait_for: until Python 3.12 it may take a cancellation for the doubt, and the watch would not end.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s * random.uniform(0.8, 1.2)):
                    await server.doubted.wait()
            server.doubted.clear()
            try:
                await self._look(server)
                pause_s, failures = CHECK_S, 0
            except SpotGRPOError as exc:
                self._lose(server, str(exc), level=_level(exc))
                server.doubted.clear()
                _give_up(server)
                pause_s = min(FIRST_PAUSE_S * 2.0**failures, LONGEST_PAUSE_S)
                failures = min(failures + 1, 16)

    async def _look(self, server: Server) -> None:
        """See that a server is well and has every version, and bring it up."""
        await (
            server.api.health()
        )  # also while a load is under way, which ends with a server that hangs
        async with server.lock:
            if not server.is_up:
                server.base = await check_server(server.api, self._demands)
            present = {card.name for card in await server.api.models()}
            forgotten = [v for v, name in server.names.items() if name not in present]
            for version in forgotten:
                del server.names[version]
            server.proven.intersection_update(server.names.values())
            if server.is_up and forgotten:
                raise ServerLost(f"{server.api.url} has forgotten its versions: it was restarted")
            self._check_silence(server)
            await self._take_off_strays(server, present)
            await self._catch_up(server)
        if not server.is_up:
            server.is_up = True
            server.say(
                logging.INFO, f"{server.api.url} serves, with {len(server.names)} versions loaded"
            )
        self._tell()

    async def _catch_up(self, server: Server) -> None:
        """Load what the server lacks, and prove what it has not proven. A version may be unloaded meanwhile."""
        for version, held in list(self._held.items()):
            if self._may_serve(server, version):
                continue
            with self._unless_gone(version):
                await self._put_on(server, version, held)
            if version not in self._held:
                server.names.pop(version, None)

    @contextlib.contextmanager
    def _unless_gone(self, version: PolicyVersion) -> Iterator[None]:
        try:
            yield
        except SpotGRPOError:
            if version in self._held:
                raise

    def _check_silence(self, server: Server) -> None:
        silent_s = time.monotonic() - server.heard_at
        if server.is_up and server.uses and silent_s > self._timeout_s:
            work = len(server.uses)
            raise ServerLost(
                f"{server.api.url} sent no token for {silent_s:.0f} s with {work} requests"
            )

    def _lose(self, server: Server, why: str, level: int = logging.WARNING) -> None:
        if server.is_up:
            server.doubted.set()
        if server.is_up or level > logging.WARNING:
            server.say(level, f"a server is away: {why}")
        server.is_up = False

    def _turn_out(self, server: Server, why: str) -> None:
        """It is away until what it is to serve has been loaded anew and proven; what it does goes on elsewhere."""
        server.names.clear()
        self._lose(server, why)
        _give_up(server)

    def _least_busy(self, version: PolicyVersion) -> Server | None:
        having = [server for server in self._up() if self._may_serve(server, version)]
        return min(having, key=lambda server: len(server.uses), default=None)

    def _may_serve(self, server: Server, version: PolicyVersion) -> bool:
        """Whether it has ``version``, and has answered as it should since there is something to prove it by."""
        name, held = server.names.get(version), self._held.get(version)
        if name is None or held is None:
            return False
        return held.proof is None or name in server.proven

    def _up(self) -> list[Server]:
        return [server for server in self._servers if server.is_up]

    def _nobody(self) -> TransientError:
        return TransientError("no server of worker.servers is there to answer")

    def _tell(self) -> None:
        """Wake all who wait for a server or a version."""
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_failure(error)


def _gap(mine: Float32Array, theirs: Float32Array | Sequence[float]) -> float:
    """Mean |difference| in nats."""
    return float(np.abs(mine - np.asarray(theirs)).sum()) / max(1, len(theirs))


async def _forget(server: Server, name: str) -> None:
    with contextlib.suppress(ServerLost, ServerRefused):  # it has forgotten it, then
        await server.api.unload(name)


def _give_up(server: Server) -> None:
    """End what it does for this worker: its connections may stay silent for ever."""
    now = asyncio.get_running_loop().time()
    for use in server.uses:
        use.reschedule(now)
    server.uses.clear()


def _level(error: SpotGRPOError) -> int:
    """What waiting does not mend is an error."""
    return logging.WARNING if isinstance(error, TransientError) else logging.ERROR
