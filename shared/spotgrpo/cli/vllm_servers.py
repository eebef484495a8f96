"""Checks of ``spotgrpo doctor`` that ask the vLLM servers of a worker."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from spotgrpo.cli.checks import Check, from_error
from spotgrpo.cli.inputs import context_of, model_settings
from spotgrpo.cli.servers import AnyConfig
from spotgrpo.shared.config import Config, ModelConfig
from spotgrpo.shared.errors import ConfigError, NotStored, SpotGRPOError, TransientError, WireError
from spotgrpo.shared.ids import Keys
from spotgrpo.shared.manifest import RunDocument

if TYPE_CHECKING:
    from spotgrpo.producer.engines.server_api import ServerApi
    from spotgrpo.producer.engines.server_check import Demands

NAME: Final = "vllm server"
UNCHECKED: Final = "needs the worker's packages: pip install 'spotgrpo[worker]'"
NOT_COMPARED: Final = "no more was compared: neither the model nor run.json could be read here"
ANYWHERE_ELSE: Final = (
    "fine where no worker runs; on a worker's machine: spotgrpo doctor --worker CONFIG"
)
LORA_FLAGS: Final = "--enable-lora"


def check_vllm_servers(config: AnyConfig) -> list[Check]:
    """A finding for each of ``worker.servers``: reachable, the key is right, it loads adapters and serves the model."""
    if importlib.util.find_spec("httpx2") is None:
        return [Check(NAME, "warn", "was not looked at", UNCHECKED)]
    return asyncio.run(look_at_servers(config, demands_of(config)))


async def look_at_servers(config: AnyConfig, demands: Demands | None) -> list[Check]:
    """The same in an event loop; ``demands`` None: nothing is known of the run."""
    looks = (_look(config, url, demands) for url in config.worker.servers)
    found = await asyncio.gather(*looks)
    return [_weighed(check) for check in found] if isinstance(config, Config) else list(found)


def demands_of(config: AnyConfig) -> Demands | None:
    """What the run asks of its servers; None where that cannot be told here."""
    from spotgrpo.producer.engines.server_check import Demands

    with contextlib.suppress(ConfigError, TransientError, NotStored, WireError):
        if isinstance(config, Config):
            model, context = config.model, context_of(config.model)
            rank, staleness = config.lora.rank, config.train.max_staleness
        else:
            from spotgrpo.shared.s3 import S3Store

            stored = S3Store(config.bucket).get(Keys(config.run.id).run_json)
            document = RunDocument.from_bytes(stored.body)
            identity = document.model
            model = config.model or ModelConfig(name=identity.name, revision=identity.revision)
            context = document.max_context
            rank, staleness = document.lora.rank, document.max_staleness
        settings = model_settings(model)
        vocabulary = int((settings.get("text_config") or settings)["vocab_size"])
        return Demands(model.name, context, vocabulary, rank, staleness + 3)
    return None


async def _look(config: AnyConfig, url: str, demands: Demands | None) -> Check:
    from spotgrpo.producer.engines.server_api import ServerApi

    key = config.worker.server_api_key
    api = None
    try:
        api = ServerApi(
            url, key.get_secret_value() if key else None, config.worker.server_timeout_s
        )
        return await _compared(api, demands)
    except SpotGRPOError as exc:
        return from_error(NAME, exc)
    finally:
        if api is not None:
            await api.close()


async def _compared(api: ServerApi, demands: Demands | None) -> Check:
    from spotgrpo.producer.engines.server_check import check_access, check_server

    await api.health()
    base = await check_access(api, demands.lora_flags if demands else LORA_FLAGS)
    detail = f"{api.url}: vLLM {await api.version()} with {base.root}, loads adapters"
    if demands is None:
        return Check(NAME, "warn", detail, NOT_COMPARED)
    await check_server(api, demands)
    return Check(NAME, "ok", f"{detail}, logprobs at the sampling temperature")


def _weighed(check: Check) -> Check:
    """A server that is out of a learner's reach is no fault of it."""
    if check.state != "unreached":
        return check
    return replace(check, state="warn", remedy=ANYWHERE_ELSE)
