"""vLLM as an engine, stepped on a thread of our own.

Its LLMEngine is used and not AsyncLLM, whose engine core is always a process of its own: after a SIGKILL
of the worker that process goes on, with its memory and its share of the machine. In one process
(VLLM_ENABLE_V1_MULTIPROCESSING=0, the default here, which the environment can override) nothing stays.

Ends of completions are ours, not vLLM's, so that both engines stop at the same token: a stop string is
looked for after each step, and the request is aborted before the next.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from spotgrpo.producer.engines.adapter import Linear, read_adapter
from spotgrpo.producer.engines.base import Chunk
from spotgrpo.producer.engines.base_model import (
    LOAD_ERRORS,
    BaseModel,
    check_targets,
    describe,
    linear_modules,
    not_loadable,
    refuse_head,
    skeleton,
)
from spotgrpo.producer.engines.threaded import Running, ThreadedEngine
from spotgrpo.producer.engines.trial import TRIAL, write_trial
from spotgrpo.producer.engines.vllm_arguments import engine_arguments, is_cpu_build
from spotgrpo.shared.errors import ConfigError, IntegrityError, SpotGRPOError

if TYPE_CHECKING:
    from spotgrpo.producer.engines.base import EngineSpec, GenerationRequest
    from spotgrpo.producer.engines.ends import Ends
    from spotgrpo.shared.ids import PolicyVersion
    from spotgrpo.shared.wire import Float32Array

ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
CPU_ENVIRONMENT: Final = {
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Its warnings on a CPU are about what these settings mean to do. What fails is raised.
    "VLLM_LOGGING_LEVEL": "ERROR",
}
OTHER_ENGINE: Final = "use worker.engine = 'transformers'"


def prepare_environment(spec: EngineSpec) -> None:
    """Set what vLLM reads while it is imported; what the user has set stays."""
    wanted = dict(ENVIRONMENT)
    if is_cpu_build():
        wanted |= CPU_ENVIRONMENT
        if spec.threads is not None:
            wanted["OMP_NUM_THREADS"] = str(spec.threads)
    for key, value in wanted.items():
        os.environ.setdefault(key, value)


class VLLMEngine(ThreadedEngine):
    """Samples with vLLM: continuous batching, several LoRA versions in one batch.

    Raises ImportError on creation where vLLM does not import.
    """

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        prepare_environment(spec)
        import vllm

        self._vllm: Any = vllm
        self._engine: Any = None
        self._modules: dict[str, Linear] = {}
        self._adapters: dict[PolicyVersion, Any] = {}
        self._used_ids = 0
        self._scores: dict[str, Float32Array] = {}

    @property
    def name(self) -> str:
        """``vllm``."""
        return "vllm"

    @property
    def engine_version(self) -> str:
        """Version of vLLM."""
        return str(self._vllm.__version__)

    def _open(self) -> Ends:
        spec = self._spec
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        base = describe(spec)
        model = skeleton(spec, base.config)
        refuse_head(spec, model)
        self._modules = linear_modules(model)
        check_targets(spec, self._modules)
        self._engine = self._make_engine(base)
        self._try_adapters()
        return base.ends

    def _make_engine(self, base: BaseModel) -> Any:
        arguments = engine_arguments(self._spec, base)
        try:
            options = self._vllm.EngineArgs(**arguments)
        except TypeError as exc:
            raise ConfigError("worker.vllm", dict(self._spec.vllm), str(exc)) from exc
        try:
            return self._vllm.LLMEngine.from_engine_args(options)
        except (*LOAD_ERRORS, TypeError, AssertionError) as exc:
            error = not_loadable(self._spec, exc)
            if "lora" in str(exc).lower():
                error = ConfigError(error.key, error.value, f"{OTHER_ENGINE} ({exc})")
            raise error from exc

    def _try_adapters(self) -> None:
        """Sample under an adapter of zeros: what vLLM cannot serve is found here, not at the first version.

        Raises:
            ConfigError: vLLM has no place for an adapter on some target modules, or cannot run this model with one.
        """
        targets = self._spec.target_modules
        try:
            if self._serves(targets):
                return
        except (*LOAD_ERRORS, TypeError, AssertionError) as exc:
            remedy = f"vLLM does not run it with an adapter here: {OTHER_ENGINE} ({type(exc).__name__}: {exc})"
            raise ConfigError("model.name", self._spec.model, remedy) from exc
        refused = [target for target in targets if not self._serves((target,))] or list(targets)
        remedy = f"vLLM puts no adapter on {', '.join(refused)} of this model: {OTHER_ENGINE}, or leave it out"
        raise ConfigError("lora.target_modules", list(targets), remedy)

    def _serves(self, targets: tuple[str, ...]) -> bool:
        with tempfile.TemporaryDirectory(prefix="spotgrpo-trial-") as name:
            folder = Path(name)
            write_trial(folder, self._modules, targets)
            try:
                self._put_on(TRIAL, folder)
            except IntegrityError:
                return False
            self._logprobs(TRIAL, (0, 0))
            self._take_off(TRIAL)
        return True

    def _put_on(self, version: PolicyVersion, folder: Path) -> int:
        from vllm.lora.request import LoRARequest

        adapter = read_adapter(folder)
        adapter.check(self._modules, self._spec.lora_rank, self._spec.target_modules)
        self._used_ids += 1
        # vLLM caches prefixes by name and path: neither may come twice, whatever version this is.
        request = LoRARequest(f"{version}.{self._used_ids}", self._used_ids, str(folder))
        try:
            added = self._engine.add_lora(request)
        except (ValueError, RuntimeError, KeyError, TypeError, OSError, AssertionError) as exc:
            raise adapter.broken(f"vLLM refuses it: {exc}") from exc
        taken = self._census(request.lora_int_id) if added else 0
        if taken != len(adapter.shapes):
            self._engine.remove_lora(request.lora_int_id)
            raise adapter.broken(f"{taken} of {len(adapter.shapes)} modules took it")
        self._adapters[version] = request
        return taken

    def _census(self, adapter_id: int) -> int:
        """Modules that apply the adapter; the same module on several workers counts once."""
        answers = self._engine.collective_rpc("spotgrpo_adapter_modules", args=(adapter_id,))
        return len({name for names in answers for name in names})

    def _take_off(self, version: PolicyVersion) -> None:
        self._engine.remove_lora(self._adapters.pop(version).lora_int_id)

    def _take(self, running: Running) -> None:
        request = running.request
        prompt = {"prompt_token_ids": list(running.sequence)}
        self._engine.add_request(
            request.request_id,
            prompt,
            self._sampling_params(request),
            lora_request=self._adapters[request.version],
        )

    def _sampling_params(self, request: GenerationRequest) -> Any:
        if self._ends is None:
            raise SpotGRPOError("the vllm engine is not started")
        return self._vllm.SamplingParams(
            temperature=request.sampling.temperature,
            seed=request.stream_seed,
            max_tokens=self._ends.token_limit(request) - len(request.prefix_ids),
            stop_token_ids=sorted(self._ends.stop_ids(request)),
            logprobs=0,  # the sampled token's alone
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
        )

    def _drop(self, running: Running) -> None:
        self._engine.abort_request([running.request.request_id])

    def _sample(self) -> list[tuple[Running, Chunk]]:
        news: list[tuple[Running, Chunk]] = []
        for output in self._engine.step():
            running = self._running.get(output.request_id)
            if running is not None:
                news.append((running, self._chunk(running, output)))
            elif output.prompt_logprobs is not None:
                self._scores[output.request_id] = _prompt_scores(output)
        return news

    def _chunk(self, running: Running, output: Any) -> Chunk:
        """The new tokens up to where the completion ends; vLLM may have gone further or not know."""
        completion = output.outputs[0]
        token_ids: list[int] = []
        logprobs: list[float] = []
        finish: str | None = None
        for token_id, options in zip(completion.token_ids, completion.logprobs or (), strict=True):
            token_ids.append(token_id)
            logprobs.append(options[token_id].logprob)
            running.completion.append(token_id)
            finish = self._ends.finish(running.request, running.completion) if self._ends else None
            if finish is not None:
                break
        if output.finished and finish is None:
            raise RuntimeError(f"vLLM ended a request early: {completion.finish_reason}")
        if finish is not None and not output.finished:
            self._drop(running)
        return Chunk(tuple(token_ids), tuple(logprobs), finish)

    def _logprobs(self, version: PolicyVersion | None, token_ids: tuple[int, ...]) -> Float32Array:
        """One request that samples a token for nothing; the others go on meanwhile."""
        self._used_ids += 1
        request_id = f"score-{self._used_ids}"
        self._engine.add_request(
            request_id,
            {"prompt_token_ids": list(token_ids)},
            self._vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
            lora_request=None if version is None else self._adapters[version],
        )
        while request_id not in self._scores:
            self._post_chunks(self._sample())
        return self._scores.pop(request_id)

    def _free(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        engine.engine_core.shutdown()
        engine.renderer.shutdown()
        del engine
        cleanup_dist_env_and_memory()


def _prompt_scores(output: Any) -> Float32Array:
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return np.array([options[token_id].logprob for token_id, options in pairs], dtype=np.float32)
