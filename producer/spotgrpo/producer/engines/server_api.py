"""One vLLM server over HTTP: what is asked of it, and what its answers mean. Only this module imports httpx2."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import httpx2
import numpy as np

from spotgrpo.shared.errors import ConfigError, SpotGRPOError, TransientError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence

    from spotgrpo.shared.wire import Float32Array

CONNECT_S: Final = 10.0
"""For connections and for questions that need no model."""
OVERLOADED: Final = (429, 502, 503, 504)
"""Answers, of the server or of a proxy before it, that say nothing of the request."""
UNTOUCHED: Final[Mapping[str, Any]] = {
    "n": 1,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}
"""A server takes what a request leaves out from the model's ``generation_config.json``: nothing is left out."""
SCORED_AT_ONCE: Final = 64
"""Positions of one request; vLLM takes 128 ids and 1024 prompts."""
LONGEST_WHY: Final = 300


class ServerLost(TransientError):
    """The server did not answer, broke off, or cannot now.

    Args:
        broke_off: it had taken the request on.
    """

    def __init__(self, message: str, *, broke_off: bool = False) -> None:
        super().__init__(message)
        self.broke_off = broke_off


class ServerRefused(SpotGRPOError):
    """The server answered that it will not; ``status`` is HTTP's."""

    def __init__(self, url: str, status: int, why: str) -> None:
        super().__init__(f"{url} answers {status}: {why}")
        self.status, self.why = status, why


@dataclass(frozen=True)
class Card:
    """A model that a server lists; ``parent`` is None for its base model, ``root`` where it was loaded from."""

    name: str
    root: str
    parent: str | None
    max_context: int | None


@dataclass(frozen=True)
class Part:
    """New tokens of a stream with their logprobs; ``finish`` as the server calls it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str | None


class ServerApi:
    """What a vLLM server is asked. Every call raises ServerLost or ServerRefused, and no other error.

    Args:
        timeout_s: for an answer; a stream may be silent for any time.

    Raises:
        ConfigError: ``url`` is not one.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        self.url = url
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        try:
            self._client = httpx2.AsyncClient(
                base_url=url,
                headers=headers,
                timeout=httpx2.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s), pool=None),
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=32),
            )
        except (httpx2.InvalidURL, ValueError) as exc:
            raise ConfigError("worker.servers", url, f"give addresses of servers ({exc})") from exc

    async def health(self) -> None:
        """Return where the server and the engine behind it are well."""
        await self._ask("GET", "/health", timeout=CONNECT_S)

    async def version(self) -> str:
        """Version of vLLM."""
        answer = await self._ask("GET", "/version", timeout=CONNECT_S)
        with self._readable():
            return str(answer.json()["version"])

    async def models(self) -> list[Card]:
        """The base model and every adapter that is loaded."""
        answer = await self._ask("GET", "/v1/models", timeout=CONNECT_S)
        with self._readable():
            return [
                Card(
                    str(card["id"]),
                    str(card.get("root") or card["id"]),
                    card.get("parent"),
                    card.get("max_model_len"),
                )
                for card in answer.json()["data"]
            ]

    async def load(self, name: str, path: str) -> None:
        """Load the adapter in ``path``, a folder as the server sees it, under a name that is not in use."""
        body = {"lora_name": name, "lora_path": path}
        await self._ask("POST", "/v1/load_lora_adapter", json=body)

    async def unload(self, name: str) -> None:
        """Forget an adapter. Requests that run on it go on."""
        body = {"lora_name": name}
        await self._ask("POST", "/v1/unload_lora_adapter", json=body, timeout=CONNECT_S)

    async def score(self, model: str, token_ids: Sequence[int]) -> Float32Array:
        """Logprobs at temperature 1 of ``token_ids[1:]``, float32 [T-1].

        Each is asked for as the token to sample next, and so comes by the way that behaviour logprobs come. vLLM's
        ``prompt_logprobs`` do not: with adapters in the batch they end the engine or are another adapter's (its
        issues 16668, 29955 and 51594).
        """
        found: list[float] = []
        for start in range(1, len(token_ids), SCORED_AT_ONCE):
            ends = range(start, min(start + SCORED_AT_ONCE, len(token_ids)))
            prompts = [list(token_ids[:end]) for end in ends]
            wanted = [token_ids[end] for end in ends]
            tables = await self._tables(model, prompts, 1.0, wanted)
            found += [table[token_id] for table, token_id in zip(tables, wanted, strict=True)]
        return np.array(found, dtype=np.float32)

    async def next_logprobs(
        self, model: str, prompt: Sequence[int], temperature: float, wanted: Sequence[int]
    ) -> Float32Array:
        """Logprobs of each token in ``wanted`` as the next one, float32."""
        tables = await self._tables(model, [list(prompt)], temperature, wanted)
        return np.array([tables[0][token_id] for token_id in wanted], dtype=np.float32)

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Part, None]:
        """Sample a completion; parts arrive as they come, the last one with its ``finish``.

        Closing the iterator ends the request on the server.
        """
        whole = {**UNTOUCHED, "stream": True, "logprobs": 0, **body}
        has_begun = False
        try:
            async with self._client.stream(
                "POST",
                "/v1/completions",
                json=whole,
                timeout=httpx2.Timeout(CONNECT_S, read=None, pool=None),
            ) as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise self._refusal(answer)
                has_begun = True
                async for line in answer.aiter_lines():
                    event = line.removeprefix("data: ")
                    if event == "[DONE]":
                        return
                    if len(event) < len(line):
                        yield self._part(event)
        except httpx2.HTTPError as exc:
            raise self._loss(exc, broke_off=has_begun) from exc
        raise ServerLost(f"{self.url} broke an answer off", broke_off=True)

    async def close(self) -> None:
        """End all connections."""
        await self._client.aclose()

    # ---- answers ---------------------------------------------------------------------------------------

    async def _tables(
        self, model: str, prompts: list[list[int]], temperature: float, wanted: Sequence[int]
    ) -> list[dict[int, float]]:
        """For each prompt the logprobs of ``wanted``, by token id. Samples a token of each for nothing."""
        body = {
            **UNTOUCHED,
            "model": model,
            "prompt": prompts,
            "max_tokens": 1,
            "temperature": temperature,
            "seed": 0,
            "logprobs": 0,
            "logprob_token_ids": sorted(set(wanted)),
        }
        answer = await self._ask("POST", "/v1/completions", json=body)
        with self._readable():
            choices = answer.json()["choices"]
            if [choice["prompt_token_ids"] for choice in choices] != prompts:
                raise ValueError("it went on from other tokens than it was given")
            options = [choice["logprobs"]["top_logprobs"][0] for choice in choices]
            found = [{int(name.rpartition(":")[2]): one[name] for name in one} for one in options]
        if not all(table.keys() >= set(wanted) for table in found):
            raise ServerRefused(
                self.url, answer.status_code, "logprob_token_ids means nothing to it"
            )
        return found

    async def _ask(self, method: str, path: str, **options: Any) -> httpx2.Response:
        try:
            answer = await self._client.request(method, path, **options)
        except httpx2.HTTPError as exc:
            raise self._loss(exc) from exc
        if not answer.is_success:
            raise self._refusal(answer)
        return answer

    def _part(self, event: str) -> Part:
        with self._readable():
            found = json.loads(event)
            if "error" in found:
                raise ServerLost(f"{self.url} broke off: {_why(found)}", broke_off=True)
            choice = found["choices"][0]
            finish = choice.get("finish_reason")
            token_ids = tuple(choice["token_ids"])
            logprobs = tuple(choice["logprobs"]["token_logprobs"]) if token_ids else ()
            if len(token_ids) != len(logprobs):
                raise ValueError(f"{len(token_ids)} tokens with {len(logprobs)} logprobs")
            if finish in ("abort", "error") and not token_ids:
                raise ServerLost(f"{self.url} ended a request with {finish}", broke_off=True)
        return Part(token_ids, logprobs, finish)

    def _loss(self, exc: httpx2.HTTPError, *, broke_off: bool = False) -> ServerLost:
        is_late = isinstance(exc, httpx2.TimeoutException)
        why = "no answer in time" if is_late else f"{exc}".strip() or type(exc).__name__
        return ServerLost(f"{self.url}: {why}", broke_off=broke_off)

    def _refusal(self, answer: httpx2.Response) -> SpotGRPOError:
        try:
            why = _why(answer.json())
        except ValueError:
            why = " ".join(answer.text.split())[:LONGEST_WHY] or answer.reason_phrase
        if answer.status_code in OVERLOADED:
            return ServerLost(f"{self.url} answers {answer.status_code}: {why}")
        return ServerRefused(self.url, answer.status_code, why)

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        """What is read of an answer here has to be in it."""
        try:
            yield
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as exc:
            what = f"{type(exc).__name__}: {exc}"
            raise ServerLost(
                f"{self.url} does not answer as vLLM does ({what})", broke_off=True
            ) from exc


def _why(body: Any) -> str:
    """The sentence in an error's body, which has several shapes."""
    found = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    found = found.get("message", found) if isinstance(found, dict) else found
    return " ".join(str(found).split())[:LONGEST_WHY]
