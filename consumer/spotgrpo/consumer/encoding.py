"""Prompts as token ids, the way the model was trained to read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from spotgrpo.shared.config import DataConfig
from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.wire import Json, Prompt


class PromptEncoder:
    """Turns what a prompt column holds into what is asked, and that into token ids.

    Text goes through the tokenizer with the special tokens that it puts in front (not with any that it would
    put behind: the completion follows). Messages go through the chat template, which brings its own. A text prompt
    under ``data.system_prompt`` becomes a chat of that and one user message.

    Args:
        tokenizer: of ``transformers``.
        config: for ``system_prompt`` and ``chat_template_kwargs``.
    """

    def __init__(self, tokenizer: Any, config: DataConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._prefix = _leading_ids(tokenizer)

    def asked(self, raw: Json, where: str) -> Prompt:
        """The prompt as rewards and template get it, system message included.

        Raises:
            ConfigError: neither text nor messages; ``where`` says which row.
        """
        system = self._config.system_prompt
        if isinstance(raw, str):
            if system is None:
                return raw
            return [{"role": "system", "content": system}, {"role": "user", "content": raw}]
        messages = self._messages(raw, where)
        if system is None:
            return messages
        if messages[0]["role"] == "system":
            raise ConfigError(
                "data.system_prompt",
                system,
                f"{where} begins with a system message of its own: remove one",
            )
        return [{"role": "system", "content": system}, *messages]

    def encode(self, prompts: Sequence[Prompt], where: str) -> list[tuple[int, ...]]:
        """Token ids of each prompt; one call for many is far faster.

        Raises:
            ConfigError: the chat template is missing or refuses the messages.
        """
        chats = [not isinstance(prompt, str) for prompt in prompts]
        texts = [self._text(prompt, where) for prompt in prompts]
        encoded = (
            self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            if texts
            else []
        )
        return [
            tuple(ids) if chat else self._with_prefix(ids)
            for ids, chat in zip(encoded, chats, strict=True)
        ]

    def _messages(self, raw: Json, where: str) -> list[dict[str, Json]]:
        column = self._config.prompt_column
        if not isinstance(raw, list) or not raw:
            what = (
                "an empty list"
                if raw == []
                else "nothing"
                if raw is None
                else f"a {type(raw).__name__}"
            )
            remedy = f"{where} holds {what}; a prompt is text, or a list of messages with role and content"
            raise ConfigError("data.prompt_column", column, remedy)
        for message in raw:
            if (
                not isinstance(message, dict)
                or not isinstance(message.get("role"), str)
                or "content" not in message
            ):
                remedy = f"{where} has a message that is no map with role and content"
                raise ConfigError("data.prompt_column", column, remedy)
        # Columnar files fill in keys that a message does not have, and templates take a null for a value.
        return [
            {key: value for key, value in message.items() if value is not None or key == "content"}
            for message in cast("list[dict[str, Json]]", raw)
        ]

    def _text(self, prompt: Prompt, where: str) -> str:
        if isinstance(prompt, str):
            return prompt
        import jinja2

        options = self._config.chat_template_kwargs
        if not getattr(self._tokenizer, "chat_template", None):
            remedy = "prompts are chat messages, but the model's tokenizer has no chat template: give text prompts"
            raise ConfigError("data.prompt_column", self._config.prompt_column, remedy)
        try:
            return cast(
                "str",
                self._tokenizer.apply_chat_template(
                    prompt, tokenize=False, add_generation_prompt=True, **options
                ),
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as exc:
            remedy = f"the chat template refuses {where}: {type(exc).__name__}: {exc}"
            raise ConfigError("data.prompt_column", self._config.prompt_column, remedy) from exc

    def _with_prefix(self, ids: Sequence[int]) -> tuple[int, ...]:
        if tuple(ids[: len(self._prefix)]) == self._prefix:
            return tuple(ids)  # the text brought it along: no second BOS
        return (*self._prefix, *ids)


def _leading_ids(tokenizer: Any) -> tuple[int, ...]:
    """Ids of the special tokens that the tokenizer puts before a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    return ()
