"""The reference engine: a transformers model with peft adapters, sampled by our own decoding loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

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
from spotgrpo.producer.engines.decoding import Batch, Decoder, prefill_share
from spotgrpo.producer.engines.threaded import Running, ThreadedEngine
from spotgrpo.shared.errors import ConfigError, IntegrityError

if TYPE_CHECKING:
    from pathlib import Path

    from spotgrpo.producer.engines.adapter import Adapter
    from spotgrpo.producer.engines.base import EngineSpec
    from spotgrpo.producer.engines.ends import Ends
    from spotgrpo.shared.ids import PolicyVersion
    from spotgrpo.shared.wire import Float32Array

NO_ADAPTER: Final = "none"
"""A rank-1 zero adapter that is always there: peft cannot delete the last one."""


class TransformersEngine(ThreadedEngine):
    """Samples any causal language model of transformers.

    Requests of a version run as one batch; versions take turns, a token each.
    """

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._waiting: list[Running] = []
        self._batches: dict[PolicyVersion, list[Batch]] = {}
        self._active = NO_ADAPTER
        self._model: Any = None
        self._modules: dict[str, Linear] = {}
        self._decoder: Decoder

    @property
    def name(self) -> str:
        """``transformers``."""
        return "transformers"

    @property
    def engine_version(self) -> str:
        """Version of transformers."""
        return str(transformers.__version__)

    def _run(self) -> None:
        with torch.inference_mode():
            super()._run()

    def _open(self) -> Ends:
        spec = self._spec
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        base = describe(spec)
        model = _load_model(spec)
        self._modules = linear_modules(model)
        check_targets(spec, self._modules)
        self._model = _with_adapters(model, spec)
        self._decoder = Decoder(self._model, base.ends, base.max_context)
        return base.ends

    def _put_on(self, version: PolicyVersion, folder: Path) -> int:
        adapter = read_adapter(folder)
        adapter.check(self._modules, self._spec.lora_rank, self._spec.target_modules)
        try:
            return self._load_adapter(adapter, _adapter_name(version))
        except IntegrityError:
            self._take_off(version)
            raise

    def _load_adapter(self, adapter: Adapter, name: str) -> int:
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

    def _take_off(self, version: PolicyVersion) -> None:
        self._activate(NO_ADAPTER)
        if _adapter_name(version) in self._model.peft_config:
            self._model.delete_adapter(_adapter_name(version))

    def _activate(self, name: str) -> None:
        if name != self._active:
            self._model.set_adapter(name, inference_mode=True)
            self._active = name

    def _logprobs(self, version: PolicyVersion | None, token_ids: tuple[int, ...]) -> Float32Array:
        self._activate(NO_ADAPTER if version is None else _adapter_name(version))
        if version is None:
            with self._model.disable_adapter():
                scores: Float32Array = self._decoder.score(token_ids).cpu().numpy()
        else:
            scores = self._decoder.score(token_ids).cpu().numpy()
        return scores

    def _take(self, running: Running) -> None:
        self._waiting.append(running)

    def _drop(self, running: Running) -> None:
        if running in self._waiting:
            self._waiting.remove(running)
        for version, batches in list(self._batches.items()):
            for batch in batches:
                if running in batch.rows:
                    batch.drop(running)
            self._keep_live(version)

    def _sample(self) -> list[tuple[Running, Chunk]]:
        self._admit()
        news: list[tuple[Running, Chunk]] = []
        for version, batches in list(self._batches.items()):
            self._activate(_adapter_name(version))
            for batch in batches:
                news += [
                    (sampled.row, Chunk((sampled.token_id,), (sampled.logprob,), sampled.finish))
                    for sampled in self._decoder.advance(batch)
                ]
            self._keep_live(version)
        return news

    def _admit(self) -> None:
        """Prefill what waits for one version, as much as fits; the rest after the next token."""
        free = self._spec.max_inflight - (len(self._running) - len(self._waiting))
        if not self._waiting or free < 1:
            return
        version = self._waiting[0].request.version
        chosen = [row for row in self._waiting if row.request.version == version][:free]
        chosen = chosen[: prefill_share(chosen)]
        self._waiting = [row for row in self._waiting if row not in chosen]
        self._activate(_adapter_name(version))
        batch = self._decoder.start(chosen)
        batches = self._batches.setdefault(version, [])
        if batches and self._decoder.can_merge(batch):
            batch = self._decoder.merge(batches.pop(), batch)
        batches.append(batch)

    def _keep_live(self, version: PolicyVersion) -> None:
        left = [batch for batch in self._batches[version] if batch.has_live_rows]
        if left:
            self._batches[version] = left
        else:
            del self._batches[version]

    def _free(self) -> None:
        self._batches.clear()
        self._model = None
        vars(self).pop("_decoder", None)


def _adapter_name(version: PolicyVersion) -> str:
    """Torch allows no dots in module names."""
    return str(version).replace(".", "-")


def _load_model(spec: EngineSpec) -> Any:
    device = spec.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"revision": spec.revision, "trust_remote_code": spec.trust_remote_code}
    if spec.attn_implementation is not None:
        options["attn_implementation"] = spec.attn_implementation
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            spec.model, dtype=getattr(torch, spec.dtype), **options
        )
        return model.to(device).eval()
    except LOAD_ERRORS as exc:
        raise not_loadable(spec, exc) from exc


def _with_adapters(model: Any, spec: EngineSpec) -> Any:
    config = peft.LoraConfig(
        r=1, target_modules=list(spec.target_modules), inference_mode=True, task_type="CAUSAL_LM"
    )
    try:
        return peft.PeftModel(model, config, adapter_name=NO_ADAPTER).eval()
    except ValueError as exc:
        raise ConfigError("lora.target_modules", list(spec.target_modules), str(exc)) from exc
