"""The run's endless order of prompts: prompt i is the same for every learner of a run, whenever it starts."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

from spotgrpo.consumer.encoding import PromptEncoder
from spotgrpo.consumer.rows import MAX_ROW_BYTES, Rows, canonical_json, load_rows
from spotgrpo.shared.config import DataConfig
from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.manifest import DataIdentity
from spotgrpo.shared.wire import Json, Prompt, Row

log = logging.getLogger(__name__)

ORDER: Final = 1
"""Version of the order below; part of the identity."""
BATCH: Final = 1000
CACHED_PROMPTS: Final = 1024


@dataclass(frozen=True)
class PromptRow:
    """One prompt of the order.

    Attributes:
        prompt: text or messages as they are asked, ``data.system_prompt`` included; what rewards are given.
        prompt_ids: its token ids, chat template applied.
        row: the data set's other columns.
    """

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    row: Row


@dataclass(frozen=True)
class _Scan:
    """What one look at all rows found: digest of their content, and which of them are used."""

    sha256: str
    kept: Sequence[int]


class PromptSource:
    """Prompts by their place in the run's order. Make one with :meth:`open`."""

    def __init__(
        self, rows: Rows, config: DataConfig, seed: int, encoder: PromptEncoder, limit: int
    ) -> None:
        self._rows = rows
        self._config = config
        self._seed = seed
        self._encoder = encoder
        self._limit = limit
        self._order = lru_cache(maxsize=2)(self._pass_order)
        self._row = lru_cache(maxsize=CACHED_PROMPTS)(self._encoded)

    @classmethod
    def open(
        cls, config: DataConfig, seed: int, tokenizer: Any, max_context: int, max_new_tokens: int
    ) -> PromptSource:
        """Load the data set and look at every row once.

        Args:
            config: the ``[data]`` table, paths resolved.
            seed: of the order, and of procedural tasks that name none.
            tokenizer: of ``transformers``.
            max_context: tokens that prompt and completion may have together.
            max_new_tokens: tokens that the completion may have.

        Raises:
            ConfigError: whatever is wrong with the data set or one of its rows.
        """
        limit = longest_prompt(config, max_context, max_new_tokens)
        rows = load_rows(config, seed)
        source = cls(rows, config, seed, PromptEncoder(tokenizer, config), limit)
        source.validate()
        log.info("%d prompts from %s", len(source), rows.source)
        return source

    def __len__(self) -> int:
        """Prompts of one pass."""
        return len(self._scan.kept)

    def __getitem__(self, index: int) -> PromptRow:
        """The ``index``-th prompt of the order, from 0 without end."""
        if index < 0:
            raise IndexError(index)
        done, place = divmod(index, len(self))
        return self._row(self._order(done)[place])

    def identity(self) -> DataIdentity:
        """What a run has to find again to go on with it: content, what is asked, and the order."""
        scan = self._scan
        config = self._config
        made_of: dict[str, Json] = {
            "order": ORDER,
            "content": scan.sha256,
            "prompt_column": config.prompt_column,
            "system_prompt": config.system_prompt,
            "chat_template_kwargs": repr(sorted(config.chat_template_kwargs.items())),
            "kept": len(scan.kept) if self._rows.fingerprint else _digest_of_numbers(scan.kept),
        }
        return DataIdentity(
            source=self._rows.source,
            sha256=hashlib.sha256(canonical_json(made_of)).hexdigest(),
            rows=len(self._rows),
            shuffle_seed=self._seed if config.shuffle else None,
        )

    def validate(self) -> None:
        """Check every row, once; :meth:`open` does it.

        Raises:
            ConfigError: a prompt of the wrong type or length, a value that JSON cannot carry, a row
                too big for a message, or nothing left.
        """
        self._scan  # noqa: B018 - looked at on first access

    @cached_property
    def _scan(self) -> _Scan:
        digest = hashlib.sha256((self._rows.fingerprint or "").encode())
        kept: list[int] = []
        for first, batch in _batches(self._rows):
            prompts = []
            for index, (raw, row) in enumerate(batch, start=first):
                prompts.append(self._asked(index, raw))
                body = self._body(index, raw, row)
                if self._rows.fingerprint is None:
                    digest.update(body)
            lengths = [len(ids) for ids in self._encode_each(first, prompts)]
            kept.extend(
                index
                for index, tokens in enumerate(lengths, start=first)
                if self._fits(index, tokens)
            )
        self._say_dropped(len(kept))
        return _Scan(digest.hexdigest(), kept)

    def _asked(self, index: int, raw: Json) -> Prompt:
        return self._encoder.asked(raw, f"row {index}")

    def _encode_each(self, first: int, prompts: list[Prompt]) -> list[tuple[int, ...]]:
        try:
            return self._encoder.encode(
                prompts, f"one of rows {first} to {first + len(prompts) - 1}"
            )
        except ConfigError:
            for index, prompt in enumerate(prompts, start=first):  # say which one
                self._encoder.encode([prompt], f"row {index}")
            raise

    def _body(self, index: int, raw: Json, row: Row) -> bytes:
        try:
            body = canonical_json([raw, row])
        except UnicodeEncodeError as exc:
            remedy = f"row {index} holds half of a surrogate pair, which is no text: {exc}"
            raise ConfigError(self._rows.key, self._rows.shown, remedy) from exc
        if len(body) > MAX_ROW_BYTES:
            remedy = f"row {index} has {len(body)} bytes, more than the {MAX_ROW_BYTES} that fit into a message"
            raise ConfigError(
                self._rows.key, self._rows.shown, remedy + ": remove columns that no reward needs"
            )
        return body

    def _fits(self, index: int, tokens: int) -> bool:
        if not tokens:
            raise ConfigError(
                self._rows.key, self._rows.shown, f"the prompt of row {index} is empty"
            )
        if tokens <= self._limit:
            return True
        if self._config.overlong == "error":
            remedy = (
                f"the prompt of row {index} has {tokens} tokens, more than the limit of {self._limit} "
                "(data.max_prompt_tokens, or model.max_context less sampling.max_new_tokens): shorten it, raise the "
                'limit, or set data.overlong = "drop"'
            )
            raise ConfigError("data.overlong", "error", remedy)
        return False

    def _say_dropped(self, kept: int) -> None:
        total = len(self._rows)
        if not kept:
            remedy = f"all {total} prompts have more tokens than the limit of {self._limit}: raise it or shorten them"
            raise ConfigError("data.overlong", self._config.overlong, remedy)
        if kept < total:
            log.warning(
                "%d of %d prompts are longer than %d tokens and were dropped",
                total - kept,
                total,
                self._limit,
            )

    def _encoded(self, index: int) -> PromptRow:
        raw, row = self._rows[index]
        prompt = self._asked(index, raw)
        (ids,) = self._encoder.encode([prompt], f"row {index}")
        return PromptRow(prompt, ids, row)

    def _pass_order(self, done: int) -> Sequence[int]:
        kept = self._scan.kept
        return pass_order(kept, self._seed, done) if self._config.shuffle else kept


def longest_prompt(config: DataConfig, max_context: int, max_new_tokens: int) -> int:
    """Tokens that a prompt may have; ConfigError where the settings leave none, or contradict each other."""
    left = max_context - max_new_tokens
    if left < 1:
        remedy = (
            f"leaves no room for a prompt: the context (model.max_context) is {max_context} tokens"
        )
        raise ConfigError("sampling.max_new_tokens", max_new_tokens, remedy)
    if config.max_prompt_tokens is not None and config.max_prompt_tokens > left:
        remedy = f"the context of {max_context} tokens less sampling.max_new_tokens = {max_new_tokens} leaves {left}"
        raise ConfigError("data.max_prompt_tokens", config.max_prompt_tokens, remedy)
    return config.max_prompt_tokens or left


def pass_order(kept: Sequence[int], seed: int, done: int) -> list[int]:
    """``kept`` in the order of pass ``done``: sorted by a digest, so that no library's generator decides it."""
    return sorted(
        kept, key=lambda index: hashlib.sha256(f"{seed}.{done}.{index}".encode()).digest()
    )


def _batches(rows: Rows) -> Iterator[tuple[int, list[tuple[Json, Row]]]]:
    walk, first = iter(rows), 0
    while batch := list(itertools.islice(walk, BATCH)):
        yield first, batch
        first += len(batch)


def _digest_of_numbers(numbers: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, numbers)).encode()).hexdigest()
