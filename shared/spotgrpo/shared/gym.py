"""Procedural tasks of reasoning-gym, as rows that survive JSON.

A row carries its entry whole. Making the entry again from its index is no way out: several data sets depend on the
hash seed of the process that makes them. Tuples become lists on the wire, yet some scorers compare with tuples, so
the row also names the places that held one.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.wire import Json, Row

log = logging.getLogger(__name__)

KEY: Final = "data.reasoning_gym"
ENTRY: Final = "entry"
DATASET: Final = "dataset"
TUPLES: Final = "tuples"


def gym_version() -> str:
    """Version of the installed reasoning-gym; ConfigError where there is none."""
    try:
        return version("reasoning_gym")
    except PackageNotFoundError as exc:
        raise ConfigError(
            KEY, "reasoning_gym", "reasoning-gym is not installed: pip install 'spotgrpo[gym]'"
        ) from exc


def make_tasks(name: str, options: Mapping[str, Any], seed: int) -> Any:
    """The data set ``name``: a sequence of entries (``question``, ``answer``, ``metadata``).

    ``seed`` counts unless the options name one: without either, every start would make other tasks.

    Raises:
        ConfigError: not installed, no such data set (near names are given), or options it refuses.
    """
    check_name(name)
    from reasoning_gym import create_dataset

    try:
        return create_dataset(name, **{"seed": seed, **options})
    except (TypeError, ValueError, AssertionError, KeyError) as exc:
        remedy = f"{name} refuses these options: {type(exc).__name__}: {exc}"
        raise ConfigError("data.reasoning_gym_options", dict(options), remedy) from exc


def check_name(name: str) -> None:
    """Raise ConfigError unless reasoning-gym is installed and has a data set ``name``."""
    gym_version()
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.4)
        hint = (
            f"did you mean {', '.join(near)}?"
            if near
            else f"there are {', '.join(sorted(DATASETS))}"
        )
        raise ConfigError(KEY, name, f"reasoning-gym has no such data set; {hint}")


def entry_to_row(dataset: str, entry: Mapping[str, Any]) -> Row:
    """``{entry, dataset, tuples}`` with the entry in JSON types."""
    return {
        ENTRY: _to_json(entry),
        DATASET: dataset,
        TUPLES: [*sorted(set(_tuple_places(entry, "")))],
    }


def entry_of_row(row: Row) -> dict[str, Any]:
    """The entry of a row, tuples restored; ConfigError where the row has none."""
    entry, places = row.get(ENTRY), row.get(TUPLES)
    if not isinstance(entry, dict) or not isinstance(row.get(DATASET), str):
        raise ConfigError(
            "rewards.function", "reasoning_gym", "this scorer needs prompts of data.reasoning_gym"
        )
    marks = frozenset(str(place) for place in places) if isinstance(places, list) else frozenset()
    restored = _restore(entry, "", marks)
    return dict(restored)


def score(completion: str, row: Row) -> float:
    """The task's own score of a completion, from 0 to 1.

    The answer is what stands in the last ``<answer>…</answer>``, or else the whole completion. Scorers raise on
    some answers that they cannot read (a word where factors should be): such an answer scores 0.
    """
    from reasoning_gym.utils import extract_answer

    entry, dataset = entry_of_row(row), str(row[DATASET])
    answer = extract_answer(completion)
    scorer = _scorer(dataset)
    try:
        return float(scorer(completion.strip() if answer is None else answer, entry))
    except Exception as exc:  # noqa: BLE001 - code of a hundred authors, run on whatever a model says
        log.debug("the scorer of %s raised %s: %s", dataset, type(exc).__name__, exc)
        return 0.0


@cache
def _scorer(dataset: str) -> Callable[[str, dict[str, Any]], Any]:
    check_name(dataset)
    from reasoning_gym import get_score_answer_fn

    found: Callable[[str, dict[str, Any]], Any] = get_score_answer_fn(dataset)
    return found


def _to_json(value: Any) -> Json:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_to_json(item) for item in value]
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return _to_json(value.tolist())
    return str(value)


def _tuple_places(value: Any, place: str) -> Iterator[str]:
    """Where tuples stand: keys joined by dots, ``[]`` for every element of a list."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tuple_places(item, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        if isinstance(value, tuple):
            yield place
        for item in value:
            yield from _tuple_places(item, f"{place}[]")


def _restore(value: Json, place: str, tuples: frozenset[str]) -> Any:
    if isinstance(value, dict):
        return {key: _restore(item, f"{place}.{key}", tuples) for key, item in value.items()}
    if isinstance(value, list):
        items = [_restore(item, f"{place}[]", tuples) for item in value]
        return tuple(items) if place in tuples else items
    return value
