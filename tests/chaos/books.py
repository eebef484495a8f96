"""What must hold after every fault: checked from the bucket alone, and against what the processes wrote down.

Nothing here believes a learner's own summary. The chain of ledgers is read from the bucket, groups that the broker
confirmed come from the workers' logs, and bodies that were trained from the learners' records; the weights at the
end are compared bit for bit with those of a trainer that never saw a fault.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgpack
import torch
from safetensors.torch import load

from spotgrpo.consumer.audit import audit_chain
from spotgrpo.consumer.issuer import rollout_seeds
from spotgrpo.consumer.ledger import Ledger, decode_ledger
from spotgrpo.consumer.losses.objective import Objective
from spotgrpo.consumer.staleness import oldest_version
from spotgrpo.consumer.trainer import Trainer
from spotgrpo.shared.config import Config
from spotgrpo.shared.errors import NotStored
from spotgrpo.shared.ids import FIRST_HELD_OUT, Keys, PolicyVersion, TaskId
from spotgrpo.shared.manifest import Latest
from spotgrpo.shared.ports import ObjectStore
from spotgrpo.shared.wire import Group, decode_group
from tests.tools.scripted_engine import scripted_token


@dataclass
class Books:
    """The books of one run, read again and again while it goes on.

    Args:
        folder: where the roles write down what they did: ``records``, ``confirmed``, ``adapters``.
        max_staleness, seed: of the run.
    """

    store: ObjectStore
    keys: Keys
    folder: Path
    max_staleness: int
    seed: int = 0
    chain: list[Ledger] = field(default_factory=list)
    _bodies: dict[tuple[int, TaskId], bytes] = field(default_factory=dict)
    _read: dict[Path, int] = field(default_factory=dict)
    _checked: int = 0

    def latest(self) -> Latest | None:
        """None before the run has begun."""
        try:
            return Latest.from_bytes(self.store.get(self.keys.latest).body)
        except NotStored:
            return None

    def update(self) -> Ledger | None:
        """Read what the chain has gained; returns the committed ledger.

        Fails where a ledger that was committed once is not an ancestor of the one that is now.
        """
        latest = self.latest()
        if latest is None:
            return None
        known = {self.keys.ledger(one.sequence, one.epoch): one for one in self.chain[-1:]}
        new: list[Ledger] = []
        key: str | None = latest.durable.ledger
        while key is not None and key not in known:
            new.append(decode_ledger(self.store.get(key).body))
            key = new[-1].parent
        assert key in known or not self.chain, "a committed ledger is not in the chain any more"
        self.chain += reversed(new)
        return self.chain[-1]

    def check(self) -> None:
        """Every invariant that can be told while the run goes on."""
        self.check_write_ahead()
        report = audit_chain(self.keys.run, self.chain)
        assert report.balanced, report.to_dict()
        self._check_versions()
        self._check_trained()
        self._check_adapters()

    def lost(self) -> list[str]:
        """Tasks that were issued, and groups that the broker confirmed, of which the books know nothing."""
        report = audit_chain(self.keys.run, self.chain)
        return report.lost + sorted(map(str, self.confirmed() - self._issued()))

    def unsettled(self) -> list[str]:
        """Confirmed groups whose task is not settled: once a run has finished, these are lost."""
        settled = {task for one in self.chain for tasks in one.settled.values() for task in tasks}
        return sorted(map(str, self.confirmed() - settled))

    def duplicated(self) -> list[str]:
        """Tasks that count more than once."""
        report = audit_chain(self.keys.run, self.chain)
        trained = Counter(t for one in self.chain for t in one.settled.get("trained", ()))
        twice = [str(task) for task, times in trained.items() if times > 1]
        return sorted({*report.settled_twice, *report.issued_twice, *twice})

    def _issued(self) -> set[TaskId]:
        return {task for one in self.chain for task in one.issued}

    def _check_versions(self) -> None:
        """Monotone; gapless within an epoch; a takeover goes on from where the books stand."""
        for before, after in zip(self.chain, self.chain[1:], strict=False):
            assert after.sequence == before.sequence + 1
            assert after.epoch >= before.epoch, f"epoch {after.epoch} after {before.epoch}"
            step = after.version - before.version
            assert step in (0, 1), f"version {after.version} after {before.version}"
            assert bool(after.settled.get("trained")) == bool(step), "trained without a version"

    def check_write_ahead(self) -> None:
        """No group is confirmed of a task that no committed ledger issued: the ledger is written ahead.

        The groups are read first: what was confirmed by then must be in a ledger that is committed now.
        """
        confirmed = self.confirmed()
        self.update()
        unknown = confirmed - self._issued()
        assert not unknown, f"groups of tasks that no ledger issued: {sorted(map(str, unknown))}"

    def carried_on(self) -> int:
        """Rollouts that were carried on from a partial."""
        path = self.folder / "continued.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def any_group(self) -> Group:
        """A group that was trained."""
        self._read_records()
        return decode_group(next(iter(self._bodies.values())))

    def confirmed(self) -> set[TaskId]:
        """Tasks of the groups that the broker confirmed to workers, but for held-out ones: they are in no books."""
        found = {
            TaskId.parse(line.split()[0])
            for path in (self.folder / "confirmed").glob("*.log")
            for line in path.read_text().splitlines()
        }
        return {task for task in found if not task.is_held_out}

    def _check_trained(self) -> None:
        """Nothing was trained beyond the staleness that the run allows, or that is not what was sampled."""
        self._read_records()
        for ledger in self.chain[self._checked :]:
            for task in ledger.settled.get("trained", ()):
                group = decode_group(self._bodies[ledger.epoch, task])
                lag = ledger.version - 1 - oldest_version(group, ledger.takeovers)
                assert lag <= self.max_staleness, f"task {task} was trained {lag} versions late"
                self._check_tokens(group)
        self._checked = len(self.chain)

    def _check_tokens(self, group: Group) -> None:
        """Every token and logprob is what the paced engine gives for the version that the group names for it."""
        seeds = rollout_seeds(self.seed, group.task_id, len(group.rollouts))
        for seed, rollout in zip(seeds, group.rollouts, strict=True):
            versions = [run.version for run in rollout.versions for _ in range(run.tokens)]
            wanted = [scripted_token(seed, v, position) for position, v in enumerate(versions)]
            found = list(zip(rollout.token_ids.tolist(), rollout.logprobs.tolist(), strict=True))
            assert found == wanted, f"task {group.task_id} holds tokens that nobody sampled so"

    def _check_adapters(self) -> None:
        """What a worker loaded under a version's name is what the learner stored under it."""
        stored = self._digests("stored")
        for version, digests in self._digests("loaded").items():
            assert digests <= stored.get(version, set()), f"{version} is served from other bytes"

    def _digests(self, what: str) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for path in (self.folder / "adapters").glob(f"{what}.*"):
            for line in path.read_text().splitlines():
                version, digest = line.split()
                found.setdefault(version, set()).add(digest)
        return found

    def _read_records(self) -> None:
        """Epoch of the learner and task -> the body that it was stepped on last; what is new in the files."""
        for path in (self.folder / "records").glob("*.msgpack"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                unpacker = msgpack.Unpacker(raw=False, max_buffer_size=1 << 30)
                unpacker.feed(file.read())
            start = self._read.get(path, 0)
            for (
                record
            ) in unpacker:  # the last one may be half: its writer was killed, or is writing
                self._bodies[record["epoch"], TaskId.parse(record["task"])] = record["body"]
                self._read[path] = start + unpacker.tell()

    def check_evaluations(
        self, prompts: int, worth: Callable[[Sequence[int]], float | None], tokens: int = 8
    ) -> int:
        """Every evaluation is of each prompt once, and its reward that of the tokens sampled; how many there were.

        Args:
            worth: of a completion's tokens, the reward that the run's function gives.
            tokens: of a completion.
        """
        lines = (self.folder / "runs" / self.keys.run / "metrics.jsonl").read_text().splitlines()
        found = [record for line in lines if (record := json.loads(line))["role"] == "eval"]
        rewards = {}
        for one in found:
            version = PolicyVersion(one["eval_epoch"], one["eval_version"])
            scored = [
                reward
                for prompt in range(prompts)
                for seed in rollout_seeds(self.seed, TaskId(FIRST_HELD_OUT + prompt), 1)
                if (reward := worth(_sampled(seed, version, tokens))) is not None
            ]
            assert (one["eval_answered"], one["eval_scored"]) == (prompts, len(scored)), one
            assert abs(one["eval_reward"] - sum(scored) / len(scored)) < 1e-9, one
            rewards[version] = one["eval_reward"]
        latest = self.latest()
        assert latest is not None
        assert latest.evaluated is not None
        assert latest.evaluated.last.policy in rewards
        best = latest.evaluated.best
        assert best is None or rewards[best.policy] == best.reward
        return len(rewards)

    def replayed_state(self, config: Config) -> bytes:
        """The trainer state of a run without faults: the recorded bodies, in the order of the ledgers."""
        self._read_records()
        trainer = Trainer(
            config.model,
            config.lora,
            config.train,
            config.sampling.temperature,
            config.run.seed,
            Objective.of(config),
        )
        for ledger in self.chain:
            trained = ledger.settled.get("trained", ())
            if trained:
                bodies = [self._bodies[ledger.epoch, task] for task in trained]
                trainer.step([decode_group(body) for body in bodies])
        return trainer.state()

    def check_weights(self, config: Config) -> None:
        """The durable weights and moments are bit for bit those of the replay; nothing draws random numbers."""
        latest = self.latest()
        assert latest is not None
        found = load(self.store.get(latest.durable.state).body)
        wanted = load(self.replayed_state(config))
        assert found.keys() == wanted.keys()
        differing = [
            name
            for name, tensor in wanted.items()
            if not name.startswith("random.") and not torch.equal(tensor, found[name])
        ]
        assert not differing, f"not those of a run without faults: {differing[:5]}"

    def check_bucket(self) -> None:
        """What the end of a run leaves: nothing unfinished, one trainer state, no version without a manifest."""
        for leftover in ("groups/", "partials/"):
            found = [info.key for info in self.store.list(f"{self.keys.run}/{leftover}")]
            assert not found, f"left in the bucket: {found[:5]}"


def _sampled(seed: int, version: PolicyVersion, tokens: int) -> list[int]:
    return [scripted_token(seed, version, position)[0] for position in range(tokens)]
