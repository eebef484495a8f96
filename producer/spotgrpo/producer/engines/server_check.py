"""What a vLLM server has to be like before it serves a run. Each error names what to start it with."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from spotgrpo.producer.engines.server_api import ServerLost, ServerRefused
from spotgrpo.shared.errors import ConfigError, IntegrityError

if TYPE_CHECKING:
    from spotgrpo.producer.engines.server_api import Card, ServerApi
    from spotgrpo.shared.errors import SpotGRPOError

KEY: Final = "worker.servers"
SETTING: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
LORA_FLAGS: Final = "--enable-lora --max-lora-rank {rank} --max-loras {versions}"
NOWHERE: Final = "/nonexistent/spotgrpo"
"""No server has an adapter there."""
PROCESSED: Final = "start it with --logprobs-mode processed_logprobs"
HOT: Final = 2.0
"""A temperature that halves the distances between logprobs."""
MOST_RATIO: Final = 0.75
"""Between 1, as raw logprobs have, and 1 / HOT."""
LEAST_LOSS: Final = 1e-3
"""Nats by which the likely tokens lose to the others where it is hotter; logits, not being normalised, lose nothing."""


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
    base = await check_access(api, demands.lora_flags)
    try:
        _check_base(api, base, demands)
        await _check_logprobs(api, base.name, demands)
    except ServerRefused as exc:
        raise _meaning(api, exc) from exc
    return base.name


async def check_access(api: ServerApi, lora_flags: str) -> Card:
    """The base model of a server that lets us in and loads adapters, whatever run it is for.

    Raises:
        ConfigError: it does not, as it was started.
        ServerLost: it does not answer.
    """
    try:
        base = _base_of(api, await api.models())
        await _check_lora(api, lora_flags)
    except ServerRefused as exc:
        raise _meaning(api, exc) from exc
    return base


def _meaning(api: ServerApi, refused: ServerRefused) -> SpotGRPOError:
    if refused.status in (401, 403):
        remedy = f"give the key that {api.url} takes ({refused})"
        return ConfigError("worker.server_api_key", "***", remedy)
    if refused.status >= 500:
        return ServerLost(str(refused))
    return ConfigError(KEY, api.url, f"give a vLLM server, 0.32 or newer ({refused})")


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


async def _check_lora(api: ServerApi, lora_flags: str) -> None:
    """Load an adapter without name and place, and one from nowhere: refused in any case, but in different words."""
    try:
        await api.load("", "")
    except ServerRefused as exc:
        if exc.status in (404, 405):
            remedy = f"it loads no adapters while it runs: start it with {SETTING} and {lora_flags}"
            raise ConfigError(KEY, api.url, remedy) from exc
        if exc.status not in (400, 422):
            raise
    try:
        await api.load("spotgrpo-check", f"{NOWHERE}-{secrets.token_hex(8)}")
    except ServerRefused as exc:
        if "not enabled" in exc.why:
            remedy = f"it serves no adapters: start it with {lora_flags} ({exc.why})"
            raise ConfigError(KEY, api.url, remedy) from exc


async def _check_logprobs(api: ServerApi, base: str, demands: Demands) -> None:
    """A server may give logprobs, or logits, of before the temperature was applied. The loss needs those after."""
    tokens = [demands.vocabulary * part // 8 for part in range(1, 8)]
    warm = await api.next_logprobs(base, tokens, 1.0, tokens)
    hot = await api.next_logprobs(base, tokens, HOT, tokens)
    if float(np.ptp(hot)) > MOST_RATIO * float(np.ptp(warm)):
        raise ConfigError(KEY, api.url, f"its logprobs ignore the temperature: {PROCESSED}")
    if abs(float((hot - warm / HOT).mean())) < LEAST_LOSS:
        raise ConfigError(KEY, api.url, f"it gives logits for logprobs: {PROCESSED}")


def refused_adapter(url: str, path: str, refused: ServerRefused, demands: Demands) -> SpotGRPOError:
    """What a refused adapter means: a folder that is not shared, a flag, or a broken adapter."""
    if refused.status == 404 or "ermission denied" in refused.why:
        return ConfigError(
            "worker.server_adapter_dir",
            path,
            f"{url} cannot read an adapter there: share worker.cache_dir with it, and name the folder as it "
            f"sees it ({refused.why})",
        )
    if "max_lora_rank" in refused.why or "not enabled" in refused.why:
        return ConfigError(KEY, url, f"start it with {demands.lora_flags} ({refused.why})")
    return IntegrityError(f"the adapter is refused: {refused}")
