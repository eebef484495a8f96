"""Skipped steps that the bucket can still give back whole: which there are, and all that taking one again needs.

Reads the bucket alone and changes nothing there. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from pydantic import BaseModel

from spotgrpo.consumer.audit import read_latest
from spotgrpo.consumer.skips import RECORD, SkippedStep
from spotgrpo.shared.config import LoraConfig, SamplingConfig, Section, TrainConfig
from spotgrpo.shared.errors import ConfigError, IntegrityError, NotStored, WireError
from spotgrpo.shared.fingerprint import base_fingerprint
from spotgrpo.shared.ids import Keys, SkippedId
from spotgrpo.shared.loading import override, table_of
from spotgrpo.shared.loss_config import COMMON, LossConfig
from spotgrpo.shared.manifest import LoraIdentity, Manifest, RunDocument, sha256_hex
from spotgrpo.shared.ports import ObjectStore
from spotgrpo.shared.wire import Group, decode_group

Table = Literal["loss", "train", "sampling"]
TABLES: Final[tuple[Table, ...]] = get_args(Table)
"""What a record has the settings of."""
KINDS: Final[Mapping[Table, type[BaseModel]]] = {
    "loss": LossConfig,
    "train": TrainConfig,
    "sampling": SamplingConfig,
}
FOR_THE_PLACE: Final = ("run", "broker", "bucket", "model", "lora", "log")
"""Other tables that say something of a replay: where the record lies, on which base it is taken."""


@dataclass(frozen=True)
class Kept:
    """A skipped step that can be taken again.

    Attributes:
        at: Unix seconds.
        version: number of the version whose weights the gradient was taken at.
        loss, grad_norm: as Python writes floats.
        workers: of its groups, each once.
    """

    step: str
    at: float
    version: int
    loss: str
    grad_norm: str
    groups: int
    workers: tuple[str, ...]


@dataclass(frozen=True)
class Recorded:
    """A skipped step, every part of it found to be what was recorded.

    Attributes:
        step: the record.
        groups: in the order in which the trainer had them.
        state: of the trainer.
        run: ``run.json``.
        base_sha256: of the base model.
    """

    step: SkippedStep
    groups: tuple[Group, ...]
    state: bytes
    run: RunDocument
    base_sha256: str


class Settings(Section):
    """What a step is computed with."""

    loss: LossConfig
    train: TrainConfig
    sampling: SamplingConfig


def list_kept(store: ObjectStore, keys: Keys) -> tuple[Kept, ...]:
    """The skipped steps of a run, the oldest first. Raises ConfigError where the bucket holds no such run."""
    read_latest(store, keys)
    found = []
    for step in _steps(store, keys):
        try:
            record = _record(store, keys, step)
        except NotStored:
            continue  # newer ones took its place just now
        workers = tuple(dict.fromkeys(entry.worker for entry in record.groups))
        found.append(
            Kept(
                step=str(step),
                at=record.created_at,
                version=record.version,
                loss=record.loss,
                grad_norm=record.grad_norm,
                groups=len(record.groups),
                workers=workers,
            )
        )
    return tuple(found)


def fetch(store: ObjectStore, keys: Keys, name: str) -> Recorded:
    """All of one skipped step.

    Raises:
        ConfigError: no such run, ``name`` is no id, or no such step is kept.
        IntegrityError: a part is missing, or does not have the digest that the record names.
    """
    read_latest(store, keys)
    record = _chosen(store, keys, name)
    manifest = Manifest.from_bytes(_whole(store, record.manifest, record.manifest_sha256))
    groups = tuple(
        decode_group(_whole(store, keys.replay(record.id, entry.task), entry.sha256))
        for entry in record.groups
    )
    return Recorded(
        step=record,
        groups=groups,
        state=_whole(store, record.state, record.state_sha256),
        run=RunDocument.from_bytes(_get(store, keys.run_json)),
        base_sha256=manifest.base_sha256,
    )


def check_sets(sets: Sequence[str]) -> None:
    """Raise ConfigError for one of ``sets`` (``a.b=c``) that says nothing of a replay."""
    for item in sets:
        if table_of(item) not in (*TABLES, *FOR_THE_PLACE):
            known = ", ".join(f"[{table}]" for table in TABLES)
            remedy = f"changes nothing of a replay: set keys of {known} or [model]"
            raise ConfigError("--set", item, remedy)


def settings_of(record: SkippedStep, sets: Sequence[str]) -> Settings:
    """The recorded settings, and those of ``sets`` (``a.b=c``, as ``load_config`` takes them) over them.

    Another ``loss.preset`` brings its own parts; what no preset has (``loss.kl``, …) stays as it was recorded.

    Raises:
        ConfigError: one of ``sets`` says nothing of a replay, settings do not fit together, or another version of
            this program recorded some that are not known here.
        IntegrityError: the record lacks a table.
    """
    check_sets(sets)
    tables: dict[str, Mapping[str, Any]] = {table: _table(record, table) for table in TABLES}
    found = override(tables, sets, Settings)
    if found.loss.preset == tables["loss"].get("preset"):
        return found
    kept = {key: value for key, value in tables["loss"].items() if key not in COMMON}
    return override({**tables, "loss": kept}, sets, Settings)


def changes(record: SkippedStep, settings: Settings) -> dict[str, tuple[object, object]]:
    """By dotted key, what was recorded and what is taken in its place."""
    found: dict[str, tuple[object, object]] = {}
    for table in TABLES:
        now = getattr(settings, table).model_dump(mode="json")
        then = record.settings[table]
        found |= {
            f"{table}.{key}": (then.get(key), value)
            for key, value in now.items()
            if then.get(key) != value
        }
    return found


def check_base(recorded: Recorded, name: str, revision: str | None) -> None:
    """Raise ConfigError unless the model called ``name`` is the run's base."""
    found = base_fingerprint(name, revision)
    if found != recorded.base_sha256:
        remedy = (
            f"its weights are not those of the run's base ({recorded.run.model.name}): their sha256 is {found}, "
            f"the run's {recorded.base_sha256}"
        )
        raise ConfigError("model.name", name, remedy)


def check_lora(recorded: Recorded, lora: LoraConfig, target_modules: list[str]) -> None:
    """Raise ConfigError unless the adapter has the shape that the run's has: its weights mean nothing in another.

    Args:
        target_modules: last name parts of the modules that carry it.
    """
    here = LoraIdentity(
        rank=lora.rank,
        alpha=lora.alpha,
        target_modules=target_modules,
        use_rslora=lora.use_rslora,
    )
    for name, there in recorded.run.lora.model_dump().items():
        if getattr(here, name) != there:
            raise ConfigError(
                f"lora.{name}",
                getattr(here, name),
                f"run.json of this run has {there!r}: give that",
            )


def _table(record: SkippedStep, table: Table) -> Mapping[str, Any]:
    values = record.settings.get(table)
    if not isinstance(values, dict):
        raise IntegrityError(f"the record of {record.id} has no settings of [{table}]")
    unknown = sorted(values.keys() - KINDS[table].model_fields.keys())
    if unknown:
        remedy = f"recorded with {table}.{unknown[0]}, which this version does not have: use the version that did"
        raise ConfigError("STEP", str(record.id), remedy)
    return values


# ---- the bucket -----------------------------------------------------------------------------------------------


def _steps(store: ObjectStore, keys: Keys) -> list[SkippedId]:
    """Those with a record, in their order."""
    found = set()
    for info in store.list(keys.replays):
        if info.key.endswith(f"/{RECORD}"):
            try:
                found.add(keys.skipped_of(info.key))
            except WireError:
                continue  # one that is not ours
    return sorted(found)


def _chosen(store: ObjectStore, keys: Keys, name: str) -> SkippedStep:
    try:
        step = SkippedId.parse(name)
        return _record(store, keys, step)
    except NotStored:
        what = "the bucket keeps no such step"
    except WireError as exc:
        if "skipped step" not in str(exc) and "policy version" not in str(exc):
            raise IntegrityError(f"the record of {name} cannot be read: {exc}") from exc
        what = "not the id of a skipped step"
    kept = ", ".join(map(str, _steps(store, keys)))
    remedy = (
        f"name one of {kept}"
        if kept
        else "this run has none (a step whose loss is finite is not kept)"
    )
    raise ConfigError("STEP", name, f"{what}; {remedy}")


def _record(store: ObjectStore, keys: Keys, step: SkippedId) -> SkippedStep:
    """Raises NotStored, WireError, IntegrityError."""
    record = SkippedStep.from_bytes(store.get(keys.replay(step, RECORD)).body)
    if record.id != step or record.run != keys.run:
        raise IntegrityError(f"the record of {step} is of {record.id} of run {record.run}")
    return record


def _get(store: ObjectStore, key: str) -> bytes:
    try:
        return store.get(key).body
    except NotStored as exc:
        raise IntegrityError(f"{key}, which the step needs, is not in the bucket") from exc


def _whole(store: ObjectStore, key: str, sha256: str) -> bytes:
    body = _get(store, key)
    if sha256_hex(body) != sha256:
        raise IntegrityError(f"{key} does not have the sha256 that the step's record names")
    return body
