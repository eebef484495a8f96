"""A vLLM server without a model, for faults that a real one cannot be made to have at will.

Every token is a function of all tokens before it, so that a completion that wanders from server to server is the same
as one that did not, token by token. It speaks as much HTTP as the engine asks for.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Final

from spotgrpo.producer.engines.server_check import NOWHERE

VOCABULARY: Final = 90
FIRST_ID: Final = 10
"""Lower ids are special ones that end a completion."""
BASE: Final = "base"
MOVED: Final = 40


def token_after(token_ids: list[int]) -> int:
    """The only token that may follow ``token_ids``."""
    digest = hashlib.blake2b(f"{token_ids}".encode(), digest_size=4).digest()
    return FIRST_ID + int.from_bytes(digest, "little") % (VOCABULARY - FIRST_ID)


def logprob_of(token_id: int, temperature: float) -> float:
    """Spread grows as temperature falls, as it does."""
    return -token_id / 10 / (temperature or 1.0)


@dataclass
class FakeVLLM:
    """One server; change its attributes while it runs.

    Attributes:
        loaded: path of every adapter, by name.
        ever_loaded: every path that was loaded, in order.
        token_s: seconds a token takes.
        dies_after: tokens of a stream after which its connection is cut, once a stream; None: never.
        hangs_after: tokens of a stream after which nothing comes any more.
        hangs: it takes connections and answers nothing, as a process that is stopped does.
        shift: added to every scored logprob: another model.
        effect: of every adapter, added to the scored logprob of one token, ``MOVED``.
        requests: every completion that was asked for.
        refuses_with: status and sentence for every completion.
    """

    model: str
    max_context: int = 512
    api_key: str | None = None
    can_load: bool = True
    has_lora: bool = True
    is_raw: bool = False
    gives_logits: bool = False
    knows_token_ids: bool = True
    sees_adapters: bool = True
    loaded: dict[str, str] = field(default_factory=dict)
    ever_loaded: list[str] = field(default_factory=list)
    unloaded: list[str] = field(default_factory=list)
    token_s: float = 0.002
    dies_after: int | None = None
    hangs_after: int | None = None
    hangs: bool = False
    shift: float = 0.0
    effect: float = 0.0
    refuses_with: tuple[int, str] | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    port: int = 0
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, on the same port as before."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """Cut all connections and forget what was loaded."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        self.loaded.clear()
        self._server = None
        await asyncio.sleep(0)

    # ---- HTTP ------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, path, _ = head[0].split(" ")
                headers = {
                    key.lower(): value for key, _, value in (h.partition(": ") for h in head[1:])
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                asked = json.loads(body) if body else {}
                await self._route(writer, f"{method} {path}", headers, asked)
        self._writers.discard(writer)
        writer.close()

    async def _route(
        self, writer: asyncio.StreamWriter, what: str, headers: dict[str, str], asked: Any
    ) -> None:
        while self.hangs:  # noqa: ASYNC110  set from outside
            await asyncio.sleep(0.01)
        key = headers.get("authorization", "")
        if "/v1/" in what and self.api_key is not None and key != f"Bearer {self.api_key}":
            _answer(writer, 401, {"error": "Unauthorized"})
        elif what == "GET /health":
            _answer(writer, 200, {})
        elif what == "GET /version":
            _answer(writer, 200, {"version": "0.0.1"})
        elif what == "GET /v1/models":
            _answer(writer, 200, {"data": self._cards()})
        elif what == "POST /v1/load_lora_adapter" and self.can_load:
            _answer(writer, *self._load(asked["lora_name"], asked["lora_path"]))
        elif what == "POST /v1/unload_lora_adapter" and self.can_load:
            self.unloaded.append(asked["lora_name"])
            self.loaded.pop(asked["lora_name"], None)
            _answer(writer, 200, {})
        elif what == "POST /v1/completions":
            await self._complete(writer, asked)
        else:
            _answer(writer, 404, {"detail": "Not Found"})
        await writer.drain()

    def _cards(self) -> list[dict[str, Any]]:
        base = {
            "id": BASE,
            "root": self.model,
            "parent": None,
            "max_model_len": self.max_context,
        }
        return [
            base,
            *({"id": name, "root": path, "parent": BASE} for name, path in self.loaded.items()),
        ]

    def _load(self, name: str, path: str) -> tuple[int, Any]:
        if not name or not path:
            return 400, _error("Both 'lora_name' and 'lora_path' must be provided.", 400)
        if not self.has_lora:
            return 500, _error("Worker failed with error 'LoRA is not enabled.'", 500)
        if not self.sees_adapters or path.startswith(NOWHERE):
            return 404, _error(f"Loading lora {name} failed: No adapter found for {path}", 404)
        if name in self.loaded:
            return 400, _error("has already been loaded", 400)
        self.loaded[name] = path
        self.ever_loaded.append(path)
        return 200, {}

    # ---- completions -----------------------------------------------------------------------------------

    async def _complete(self, writer: asyncio.StreamWriter, asked: dict[str, Any]) -> None:
        self.requests.append(asked)
        if self.refuses_with is not None and asked.get("stream"):
            status, why = self.refuses_with
            _answer(writer, status, _error(why, status))
        elif asked["model"] not in (BASE, *self.loaded):
            _answer(writer, 404, _error(f"The model `{asked['model']}` does not exist.", 404))
        elif asked.get("stream"):
            await self._stream(writer, asked)
        else:
            choices = [self._choice(asked, prompt) for prompt in asked["prompt"]]
            _answer(writer, 200, {"choices": choices})

    def _choice(self, asked: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
        token_id = token_after(prompt)
        temperature = 1.0 if self.is_raw else asked["temperature"]
        normaliser = self.shift - (0.0 if self.gives_logits else temperature)
        wanted = {token_id, *(asked["logprob_token_ids"] if self.knows_token_ids else ())}
        options = {f"token_id:{n}": logprob_of(n, temperature) + normaliser for n in wanted}
        if asked["model"] != BASE and f"token_id:{MOVED}" in options:
            options[f"token_id:{MOVED}"] += self.effect
        return {
            "token_ids": [token_id],
            "prompt_token_ids": prompt,
            "logprobs": {
                "token_logprobs": [options[f"token_id:{token_id}"]],
                "top_logprobs": [options],
            },
            "finish_reason": "length",
        }

    async def _stream(self, writer: asyncio.StreamWriter, asked: dict[str, Any]) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        sequence, given = list(asked["prompt"]), 0
        while given < asked["max_tokens"]:
            await asyncio.sleep(self.token_s)
            if given == self.dies_after:
                writer.transport.abort()
                return
            if given == self.hangs_after:
                await asyncio.sleep(3600)
            sequence.append(token_after(sequence))
            given += 1
            _event(writer, sequence[-1], asked, is_last=given == asked["max_tokens"])
            await writer.drain()
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def _event(
    writer: asyncio.StreamWriter, token_id: int, asked: dict[str, Any], *, is_last: bool
) -> None:
    choice = {
        "token_ids": [token_id],
        "logprobs": {"token_logprobs": [logprob_of(token_id, asked["temperature"])]},
        "finish_reason": "length" if is_last else None,
    }
    data = f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _error(message: str, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": "Error", "code": code}}


def _answer(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
