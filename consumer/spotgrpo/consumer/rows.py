"""Rows of a data set as JSON values: from a file, from the hub, or from reasoning-gym.

JSON files are read here and not by ``datasets``, whose reader turns text that looks like a date into a timestamp and
fills nested keys that a row does not have: a reward would compare with something that the file does not say.
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from spotgrpo.shared import gym
from spotgrpo.shared.config import DataConfig
from spotgrpo.shared.errors import ConfigError, WireError
from spotgrpo.shared.wire import MAX_MESSAGE_BYTES, Json, Row, check_json

KEY: Final = "data.path"
JSON_SUFFIXES: Final = (".jsonl", ".json")
BUILDERS: Final = {".parquet": "parquet", ".csv": "csv"}
MAX_ROW_BYTES: Final = MAX_MESSAGE_BYTES // 2
"""A task carries prompt ids, prompt and row in one message."""


@dataclass(frozen=True)
class Rows:
    """All rows of a data set, not yet checked.

    Attributes:
        source: what people call it; part of the run's identity, so without the folders of one machine.
        columns: names of the columns, the prompt's included.
        values: a sequence of rows; a row may lack columns.
        prompt_column: which column is the prompt.
        fingerprint: names the content where the rows themselves cannot (procedural tasks, see ``gym``).
    """

    source: str
    columns: tuple[str, ...]
    values: Sequence[Mapping[str, Any]]
    prompt_column: str
    fingerprint: str | None = None
    key: str = KEY
    shown: str = field(default="", compare=False)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[Json, Row]:
        """Prompt and other columns of a row; ConfigError names the column that JSON cannot carry."""
        return self._split(index, self.values[index])

    def __iter__(self) -> Iterator[tuple[Json, Row]]:
        for index, value in enumerate(self.values):
            yield self._split(index, value)

    def _split(self, index: int, value: Mapping[str, Any]) -> tuple[Json, Row]:
        row = {name: self._json(index, name, value.get(name)) for name in self.columns}
        return row.pop(self.prompt_column, None), row

    def _json(self, index: int, column: str, value: Any) -> Json:
        try:
            return check_json(to_json(value), "it")
        except WireError as exc:
            remedy = (
                f"column {column!r} of row {index} cannot be sent as JSON ({exc}): "
                "remove the column or convert it to text, finite numbers, lists and maps"
            )
            raise ConfigError(self.key, self.shown, remedy) from exc


def load_rows(config: DataConfig, seed: int) -> Rows:
    """The rows that ``config`` names; ``seed`` makes procedural tasks that name none of their own.

    Raises:
        ConfigError: not found, not readable, empty, or without the prompt column.
    """
    if config.reasoning_gym is not None:
        return _gym_rows(config.reasoning_gym, config.reasoning_gym_options, seed)
    path = str(config.path)
    rows = (
        _json_rows(Path(path), config)
        if path.endswith(JSON_SUFFIXES)
        else _dataset_rows(config, path)
    )
    if not len(rows):
        raise ConfigError(KEY, path, "the data set has no rows")
    if config.prompt_column not in rows.columns:
        remedy = f"the data set has no such column; it has {', '.join(rows.columns)}"
        raise ConfigError("data.prompt_column", config.prompt_column, remedy)
    return rows


def to_json(value: Any) -> Any:
    """``value`` with numpy, date and decimal values turned into JSON types; others are left for the check."""
    if isinstance(value, np.ndarray | np.generic):
        return to_json(value.tolist())
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, dt.timedelta):
        return value.total_seconds()
    return str(value) if isinstance(value, decimal.Decimal) else value


def canonical_json(value: Json) -> bytes:
    """The bytes of ``value`` that digests are taken over; UnicodeEncodeError for half a surrogate pair."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


# ---- JSON files -----------------------------------------------------------------------------------------------


def _json_rows(path: Path, config: DataConfig) -> Rows:
    if not path.is_file():
        raise ConfigError(KEY, str(path), "no such file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(KEY, str(path), f"cannot be read as UTF-8 text: {exc}") from exc
    values = (
        _parse_lines(path, text) if not text.lstrip().startswith("[") else _parse_list(path, text)
    )
    values = _slice(values, config.split)
    columns = tuple(dict.fromkeys(name for value in values for name in value))
    return Rows(
        f"{path.name}[{config.split}]", columns, values, config.prompt_column, shown=str(path)
    )


def _parse_lines(path: Path, text: str) -> list[dict[str, Any]]:
    values = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as exc:
            raise ConfigError(KEY, str(path), f"line {number} is not JSON: {exc}") from exc
        values.append(_object(path, value, f"line {number}"))
    return values


def _parse_list(path: Path, text: str) -> list[dict[str, Any]]:
    try:
        values = json.loads(text)
    except ValueError as exc:
        raise ConfigError(KEY, str(path), f"not a JSON list: {exc}") from exc
    return [_object(path, value, f"element {index}") for index, value in enumerate(values)]


def _object(path: Path, value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        remedy = (
            f"{where} is a {type(value).__name__}, but each row has to be an object with columns"
        )
        raise ConfigError(KEY, str(path), remedy)
    return value


def _slice(values: list[dict[str, Any]], split: str) -> list[dict[str, Any]]:
    """What ``train[:100]`` or ``train[10%:]`` names of a file, which is one split whatever its name."""
    if "[" not in split and "+" not in split:
        return values
    datasets = _import_datasets()
    base = split.partition("[")[0]
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute({base: len(values)})
    except (ValueError, AssertionError, KeyError) as exc:
        raise ConfigError(
            "data.split", split, f"no such part of a file with {len(values)} rows: {exc}"
        ) from exc
    return [value for part in parts for value in values[slice(part.from_, part.to)]]


# ---- datasets -------------------------------------------------------------------------------------------------


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as exc:
        raise ConfigError(
            KEY, "datasets", "the library is not installed: pip install 'spotgrpo[learner]'"
        ) from exc
    return datasets


def _dataset_rows(config: DataConfig, path: str) -> Rows:
    found = _load_dataset(config, path)
    columns = tuple(found.column_names)
    media = [name for name in columns if _has_media(found.features[name])]
    if media:
        raise ConfigError(
            KEY,
            path,
            f"column {media[0]!r} holds images, sound or files, which a task cannot carry: remove it",
        )
    file = Path(path).suffix in BUILDERS
    name = Path(path).name if file else "/".join(part for part in (path, config.name) if part)
    revision = f"@{config.revision}" if config.revision else ""
    return Rows(
        f"{name}[{config.split}]{revision}",
        columns,
        _Batched(found),
        config.prompt_column,
        shown=path,
    )


def _load_dataset(config: DataConfig, path: str) -> Any:
    datasets = _import_datasets()

    builder = BUILDERS.get(Path(path).suffix)
    if builder and not Path(path).is_file():
        raise ConfigError(KEY, path, "no such file")
    if builder and not Path(path).stat().st_size:
        raise ConfigError(KEY, path, "the file is empty")
    base = config.split.partition("[")[0]
    arguments = (
        {"path": builder, "data_files": {base: path}}
        if builder
        else {"path": path, "name": config.name}
    )
    foreign = (
        datasets.exceptions.DatasetsError,
        OSError,
        ValueError,
        RuntimeError,
        LookupError,
        TypeError,
        StopIteration,
        ImportError,
    )
    try:
        with _quiet(datasets):
            return datasets.load_dataset(**arguments, split=config.split, revision=config.revision)
    except foreign as exc:
        raise _translated(config, path, exc) from exc


def _translated(config: DataConfig, path: str, exc: Exception) -> ConfigError:
    text = " ".join(str(exc.__cause__ or exc).split())[:300]
    if "corresponds to no data" in text:
        return ConfigError(KEY, path, "the data set has no rows")
    if "split" in text.lower() and isinstance(exc, ValueError):
        return ConfigError("data.split", config.split, text)
    if "BuilderConfig" in text or "Config name" in text:
        return ConfigError("data.name", config.name, text)
    if isinstance(exc, OSError):
        remedy = f"neither a file nor a data set that the hub or its local cache has ({text})"
        return ConfigError(KEY, path, remedy)
    return ConfigError(KEY, path, f"cannot be read: {type(exc.__cause__ or exc).__name__}: {text}")


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Without its progress bars and error lines: what goes wrong is said once, by us."""
    level = datasets.utils.logging.get_verbosity()
    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets.utils.logging.set_verbosity(level)
        if not bars:
            datasets.enable_progress_bars()


def _has_media(feature: Any) -> bool:
    """Whether a feature, or one inside it, decodes to something other than JSON."""
    if isinstance(feature, Mapping):
        return any(_has_media(item) for item in feature.values())
    if isinstance(feature, list | tuple):
        return any(_has_media(item) for item in feature)
    if hasattr(feature, "decode"):
        return type(feature).__name__ != "Json"
    return hasattr(feature, "feature") and _has_media(feature.feature)


class _Batched(Sequence[Mapping[str, Any]]):
    """A ``datasets.Dataset`` whose iteration reads a thousand rows at a time (one by one is ten times slower)."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for batch in self._dataset.iter(batch_size=1000):
            names = list(batch)
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(names, values, strict=True))


# ---- reasoning-gym --------------------------------------------------------------------------------------------


def _gym_rows(name: str, options: Mapping[str, Any], seed: int) -> Rows:
    tasks = gym.make_tasks(name, options, seed)
    values = [{"prompt": entry["question"], **gym.entry_to_row(name, entry)} for entry in tasks]
    if not values:
        raise ConfigError(
            "data.reasoning_gym_options", dict(options), "these options give no tasks (size)"
        )
    made_of = {
        "name": name,
        "options": to_json({"seed": seed, **options}),
        "version": gym.gym_version(),
    }
    columns = ("prompt", gym.ENTRY, gym.DATASET, gym.TUPLES)
    fingerprint = json.dumps(made_of, sort_keys=True, default=str)
    return Rows(f"reasoning_gym/{name}", columns, values, "prompt", fingerprint, gym.KEY, name)
