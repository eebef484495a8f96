"""Scoring a group with reward functions as TRL users write them.

``f(prompts, completions, completion_ids=…, **columns) -> list[float | None]``, sync or async. One call a group:
prompt and columns are repeated for every completion, and a completion is text, or for a chat prompt
``[{"role": "assistant", "content": …}]``. A bad function is data and not a crash: its part is None, and counted.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Final

from spotgrpo.producer.calling import Caller, NoAnswer, run_blocking
from spotgrpo.producer.reward_code import GYM, RewardCode, find_reward, where
from spotgrpo.shared.config import RewardConfig
from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.gym import gym_version
from spotgrpo.shared.manifest import RewardIdentity
from spotgrpo.shared.wire import Prompt, Row

log = logging.getLogger(__name__)

OURS: Final = ("prompts", "completions", "completion_ids")
TRIAL: Final = ("1", "2")
"""Two completions, since a function that gives one value for all is only found out with two."""


@dataclass(frozen=True)
class Scored:
    """A completion's reward: the weighted sum of the parts that are numbers, None where none is."""

    reward: float | None
    parts: dict[str, float | None]


@dataclass(frozen=True)
class RewardFunction:
    """One reward function of the run; ``name`` is unique among them."""

    name: str
    key: str
    spec: str
    weight: float
    code: RewardCode
    accepts: frozenset[str] | None
    """Names of its parameters, None where it takes any."""


class BadResult(Exception):
    """A function returned something that is no list of numbers of the right length."""


class Rewards:
    """The reward functions of a run. Make them with :meth:`resolve` or :meth:`from_run`.

    Attributes:
        functions: in the order of the configuration.
        failures: by function name, calls that raised, timed out, or gave a wrong list or a value that is no number.
    """

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        self.functions = tuple(functions)
        self.failures: Counter[str] = Counter()
        self._caller = Caller()
        self._said: set[tuple[str, str]] = set()

    @classmethod
    def resolve(cls, configs: Sequence[RewardConfig], base_dir: Path) -> Rewards:
        """Import every function; file paths are taken from ``base_dir``.

        Raises:
            ConfigError: under ``rewards[i].function``: missing, does not import, or cannot be called.
        """
        functions: list[RewardFunction] = []
        for index, config in enumerate(configs):
            key = f"rewards[{index}].function"
            code = find_reward(config.function, base_dir, key)
            name = _unique(code.name, {function.name for function in functions})
            accepts = _accepted(code.call, config.function, key)
            functions.append(
                RewardFunction(name, key, config.function, config.weight, code, accepts)
            )
        return cls(functions)

    @classmethod
    def from_run(
        cls, identities: Sequence[RewardIdentity], overrides: Sequence[RewardConfig], base_dir: Path
    ) -> Rewards:
        """The learner's functions on a worker's machine.

        Args:
            identities: ``run.json``'s ``rewards``.
            overrides: ``[[rewards]]`` of the worker's TOML, where files lie elsewhere; empty, or one for each.
            base_dir: what file paths are relative to.

        Raises:
            ConfigError: not found here, or another function, weight or code than the learner's.
        """
        if overrides and len(overrides) != len(identities):
            remedy = f"the run has {len(identities)} reward functions: name as many, or none"
            raise ConfigError("rewards", [config.function for config in overrides], remedy)
        configs = [
            RewardConfig(function=identity.function, weight=identity.weight)
            for identity in identities
        ]
        for index, (override, identity) in enumerate(zip(overrides, identities, strict=False)):
            configs[index] = _overridden(index, override, identity)
        try:
            rewards = cls.resolve(configs, base_dir)
        except ConfigError as exc:
            remedy = (
                f"{exc.remedy}; where it lies elsewhere on this machine, name it in [[rewards]]"
            )
            raise ConfigError(exc.key, exc.value, remedy) from exc
        for function, identity in zip(rewards.functions, identities, strict=True):
            _check_same(function, identity)
        return rewards

    def identities(self) -> list[RewardIdentity]:
        """What ``run.json`` says of the functions."""
        return [
            RewardIdentity(
                function=function.spec, weight=function.weight, sha256=function.code.sha256
            )
            for function in self.functions
        ]

    async def score(
        self,
        prompt: Prompt,
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        row: Row,
        timeout_s: float,
    ) -> list[Scored]:
        """Score a group's completions, one call of each function.

        Args:
            prompt: text or messages, as the task has it.
            completions: the completions' texts.
            completion_ids: their token ids.
            row: the data set's other columns.
            timeout_s: seconds that each function may take.

        Returns:
            One Scored a completion, in order. Nothing that a function does raises.
        """
        columns = _columns(prompt, completions, completion_ids, row)
        parts = await asyncio.gather(
            *(
                self._part(function, columns, len(completions), timeout_s)
                for function in self.functions
            )
        )
        return [self._sum([values[index] for values in parts]) for index in range(len(completions))]

    def try_once(self, prompt: Prompt, row: Row, timeout_s: float = 300.0) -> None:
        """Call every function on one row with completions made up, and refuse what a run would trip over.

        Blocks; for the start of a role, before anything is generated.

        Raises:
            ConfigError: a function that raises, does not answer, wants an argument that is not there, or does not
                return one number or None a completion.
        """
        columns = _columns(prompt, TRIAL, [[0]] * len(TRIAL), row)
        for function in self.functions:
            arguments = _arguments(function, columns)
            _check_signature(function, arguments, row)
            try:
                result = run_blocking(self._caller.call(function.code.call, arguments, timeout_s))
                values = _numbers(result, len(TRIAL))
            except BadResult as exc:
                raise ConfigError(
                    function.key, function.spec, f"on the first row it {exc}"
                ) from exc
            except ConfigError as exc:
                raise ConfigError(function.key, function.spec, exc.remedy) from exc
            except Exception as exc:  # a user's function may raise anything
                said = where(exc, function.code.file)
                raise ConfigError(
                    function.key, function.spec, f"fails on the first row: {said}"
                ) from exc
            if wrong := [
                value for value in values if value is not None and not math.isfinite(value)
            ]:
                raise ConfigError(function.key, function.spec, f"gives {wrong[0]} on the first row")

    def close(self) -> None:
        """Leave what still runs behind. Nothing has to be closed before the process ends."""
        self._caller.close()

    async def _part(
        self, function: RewardFunction, columns: Mapping[str, Any], count: int, timeout_s: float
    ) -> list[float | None]:
        try:
            result = await self._caller.call(
                function.code.call, _arguments(function, columns), timeout_s
            )
            values = _numbers(result, count)
        except NoAnswer as exc:
            return self._failed(function, "timeout", f"gave {exc}", count)
        except BadResult as exc:
            return self._failed(function, "result", str(exc), count)
        except Exception as exc:  # noqa: BLE001 - a user's function may raise anything
            return self._failed(
                function, type(exc).__name__, f"raised {where(exc, function.code.file)}", count
            )
        return self._finite(function, values)

    def _finite(self, function: RewardFunction, values: list[float | None]) -> list[float | None]:
        finite = [value if value is not None and math.isfinite(value) else None for value in values]
        if wrong := [value for value in values if value is not None and not math.isfinite(value)]:
            self._failed(function, "not finite", f"gave {wrong[0]}", len(wrong))
        return finite

    def _failed(
        self, function: RewardFunction, kind: str, what: str, count: int
    ) -> list[float | None]:
        self.failures[function.name] += 1
        if (function.name, kind) not in self._said:
            self._said.add((function.name, kind))
            log.warning(
                "reward %s %s; it counts as None for %d completions (further ones are only counted)",
                function.name,
                what,
                count,
            )
        return [None] * count

    def _sum(self, values: Sequence[float | None]) -> Scored:
        names = [function.name for function in self.functions]
        known = [
            function.weight * value
            for function, value in zip(self.functions, values, strict=True)
            if value is not None
        ]
        total = sum(known) if known else None
        if total is not None and not math.isfinite(total):
            total = None  # finite parts, and a sum that no float holds
        return Scored(total, dict(zip(names, values, strict=True)))


# ---- arguments and results ------------------------------------------------------------------------------------


def _columns(
    prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]], row: Row
) -> dict[str, list[Any]]:
    count = len(completions)
    chat = not isinstance(prompt, str)
    return {
        **{name: [value] * count for name, value in row.items()},
        "prompts": [prompt] * count,
        "completions": [
            [{"role": "assistant", "content": text}] if chat else text for text in completions
        ],
        "completion_ids": [list(ids) for ids in completion_ids],
    }


def _arguments(function: RewardFunction, columns: Mapping[str, Any]) -> dict[str, Any]:
    if function.code.name == GYM and function.spec == GYM:
        columns = {
            name: values
            for name, values in columns.items()
            if name not in ("prompts", "completion_ids")
        }
    if function.accepts is not None:
        columns = {name: values for name, values in columns.items() if name in function.accepts}
    return copy.deepcopy(dict(columns))  # a function that changes what it is given changes no task


def _accepted(call: Callable[..., Any], spec: str, key: str) -> frozenset[str] | None:
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(one.kind is one.POSITIONAL_ONLY and one.default is one.empty for one in parameters):
        raise ConfigError(key, spec, "has parameters that cannot be given by name: remove the '/'")
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return frozenset(
        one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    )


def _check_signature(function: RewardFunction, arguments: Mapping[str, Any], row: Row) -> None:
    try:
        inspect.signature(function.code.call).bind(**arguments)
    except TypeError as exc:
        given = ", ".join((*OURS, *row))
        raise ConfigError(function.key, function.spec, f"{exc}; it can be given {given}") from exc
    except ValueError:
        return  # a builtin without a signature: the call will show


def _numbers(result: Any, count: int) -> list[float | None]:
    """``result`` as ``count`` numbers or Nones; BadResult where it is something else."""
    if (
        isinstance(result, str | bytes | Mapping)
        or not hasattr(result, "__iter__")
        or not hasattr(result, "__len__")
    ):
        raise BadResult(f"returned a {type(result).__name__} instead of a list of {count} numbers")
    if getattr(result, "shape", None) == ():
        raise BadResult(f"returned one number instead of a list of {count}")
    if len(result) != count:
        raise BadResult(f"returned {len(result)} values for {count} completions")
    return [_number(value) for value in result]


def _number(value: Any) -> float | None:
    if hasattr(value, "item") and getattr(value, "shape", None) in ((), (1,)):
        value = value.item()  # scalars of numpy and torch
    if value is None:
        return None
    if not isinstance(value, Real):  # bool, int, float, Fraction; no text, no complex
        raise BadResult(f"returned a list with {value!r:.60} in it, which is no number")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _unique(name: str, taken: set[str]) -> str:
    found, number = name, 1
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found


# ---- a worker's side of run.json ------------------------------------------------------------------------------


def _overridden(index: int, override: RewardConfig, identity: RewardIdentity) -> RewardConfig:
    if "weight" in override.model_fields_set and override.weight != identity.weight:
        remedy = f"the run weighs this function {identity.weight:g}: leave the weight out"
        raise ConfigError(f"rewards[{index}].weight", override.weight, remedy)
    return RewardConfig(function=override.function, weight=identity.weight)


def _check_same(function: RewardFunction, identity: RewardIdentity) -> None:
    here, there = function.spec.rpartition(":")[2], identity.function.rpartition(":")[2]
    if here != there:
        raise ConfigError(
            function.key, function.spec, f"the learner's function is {identity.function}"
        )
    if function.code.sha256 == identity.sha256:
        return
    what = (
        f"reasoning-gym {gym_version()} here"
        if function.spec == GYM
        else function.code.file or function.spec
    )
    remedy = (
        f"its code differs from the learner's (sha256 {function.code.sha256} of {what}, the learner's "
        f"{identity.sha256}): install the same version or copy the learner's file"
    )
    raise ConfigError(function.key, function.spec, remedy)
