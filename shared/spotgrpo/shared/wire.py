"""The messages between learner and workers, as validated values and as bytes.

A body is a msgpack map ``{schema, kind, sha256, payload}``. ``payload`` is itself packed, and ``sha256`` covers
schema, kind and payload, so that a body that was cut, flipped or forged by accident is a WireError and never a
wrong number. Arrays are raw little-endian bytes with their dtype. Readers take schema N and N-1 and pass over
optional payload fields they do not know, but for those of sampling.

Nothing here allocates more than a small multiple of the body: its size and its shape (``packed``) are checked before
anything is unpacked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, cast

import msgpack
import numpy as np
import numpy.typing as npt

from spotgrpo.shared.errors import WireError
from spotgrpo.shared.ids import PolicyVersion, TaskId
from spotgrpo.shared.packed import Limits, check_shape

SCHEMA: Final = 1
OLDEST_READABLE: Final = 1

MAX_MESSAGE_BYTES: Final = 8 << 20
"""Largest body that travels through the broker; bigger groups go by reference (claim check)."""
MAX_OBJECT_BYTES: Final = 512 << 20
"""Largest packed object that is read from the bucket."""
OUTER: Final = Limits(items=32, containers=1)
PAYLOAD: Final = Limits(items=1 << 20, containers=1 << 16)
MAX_TOKENS: Final = 1 << 22
MAX_GROUP_SIZE: Final = 4096
AGAIN: Final = "again"
"""Message header of a task that is published once more: a worker may have begun it, and left a partial."""
SHA256: Final = re.compile(r"[0-9a-f]{64}")

Int32Array: TypeAlias = npt.NDArray[np.int32]
Float32Array: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Row: TypeAlias = dict[str, Json]
Prompt: TypeAlias = "str | list[dict[str, Json]]"
"""What a data set's ``prompt`` column holds: text, or chat messages (``role``, ``content``)."""

Kind = Literal["train", "eval"]
Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled. Logprobs are those of the distribution at this temperature.

    Nothing else shapes that distribution, no top_p, top_k, min_p or penalty: behaviour logprobs are of what was sampled
    from, and the loss takes its gradient at the same.

    Attributes:
        max_new_tokens: tokens at most, end token included.
        temperature: 0 is greedy (evaluation only).
        stop: strings that end a completion; the token that completes one is kept.
        stop_token_ids: ids that end a completion besides the model's own end tokens; kept.
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Task:
    """One prompt to be turned into one group.

    Attributes:
        prompt_ids: the prompt as token ids, chat template applied; what the engine is given.
        prompt: the prompt as the data set has it; what rewards are given.
        row: the data set's other columns, handed to rewards by name.
        seeds: one for each rollout of the group.
        min_version: oldest version number that the group may be sampled with; a worker that serves an older one
            adopts first.
        pinned: the version to sample with, or None for the newest.
    """

    run: str
    task_id: TaskId
    prompt_ids: tuple[int, ...]
    prompt: Prompt
    row: Row
    sampling: Sampling
    seeds: tuple[int, ...]
    min_version: int = 0
    pinned: PolicyVersion | None = None
    kind: Kind = "train"

    @property
    def group_size(self) -> int:
        return len(self.seeds)


@dataclass(frozen=True)
class VersionRun:
    """``tokens`` consecutive tokens that one policy version sampled."""

    version: PolicyVersion
    tokens: int


@dataclass(frozen=True, eq=False)
class Rollout:
    """One completion.

    Attributes:
        token_ids: int32 [T], the engine's own, never text encoded again.
        logprobs: float32 [T], behaviour logprobs at the sampling temperature.
        loss_mask: bool [T], True where a token is trained.
        versions: runs of tokens by version, in order; their tokens add up to T.
        reward: weighted sum of the parts that are numbers, or None if unscored.
        reward_parts: each reward function's value, None where it gave none.
        finish: ``stop`` at an end token or stop string, ``length`` where the token limit cut it.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    loss_mask: BoolArray
    versions: tuple[VersionRun, ...]
    reward: float | None
    reward_parts: Mapping[str, float | None]
    finish: Finish

    @property
    def truncated(self) -> bool:
        return self.finish == "length"


@dataclass(frozen=True, eq=False)
class Group:
    """All rollouts of one task: the unit of delivery, dedupe, ack and advantage. Times are Unix seconds."""

    run: str
    task_id: TaskId
    worker: str
    engine: str
    engine_version: str
    manifest_sha256: str
    prompt_ids: Int32Array
    row: Row
    sampling: Sampling
    rollouts: tuple[Rollout, ...]
    kind: Kind = "train"
    started_at: float = 0.0
    generated_at: float = 0.0
    scored_at: float = 0.0

    @property
    def tokens(self) -> int:
        """Completion tokens in all."""
        return sum(len(rollout.token_ids) for rollout in self.rollouts)


@dataclass(frozen=True, eq=False)
class PartialRollout:
    """A completion as far as it got; see :class:`Rollout`.

    Attributes:
        seed: of the rollout; with the number of tokens it fixes how the completion goes on.
        finish: None while it is unfinished.
    """

    seed: int
    token_ids: Int32Array
    logprobs: Float32Array
    versions: tuple[VersionRun, ...]
    finish: Finish | None


@dataclass(frozen=True, eq=False)
class Partial:
    """A group as far as a worker got with it: what the next one needs to carry it on from there.

    Attributes:
        rollouts: one for each seed of the task, in its order; some may have no token yet.
        saved_at: Unix seconds.
    """

    run: str
    task_id: TaskId
    worker: str
    prompt_ids: Int32Array
    sampling: Sampling
    rollouts: tuple[PartialRollout, ...]
    saved_at: float = 0.0

    @property
    def tokens(self) -> int:
        """Completion tokens in all."""
        return sum(len(rollout.token_ids) for rollout in self.rollouts)


@dataclass(frozen=True)
class GroupRef:
    """A group too big for a message: where its encoded body lies in the bucket."""

    run: str
    task_id: TaskId
    key: str
    sha256: str
    size: int


# ---- envelope -------------------------------------------------------------------------------------------------


def pack_body(kind: str, payload: Mapping[str, Any], schema: int = SCHEMA) -> bytes:
    """Wrap ``payload`` as a body of ``kind``.

    Raises:
        WireError: it holds something that msgpack cannot carry (a numpy scalar, an integer over 64 bits, …).
    """
    try:
        packed = msgpack.packb(payload, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as exc:
        raise WireError(f"a {kind} cannot be sent: {str(exc)[:200]}") from exc
    return msgpack.packb(
        {
            "schema": schema,
            "kind": kind,
            "sha256": _digest(schema, kind, packed),
            "payload": packed,
        },
        use_bin_type=True,
    )


def unpack_body(body: bytes, kind: str, max_bytes: int = MAX_OBJECT_BYTES) -> Fields:
    """Open a body of ``kind``.

    Raises:
        WireError: too big, not msgpack, cut, altered, of another kind, or of a schema outside N-1 … N.
    """
    if len(body) > max_bytes:
        raise WireError(f"body of {len(body)} bytes is over the limit of {max_bytes}")
    outer = Fields(_unpack(body, OUTER), "body")
    schema = outer.integer("schema", low=0)
    if not OLDEST_READABLE <= schema <= SCHEMA:
        raise WireError(
            f"schema {schema} is outside {OLDEST_READABLE} to {SCHEMA}: update the older side"
        )
    found = outer.text("kind", longest=32)
    if found != kind:
        raise WireError(f"body is a {found!r}, not a {kind!r}")
    payload = outer.raw("payload")
    if outer.raw("sha256") != _digest(schema, kind, payload):
        raise WireError("body does not match its sha256")
    if set(outer.names) != {"schema", "kind", "sha256", "payload"}:
        raise WireError("body has fields beside schema, kind, sha256 and payload")
    return Fields(_unpack(payload, PAYLOAD), kind)


def _digest(schema: int, kind: str, payload: bytes) -> bytes:
    digest = hashlib.sha256(f"{schema}:{kind}:".encode())
    digest.update(payload)
    return digest.digest()


def _unpack(body: bytes, limits: Limits) -> Any:
    check_shape(body, limits)
    try:
        return msgpack.unpackb(body, raw=False, strict_map_key=True, object_pairs_hook=_as_map)
    except WireError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException, OverflowError) as exc:
        raise WireError(
            f"not a readable msgpack body: {type(exc).__name__}: {str(exc)[:120]}"
        ) from exc


def _as_map(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise WireError("a map names a key twice")
    if any(type(key) is not str for key in found):
        raise WireError("a map has a key that is not text")
    return found


class Fields:
    """A decoded map whose getters raise WireError for anything that is not of the type and range asked for."""

    def __init__(self, values: object, where: str) -> None:
        if not isinstance(values, dict):
            raise WireError(f"{where} is not a map")
        self._values: dict[str, Any] = values
        self._where = where

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._values)

    def _get(self, name: str, *types: type) -> Any:
        if name not in self._values:
            raise WireError(f"{self._where}.{name} is missing")
        value = self._values[name]
        if type(value) not in types:
            raise WireError(f"{self._where}.{name} is a {type(value).__name__}")
        return value

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def integer(self, name: str, low: int = 0, high: int = 2**63 - 1) -> int:
        value: int = self._get(name, int)
        if not low <= value <= high:
            raise WireError(f"{self._where}.{name} = {value} is outside {low} to {high}")
        return value

    def number(self, name: str) -> float:
        value = float(self._get(name, int, float))
        if not math.isfinite(value):
            raise WireError(f"{self._where}.{name} is not finite")
        return value

    def number_or_none(self, name: str) -> float | None:
        return self.number(name) if self._get(name, int, float, type(None)) is not None else None

    def text(self, name: str, longest: int = 4096) -> str:
        value: str = self._get(name, str)
        if len(value) > longest:
            raise WireError(
                f"{self._where}.{name} has {len(value)} characters, more than {longest}"
            )
        return value

    def choice(self, name: str, *allowed: str) -> str:
        value = self.text(name)
        if value not in allowed:
            raise WireError(
                f"{self._where}.{name} = {value[:40]!r} is none of {', '.join(allowed)}"
            )
        return value

    def choice_or_none(self, name: str, *allowed: str) -> str | None:
        return self.choice(name, *allowed) if self._get(name, str, type(None)) is not None else None

    def raw(self, name: str) -> bytes:
        return cast(bytes, self._get(name, bytes))

    def fields(self, name: str) -> Fields:
        return Fields(self._get(name, dict), f"{self._where}.{name}")

    def each(self, name: str, longest: int) -> list[Fields]:
        values: list[Any] = self._get(name, list)
        if len(values) > longest:
            raise WireError(f"{self._where}.{name} has {len(values)} entries, more than {longest}")
        return [Fields(value, f"{self._where}.{name}[{i}]") for i, value in enumerate(values)]

    def list_of(self, name: str, kind: type, longest: int) -> list[Any]:
        values: list[Any] = self._get(name, list)
        if len(values) > longest or any(type(value) is not kind for value in values):
            raise WireError(
                f"{self._where}.{name} is not a list of at most {longest} {kind.__name__}"
            )
        return values

    def integers(self, name: str, longest: int, high: int = 2**63 - 1) -> list[int]:
        values: list[int] = self.list_of(name, int, longest)
        if any(not 0 <= value <= high for value in values):
            raise WireError(f"{self._where}.{name} holds a number outside 0 to {high}")
        return values

    def digest(self, name: str) -> str:
        value = self.text(name, longest=64)
        if not SHA256.fullmatch(value):
            raise WireError(f"{self._where}.{name} is not a sha256 in hex")
        return value

    def json(self, name: str) -> Json:
        if name not in self._values:
            raise WireError(f"{self._where}.{name} is missing")
        return check_json(self._values[name], f"{self._where}.{name}")

    def array(self, name: str, dtype: str, longest: int = MAX_TOKENS) -> npt.NDArray[Any]:
        """A 1-D array of exactly ``dtype`` (numpy name), read-only view on the body."""
        packed = self.fields(name)
        found = packed.text("dtype", longest=8)
        data = packed.raw("data")
        wanted = np.dtype(dtype).newbyteorder("<")
        if (
            found != wanted.str
            or len(data) % wanted.itemsize
            or len(data) // wanted.itemsize > longest
        ):
            raise WireError(
                f"{self._where}.{name} is not a {wanted.str} array of at most {longest}"
            )
        return np.frombuffer(data, dtype=wanted).astype(np.dtype(dtype), copy=False)


def check_json(value: object, where: str, depth: int = 16) -> Json:
    """Return ``value`` if it is made of JSON types alone, finite and not nested deeper than ``depth``."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if depth > 0 and isinstance(value, list):
        return [check_json(item, where, depth - 1) for item in value]
    if depth > 0 and isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: check_json(item, where, depth - 1) for key, item in value.items()}
    raise WireError(f"{where} holds a {type(value).__name__} that JSON cannot carry")


def pack_array(array: npt.NDArray[Any], dtype: str) -> dict[str, Any]:
    """The wire form of a 1-D array."""
    little = np.ascontiguousarray(array, dtype=np.dtype(dtype).newbyteorder("<"))
    return {"dtype": little.dtype.str, "data": little.tobytes()}


# ---- sampling, task -------------------------------------------------------------------------------------------


_SAMPLING_FIELDS: Final = frozenset(one.name for one in dataclasses.fields(Sampling))


def pack_sampling(sampling: Sampling) -> dict[str, Any]:
    """The wire form of sampling parameters."""
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
    }


def read_sampling(fields: Fields) -> Sampling:
    """Sampling parameters from their wire form, or WireError.

    Fields that are not known are refused here: whoever passes a top_p over samples from another distribution.
    """
    unknown = set(fields.names) - _SAMPLING_FIELDS
    if unknown:
        raise WireError(f"sampling.{min(map(str, unknown))} is not known here")
    temperature = fields.number("temperature")
    if not 0 <= temperature <= 100:
        raise WireError(f"temperature {temperature} is outside 0 to 100")
    return Sampling(
        max_new_tokens=fields.integer("max_new_tokens", low=1, high=MAX_TOKENS),
        temperature=temperature,
        stop=tuple(fields.list_of("stop", str, 64)),
        stop_token_ids=tuple(fields.integers("stop_token_ids", 256, high=2**31 - 1)),
    )


def encode_task(task: Task) -> bytes:
    """``task`` as a message body, or WireError where its row holds what JSON cannot carry (NaN, a date)."""
    payload: dict[str, Any] = {
        "run": task.run,
        "task": str(task.task_id),
        "kind": task.kind,
        "prompt_ids": pack_array(np.asarray(task.prompt_ids), "int32"),
        "prompt": check_json(task.prompt, "task.prompt"),
        "row": check_json(task.row, "task.row"),
        "sampling": pack_sampling(task.sampling),
        "seeds": list(task.seeds),
        "min_version": task.min_version,
        "pinned": str(task.pinned) if task.pinned else None,
    }
    return pack_body("task", payload)


def decode_task(body: bytes) -> Task:
    """The task in a message body, or WireError."""
    fields = unpack_body(body, "task", MAX_MESSAGE_BYTES)
    seeds = fields.integers("seeds", MAX_GROUP_SIZE)
    if not seeds:
        raise WireError("a task without seeds asks for no rollouts")
    return Task(
        run=fields.text("run", longest=64),
        task_id=TaskId.parse(fields.text("task", longest=32)),
        kind=cast(Kind, fields.choice("kind", "train", "eval")),
        prompt_ids=tuple(_token_ids(fields, "prompt_ids").tolist()),
        prompt=_prompt(fields.json("prompt")),
        row=_row(fields.json("row")),
        sampling=read_sampling(fields.fields("sampling")),
        seeds=tuple(seeds),
        min_version=fields.integer("min_version"),
        pinned=PolicyVersion.parse(fields.text("pinned", 32)) if fields.has("pinned") else None,
    )


def _token_ids(fields: Fields, name: str) -> Int32Array:
    ids = fields.array(name, "int32")
    if ids.size and int(ids.min()) < 0:
        raise WireError(f"{name} holds a negative token id")
    return ids


def _prompt(value: Json) -> Prompt:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        return cast(Prompt, value)
    raise WireError("task.prompt is neither text nor a list of messages")


def _row(value: Json) -> Row:
    if not isinstance(value, dict):
        raise WireError("row is not a map")
    return value


# ---- group ----------------------------------------------------------------------------------------------------


def _pack_rollout(rollout: Rollout) -> dict[str, Any]:
    return {
        "token_ids": pack_array(rollout.token_ids, "int32"),
        "logprobs": pack_array(rollout.logprobs, "float32"),
        "loss_mask": pack_array(rollout.loss_mask, "uint8"),
        "versions": _pack_version_runs(rollout.versions),
        "reward": rollout.reward,
        "reward_parts": dict(rollout.reward_parts),
        "finish": rollout.finish,
    }


def _pack_version_runs(versions: tuple[VersionRun, ...]) -> list[dict[str, int]]:
    return [
        {"epoch": run.version.epoch, "version": run.version.number, "tokens": run.tokens}
        for run in versions
    ]


def _read_tokens(fields: Fields) -> tuple[Int32Array, Float32Array, tuple[VersionRun, ...]]:
    """Token ids, behaviour logprobs and version runs of a rollout, as many of each."""
    token_ids = _token_ids(fields, "token_ids")
    logprobs = fields.array("logprobs", "float32")
    versions = tuple(_read_version_run(run) for run in fields.each("versions", longest=4096))
    if not len(token_ids) == len(logprobs) == sum(run.tokens for run in versions):
        raise WireError("token_ids, logprobs and versions of a rollout differ in length")
    if not np.isfinite(logprobs).all() or float(logprobs.max(initial=0.0)) > 1e-3:
        raise WireError("logprobs of a rollout are not finite numbers up to 0")
    return token_ids, logprobs, versions


def _read_rollout(fields: Fields) -> Rollout:
    token_ids, logprobs, versions = _read_tokens(fields)
    mask = fields.array("loss_mask", "uint8")
    if not len(token_ids) or len(mask) != len(token_ids):
        raise WireError("loss_mask of a rollout is not as long as its tokens, or it has none")
    if int(mask.max()) > 1:
        raise WireError("loss_mask of a rollout holds more than 0 and 1")
    parts = fields.fields("reward_parts")
    return Rollout(
        token_ids=token_ids,
        logprobs=logprobs,
        loss_mask=mask.astype(np.bool_),
        versions=versions,
        reward=fields.number_or_none("reward"),
        reward_parts={name: parts.number_or_none(name) for name in parts.names},
        finish=cast(Finish, fields.choice("finish", "stop", "length")),
    )


def _read_version_run(fields: Fields) -> VersionRun:
    version = PolicyVersion(epoch=fields.integer("epoch", low=1), number=fields.integer("version"))
    return VersionRun(version, fields.integer("tokens", low=1, high=MAX_TOKENS))


def encode_group(group: Group) -> bytes:
    """``group`` as a body; over MAX_MESSAGE_BYTES it has to travel as a GroupRef."""
    return pack_body(
        "group",
        {
            "run": group.run,
            "task": str(group.task_id),
            "kind": group.kind,
            "worker": group.worker,
            "engine": group.engine,
            "engine_version": group.engine_version,
            "manifest_sha256": group.manifest_sha256,
            "prompt_ids": pack_array(group.prompt_ids, "int32"),
            "row": group.row,
            "sampling": pack_sampling(group.sampling),
            "rollouts": [_pack_rollout(rollout) for rollout in group.rollouts],
            "started_at": group.started_at,
            "generated_at": group.generated_at,
            "scored_at": group.scored_at,
        },
    )


def decode_group(body: bytes) -> Group:
    """The group in a body (from a message or a ``groups/`` object), or WireError."""
    fields = unpack_body(body, "group")
    rollouts = tuple(_read_rollout(rollout) for rollout in fields.each("rollouts", MAX_GROUP_SIZE))
    if not rollouts:
        raise WireError("a group without rollouts")
    return Group(
        run=fields.text("run", longest=64),
        task_id=TaskId.parse(fields.text("task", longest=32)),
        kind=cast(Kind, fields.choice("kind", "train", "eval")),
        worker=fields.text("worker", longest=256),
        engine=fields.text("engine", longest=64),
        engine_version=fields.text("engine_version", longest=64),
        manifest_sha256=fields.text("manifest_sha256", longest=64),
        prompt_ids=_token_ids(fields, "prompt_ids"),
        row=_row(fields.json("row")),
        sampling=read_sampling(fields.fields("sampling")),
        rollouts=rollouts,
        started_at=fields.number("started_at"),
        generated_at=fields.number("generated_at"),
        scored_at=fields.number("scored_at"),
    )


def encode_group_ref(ref: GroupRef) -> bytes:
    """``ref`` as a message body."""
    return pack_body(
        "group_ref",
        {
            "run": ref.run,
            "task": str(ref.task_id),
            "key": ref.key,
            "sha256": ref.sha256,
            "size": ref.size,
        },
    )


def decode_group_ref(body: bytes) -> GroupRef:
    """The reference in a message body, or WireError."""
    fields = unpack_body(body, "group_ref", MAX_MESSAGE_BYTES)
    return GroupRef(
        run=fields.text("run", longest=64),
        task_id=TaskId.parse(fields.text("task", longest=32)),
        key=fields.text("key", longest=512),
        sha256=fields.digest("sha256"),
        size=fields.integer("size", low=1, high=MAX_OBJECT_BYTES),
    )


# ---- partials -------------------------------------------------------------------------------------------------


def encode_partial(partial: Partial) -> bytes:
    """``partial`` as the body of a ``partials/`` object."""
    payload: dict[str, Any] = {
        "run": partial.run,
        "task": str(partial.task_id),
        "worker": partial.worker,
        "prompt_ids": pack_array(partial.prompt_ids, "int32"),
        "sampling": pack_sampling(partial.sampling),
        "rollouts": [_pack_partial_rollout(rollout) for rollout in partial.rollouts],
        "saved_at": partial.saved_at,
    }
    return pack_body("partial", payload)


def _pack_partial_rollout(rollout: PartialRollout) -> dict[str, Any]:
    return {
        "seed": rollout.seed,
        "token_ids": pack_array(rollout.token_ids, "int32"),
        "logprobs": pack_array(rollout.logprobs, "float32"),
        "versions": _pack_version_runs(rollout.versions),
        "finish": rollout.finish,
    }


def decode_partial(body: bytes) -> Partial:
    """The partial in the body of a ``partials/`` object, or WireError."""
    fields = unpack_body(body, "partial")
    sampling = read_sampling(fields.fields("sampling"))
    rollouts = fields.each("rollouts", MAX_GROUP_SIZE)
    if not rollouts:
        raise WireError("a partial without rollouts")
    return Partial(
        run=fields.text("run", longest=64),
        task_id=TaskId.parse(fields.text("task", longest=32)),
        worker=fields.text("worker", longest=256),
        prompt_ids=_token_ids(fields, "prompt_ids"),
        sampling=sampling,
        rollouts=tuple(_read_partial_rollout(rollout, sampling) for rollout in rollouts),
        saved_at=fields.number("saved_at"),
    )


def _read_partial_rollout(fields: Fields, sampling: Sampling) -> PartialRollout:
    token_ids, logprobs, versions = _read_tokens(fields)
    finish = fields.choice_or_none("finish", "stop", "length")
    if len(token_ids) > sampling.max_new_tokens or (finish and not len(token_ids)):
        raise WireError(f"a rollout with {len(token_ids)} tokens cannot be as its partial says")
    return PartialRollout(
        seed=fields.integer("seed"),
        token_ids=token_ids,
        logprobs=logprobs,
        versions=versions,
        finish=cast("Finish | None", finish),
    )


# ---- reports --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What a role says of itself on the telemetry exchange: free scalar values under a source and a time."""

    source: str
    role: Literal["worker", "learner"]
    at: float
    values: Mapping[str, Json] = field(default_factory=dict)


def encode_report(report: Report) -> bytes:
    """``report`` as a message body. A number that is not finite becomes None: it must not hide the others."""
    values = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in report.values.items()
    }
    payload = {"source": report.source, "role": report.role, "at": report.at, "values": values}
    return pack_body("report", payload)


def decode_report(body: bytes) -> Report:
    """The report in a message body, or WireError."""
    fields = unpack_body(body, "report", max_bytes=1 << 20)
    return Report(
        source=fields.text("source", longest=256),
        role=cast(Literal["worker", "learner"], fields.choice("role", "worker", "learner")),
        at=fields.number("at"),
        values=_row(fields.json("values")),
    )
