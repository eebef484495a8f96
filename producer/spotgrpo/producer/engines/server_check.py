"""What a vLLM server has to be like before it serves a run. Each error names what to start it with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spotgrpo.producer.engines.server_api import ServerRefused
from spotgrpo.shared.errors import ConfigError, IntegrityError

if TYPE_CHECKING:
    from spotgrpo.producer.engines.server_api import Card, ServerApi
    from spotgrpo.shared.errors import SpotGRPOError

KEY: Final = "worker.servers"
NOWHERE: Final = "/spotgrpo/no/such/adapter"
LORA_FLAGS: Final = "--enable-lora --max-lora-rank {rank} --max-loras {versions}"
PROCESSED: Final = "start it with --logprobs-mode processed_logprobs"
COLD: Final = 0.5
"""A temperature that doubles the distances between logprobs."""
TOP: Final = 5
LEAST_RATIO: Final = 1.5
"""Between 1, as raw logprobs have, and 1 / COLD."""
WRONG: Final = 0.5
"""Nats; two ways to one logprob differ by far less in any dtype."""


@dataclass(frozen=True)
class Demands:
    """What a run asks of its servers."""

    model: str
    max_context: int
    vocabulary: int
    lora_rank: int
    versions: int

    @property
    def lora_flags(self) -> str:
        return LORA_FLAGS.format(rank=self.lora_rank, versions=self.versions)


async def check_server(api: ServerApi, demands: Demands) -> str:
    """The name of a server's base model.

    Raises:
        ConfigError: the server cannot serve this run as it was started.
        ServerLost: it does not answer.
    """
    try:
        base = _base_of(api, await api.models())
        _check_base(api, base, demands)
        await _check_lora(api, demands)
        await _check_logprobs(api, base.name, demands)
    except ServerRefused as exc:
        if exc.status in (401, 403):
            raise ConfigError(
                "worker.server_api_key", "***", f"give the key that {api.url} takes ({exc})"
            ) from exc
        raise ConfigError(KEY, api.url, f"give a vLLM server, 0.11 or newer ({exc})") from exc
    return base.name


def _base_of(api: ServerApi, cards: list[Card]) -> Card:
    base = next((card for card in cards if card.parent is None), None)
    if base is None:
        raise ConfigError(KEY, api.url, "give a vLLM server: this one lists no base model")
    return base


def _check_base(api: ServerApi, base: Card, demands: Demands) -> None:
    if _last_part(base.root) != _last_part(demands.model):
        raise ConfigError(
            KEY, api.url, f"it serves {base.root}: start it with --model {demands.model}"
        )
    if base.max_context is not None and base.max_context < demands.max_context:
        raise ConfigError(
            KEY,
            api.url,
            f"it takes {base.max_context} tokens: start it with --max-model-len {demands.max_context}",
        )


def _last_part(model: str) -> str:
    """The name without where it lies: a hub's name, a folder, or a folder of the hub's local cache."""
    parts = model.rstrip("/").split("/")
    cached = next((part for part in parts if part.startswith("models--")), None)
    return cached.rsplit("--", 1)[-1] if cached else parts[-1]


async def _check_lora(api: ServerApi, demands: Demands) -> None:
    """Load an adapter that is nowhere: how that is refused says whether another one could be loaded."""
    try:
        await api.load("spotgrpo-nowhere", NOWHERE)
    except ServerRefused as exc:
        if NOWHERE in exc.why:
            return
        if exc.status in (404, 405):
            remedy = f"start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and {demands.lora_flags}"
        elif "not enabled" in exc.why:
            remedy = f"start it with {demands.lora_flags}"
        else:
            raise
        raise ConfigError(KEY, api.url, f"it loads no adapters while it runs: {remedy}") from exc


async def _check_logprobs(api: ServerApi, base: str, demands: Demands) -> None:
    """A server may give logprobs, or logits, of before the temperature was applied. The loss needs those after."""
    prompt = [demands.vocabulary * part // 8 for part in range(1, 8)]
    warm = await api.next_token(base, prompt, 1.0, TOP)
    cold = await api.next_token(base, prompt, COLD, TOP)
    spread = warm.top[0] - warm.top[TOP - 1]
    if cold.top[0] - cold.top[TOP - 1] < LEAST_RATIO * spread:
        raise ConfigError(KEY, api.url, f"its logprobs ignore the temperature: {PROCESSED}")
    scored = await api.score(base, [*prompt, warm.token_id])
    if abs(float(scored[-1]) - warm.logprob) > WRONG:
        raise ConfigError(KEY, api.url, f"its logprobs are not the model's: {PROCESSED}")


def refused_adapter(url: str, path: str, refused: ServerRefused, demands: Demands) -> SpotGRPOError:
    """What a refused adapter means: a folder that is not shared, a flag, or a broken adapter."""
    if refused.status == 404 or "ermission denied" in refused.why:
        return ConfigError(
            "worker.server_adapter_dir",
            path,
            f"{url} cannot read an adapter there: share worker.cache_dir with it, and name the folder as it "
            f"sees it ({refused.why})",
        )
    if "max_lora_rank" in refused.why:
        return ConfigError(KEY, url, f"start it with {demands.lora_flags} ({refused.why})")
    return IntegrityError(f"the adapter is refused: {refused}")
