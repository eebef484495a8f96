"""The world of a chaos run: real broker and bucket, proxies in front of both, and role processes kept at their number.

Every role reaches the servers through a proxy of its kind (learners, workers); the world itself reads the bucket
behind it, so that what it sees is what is stored. Whatever dies as it was meant to is replaced; whatever ends in
another way fails the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import psutil
from pydantic import SecretStr

from spotgrpo.shared.config import BucketConfig, Config
from spotgrpo.shared.ids import Keys, Queues
from spotgrpo.shared.loading import load_config
from spotgrpo.shared.s3 import S3Store
from spotgrpo.shared.services import PrivateRabbitMQ, PrivateS3
from tests.chaos.books import Books
from tests.chaos.nursery import Nursery
from tests.tools.faulty_s3 import FaultyS3
from tests.tools.proxy import Proxy
from tests.tools.tiny_model import build_tiny_model, build_tokenizer

Role = Literal["learner", "worker"]
ROLES: tuple[Role, Role] = ("learner", "worker")
HEARTBEAT_S = 2
DEAD_AFTER_S = 3 * HEARTBEAT_S + 1.0
"""A link is dead for the broker after two to three heartbeats."""
FIRING_S = 40.0
NEVER_S = 86_400.0
RECOVERY_S = 90.0
POLL_S = 0.02
FENCED = 4
LOST_RUN = "has lost the run"
DISK_BYTES = 64 << 20
MORE_FILES = 8
MORE_BYTES = 50 << 20
FAST_TOKEN_S = 0.01

TOML = """
[run]
id = "{run}"
output_dir = "runs"
[broker]
url = "amqp://none"
heartbeat_s = {heartbeat_s}
delivery_limit = 100
[bucket]
url = "s3://{bucket}/chaos"
endpoint_url = "http://127.0.0.1:1"
access_key_id = "{key}"
secret_access_key = "{secret}"
timeout_s = 5
[model]
name = "{base}/model"
[lora]
rank = 4
alpha = 8
target_modules = ["q_proj", "v_proj"]
[data]
path = "prompts.jsonl"
[[rewards]]
function = "rewards.py:letters"
[sampling]
group_size = 2
max_new_tokens = 8
[train]
max_steps = 1000000
groups_per_step = 4
max_staleness = 2
reissue_after_s = {reissue_after_s}
learning_rate = 1e-3
threads = 1
[worker]
engine = "transformers"
threads = 1
max_inflight = 8
poll_s = 0.2
drain_s = 0.0
report_s = 1.0
engine_stall_s = 4
cache_dir = "{base}/cache"
notices = "none"
[log]
stall_warn_s = 5
"""
EVALUATES = ("eval.every=3", "eval.path=heldout.jsonl")
"""Makes a run one that evaluates."""
REWARDS = """
def letters(completions, **_):
    # Every eighth group is flat, and now and then the function fails.
    total = sum(map(ord, "".join(completions)))
    if total % 16 == 5:
        raise ValueError("a reward function that fails")
    return [0.0 if total % 8 == 0 else sum(map(ord, text)) / 100 for text in completions]
"""


def reward_of(token_ids: Sequence[int]) -> float | None:
    """What that function gives for a group of one completion; None where it fails."""
    text = build_tokenizer().decode([*token_ids], skip_special_tokens=True)
    total = sum(map(ord, text))
    if total % 16 == 5:
        return None
    return 0.0 if total % 8 == 0 else total / 100


class Failure(AssertionError):
    """A promise was broken, or a fault did not fire."""


class SmallDisk:
    """A file system of a few MiB that can be filled up. Without the right to mount one it is a plain folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
        done = subprocess.run(command, capture_output=True, check=False)
        self.is_mounted = not done.returncode

    def fill(self) -> None:
        """Leave no byte free, this time or again. Never on the machine's own disk."""
        assert self.is_mounted
        with contextlib.suppress(OSError), (self._folder / "filler").open("ab", 0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        (self._folder / "filler").unlink()

    def close(self) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self._folder)], check=True)  # noqa: S607


@dataclass
class Member:
    """A role process. ``fate`` holds the exit codes that are no surprise: none, unless something is done to it."""

    role: Role
    pid: int
    log: Path
    is_target: bool
    fate: set[int] = field(default_factory=set)

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.pid)

    def hears_sigterm(self) -> bool:
        """Whether it has a handler for SIGTERM, or has ended."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return True
        facts = dict(line.split(":", 1) for line in status.splitlines())
        has_handler = int(facts["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1
        return bool(has_handler) or facts["State"].strip().startswith("Z")

    def said(self, text: str) -> int:
        """How often its log has ``text``."""
        return self.log.read_text(errors="replace").count(text) if self.log.exists() else 0


@dataclass
class World:
    """Servers, proxies and roles of one run. Use it as a context manager, from the main thread.

    Args:
        workers: how many to keep; one of them is never the target of a fault.
        standby: keep a second learner waiting.
        reissue_after_s: the default is longer than any run here: whatever is lost is lost for good then, and the run
            hangs. Only a broker's lost disk needs tasks to be published again, and has a world of its own.
        patience_s: how long a recovery may take.
        mutant: name of a rule to break in every role.
    """

    folder: Path
    workers: int = 3
    standby: bool = True
    token_s: float = FAST_TOKEN_S
    reissue_after_s: float = NEVER_S
    patience_s: float = RECOVERY_S
    mutant: str = ""
    run: str = "chaos"
    sets: tuple[str, ...] = ()
    members: list[Member] = field(default_factory=list)
    started: int = 0
    sizes: list[tuple[int, int]] = field(default_factory=list)
    steady_pids: set[int] = field(default_factory=set)
    _fault: int = 0

    def __enter__(self) -> Self:
        self._stack = contextlib.ExitStack()
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open(self) -> None:
        self.base = self.folder
        self.base.mkdir(parents=True, exist_ok=True)
        self.rabbitmq = PrivateRabbitMQ(self.base / "rabbitmq")
        self.s3 = PrivateS3(self.base / "s3")
        for server in (self.rabbitmq, self.s3):
            server.start()
            self._stack.callback(server.stop)
        self.amqp = {r: self._stack.enter_context(Proxy(self.rabbitmq.port)) for r in ROLES}
        self.buckets = {r: self._stack.enter_context(self._faulty_s3()) for r in ROLES}
        self.disk = SmallDisk(self.base / "cache")
        self._stack.callback(self.disk.close)
        build_tiny_model(self.base / "model")
        self.nursery = Nursery(self.base / "nursery.log")
        self._stack.callback(self.nursery.close)
        self._begin()
        bucket = self.config.bucket.model_copy(update={"endpoint_url": self.s3.endpoint_url})
        self.store = S3Store(BucketConfig.model_validate(bucket.model_dump()))
        self._stack.callback(self.store.close)
        self._open_books()

    def renew(self, run: str, reissue_after_s: float = NEVER_S, sets: tuple[str, ...] = ()) -> None:
        """Another run on the same servers, once the one before is finished."""
        assert not self.members
        self.run, self.reissue_after_s, self.sets = run, reissue_after_s, sets
        self.folder = self.base / run
        self.folder.mkdir()
        self.sizes.clear()
        self.steady_pids.clear()
        self._begin()
        self._open_books()

    def _faulty_s3(self) -> FaultyS3:
        return FaultyS3(
            self.s3.endpoint_url,
            self.s3.access_key_id,
            self.s3.secret_access_key,
            keeps_requests=False,
        )

    def _begin(self) -> None:
        """The run's folder: what its roles read, and where they write down what they did."""
        for name in ("armed", "witness", "records", "confirmed", "adapters", "logs"):
            (self.folder / name).mkdir()
        (self.folder / "rewards.py").write_text(REWARDS)
        rows = [{"prompt": f"{i} plus {i} is "} for i in range(50)]
        (self.folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
        rows = [{"prompt": f"{i} minus {i} is "} for i in range(50)]
        (self.folder / "heldout.jsonl").write_text("\n".join(map(json.dumps, rows)))
        settings = {
            "run": self.run,
            "base": self.base,
            "reissue_after_s": self.reissue_after_s,
            "heartbeat_s": HEARTBEAT_S,
            "bucket": self.s3.bucket,
            "key": self.s3.access_key_id,
            "secret": self.s3.secret_access_key,
        }
        (self.folder / "run.toml").write_text(TOML.format(**settings))
        self.config = load_config(self.folder / "run.toml", [], Config)
        self.keys, self.queues = Keys(self.run), Queues(self.run)

    def _open_books(self) -> None:
        limit = self.config.train.max_staleness
        self.books = Books(self.store, self.keys, self.folder, limit)

    # ---- processes -------------------------------------------------------------------------------------------

    def start(self, role: Role, *sets: str, is_target: bool = True, **facts: object) -> Member:
        """Start a role process through its proxies. ``facts`` are for what its order says to ``prepare`` with."""
        self.started += 1
        url = self.rabbitmq.url.replace(f":{self.rabbitmq.port}/", f":{self.amqp[role].port}/")
        settings = (
            f"broker.url={url}",
            f"bucket.endpoint_url={self.buckets[role].url}",
            *self.sets,
            *sets,
        )
        args = [role, "run.toml", *(part for one in settings for part in ("--set", one))]
        log = self.folder / "logs" / f"{role}-{self.started:03d}.log"
        order = {
            "args": args,
            "folder": str(self.folder),
            "token_s": self.token_s,
            "is_target": is_target,
            "mutant": self.mutant,
            **facts,
        }
        member = Member(role, self.nursery.start(log, order), log, is_target)
        self.members.append(member)
        return member

    def of(self, role: Role) -> list[Member]:
        """The processes of a role that run, oldest first."""
        return [member for member in self.members if member.role == role]

    @property
    def active(self) -> Member:
        """The learner that moved ``latest.json`` last, waiting until it is one of ours and alive."""
        return self.wait_for("a learner to lead", self._active)

    def _active(self) -> Member | None:
        writer = self._writer()
        return next((one for one in self.of("learner") if one.pid == writer), None)

    def _writer(self) -> int | None:
        """Process id of the learner that moved ``latest.json`` last."""
        latest = self.books.latest()
        return int(latest.writer.split("-")[-2]) if latest else None

    @property
    def steady(self) -> Member:
        """The worker that no fault is armed for: it lives through everything that happens to the servers."""
        return next(member for member in self.of("worker") if not member.is_target)

    def tend(self) -> None:
        """Bury who has ended as expected, fail over any other end, and keep the numbers up."""
        for member in list(self.members):
            code = self.nursery.exit_code(member.pid)
            if code is not None:
                self.members.remove(member)
                if code not in member.fate and not self._was_fenced(member, code):
                    raise Failure(f"{member.log.name} ended with {code}\n{self.tail(member.log)}")
        if not any(not one.is_target for one in self.of("worker")):
            self.start("worker", is_target=False)
        while len(self.of("worker")) < self.workers:
            self.start("worker")
        while len(self.of("learner")) < 1 + self.standby:
            self.start("learner")

    def _was_fenced(self, member: Member, code: int) -> bool:
        """Whether it ended as a learner does that another one took the run from, told to stop meanwhile or not."""
        ends = (FENCED, -signal.SIGTERM)
        return code in ends and self._writer() != member.pid and bool(member.said(LOST_RUN))

    def wait_for(
        self, what: str, look: Callable[[], Any], seconds: float = RECOVERY_S, *, tend: bool = True
    ) -> Any:
        """The first true answer of ``look``; Failure after ``seconds``."""
        deadline = time.monotonic() + seconds
        while not (found := look()):
            if tend:
                self.tend()
            if time.monotonic() > deadline:
                raise Failure(f"{what} did not happen within {seconds:g} s\n{self.tails()}")
            time.sleep(POLL_S)
        return found

    def wait_for_exit(self, member: Member, *codes: int, seconds: float = RECOVERY_S) -> None:
        """Wait until a process has ended with one of ``codes``."""
        member.fate = set(codes)
        self.wait_for(f"the end of {member.log.name}", lambda: member not in self.members, seconds)

    def tell_to_stop(self, member: Member) -> None:
        """SIGTERM, once the process listens for it: until then it would simply die of it."""
        self.wait_for(f"{member.log.name} to listen", member.hears_sigterm, tend=False)
        os.kill(member.pid, signal.SIGTERM)

    def member(self, pid: int) -> Member | None:
        """The running process of that id."""
        return next((member for member in self.members if member.pid == pid), None)

    def owner_of(self, port: int, role: Role) -> Member | None:
        """Whose connection to a proxy has ``port`` on its side."""
        for member in self.of(role):
            with contextlib.suppress(psutil.Error):
                ports = {c.laddr.port for c in member.process.net_connections("tcp") if c.laddr}
                if port in ports:
                    return member
        return None

    def said(self, role: Role, text: str) -> int:
        """How often the logs of a role's processes have ``text``, those included that have ended."""
        logs = (self.folder / "logs").glob(f"{role}-*.log")
        return sum(log.read_text(errors="replace").count(text) for log in logs)

    def tail(self, log: Path, lines: int = 40) -> str:
        """The end of a log."""
        text = log.read_text(errors="replace").splitlines() if log.exists() else []
        return "\n".join([f"--- {log.name}", *text[-lines:]])

    def tails(self) -> str:
        return "\n".join(self.tail(member.log, 15) for member in self.members)

    # ---- faults ----------------------------------------------------------------------------------------------

    def arm(self, role: Role, step: str, sig: str, visit: int = 1) -> Path:
        """Have the first process of ``role`` that comes to ``step`` for the ``visit``-th time hit by ``sig``.

        Returns where its witness will lie.
        """
        self._fault += 1
        name = f"{self._fault:04d}"
        order = {"id": name, "step": step, "signal": sig, "visit": visit, "then": {"signal": sig}}
        part = self.folder / "armed" / f"{role}.part"
        part.write_text(json.dumps(order))
        part.rename(self.folder / "armed" / f"{role}.json")
        return self.folder / "witness" / f"{name}.json"

    def witness(self, path: Path) -> Member:
        """Wait until the armed fault has fired; whom it hit. Its process must be one of ours, and a target."""

        def look() -> dict[str, Any] | None:
            return json.loads(path.read_text()) if path.exists() else None

        facts = self.wait_for(f"the fault {path.stem} to fire", look, FIRING_S, tend=False)
        member = self.member(facts["pid"])
        if member is None or not member.is_target:
            raise Failure(f"fault {path.stem} hit process {facts['pid']}, which is none of ours")
        return member

    def is_stopped(self, member: Member) -> bool:
        return bool(member.process.status() == psutil.STATUS_STOPPED)

    # ---- the run ---------------------------------------------------------------------------------------------

    @property
    def broker_url(self) -> SecretStr:
        """The broker itself, behind the proxies."""
        return SecretStr(self.rabbitmq.url)

    def epoch(self) -> int:
        latest = self.books.latest()
        return latest.epoch if latest else 0

    def version(self) -> int:
        latest = self.books.latest()
        return latest.durable.version if latest else -1

    def outstanding(self) -> set[Any]:
        ledger = self.books.update()
        return set(ledger.outstanding) if ledger else set()

    def recover(self, before: set[Any]) -> None:
        """Wait until every task of ``before`` is settled and another version is durable."""
        version = self.version()
        self.wait_for("a new version", lambda: self._passed(version), self.patience_s)
        self.wait_for(
            "the tasks of before the fault to be settled",
            lambda: not before & self._outstanding_checked(),
            self.patience_s,
        )

    def _passed(self, version: int) -> bool:
        self.books.check_write_ahead()
        return self.version() > version

    def _outstanding_checked(self) -> set[Any]:
        self.books.check_write_ahead()
        return self.outstanding()

    def note_size(self) -> None:
        """Open files and resident bytes of the worker that lives through everything."""
        process = self.steady.process
        self.sizes.append((process.num_fds(), process.memory_info().rss))
        self.steady_pids.add(process.pid)

    def check_sizes(self) -> None:
        """The worker that lived through everything holds no more files, and little more memory, than early on."""
        if len(self.steady_pids) > 1:
            raise Failure("the steady worker did not live through everything")
        early, late = self.sizes[: len(self.sizes) // 3], self.sizes[-(len(self.sizes) // 3) :]
        if len(early) < 3:
            return
        files, size = (statistics.median(one[i] for one in late) for i in (0, 1))
        most_files, most_size = (max(one[i] for one in early) for i in (0, 1))
        if files > most_files + MORE_FILES or size > most_size + MORE_BYTES:
            raise Failure(f"the steady worker grew: {self.sizes}")

    def finish(self, steps: int = 3) -> None:
        """Let the run come to its end in good order: all learners stop, one resumes with a last step in sight."""
        for member in self.of("learner"):
            self.tell_to_stop(member)
        self.wait_for(
            "the learners to stop", lambda: self._gone(self.of("learner")), 60, tend=False
        )
        last = self.start("learner", f"train.max_steps={self.version() + steps}")
        self.wait_for("the last learner to end", lambda: self._gone([last]), tend=False)
        self.wait_for("the workers to leave", lambda: self._gone(self.of("worker")), 60, tend=False)
        if left := psutil.Process(self.nursery_pid).children():
            raise Failure(f"left behind: {left}")

    @property
    def nursery_pid(self) -> int:
        return self.nursery.pid

    def _gone(self, members: list[Member]) -> bool:
        """Whether all have ended with 0."""
        for member in members:
            code = self.nursery.exit_code(member.pid)
            if code not in (None, 0) and not self._was_fenced(member, code):
                raise Failure(f"{member.log.name} ended with {code}\n{self.tail(member.log)}")
            if code is None:
                return False
        for member in members:
            with contextlib.suppress(ValueError):
                self.members.remove(member)
        return True


@contextlib.contextmanager
def kept_on_failure(folder: Path) -> Iterator[Path]:
    """A folder that is removed, unless the block fails."""
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
