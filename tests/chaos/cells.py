"""The kill matrix: every fault at every point where it could lose or double something.

A cell brings its fault about, waits for the witness that it fired and hit whom it was meant for, and puts right what
a person or a cloud would (starts a server again, replaces a machine). That the system recovers is not the cell's
business: ``soak`` waits for it and checks the books.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pika
import pika.exceptions

from spotgrpo.shared.ids import TaskId
from spotgrpo.shared.ports import Message
from spotgrpo.shared.rabbitmq import RabbitMQBroker
from spotgrpo.shared.steps import Step
from spotgrpo.shared.wire import encode_group
from tests.chaos.world import DEAD_AFTER_S, FENCED, FIRING_S, Failure, Member, Role, World
from tests.tools.faulty_s3 import Answer, Cut, Fault, Flip, Slow, Swallow, Truncate
from tests.tools.metadata_servers import (
    AwsMetadata,
    AzureMetadata,
    GcpMetadata,
    MetadataServer,
    serving,
)
from tests.tools.proxy import Trap

OUTAGE_S = 3.0
MANY = 1_000_000
HELD_OUT = 10
"""Held-out prompts of an evaluation, where there are any."""
MARKER = "a-queue-of-before"
DISK_FULL = "disk full"
NO_SPACE = "No space left on device"


@dataclass(frozen=True)
class Cell:
    """A fault at a point.

    Attributes:
        fault: row of the matrix.
        point: column.
        play: brings it about and returns once it has fired and what has to be put right is.
        in_short: one of the cells of the short form, in which every row comes once.
    """

    fault: str
    point: str
    play: Callable[[World, random.Random], None]
    in_short: bool = False

    def __str__(self) -> str:
        return f"{self.fault} / {self.point}"


# ---- signals --------------------------------------------------------------------------------------------------


def killed_at(role: Role, step: Step, latest: int = 3) -> Callable[[World, random.Random], None]:
    """SIGKILL when ``role`` comes to ``step`` for the n-th time, n up to ``latest``."""

    def play(world: World, rng: random.Random) -> None:
        member = world.witness(world.arm(role, step, "SIGKILL", rng.randint(1, latest)))
        world.wait_for_exit(member, -signal.SIGKILL)

    return play


def killed_in_drain(step: Step) -> Callable[[World, random.Random], None]:
    """A worker told to stop is killed at ``step`` of its drain."""

    def play(world: World, rng: random.Random) -> None:
        begun = world.arm("worker", Step.WORKER_GENERATING, "SIGTERM", rng.randint(1, 5))
        member = world.witness(begun)
        member.fate = {0, -signal.SIGKILL}
        witness = world.arm("worker", step, "SIGKILL")
        # Its drain may be over before the second order lies there: then the next worker is told to stop.
        deadline = time.monotonic() + FIRING_S
        while not witness.exists() and time.monotonic() < deadline:
            world.tend()
            if world.member(member.pid) is None:
                for other in world.of("worker"):
                    if other.is_target and not witness.exists():
                        other.fate = {0, -signal.SIGKILL}
                        world.tell_to_stop(other)
                        break
                time.sleep(0.3)
        world.wait_for("the kill", witness.exists, FIRING_S)

    return play


def stopped_at(role: Role, step: Step) -> Callable[[World, random.Random], None]:
    """SIGSTOP at ``step`` for longer than the heartbeat, then SIGCONT."""

    def play(world: World, rng: random.Random) -> None:
        epoch = world.epoch()
        member = world.witness(world.arm(role, step, "SIGSTOP", rng.randint(1, 3)))
        world.wait_for("the freeze", lambda: world.is_stopped(member), FIRING_S)
        if role == "learner":
            world.wait_for("the standby to take over", lambda: world.epoch() > epoch)
        else:
            time.sleep(DEAD_AFTER_S)
        _still_frozen(world, member)
        os.kill(member.pid, signal.SIGCONT)
        if role == "learner":
            _expect_fenced(world, member)

    return play


def _still_frozen(world: World, member: Member) -> None:
    if not world.is_stopped(member):
        raise Failure(f"{member.log.name} was not frozen for as long as it was meant to be")


def _expect_fenced(world: World, member: Member) -> None:
    """A learner that comes back leaves with exit 4 and changes nothing: the books only grow meanwhile."""
    member.fate = {FENCED}

    def left() -> bool:
        world.books.update()
        return member not in world.members

    world.wait_for(f"the end of {member.log.name}", left)


def told_to_stop(role: Role, step: Step, sig: str = "SIGTERM") -> Callable[..., None]:
    """SIGTERM or SIGINT at ``step``: the process leaves in good order, with exit 0."""

    def play(world: World, rng: random.Random) -> None:
        world.wait_for_exit(world.witness(world.arm(role, step, sig, rng.randint(1, 3))), 0)

    return play


def told_to_stop_with_time(world: World, _rng: random.Random) -> None:
    """SIGTERM to a worker that may finish what it has begun: it hands nothing unfinished back."""
    member = world.start("worker", "worker.drain_s=20")
    world.wait_for("it to work", lambda: member.said("serving version"))
    world.tell_to_stop(member)
    world.wait_for_exit(member, 0)


def taking_over(step: Step) -> Callable[[World, random.Random], None]:
    """The active learner is killed, and the one that takes over is killed at ``step``."""

    def play(world: World, _rng: random.Random) -> None:
        witness = world.arm("learner", step, "SIGKILL")
        active = world.active
        active.fate = {-signal.SIGKILL}
        os.kill(active.pid, signal.SIGKILL)
        world.wait_for_exit(world.witness(witness), -signal.SIGKILL)

    return play


def engine_stalls(world: World, rng: random.Random) -> None:
    """No token comes any more: the worker ends itself, with an error, and its tasks go to others."""
    member = rng.choice([one for one in world.of("worker") if one.is_target])
    (world.folder / f"stalled.{member.pid}").touch()
    world.wait_for_exit(member, 1)
    if not member.said("the engine gave no token for"):
        raise Failure(f"{member.log.name} ended for another reason\n{world.tail(member.log)}")


def _notify(metadata: MetadataServer) -> None:
    """Let the cloud say that it takes the machine back, in the words that it has for that."""
    match metadata:
        case AwsMetadata():
            metadata.interrupt(120.0)
        case GcpMetadata():
            metadata.preempted = "TRUE"
        case AzureMetadata():
            metadata.schedule("Preempt", in_s=30.0)


def noticed(make: Callable[[], MetadataServer], cloud: str) -> Callable[..., None]:
    """The cloud takes the machine back: the worker on it hears of it, drains, and leaves with exit 0."""

    def play(world: World, _rng: random.Random) -> None:
        with serving(make()) as metadata:
            sets = (f"worker.notices={cloud}", f"worker.notice_url={metadata.url}")
            member = world.start("worker", *sets)
            world.wait_for("it to work", lambda: member.said("serving version"))
            _notify(metadata)
            world.wait_for_exit(member, 0)
            if not member.said("draining"):
                raise Failure(
                    f"{member.log.name} left for another reason\n{world.tail(member.log)}"
                )

    return play


def reset_then_killed(world: World, rng: random.Random) -> None:
    """The learner's line is reset; it goes on with copies of what it held, and dies before it has settled them."""
    _stop_standby(world)
    active, epoch, version = world.active, world.epoch(), world.version()
    _cut(world, "learner")
    # One step may be on its way already; what settles the next one was acked on the new connection.
    world.wait_for("it to go on", lambda: world.version() > version + 1, FIRING_S, tend=False)
    time.sleep(rng.uniform(0.0, 0.3))
    if world.epoch() != epoch:
        raise Failure("another learner took the run over")
    active.fate = {-signal.SIGKILL}
    os.kill(active.pid, signal.SIGKILL)
    world.wait_for_exit(active, -signal.SIGKILL)


def _stop_standby(world: World) -> None:
    """So that the active learner gets the run back whatever happens to its line.

    One that is no standby but lost the run a moment ago leaves fenced, told to stop or not.
    """
    for member in world.of("learner"):
        if member is not world.active:
            member.fate = {0}
            world.tell_to_stop(member)
            world.wait_for(
                f"{member.log.name} to leave",
                lambda gone=member: world.nursery.exit_code(gone.pid) is not None,
                FIRING_S,
                tend=False,
            )


# ---- on the wire ----------------------------------------------------------------------------------------------


def killed_before_confirm(world: World, _rng: random.Random) -> None:
    """A worker dies when the confirm of its group is on the wire, and never sees it."""
    hit = _set_trap(world, "worker", "broker", 0)
    world.wait_for("the trap to spring", lambda: hit, FIRING_S, tend=False)
    world.wait_for_exit(hit[0], -signal.SIGKILL)


def killed_between_acks(world: World, rng: random.Random) -> None:
    """A learner dies when the first of a commit's acks is with the broker, and the second is not.

    One ack covers a row of deliveries. Copies of groups that are held come later than others, and are acked with the
    first: no row any more.
    """
    hit = _set_trap(world, "learner", "client", 1)
    deadline = time.monotonic() + FIRING_S
    while not hit and time.monotonic() < deadline:
        _send_copies(world, rng)
    if not hit:
        raise Failure("no commit acked more than one row of deliveries")
    world.wait_for_exit(hit[0], -signal.SIGKILL)


def _send_copies(world: World, rng: random.Random) -> None:
    """Groups again that the broker has confirmed: their bodies do not matter, since the first ones are there."""
    template = world.books.any_group()
    tasks = sorted(world.books.confirmed() & world.outstanding())
    copies = [
        (task, encode_group(replace(template, task_id=task)))
        for task in rng.sample(tasks, min(3, len(tasks)))
    ]
    _publish(world, copies, "group")


def _set_trap(
    world: World, role: Role, of: Literal["broker", "client"], passing: int
) -> list[Member]:
    """Have whoever's connection springs the trap killed; who that was is in the list then."""
    hit: list[Member] = []

    def spring(port: int) -> bool:
        member = world.owner_of(port, role)
        if member is None or not member.is_target:
            return False
        member.fate = {-signal.SIGKILL}
        os.kill(member.pid, signal.SIGKILL)
        hit.append(member)
        return True

    world.amqp[role].set_trap(Trap(of, passing, spring))
    return hit


def line_cut(role: Role) -> Callable[[World, random.Random], None]:
    """The connection on which the n-th byte passes ends with it."""

    def play(world: World, rng: random.Random) -> None:
        before = world.amqp[role].cuts
        world.amqp[role].cut_after(rng.randint(1, 60_000))
        world.wait_for("the cut", lambda: world.amqp[role].cuts > before, FIRING_S)

    return play


def _cut(world: World, role: Role) -> None:
    """Reset all connections of a role, of which it has at least one for every process."""
    cut = world.amqp[role].cut()
    if cut < len(world.of(role)):
        raise Failure(f"only {cut} connections of {len(world.of(role))} {role}s were reset")


def line_reset(role: Role) -> Callable[[World, random.Random], None]:
    """All connections of the role are reset at once."""

    def play(world: World, rng: random.Random) -> None:
        time.sleep(rng.uniform(0, 0.3))
        _cut(world, role)

    return play


def confirm_lost(role: Role) -> Callable[[World, random.Random], None]:
    """A confirm is lost with its connection: the publisher repeats a message that the broker has."""

    def play(world: World, rng: random.Random) -> None:
        proxy = world.amqp[role]
        proxy.confirms_to_swallow = rng.randint(1, 3)
        world.wait_for("the confirms to be lost", lambda: not proxy.confirms_to_swallow, FIRING_S)

    return play


def half_open(role: Role) -> Callable[[World, random.Random], None]:
    """Packets vanish in both directions and nobody is told, for longer than the heartbeat."""

    def play(world: World, _rng: random.Random) -> None:
        proxy = world.amqp[role]
        proxy.stall()
        time.sleep(DEAD_AFTER_S)
        _cut(world, role)  # what stalled is gone for good, for both ends
        proxy.resume()

    return play


# ---- broker ---------------------------------------------------------------------------------------------------


def broker_killed(world: World, rng: random.Random) -> None:
    """SIGKILL, and a start on the same data."""
    pid = world.rabbitmq.pid
    world.rabbitmq.write_tables()
    world.rabbitmq.kill()
    time.sleep(rng.uniform(0, 1))
    _started_again(world, pid)


def broker_restarted(world: World, _rng: random.Random) -> None:
    """A stop in good order, and a start on the same data."""
    pid = world.rabbitmq.pid
    world.rabbitmq.restart()
    _started_again(world, pid)


def broker_wiped(world: World, _rng: random.Random) -> None:
    """SIGKILL, its disk is lost, and a start on an empty one: a durable queue of before is not there any more."""
    pid = world.rabbitmq.pid
    with pika.BlockingConnection(pika.URLParameters(world.rabbitmq.url)) as connection:
        connection.channel().queue_declare(MARKER, durable=True)
    world.rabbitmq.kill()
    shutil.rmtree(world.rabbitmq.folder / "mnesia")
    _started_again(world, pid)
    with pika.BlockingConnection(pika.URLParameters(world.rabbitmq.url)) as connection:
        try:
            connection.channel().queue_declare(MARKER, passive=True)
        except pika.exceptions.ChannelClosedByBroker:
            return
    raise Failure("the broker has what it had before its disk was lost")


def broker_frozen(world: World, _rng: random.Random) -> None:
    """SIGSTOP for longer than the heartbeat, then SIGCONT."""
    world.rabbitmq.pause()
    time.sleep(DEAD_AFTER_S)
    world.rabbitmq.resume()


def _started_again(world: World, old_pid: int) -> None:
    world.rabbitmq.start()
    if world.rabbitmq.pid == old_pid:
        raise Failure("the broker is the same process as before")


# ---- bucket ---------------------------------------------------------------------------------------------------


def bucket_away(role: Role, fault: Fault) -> Callable[[World, random.Random], None]:
    """Every request of the role meets ``fault`` for some seconds."""

    def play(world: World, _rng: random.Random) -> None:
        proxy = world.buckets[role]
        before = proxy.played
        proxy.play(fault, times=MANY)
        world.wait_for("the bucket to be missed", lambda: proxy.played > before, FIRING_S)
        time.sleep(OUTAGE_S)
        proxy.behave()

    return play


def answer_lost(part: str, fault: Fault) -> Callable[[World, random.Random], None]:
    """One write of the learner meets ``fault``."""

    def play(world: World, _rng: random.Random) -> None:
        _met_once(world, "learner", fault, "PUT", part)

    return play


def download_damaged(fault: Fault) -> Callable[[World, random.Random], None]:
    """A worker's download of an adapter meets ``fault``."""

    def play(world: World, _rng: random.Random) -> None:
        _met_once(world, "worker", fault, "GET", "adapter_model.safetensors")

    return play


def _met_once(world: World, role: Role, fault: Fault, method: str, part: str) -> None:
    proxy = world.buckets[role]
    before = proxy.played
    proxy.play(fault, method, part)
    world.wait_for("the fault to be met", lambda: proxy.played > before, FIRING_S)


def disk_full(world: World, _rng: random.Random) -> None:
    """The workers' cache has no room for a version: they serve on with the one before, and say so."""
    before = world.said("worker", NO_SPACE)

    def missed() -> bool:
        world.disk.fill()  # again: a version that was unloaded leaves room for the next
        return world.said("worker", NO_SPACE) > before

    world.wait_for("a worker to miss the room", missed, FIRING_S)
    time.sleep(1)
    world.disk.free()


# ---- messages -------------------------------------------------------------------------------------------------


def poison(kind: str) -> Callable[[World, random.Random], None]:
    """Bodies that nobody can read arrive for all tasks: those that no group came for yet die, and are tried again.

    One more is for a task that was never issued: a duplicate.
    """

    def play(world: World, rng: random.Random) -> None:
        dead, stranger = _dead(world), TaskId(99_999_999)
        deadline = time.monotonic() + FIRING_S
        while _dead(world) == dead:  # a real group may be there first for all of them
            if time.monotonic() > deadline:
                raise Failure("no task died of a body that nobody can read")
            body = rng.randbytes(200)
            _publish(world, [(task, body) for task in (*world.outstanding(), stranger)], kind)
            time.sleep(1)

    return play


def _dead(world: World) -> int:
    ledger = world.books.update()
    return ledger.counts.dead if ledger else 0


def _publish(world: World, bodies: Sequence[tuple[TaskId, bytes]], kind: str) -> None:
    """As a stranger, to the rollouts queue."""
    config = world.config.broker.model_copy(update={"url": world.broker_url})
    broker = RabbitMQBroker(config, world.run)
    try:
        publisher = broker.publisher()
        for task, body in bodies:
            headers: dict[str, str | int] = {"run": world.run, "task": str(task), "kind": kind}
            message = Message(body, f"{task}/stranger", {**headers, "worker": "stranger"})
            publisher.publish(world.queues.rollouts, message).result(FIRING_S)
    finally:
        broker.close()


# ---- the matrix -----------------------------------------------------------------------------------------------

UNREACHABLE = Swallow(forward=False)
BUSY = Answer(503, "SlowDown")

MID_GENERATION, BEFORE_PUBLISH = "mid-generation", "after generation, before publish"
BEFORE_CONFIRM, BEFORE_ACK = "after publish, before confirm", "after confirm, before ack"

CELLS: tuple[Cell, ...] = (
    Cell("SIGKILL worker", MID_GENERATION, killed_at("worker", Step.WORKER_GENERATING, 20)),
    Cell("SIGKILL worker", BEFORE_PUBLISH, killed_at("worker", Step.WORKER_GENERATED)),
    Cell("SIGKILL worker", BEFORE_CONFIRM, killed_before_confirm),
    Cell("SIGKILL worker", BEFORE_ACK, killed_at("worker", Step.WORKER_CONFIRMED), True),
    Cell(
        "SIGKILL worker", "adapter on disk, not loaded", killed_at("worker", Step.WORKER_DOWNLOADED)
    ),
    Cell(
        "SIGKILL worker",
        "draining, partial stored, task not handed back",
        killed_in_drain(Step.WORKER_PARTIAL_STORED),
    ),
    Cell(
        "SIGKILL worker",
        "draining, task handed back, not acked",
        killed_in_drain(Step.WORKER_HANDED_BACK),
    ),
    Cell("SIGSTOP worker", MID_GENERATION, stopped_at("worker", Step.WORKER_GENERATING)),
    Cell("SIGSTOP worker", BEFORE_PUBLISH, stopped_at("worker", Step.WORKER_GENERATED)),
    Cell("SIGSTOP worker", BEFORE_ACK, stopped_at("worker", Step.WORKER_CONFIRMED), True),
    Cell("SIGTERM worker", MID_GENERATION, told_to_stop("worker", Step.WORKER_GENERATING), True),
    Cell("SIGTERM worker", "mid-generation, with time to finish", told_to_stop_with_time),
    Cell("SIGTERM worker", BEFORE_ACK, told_to_stop("worker", Step.WORKER_CONFIRMED)),
    Cell(
        "SIGINT worker",
        MID_GENERATION,
        told_to_stop("worker", Step.WORKER_GENERATING, "SIGINT"),
        True,
    ),
    Cell("spot notice", "AWS, 2 minutes", noticed(AwsMetadata, "aws"), True),
    Cell("spot notice", "GCP, 30 seconds", noticed(GcpMetadata, "gcp")),
    Cell("spot notice", "Azure, 30 seconds", noticed(AzureMetadata, "azure")),
    Cell("engine stalls", MID_GENERATION, engine_stalls, True),
    Cell("SIGKILL learner", "mid-step", killed_at("learner", Step.LEARNER_STEPPING)),
    Cell("SIGKILL learner", "after the step", killed_at("learner", Step.LEARNER_STEPPED)),
    Cell(
        "SIGKILL learner",
        "after upload, before manifest",
        killed_at("learner", Step.LEARNER_UPLOADED),
    ),
    Cell(
        "SIGKILL learner",
        "after manifest, before `latest`",
        killed_at("learner", Step.LEARNER_MANIFEST_STORED),
    ),
    Cell("SIGKILL learner", "serving, not durable", killed_at("learner", Step.LEARNER_SERVING)),
    Cell(
        "SIGKILL learner",
        "state and ledger stored, before `latest`",
        killed_at("learner", Step.LEARNER_STATE_STORED),
    ),
    Cell(
        "SIGKILL learner",
        "after `latest`, before ack",
        killed_at("learner", Step.LEARNER_DURABLE),
        True,
    ),
    Cell("SIGKILL learner", "between two acks", killed_between_acks),
    Cell("SIGKILL learner", "after ack, before issue", killed_at("learner", Step.LEARNER_ACKED)),
    Cell("SIGKILL learner", "after issue", killed_at("learner", Step.LEARNER_ISSUED)),
    Cell(
        "SIGKILL learner", "takeover: leading, before the claim", taking_over(Step.LEARNER_LEADING)
    ),
    Cell("SIGKILL learner", "takeover: claimed, before restore", taking_over(Step.LEARNER_CLAIMED)),
    Cell(
        "SIGKILL learner",
        "takeover: restored, before consuming",
        taking_over(Step.LEARNER_RESTORED),
    ),
    Cell("SIGSTOP learner", "mid-step", stopped_at("learner", Step.LEARNER_STEPPING)),
    Cell(
        "SIGSTOP learner",
        "after manifest, before `latest`",
        stopped_at("learner", Step.LEARNER_MANIFEST_STORED),
        True,
    ),
    Cell(
        "SIGSTOP learner",
        "state and ledger stored, before `latest`",
        stopped_at("learner", Step.LEARNER_STATE_STORED),
    ),
    Cell(
        "SIGSTOP learner", "after `latest`, before ack", stopped_at("learner", Step.LEARNER_DURABLE)
    ),
    Cell("SIGTERM learner", "mid-step", told_to_stop("learner", Step.LEARNER_STEPPING), True),
    Cell("line cut", "worker, after n bytes", line_cut("worker"), True),
    Cell("line cut", "learner, after n bytes", line_cut("learner")),
    Cell("line reset", "worker", line_reset("worker")),
    Cell("line reset", "learner", line_reset("learner"), True),
    Cell("line reset, then SIGKILL", "learner", reset_then_killed, True),
    Cell("confirm lost", "worker's groups", confirm_lost("worker"), True),
    Cell("confirm lost", "learner's tasks", confirm_lost("learner")),
    Cell("half open", "worker", half_open("worker")),
    Cell("half open", "learner", half_open("learner"), True),
    Cell("broker killed", "any time", broker_killed, True),
    Cell("broker restarted", "any time", broker_restarted, True),
    Cell("broker frozen", "any time", broker_frozen, True),
    Cell("bucket unreachable", "learner", bucket_away("learner", UNREACHABLE), True),
    Cell("bucket unreachable", "worker", bucket_away("worker", UNREACHABLE)),
    Cell("bucket answers 503", "learner", bucket_away("learner", BUSY)),
    Cell("bucket answers 503", "worker", bucket_away("worker", BUSY), True),
    Cell("bucket slow", "learner", bucket_away("learner", Slow(0.4)), True),
    Cell("bucket slow", "worker", bucket_away("worker", Slow(0.4))),
    Cell("answer lost", "`latest` moved", answer_lost("latest.json", Swallow(forward=True)), True),
    Cell("answer lost", "`latest` not moved", answer_lost("latest.json", Swallow(forward=False))),
    Cell("answer lost", "manifest stored", answer_lost("manifest.json", Swallow(forward=True))),
    Cell("download cut", "adapter", download_damaged(Cut(after=1000)), True),
    Cell("download truncated", "adapter", download_damaged(Truncate(after=1000)), True),
    Cell("download flipped", "adapter", download_damaged(Flip(at=2000)), True),
    Cell(DISK_FULL, "worker's cache", disk_full, True),
    Cell("poison message", "unreadable group", poison("group"), True),
    Cell("poison message", "unreadable reference", poison("group_ref")),
)

WIPED: tuple[Cell, ...] = (Cell("broker wiped", "any time", broker_wiped, True),)
"""Cells of a world in which tasks that give no sign are published again: the only ones that need it."""

EVALUATED: tuple[Cell, ...] = (
    Cell(
        "SIGKILL worker", "evaluating, mid-generation", killed_at("worker", Step.WORKER_GENERATING)
    ),
    Cell(
        "SIGKILL learner",
        "evaluating, an answer acked",
        killed_at("learner", Step.LEARNER_HEARD, 2 * HELD_OUT // 3),
    ),
    Cell("SIGKILL learner", "evaluating, durable", killed_at("learner", Step.LEARNER_DURABLE)),
)
"""Cells of a world that evaluates its versions: acks of held-out answers would come between those of commits."""
