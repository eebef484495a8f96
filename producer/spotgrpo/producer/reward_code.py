"""Finding the code of a reward function: ``package.module:function`` or ``path/to/file.py:function``.

What is digested is what runs: a file is read once, and both its digest and its module come from those bytes (no
byte code that an edit within the same second leaves behind).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from spotgrpo.shared import gym
from spotgrpo.shared.errors import ConfigError

GYM: Final = "reasoning_gym"
HOW: Final = "give package.module:function, path/to/file.py:function, or reasoning_gym"


@dataclass(frozen=True)
class RewardCode:
    """A function as it was found.

    Attributes:
        name: the function's own name.
        call: the function, or for ``reasoning_gym`` the scorer.
        sha256: over the source that holds the function (hex).
        file: that source, where there is one.
    """

    name: str
    call: Callable[..., Any]
    sha256: str
    file: str | None


def find_reward(spec: str, base_dir: Path, key: str) -> RewardCode:
    """The function that ``spec`` names; a file's path is taken from ``base_dir``.

    Raises:
        ConfigError: under ``key``: not found, does not import (with the line), or cannot be called.
    """
    if spec == GYM:
        digest = hashlib.sha256(f"reasoning_gym {gym.gym_version()}".encode()).hexdigest()
        return RewardCode(GYM, score_with_gym, digest, None)
    place, colon, attribute = spec.rpartition(":")
    if not colon or not place or not attribute:
        raise ConfigError(key, spec, HOW)
    if place.endswith(".py"):
        path = (base_dir / Path(place).expanduser()).resolve()
        module, source = _load_file(path, spec, key)
        return _found(spec, key, module, attribute, [source])
    return _found(spec, key, _import(place, spec, base_dir, key), attribute, [])


def score_with_gym(completions: list[Any], **columns: list[Any]) -> list[float]:
    """The scorer of the reasoning-gym data set that each row came from."""
    return [
        gym.score(_text(one), {name: values[index] for name, values in columns.items()})
        for index, one in enumerate(completions)
    ]


def where(exc: BaseException, file: str | None) -> str:
    """``ValueError: text (rewards.py line 12)``: the last line of ``file`` that led to ``exc``."""
    text = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
    if isinstance(exc, SyntaxError) and exc.filename and exc.lineno:
        return f"{type(exc).__name__}: {exc.msg} ({Path(exc.filename).name} line {exc.lineno})"
    frames = traceback.extract_tb(exc.__traceback__)
    lines = [frame for frame in frames if frame.filename == file]
    return f"{text} ({Path(lines[-1].filename).name} line {lines[-1].lineno})" if lines else text


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _found(
    spec: str, key: str, module: ModuleType, attribute: str, sources: list[bytes]
) -> RewardCode:
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
            has = f"its functions are {', '.join(names)}" if names else "it has no functions"
            raise ConfigError(
                key, spec, f"no {attribute!r} in {module.__file__ or module.__name__}; {has}"
            )
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(
            key, spec, f"{attribute} is a {type(target).__name__}, which cannot be called"
        )
    file = _source_file(target)
    if file and (not sources or Path(file).resolve() != Path(str(module.__file__)).resolve()):
        sources = [*sources, Path(file).read_bytes()]
    return RewardCode(attribute.rpartition(".")[2], target, _digest(sources, spec, module), file)


def _source_file(target: Any) -> str | None:
    unwrapped = inspect.unwrap(target)
    unwrapped = getattr(unwrapped, "func", unwrapped)  # functools.partial
    try:
        return inspect.getsourcefile(unwrapped)
    except TypeError:
        try:
            return inspect.getsourcefile(type(unwrapped))  # an instance that can be called
        except TypeError:
            return None


def _digest(sources: list[bytes], spec: str, module: ModuleType) -> str:
    """Digest of the one file that there normally is; of all, where a file hands on another's function."""
    digests = [hashlib.sha256(source).digest() for source in sources]
    if len(digests) == 1:
        return digests[0].hex()
    named = f"{spec} {getattr(module, '__version__', '')}".encode() if not digests else b""
    return hashlib.sha256(b"".join(digests) or named).hexdigest()


# ---- importing ------------------------------------------------------------------------------------------------


def _import(name: str, spec: str, base_dir: Path, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name and (name == exc.name or name.startswith(f"{exc.name}.")):
            raise ConfigError(key, spec, _not_installed(name, exc.name, base_dir)) from exc
        raise ConfigError(key, spec, f"{name} does not import: {_last_line(exc)}") from exc
    except (Exception, SystemExit) as exc:
        raise ConfigError(key, spec, f"{name} does not import: {_last_line(exc)}") from exc


def _not_installed(name: str, missing: str, base_dir: Path) -> str:
    file = Path(*name.split(".")).with_suffix(".py")
    hint = f"; for the file write {file}:function" if (base_dir / file).is_file() else ""
    return f"there is no module {missing!r} in this Python environment: install it, or {HOW}{hint}"


def _last_line(exc: BaseException) -> str:
    frames = [
        frame
        for frame in traceback.extract_tb(exc.__traceback__)
        if "importlib" not in frame.filename
    ]
    return where(exc, frames[-1].filename if len(frames) > 1 else None)


class _Exactly(SourceFileLoader):
    """Loads the bytes that it is given, and neither reads nor writes byte code."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_data(self, path: str) -> bytes:  # noqa: ARG002 - the base class's signature
        return self._source

    def path_stats(self, path: str) -> dict[str, Any]:
        raise OSError(path)  # the documented way to say: no byte code


def _load_file(path: Path, spec: str, key: str) -> tuple[ModuleType, bytes]:
    if not path.is_file():
        raise ConfigError(key, spec, f"no such file: {path}")
    try:
        source = path.read_bytes()
    except OSError as exc:
        raise ConfigError(key, spec, f"cannot read {path}: {exc.strerror}") from exc
    name = (
        "spotgrpo_rewards_" + hashlib.sha256(str(path).encode() + b"\0" + source).hexdigest()[:16]
    )
    if name in sys.modules:
        return sys.modules[name], source
    loader = _Exactly(name, str(path), source)
    found = importlib.util.spec_from_file_location(name, path, loader=loader)
    if found is None:
        raise ConfigError(key, spec, f"{path} is not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses, pickling and typing look their module up there
    if str(path.parent) not in sys.path:
        sys.path.append(
            str(path.parent)
        )  # modules beside it, as for a script, but after all others
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as exc:
        del sys.modules[name]
        raise ConfigError(
            key, spec, f"{path.name} does not import: {where(exc, str(path))}"
        ) from exc
    return module, source
