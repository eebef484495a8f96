"""One configuration for all roles: TOML, then environment (``SPOTGRPO_BROKER__URL``), then ``--set a.b=c``.

Importable without torch. Every field has a default where a sensible one exists, and one sentence that the option
table of the README is made from. Unknown keys are refused with the nearest right one named (``load_config``).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from spotgrpo.shared.eval_config import EvalConfig
from spotgrpo.shared.ids import RUN_ID
from spotgrpo.shared.loss_config import LossConfig
from spotgrpo.shared.section import STRICT, NonNegative, Positive, Seconds

MAX_PORT = 65535
HTTP_ADDRESS = re.compile(
    r"http://([a-zA-Z0-9_-]{1,63}(\.[a-zA-Z0-9_-]{1,63})*|\[[0-9a-fA-F:.]+\])(:(?P<port>\d{1,5}))?(/[\w./-]*)?",
    re.ASCII,
)
SERVER_ADDRESS = re.compile(r"https?://[^\s/?#@]+(/[^\s?#@]*)?")


class Section(BaseModel):
    """A table of the TOML."""

    model_config = STRICT


class RunConfig(Section):
    """What this run is called and where its local files go."""

    id: Annotated[
        str, Field(description="Name of the run; all its queues and bucket objects carry it.")
    ]
    output_dir: Annotated[
        Path, Field(description="Folder for metrics.jsonl, summary.json and logs.")
    ] = Path("runs")
    seed: Annotated[
        int,
        Field(ge=0, lt=2**31, description="Seeds prompt order, LoRA initialisation and rollouts."),
    ] = 0

    @field_validator("id")
    @classmethod
    def _fits_names(cls, value: str) -> str:
        if not RUN_ID.fullmatch(value):
            raise ValueError(
                "use 1 to 64 letters, digits, '-' or '_', starting with a letter or digit"
            )
        return value


class BrokerConfig(Section):
    """RabbitMQ."""

    url: Annotated[
        SecretStr,
        Field(description="amqp:// or amqps:// URL with user, password and virtual host."),
    ]
    ca_file: Annotated[
        Path | None, Field(description="CA certificate for amqps:// where the system's do not do.")
    ] = None
    heartbeat_s: Annotated[
        int, Field(ge=1, le=600, description="A dead link is noticed after two to three of these.")
    ] = 30
    start_deadline_s: Annotated[
        Seconds, Field(description="How long a server may stay silent at start (exit 3).")
    ] = 60.0
    delivery_limit: Annotated[
        Positive, Field(description="Deliveries of a message before it counts as poison.")
    ] = 100
    max_queued_groups: Annotated[
        Positive, Field(description="Groups the rollouts queue holds before workers wait.")
    ] = 10_000


class BucketConfig(Section):
    """S3-compatible storage. Credentials come through boto3's usual chain unless they are given here."""

    url: Annotated[
        str, Field(description="s3://bucket/prefix", pattern=r"^s3://[^/\s]+(/[^\s]*)?$")
    ]
    endpoint_url: Annotated[
        str | None, Field(description="http(s) address of the server; none means AWS.")
    ] = None
    region: Annotated[str, Field(description="Region of the bucket.")] = "us-east-1"
    access_key_id: Annotated[
        str | None, Field(description="Access key; none means boto3's chain.")
    ] = None
    secret_access_key: Annotated[
        SecretStr | None, Field(description="Secret key; none means boto3's chain.")
    ] = None
    path_style: Annotated[
        bool, Field(description="Bucket in the path instead of the host name.")
    ] = True
    checksums: Annotated[
        Literal["when_supported", "when_required"],
        Field(
            description="'when_required' for older servers that refuse boto3's default checksums."
        ),
    ] = "when_supported"
    timeout_s: Annotated[Seconds, Field(description="Connect and read timeout of one request.")] = (
        20.0
    )
    start_deadline_s: Annotated[
        Seconds, Field(description="How long a server may stay silent at start (exit 3).")
    ] = 60.0


class ModelConfig(Section):
    """The base model."""

    name: Annotated[
        str, Field(description="Hub name or folder of a transformers causal language model.")
    ]
    revision: Annotated[str | None, Field(description="Hub revision.")] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        Field(description="Dtype of the base model, in trainer and engines."),
    ] = "float32"
    trust_remote_code: Annotated[bool, Field(description="Run code that comes with the model.")] = (
        False
    )
    attn_implementation: Annotated[
        str | None, Field(description="transformers' attn_implementation.")
    ] = None
    max_context: Annotated[
        Positive | None, Field(description="Longest prompt plus completion; none: the model's.")
    ] = None


class LoraConfig(Section):
    """The adapter that is trained (peft)."""

    rank: Annotated[Positive, Field(description="Rank.")] = 16
    alpha: Annotated[
        float, Field(gt=0, description="Scale: alpha / rank (alpha / sqrt(rank) with rslora).")
    ] = 32.0
    target_modules: Annotated[
        list[str] | Literal["all-linear"],
        Field(description="Module names that get an adapter, or all-linear."),
    ] = "all-linear"
    use_rslora: Annotated[bool, Field(description="Rank-stabilised scale.")] = False
    dropout: Annotated[
        float,
        Field(ge=0, le=0, description="Must be 0: dropout makes the ratio differ from 1 at lag 0."),
    ] = 0.0


class DataConfig(Section):
    """Prompts: a data set of ``datasets``, or a procedural task of reasoning-gym."""

    path: Annotated[
        str | None, Field(description="Hub name, or a .jsonl, .json, .parquet or .csv file.")
    ] = None
    name: Annotated[str | None, Field(description="Configuration name of a hub data set.")] = None
    split: Annotated[str, Field(description="Split of the data set.")] = "train"
    revision: Annotated[str | None, Field(description="Hub revision of the data set.")] = None
    reasoning_gym: Annotated[
        str | None, Field(description="Name of a reasoning-gym data set, instead of path.")
    ] = None
    reasoning_gym_options: Annotated[
        dict[str, Any], Field(description="Options of that data set (size, seed, …).")
    ] = {}
    prompt_column: Annotated[
        str, Field(description="Column with the prompt: text, or chat messages.")
    ] = "prompt"
    system_prompt: Annotated[
        str | None, Field(description="System message put before chat messages.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any], Field(description="Passed to the chat template.")
    ] = {}
    shuffle: Annotated[bool, Field(description="Shuffle every pass with run.seed.")] = True
    max_prompt_tokens: Annotated[
        Positive | None, Field(description="Longest prompt; none: what the context leaves.")
    ] = None
    overlong: Annotated[
        Literal["error", "drop"], Field(description="What to do with longer prompts.")
    ] = "error"

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if (self.path is None) == (self.reasoning_gym is None):
            raise ValueError("give exactly one of data.path and data.reasoning_gym")
        return self


class RewardConfig(Section):
    """A reward function with TRL's signature."""

    function: Annotated[
        str,
        Field(
            description="package.module:function, file.py:function, or reasoning_gym for the task's own scorer."
        ),
    ]
    weight: Annotated[float, Field(allow_inf_nan=False, description="Weight in the sum.")] = 1.0


class SamplingConfig(Section):
    """How groups are sampled."""

    group_size: Annotated[
        int,
        Field(
            ge=2,
            le=4096,
            description="Completions of a prompt; at least 2, or no advantage exists.",
        ),
    ] = 8
    max_new_tokens: Annotated[Positive, Field(description="Tokens of a completion at most.")] = 512
    temperature: Annotated[
        float, Field(gt=0, le=10, description="Sampling temperature; the loss uses the same.")
    ] = 1.0
    stop: Annotated[
        list[str], Field(max_length=64, description="Strings that end a completion; kept in it.")
    ] = []
    stop_token_ids: Annotated[
        list[int], Field(max_length=256, description="Token ids that end a completion.")
    ] = []


class TrainConfig(Section):
    """The optimizer step and its pacing."""

    max_steps: Annotated[Positive, Field(description="Policy versions to train.")] = 100
    max_wall_s: Annotated[
        Seconds | None,
        Field(
            description="End the run after so many seconds, all its learners' together; none: no limit."
        ),
    ] = None
    target_reward: Annotated[
        float | None,
        Field(
            allow_inf_nan=False,
            description="End at this mean reward of an evaluation (without [eval]: of 10 batches); none: never.",
        ),
    ] = None
    groups_per_step: Annotated[Positive, Field(description="Groups of one optimizer step.")] = 8
    max_staleness: Annotated[
        int, Field(ge=0, description="Oldest lag, in versions, that is still trained.")
    ] = 2
    max_attempts: Annotated[
        Positive, Field(description="Tries of a prompt whose groups come too late or die.")
    ] = 3
    refill_flat: Annotated[
        bool, Field(description="Ask for other groups in place of those without reward variance.")
    ] = False
    reissue_after_s: Annotated[
        Seconds,
        Field(description="Publish an outstanding task again after this long without a sign."),
    ] = 600.0
    learning_rate: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="Peak learning rate of AdamW.")
    ] = 1e-5
    lr_schedule: Annotated[
        Literal["constant", "linear", "cosine"], Field(description="After the warm-up.")
    ] = "constant"
    warmup_steps: Annotated[int, Field(ge=0, description="Steps of linear warm-up.")] = 0
    betas: Annotated[tuple[float, float], Field(description="AdamW's betas.")] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0, description="AdamW's epsilon.")] = 1e-8
    weight_decay: Annotated[NonNegative, Field(description="AdamW's decoupled weight decay.")] = 0.0
    max_grad_norm: Annotated[
        float, Field(gt=0, description="Gradients are clipped to this norm.")
    ] = 1.0
    token_budget: Annotated[Positive, Field(description="Tokens of one forward pass.")] = 4096
    gradient_checkpointing: Annotated[bool, Field(description="Trade compute for memory.")] = False
    autocast: Annotated[
        bool,
        Field(
            description="Compute in bfloat16 what a float32 model can (mixed precision); weights and logits stay."
        ),
    ] = False
    compile: Annotated[
        bool,
        Field(
            description="torch.compile each layer: minutes at the start, faster steps. Needs a C++ compiler on a CPU."
        ),
    ] = False
    quantize: Annotated[
        Literal["nf4"] | None,
        Field(
            description="Learner's base in 4 bits (QLoRA; a GPU and bitsandbytes); give engines the same."
        ),
    ] = None
    device: Annotated[str, Field(description="auto, cpu, cuda or cuda:N.")] = "auto"
    threads: Annotated[
        Positive | None, Field(description="CPU threads of the learner; none: torch's choice.")
    ] = None
    mismatch_alarm: Annotated[
        float | None,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="Warn of a worker whose logprobs at lag 0 are this far off (nats); none: by model.dtype.",
        ),
    ] = None
    quarantine: Annotated[
        bool, Field(description="Do not train groups of such a worker until they fit again.")
    ] = False
    keep_every: Annotated[
        Positive | None,
        Field(description="Keep every n-th version for good; none: only the newest."),
    ] = None
    durable_every: Annotated[
        Positive, Field(description="Versions between trainer states in the bucket.")
    ] = 1


class SyncConfig(Section):
    """How versions come to workers."""

    encoding: Annotated[
        Literal["full", "delta"],
        Field(
            description="delta: beside the whole file, what changed since the version before, for workers that have it."
        ),
    ] = "full"


class WorkerConfig(Section):
    """A generator worker."""

    engine: Annotated[
        Literal["auto", "vllm", "vllm-server", "transformers"],
        Field(description="auto: vllm where it imports, else transformers."),
    ] = "auto"
    max_inflight: Annotated[
        Positive,
        Field(description="Sequences in flight at most; a group over it still runs alone."),
    ] = 64
    admission: Annotated[
        bool,
        Field(
            description="Leave tasks that could not be done within train.max_staleness to faster workers. Experimental."
        ),
    ] = False
    poll_s: Annotated[
        Seconds, Field(description="Seconds between looks at latest.json, jittered.")
    ] = 1.0
    device: Annotated[
        str, Field(description="auto, cpu, cuda or cuda:N (transformers engine).")
    ] = "auto"
    threads: Annotated[
        Positive | None, Field(description="CPU threads of the engine; none: the library's choice.")
    ] = None
    cache_dir: Annotated[
        Path | None, Field(description="Folder for downloaded versions; none: a temporary one.")
    ] = None
    drain_s: Annotated[
        NonNegative,
        Field(description="Seconds that running groups get to finish when told to stop."),
    ] = 20.0
    segment_tokens: Annotated[
        Positive | None,
        Field(description="Tokens that one request of a rollout samples; none: all of them."),
    ] = None
    inflight: Annotated[
        Literal["finish", "switch"],
        Field(
            description="switch: a running rollout moves to the newest version between two segments."
        ),
    ] = "finish"
    partial_every_s: Annotated[
        Seconds | None,
        Field(description="Save running groups this often; none: only when told to stop."),
    ] = None
    notices: Annotated[
        Literal["auto", "none", "aws", "gcp", "azure"],
        Field(description="Cloud whose notice drains the worker; auto: the one it runs in."),
    ] = "auto"
    notice_url: Annotated[
        str | None,
        Field(description="http address of the metadata server; none: the cloud's own."),
    ] = None
    drain_on_rebalance: Annotated[
        bool, Field(description="AWS's rebalance recommendation drains too, ahead of any notice.")
    ] = True
    reward_timeout_s: Annotated[
        Seconds, Field(description="Longest that rewards of a group may take; then None.")
    ] = 300.0
    engine_stall_s: Annotated[
        Seconds,
        Field(description="An engine with work and no token for this long ends its worker."),
    ] = 300.0
    probe_every_s: Annotated[
        Seconds,
        Field(
            description="Prove this often that the engine still serves what it says; else exit 5."
        ),
    ] = 60.0
    report_s: Annotated[
        Seconds, Field(description="Seconds between reports on the telemetry exchange.")
    ] = 2.0
    vllm: Annotated[
        dict[str, Any],
        Field(description="Further vLLM engine arguments (tensor_parallel_size, …)."),
    ] = {}
    servers: Annotated[
        list[str], Field(description="Addresses of running vLLM servers (vllm-server engine).")
    ] = []
    server_api_key: Annotated[
        SecretStr | None, Field(description="The servers' --api-key; none: they ask for none.")
    ] = None
    server_adapter_dir: Annotated[
        str | None,
        Field(description="worker.cache_dir as the servers see it; none: by the same path."),
    ] = None
    server_timeout_s: Annotated[
        Seconds, Field(description="A server without an answer or a token for this long is lost.")
    ] = 120.0

    @field_validator("inflight")
    @classmethod
    def _has_borders_to_switch_at(cls, value: str, info: ValidationInfo) -> str:
        if value == "switch" and info.data.get("segment_tokens", 1) is None:
            raise ValueError("set worker.segment_tokens (512, say), or use 'finish'")
        return value

    @field_validator("notice_url")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        found = HTTP_ADDRESS.fullmatch(value) if value is not None else None
        if value is not None and (found is None or int(found["port"] or 80) > MAX_PORT):
            raise ValueError("should be http://host or http://host:port")
        return value

    @field_validator("servers")
    @classmethod
    def _are_addresses(cls, value: list[str]) -> list[str]:
        """As given on the command line of an OpenAI client, too: with ``/v1``, which is taken off."""
        found = [url.rstrip("/").removesuffix("/v1") for url in value]
        if not all(SERVER_ADDRESS.fullmatch(url) for url in found):
            raise ValueError("should be http://host:port or https://host:port, without @, ? and #")
        if len(set(found)) < len(found):
            raise ValueError("names a server twice")
        return found

    @model_validator(mode="after")
    def _has_servers(self) -> WorkerConfig:
        if self.engine == "vllm-server" and not self.servers:
            raise ValueError("engine vllm-server needs worker.servers, at least one address")
        if self.server_adapter_dir is not None and self.cache_dir is None:
            raise ValueError("worker.server_adapter_dir needs worker.cache_dir: the same folder")
        return self


class LogConfig(Section):
    """What is said."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Field(description="Least level that is shown."),
    ] = "info"
    stall_warn_s: Annotated[
        Seconds, Field(description="Say what is waited for after this long.")
    ] = 30.0


class WorkerView(Section):
    """The part of the configuration that a worker needs: it starts from broker, bucket and run id alone."""

    run: RunConfig
    broker: BrokerConfig
    bucket: BucketConfig
    model: ModelConfig | None = None
    lora: Annotated[
        LoraConfig | None, Field(description="Held against run.json, which decides.")
    ] = None
    rewards: Annotated[
        list[RewardConfig], Field(description="Overrides run.json where files lie elsewhere.")
    ] = []
    worker: WorkerConfig = WorkerConfig()
    log: LogConfig = LogConfig()


class Config(Section):
    """The whole TOML."""

    run: RunConfig
    broker: BrokerConfig
    bucket: BucketConfig
    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    data: DataConfig
    rewards: Annotated[list[RewardConfig], Field(min_length=1)]
    sampling: SamplingConfig = SamplingConfig()
    train: TrainConfig = TrainConfig()
    loss: LossConfig = LossConfig()
    eval: EvalConfig = EvalConfig()
    sync: SyncConfig = SyncConfig()
    worker: WorkerConfig = WorkerConfig()
    log: LogConfig = LogConfig()

    @property
    def held_out(self) -> DataConfig | None:
        """Where held-out rows come from: as ``data``, but for what ``eval`` names. None without evaluations."""
        return None if self.eval.every is None else _held_out(self.data, self.eval)

    @field_validator("train")
    @classmethod
    def _fits_the_model(cls, value: TrainConfig, info: ValidationInfo) -> TrainConfig:
        model = info.data.get("model")
        if value.autocast and model is not None and model.dtype != "float32":
            raise ValueError(
                f"train.autocast is for a model in float32, and model.dtype is {model.dtype}: leave one of them out"
            )
        return value

    @field_validator("eval")
    @classmethod
    def _has_rows_of_its_own(cls, value: EvalConfig, info: ValidationInfo) -> EvalConfig:
        data = info.data.get("data")
        if value.every is None or data is None:
            return value
        if not _is_held_out(data, _held_out(data, value)):
            raise ValueError(
                "held-out rows must not be those of training: give eval.path or eval.split, "
                "for reasoning-gym another seed in eval.reasoning_gym_options"
            )
        return value


def _held_out(data: DataConfig, given: EvalConfig) -> DataConfig:
    own = {name: getattr(given, name) for name in ("name", "split", "revision")}
    named = {name: value for name, value in own.items() if value is not None}
    if given.path is not None:
        others = data.model_dump(exclude={*own, "path", "reasoning_gym", "reasoning_gym_options"})
        return DataConfig.model_validate({**others, **named, "path": given.path})
    options = {**data.reasoning_gym_options, **given.reasoning_gym_options}
    return data.model_copy(update={**named, "reasoning_gym_options": options})


def _is_held_out(data: DataConfig, held_out: DataConfig) -> bool:
    """Whether the rows are others, as far as settings can say."""
    if held_out.reasoning_gym is not None:
        seeds = [one.reasoning_gym_options.get("seed") for one in (data, held_out)]
        return seeds[0] != seeds[1]
    where = ("path", "name", "split", "revision")
    return any(getattr(data, name) != getattr(held_out, name) for name in where)
