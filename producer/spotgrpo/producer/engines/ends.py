"""Where a completion ends: an end token, a stop string, the token limit, or the end of the context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from spotgrpo.producer.engines.base import RequestRefused
from spotgrpo.shared.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotgrpo.producer.engines.base import GenerationRequest
    from spotgrpo.shared.wire import Finish

MARGIN: Final = 4
"""Tokens decoded beyond what a stop string can span: a tokenizer may strip the first one's space."""


class Ends:
    """Says after each token whether its completion is over.

    Args:
        tokenizer: decodes completions for stop strings; special tokens are not part of the text.
        end_ids: the model's own end tokens.
        max_context: longest prompt plus completion, in tokens.
        vocabulary: ids from here on do not exist.
    """

    def __init__(
        self, tokenizer: Any, end_ids: frozenset[int], max_context: int, vocabulary: int
    ) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._max_context = max_context
        self._vocabulary = vocabulary

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Raise RequestRefused for tokens that the model does not have, or that leave no room for one more.

        Either would end the engine, not just the request.
        """
        if not 1 <= len(token_ids) < self._max_context:
            raise RequestRefused(
                f"{len(token_ids)} tokens are not 1 to {self._max_context - 1}, what the model takes"
            )
        if not all(0 <= token_id < self._vocabulary for token_id in token_ids):
            raise RequestRefused(f"a token id is not one of the model's {self._vocabulary}")

    def token_limit(self, request: GenerationRequest) -> int:
        """Completion tokens at most, prefix included.

        Raises ConfigError for a prompt that is empty or leaves no room in the context.
        """
        room = self._max_context - len(request.prompt_ids)
        if room < 1 or not request.prompt_ids:
            raise ConfigError(
                "data.max_prompt_tokens",
                len(request.prompt_ids),
                f"a prompt must have 1 to {self._max_context - 1} tokens with this model",
            )
        return min(request.sampling.max_new_tokens, room)

    def stop_ids(self, request: GenerationRequest) -> frozenset[int]:
        """All ids that end this request."""
        return self._end_ids.union(request.sampling.stop_token_ids)

    def finish(self, request: GenerationRequest, completion: Sequence[int]) -> Finish | None:
        """Why ``completion`` (prefix included) is over with its last token, or None where it goes on."""
        if not completion:
            return None
        last = completion[-1]
        if last in self._end_ids or last in request.sampling.stop_token_ids:
            return "stop"
        if self._stopped_by_text(request, completion):
            return "stop"
        return "length" if len(completion) >= self.token_limit(request) else None

    def _stopped_by_text(self, request: GenerationRequest, completion: Sequence[int]) -> bool:
        """Every token but the last was looked at before, so only the end of the text can be new."""
        stops = request.sampling.stop
        if not stops:
            return False
        longest = max(len(stop.encode()) for stop in stops)
        tail = list(completion[-(longest + MARGIN) :])
        text = self._tokenizer.decode(tail, skip_special_tokens=True)
        return any(stop in text for stop in stops)
