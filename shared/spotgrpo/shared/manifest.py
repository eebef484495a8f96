"""The JSON objects of a run: ``run.json``, ``latest.json`` and the manifest of a version.

Unknown fields are passed over, so that a newer learner's objects stay readable; a schema outside N-1 … N is not.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spotgrpo.shared.errors import WireError
from spotgrpo.shared.ids import PolicyVersion

SCHEMA: Final = 1
OLDEST_READABLE: Final = 1
MAX_JSON_BYTES: Final = 16 << 20

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Schema = Annotated[int, Field(ge=OLDEST_READABLE, le=SCHEMA)]
Count = Annotated[int, Field(ge=0)]


def sha256_hex(data: bytes) -> str:
    """SHA-256 of ``data`` in hex."""
    return hashlib.sha256(data).hexdigest()


class Document(BaseModel):
    """A JSON object of the bucket, immutable once read."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    def to_bytes(self) -> bytes:
        """UTF-8 JSON; equal values give equal bytes."""
        return self.model_dump_json(indent=1).encode()

    @classmethod
    def from_bytes(cls, body: bytes) -> Self:
        """The validated document, or WireError."""
        if len(body) > MAX_JSON_BYTES:
            raise WireError(
                f"{cls.__name__} of {len(body)} bytes is over the limit of {MAX_JSON_BYTES}"
            )
        try:
            return cls.model_validate_json(body)
        except ValidationError as exc:
            first = exc.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"]) or "body"
            raise WireError(f"{cls.__name__}: {place}: {first['msg']}") from exc


class SchemaDocument(Document):
    """A whole object of the bucket: it says which schema it is of."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    schema_: Schema = Field(SCHEMA, alias="schema", serialization_alias="schema")


class FileEntry(Document):
    """A file of a version's folder."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$")]
    size: Count
    sha256: Sha256


class DeltaEntry(FileEntry):
    """A file of a version's folder that turns its parent's weights file into its own (``shared.delta``).

    It saves a download where the parent is at hand, and is of use for nothing else: the weights are in ``files``.
    """

    parent: str
    parent_sha256: Sha256
    """Of the parent's whole weights file."""


class Probe(Document):
    """Tokens whose logprobs tell this version from the base.

    ``version_logprobs[i]`` and ``base_logprobs[i]`` are the learner's logprobs, at temperature 1, of
    ``token_ids[i + 1]`` given what stands before it; ``dtype`` is what the learner computed them in.
    """

    token_ids: Annotated[list[Count], Field(min_length=2, max_length=4096)]
    version_logprobs: list[float]
    base_logprobs: list[float]
    dtype: str = "float32"


class Manifest(SchemaDocument):
    """What a policy version is made of. Written last: without it the version does not exist."""

    run: str
    version: Count
    epoch: Annotated[int, Field(ge=1)]
    parent: str | None = None
    files: Annotated[list[FileEntry], Field(max_length=64)]
    modules: Count
    """Modules that carry the adapter; an engine that puts it on another number serves something else."""
    base_sha256: Sha256
    probe: Probe | None = None
    created_at: float = 0.0
    delta: DeltaEntry | None = None

    @property
    def policy(self) -> PolicyVersion:
        return PolicyVersion(epoch=self.epoch, number=self.version)


class NamedVersion(Document):
    """What names a policy version."""

    version: Count
    epoch: Annotated[int, Field(ge=1)]

    @property
    def policy(self) -> PolicyVersion:
        return PolicyVersion(epoch=self.epoch, number=self.version)


class Serving(NamedVersion):
    """The newest version that workers should adopt."""

    manifest: str
    sha256: Sha256


class Durable(NamedVersion):
    """The newest version from which a learner can resume, and the ledger that goes with it."""

    manifest: str
    manifest_sha256: Sha256
    state: str
    state_sha256: Sha256
    ledger: str
    ledger_sha256: Sha256


class BestVersion(Serving):
    """The version with the best mean reward on held-out prompts; of equal ones the first."""

    reward: float


class Evaluated(Document):
    """What evaluations on held-out prompts have found, up to the last that ended.

    ``asked_sha256`` names what was asked: rewards of other prompts or another sampling do not compare. ``since_best``
    counts evaluations after that of ``best``; ``reward`` is the last one's, None where it decided nothing.
    """

    asked_sha256: Sha256
    last: NamedVersion
    reward: float | None = None
    best: BestVersion | None = None
    since_best: Count = 0


class Latest(SchemaDocument):
    """The one mutable object of a run; moved only by compare-and-swap.

    ``epoch`` is the active learner's; ``serving`` and ``durable`` may still name versions of an epoch before it.
    ``writer`` and ``nonce`` tell one learner's bytes from any other's. ``finished`` tells workers to leave.
    ``step_s`` are seconds of a step, ``group_tokens`` tokens of a group's longest completion and ``lead_s`` seconds
    from when a step's groups were chosen until its version was served, medians of late: a worker tells from them
    whether it could finish a task in time.
    ``takeovers`` says, by epoch, from which version its learner resumed: newer ones of earlier epochs were given up.
    ``ended`` names the limit that finished the run, as key and value. ``wall_s`` are the seconds that learners have led
    the run, all together, up to this move.
    """

    epoch: Annotated[int, Field(ge=1)]
    writer: str
    nonce: str
    serving: Serving
    durable: Durable
    step_s: float = 0.0
    group_tokens: float = 0.0
    lead_s: float = 0.0
    finished: bool = False
    ended: str = ""
    takeovers: dict[int, int] = {}
    wall_s: float = 0.0
    evaluated: Evaluated | None = None


class ModelIdentity(Document):
    """Which base model and tokenizer a run is about. Digests are over weights and over vocabulary with its rules."""

    name: str
    revision: str | None = None
    base_sha256: Sha256
    tokenizer_sha256: Sha256


class LoraIdentity(Document):
    """Shape of the adapter."""

    rank: int
    alpha: float
    target_modules: list[str]
    use_rslora: bool = False


class DataIdentity(Document):
    """The data set and the order in which its prompts come."""

    source: str
    sha256: Sha256
    rows: int
    shuffle_seed: int | None


class RewardIdentity(Document):
    """A reward function as the learner resolved it; workers must resolve the same code."""

    function: str
    weight: float
    sha256: Sha256


class SamplingDocument(Document):
    """Sampling parameters of the run, shown to people; tasks carry their own."""

    group_size: int
    max_new_tokens: int
    temperature: float
    stop: list[str] = []
    stop_token_ids: list[int] = []


class RunDocument(SchemaDocument):
    """``run.json``: what a run is, and what a worker needs to take part. Written once."""

    run: str
    model: ModelIdentity
    lora: LoraIdentity
    data: DataIdentity
    rewards: list[RewardIdentity]
    sampling: SamplingDocument
    max_staleness: int
    dtype: str
    max_context: int
    wire_schemas: tuple[int, int]
    created_at: float
    evaluates: bool = False
    """Whether workers keep room for the version that is evaluated."""
