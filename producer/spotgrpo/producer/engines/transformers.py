"""The reference engine: a transformers model with peft adapters, sampled by a decoding loop of our own.

Everything that touches the model runs on one thread. Between any two tokens it takes orders (submit,
abort, load, unload, score), so a version is adopted while others generate.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import peft
import torch
import transformers
from peft.tuners.lora import LoraLayer

from spotgrpo.producer.engines.adapter import Linear, read_adapter
from spotgrpo.producer.engines.base import Chunk
from spotgrpo.producer.engines.base_model import (
    LOAD_ERRORS,
    check_targets,
    describe,
    linear_modules,
    not_loadable,
)
from spotgrpo.producer.engines.decoding import Batch, Decoder, Row, prefill_share
from spotgrpo.producer.engines.ends import Ends
from spotgrpo.shared.errors import ConfigError, IntegrityError, SpotGRPOError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from spotgrpo.producer.engines.adapter import Adapter
    from spotgrpo.producer.engines.base import EngineSpec, GenerationRequest
    from spotgrpo.shared.ids import PolicyVersion
    from spotgrpo.shared.wire import Float32Array

T = TypeVar("T")

NO_ADAPTER: Final = "none"
"""A rank-1 zero adapter that is always there: peft cannot delete the last one."""
LINGER_S: Final = 0.002
"""An idle engine waits so long after the first request, so that a whole group is prefilled at once."""


@dataclass(eq=False)
class _Running:
    """A request and where its chunks go. ``outbox`` belongs to the event loop."""

    row: Row
    outbox: asyncio.Queue[Chunk | SpotGRPOError] = field(default_factory=asyncio.Queue)

    @property
    def version(self) -> PolicyVersion:
        return self.row.request.version


class TransformersEngine:
    """Implements :class:`spotgrpo.producer.engines.base.Engine` for any causal language model."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="transformers-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death: SpotGRPOError | None = None
        self._closing = False
        # The rest belongs to the thread.
        self._running: dict[str, _Running] = {}
        self._waiting: list[_Running] = []
        self._batches: dict[PolicyVersion, list[Batch]] = {}
        self._versions: set[PolicyVersion] = set()
        self._active = NO_ADAPTER
        self._model: Any = None
        self._modules: dict[str, Linear] = {}
        self._ends: Ends
        self._decoder: Decoder

    @property
    def name(self) -> str:
        """``transformers``."""
        return "transformers"

    @property
    def engine_version(self) -> str:
        """Version of transformers."""
        return str(transformers.__version__)

    # ---- called in the event loop ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the base model. Raises ConfigError for a model that is missing or does not fit."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await self._call(self._load_base)

    async def load(self, version: PolicyVersion, folder: Path) -> int:
        """Load a PEFT folder between two tokens; see :meth:`Engine.load`."""
        return await self._call(partial(self._load, version, folder))

    async def unload(self, version: PolicyVersion) -> None:
        """Free a version that nothing in flight names."""
        await self._call(partial(self._unload, version))

    def submit(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Sample a completion; see :meth:`Engine.submit`."""
        running = _Running(Row(request))
        self._order(partial(self._accept, running))
        if self._death is not None:
            running.outbox.put_nowait(self._death)
        return self._chunks(running)

    async def _chunks(self, running: _Running) -> AsyncIterator[Chunk]:
        finished = False
        try:
            while not finished:
                item = await running.outbox.get()
                finished = isinstance(item, SpotGRPOError) or item.finish is not None
                if isinstance(item, SpotGRPOError):
                    raise item
                yield item
        finally:
            if not finished:
                await self.abort(running.row.request.request_id)

    async def abort(self, request_id: str) -> None:
        """End a request before its next token. Unknown ids are fine."""
        self._order(partial(self._abort, request_id))

    async def score(self, version: PolicyVersion | None, token_ids: Sequence[int]) -> Float32Array:
        """Logprobs at temperature 1 of ``token_ids[1:]``, float32 [T-1]."""
        return await self._call(partial(self._score, version, tuple(token_ids)))

    async def close(self) -> None:
        """Abort what runs, free the model and end the thread. Idempotent."""
        if not self._thread.is_alive():
            return
        self._order(self._stop)
        await asyncio.to_thread(self._thread.join)

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.put(order)

    async def _call(self, function: Callable[[], T]) -> T:
        if self._death is not None:
            raise self._death
        if not self._thread.is_alive():
            raise SpotGRPOError("the transformers engine is not running")
        future: Future[T] = Future()
        self._order(partial(self._answer, future, function))
        if self._death is not None:  # it may have died since, and its orders with it
            raise self._death
        return await asyncio.wrap_future(future)

    # ---- runs on the engine's thread -------------------------------------------------------------------------

    def _run(self) -> None:
        """Take orders; admit what waits; one token for every batch; until closed or broken.

        Waits only while nothing is to be sampled; every order wakes it. Ends by telling all who wait.
        """
        try:
            with torch.inference_mode():
                while not self._closing:
                    self._take_orders()
                    self._admit()
                    for version in list(self._batches):
                        self._advance(version)
            self._leave(SpotGRPOError("the transformers engine is closed"))
        except Exception as exc:  # noqa: BLE001  the thread's edge: whoever waits has to hear of it
            death = SpotGRPOError(f"the transformers engine died: {type(exc).__name__}: {exc}")
            death.__cause__ = exc
            self._leave(death)

    def _take_orders(self) -> None:
        if not self._batches and not self._waiting:
            self._orders.get()()
            time.sleep(LINGER_S)
        with contextlib.suppress(queue.Empty):
            while not self._closing:
                self._orders.get_nowait()()

    def _answer(self, future: Future[T], function: Callable[[], T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if self._death is not None:
                raise self._death
            future.set_result(function())
        except SpotGRPOError as exc:
            future.set_exception(exc)
        finally:
            if not future.done():
                future.set_exception(SpotGRPOError("the transformers engine died of this call"))

    def _leave(self, reason: SpotGRPOError) -> None:
        """Tell all who wait. Orders that come later see ``_death``; those in the queue are told here."""
        self._death = reason
        last = Chunk((), (), "abort") if self._closing else reason
        self._post([(running, last) for running in self._running.values()])
        self._running.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                self._orders.get_nowait()()
        self._batches.clear()
        self._model = None

    def _stop(self) -> None:
        self._closing = True

    def _load_base(self) -> None:
        spec = self._spec
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        device = spec.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        base = describe(spec)
        options = {"revision": spec.revision, "trust_remote_code": spec.trust_remote_code}
        if spec.attn_implementation is not None:
            options["attn_implementation"] = spec.attn_implementation
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                spec.model, dtype=getattr(torch, spec.dtype), **options
            )
            model = model.to(device).eval()
        except LOAD_ERRORS as exc:
            raise not_loadable(spec, exc) from exc
        self._modules = linear_modules(model)
        check_targets(spec, self._modules)
        self._model = _with_adapters(model, spec)
        self._ends = Ends(base.tokenizer, base.end_ids, base.max_context)
        self._decoder = Decoder(self._model, self._ends, base.max_context)

    def _load(self, version: PolicyVersion, folder: Path) -> int:
        if version in self._versions:
            raise SpotGRPOError(f"version {version} is loaded already")
        if len(self._versions) > self._spec.max_versions:
            raise SpotGRPOError(f"{len(self._versions)} versions are loaded; unload one first")
        adapter = read_adapter(folder)
        adapter.check(self._modules, self._spec.lora_rank, self._spec.target_modules)
        try:
            taken = self._put_on(adapter, _adapter_name(version))
        except IntegrityError:
            self._take_off(_adapter_name(version))
            raise
        self._versions.add(version)
        return taken

    def _put_on(self, adapter: Adapter, name: str) -> int:
        try:
            result = self._model.load_adapter(str(adapter.folder), adapter_name=name)
        except (RuntimeError, ValueError, KeyError, TypeError, OSError) as exc:
            raise adapter.broken(f"peft refuses it: {exc}") from exc
        leftover = [*result.unexpected_keys, *result.missing_keys]
        if leftover:
            raise adapter.broken(f"tensors without a place, or places without: {leftover[:4]}")
        layers = [layer for layer in self._model.modules() if isinstance(layer, LoraLayer)]
        taken = sum(name in layer.lora_A for layer in layers)
        if taken != len(adapter.shapes):
            raise adapter.broken(f"{taken} of {len(adapter.shapes)} modules took it")
        return taken

    def _unload(self, version: PolicyVersion) -> None:
        users = Counter(running.version for running in self._running.values())[version]
        if users:
            raise SpotGRPOError(f"version {version} cannot go: {users} requests run on it")
        if version in self._versions:
            self._versions.discard(version)
            self._take_off(_adapter_name(version))

    def _take_off(self, name: str) -> None:
        self._activate(NO_ADAPTER)
        if name in self._model.peft_config:
            self._model.delete_adapter(name)

    def _activate(self, name: str) -> None:
        if name != self._active:
            self._model.set_adapter(name, inference_mode=True)
            self._active = name

    def _score(self, version: PolicyVersion | None, token_ids: tuple[int, ...]) -> Float32Array:
        if version is None:
            with self._model.disable_adapter():
                logprobs_T = self._decoder.score(token_ids)
        else:
            self._check_loaded(version)
            self._activate(_adapter_name(version))
            logprobs_T = self._decoder.score(token_ids)
        scores: Float32Array = logprobs_T.cpu().numpy()
        return scores

    def _check_loaded(self, version: PolicyVersion) -> None:
        if version not in self._versions:
            raise SpotGRPOError(f"version {version} is not loaded")

    def _accept(self, running: _Running) -> None:
        request = running.row.request
        try:
            self._check_request(request)
        except SpotGRPOError as exc:
            self._post([(running, exc)])
            return
        finish = self._ends.finish(request, running.row.completion)
        if finish is not None:
            self._post([(running, Chunk((), (), finish))])
            return
        self._running[request.request_id] = running
        self._waiting.append(running)

    def _check_request(self, request: GenerationRequest) -> None:
        if self._death is not None:
            raise self._death
        self._check_loaded(request.version)
        if request.request_id in self._running:
            raise SpotGRPOError(f"request {request.request_id} is running already")
        self._ends.token_limit(request)

    def _abort(self, request_id: str) -> None:
        running = self._running.pop(request_id, None)
        if running is None:
            return
        if running in self._waiting:
            self._waiting.remove(running)
        for batches in self._batches.values():
            for batch in batches:
                if running.row in batch.rows:
                    batch.drop(running.row)
        self._post([(running, Chunk((), (), "abort"))])

    def _admit(self) -> None:
        """Prefill what waits for one version, as much as fits; the rest after the next token."""
        free = self._spec.max_inflight - (len(self._running) - len(self._waiting))
        if not self._waiting or free < 1:
            return
        version = self._waiting[0].version
        chosen = [running for running in self._waiting if running.version == version][:free]
        chosen = chosen[: prefill_share([running.row for running in chosen])]
        self._waiting = [running for running in self._waiting if running not in chosen]
        self._activate(_adapter_name(version))
        batch = self._decoder.start([running.row for running in chosen])
        batches = self._batches.setdefault(version, [])
        if batches and self._decoder.can_merge(batch):
            batch = self._decoder.merge(batches.pop(), batch)
        batches.append(batch)

    def _advance(self, version: PolicyVersion) -> None:
        """One token for every row of a version."""
        news: list[tuple[_Running, Chunk | SpotGRPOError]] = []
        for batch in self._batches[version]:
            if batch.live:
                self._activate(_adapter_name(version))
            for sampled in self._decoder.advance(batch):
                request_id = sampled.row.request.request_id
                chunk = Chunk((sampled.token_id,), (sampled.logprob,), sampled.finish)
                news.append((self._running[request_id], chunk))
                if sampled.finish is not None:
                    del self._running[request_id]
        self._post(news)
        left = [batch for batch in self._batches[version] if batch.live]
        if left:
            self._batches[version] = left
        else:
            del self._batches[version]

    def _post(self, news: list[tuple[_Running, Chunk | SpotGRPOError]]) -> None:
        if news and self._loop is not None:
            # A loop that is closed has nobody left to tell.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_deliver, news)


def _deliver(news: list[tuple[_Running, Chunk | SpotGRPOError]]) -> None:
    for running, item in news:
        running.outbox.put_nowait(item)


def _adapter_name(version: PolicyVersion) -> str:
    """Torch allows no dots in module names."""
    return str(version).replace(".", "-")


def _with_adapters(model: Any, spec: EngineSpec) -> Any:
    config = peft.LoraConfig(
        r=1, target_modules=list(spec.target_modules), inference_mode=True, task_type="CAUSAL_LM"
    )
    try:
        return peft.PeftModel(model, config, adapter_name=NO_ADAPTER).eval()
    except ValueError as exc:
        raise ConfigError("lora.target_modules", list(spec.target_modules), str(exc)) from exc
