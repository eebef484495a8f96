"""From TOML, environment and ``--set`` to a validated configuration, or to one message that says what is wrong.

The three are merged in that order into one tree; the tree is checked for unknown keys and then validated, and
every problem found is named at once. ``python -m spotgrpo.shared.loading`` prints the README's option table.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, cast
from urllib.parse import unquote

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from spotgrpo.shared.config import Config, WorkerView
from spotgrpo.shared.errors import MAX_SHOWN, ConfigError
from spotgrpo.shared.log import HIDDEN, password_of, redact, redact_url
from spotgrpo.shared.options import Option, option_table, options, tables
from spotgrpo.shared.servable import NOT_SERVED

__all__ = [
    "InvalidConfig",
    "key_of",
    "load_config",
    "option_table",
    "override",
    "redacted",
    "secrets_of",
    "table_of",
]

Tree: TypeAlias = dict[str, Any]
C = TypeVar("C", Config, WorkerView)
M = TypeVar("M", bound=BaseModel)

ENVIRONMENT_PREFIX: Final = "SPOTGRPO_"
DATA_SUFFIXES: Final = (".jsonl", ".json", ".parquet", ".csv")
_SECRET_NAME = re.compile(r"secret|password|passwd|token$|(^|_)key$", re.IGNORECASE)
_ABSENT: Final = object()


class Problem(NamedTuple):
    """One thing that is wrong: the dotted key, what was given (``_ABSENT``: nothing), what would be right."""

    key: str
    value: object
    remedy: str

    @property
    def what(self) -> str:
        """Key and value, secrets blacked out."""
        if self.value is _ABSENT:
            return self.key
        shown = repr(_hidden(self.key, self.value))
        shown = shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "…"
        return f"{self.key} = {shown}"


class InvalidConfig(ConfigError):
    """All that is wrong with a configuration, one line each; ``key``, ``value``, ``remedy`` are the first's."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        first = problems[0]
        value = None if first.value is _ABSENT else _hidden(first.key, first.value)
        super().__init__(first.key, value, first.remedy)
        self.problems = tuple(problems)
        self.args = ("\n".join(f"{problem.what}: {problem.remedy}" for problem in problems),)


def load_config(
    path: Path | None,
    sets: Sequence[str] = (),
    kind: type[C] = Config,  # type: ignore[assignment]  # a default for a type variable
    environ: Mapping[str, str] = os.environ,
) -> C:
    """The configuration of ``path`` (None: no file), overridden by environment and ``sets``.

    Args:
        path: a TOML. Where ``data.path``, ``eval.path``, ``model.name`` or ``broker.ca_file`` exists beside it, that
            is meant.
            Reward files stay as they are written: whoever resolves them is given the folder.
        sets: ``a.b=c``, values as in TOML, anything else as text; ``rewards.0.weight=2`` names an element.
        kind: Config, or WorkerView, which passes over the tables that only a learner reads.
        environ: ``SPOTGRPO_SECTION__KEY``, same values. Names are lowered.

    Raises:
        ConfigError: names every key that is unknown, missing or wrong, its value and what would be right.
    """
    tree = _read(path) if path is not None else {}
    problems: list[Problem] = []
    for key, text in [*_from_environment(environ, problems), *_from_sets(sets, problems)]:
        problems += _assign(tree, key, text)
    problems += _unknown(tree)
    wanted = {name: tree[name] for name in kind.model_fields if name in tree}
    for name, field in kind.model_fields.items():
        if field.is_required() and name in tables() and f"{name}.*" not in tables():
            wanted.setdefault(name, {})  # so that what is missing is named, not the table
    try:
        config = kind.model_validate(wanted)
    except ValidationError as exc:
        known = {problem.key for problem in problems}
        problems += [problem for problem in _explain(exc, wanted) if problem.key not in known]
        raise InvalidConfig(problems) from exc
    if problems:
        raise InvalidConfig(problems)
    return config


def override(tables: Mapping[str, Mapping[str, Any]], sets: Sequence[str], kind: type[M]) -> M:
    """Some tables of a configuration, with those of ``sets`` that are in them put over what they hold.

    Args:
        tables: by name; nothing else has a say, neither a TOML nor the environment.
        sets: as :func:`load_config` has taken them.
        kind: has a field for each of the tables.

    Raises:
        ConfigError: names every key that is wrong, its value and what would be right.
    """
    tree: Tree = {name: dict(table) for name, table in tables.items()}
    problems: list[Problem] = []
    for key, text in _from_sets(sets, problems):
        if table_of(key) in tables:
            problems += _assign(tree, key, text)
    try:
        found = kind.model_validate(tree)
    except ValidationError as exc:
        raise InvalidConfig([*problems, *_explain(exc, tree)]) from exc
    if problems:
        raise InvalidConfig(problems)
    return found


def key_of(item: str) -> str:
    """The dotted key of an item of ``--set``."""
    return item.partition("=")[0].strip()


def table_of(item: str) -> str:
    """The table that a dotted key, or an item of ``--set``, is in."""
    return key_of(item).partition(".")[0]


def redacted(config: BaseModel) -> dict[str, Any]:
    """``config`` as JSON types, secrets blacked out; passwords of URLs too."""
    shown = _hidden("", config.model_dump(mode="json"))
    url = getattr(getattr(config, "broker", None), "url", None)
    if isinstance(url, SecretStr) and isinstance(shown, dict):
        shown["broker"]["url"] = redact_url(url.get_secret_value())
    return cast(dict[str, Any], shown)


def secrets_of(config: Config | WorkerView) -> tuple[str, ...]:
    """The texts that no log may show: the broker's password, as given and unquoted, and the keys."""
    password = password_of(config.broker.url.get_secret_value())
    keys = (config.bucket.secret_access_key, config.worker.server_api_key)
    found = (password, unquote(password), *(key.get_secret_value() for key in keys if key))
    return tuple(dict.fromkeys(text for text in found if text))


# ---- the three sources ----------------------------------------------------------------------------------------


def _read(path: Path) -> Tree:
    remedy = "give the path of a TOML that can be read"
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ConfigError("CONFIG", str(path), f"no such file; {remedy}") from exc
    except OSError as exc:
        raise ConfigError("CONFIG", str(path), f"{exc.strerror}; {remedy}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError("CONFIG", str(path), f"not UTF-8 ({exc.reason}); {remedy}") from exc
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError("CONFIG", str(path), f"not valid TOML: {exc}") from exc
    _resolve_paths(tree, path.parent)
    return tree


def _resolve_paths(tree: Tree, folder: Path) -> None:
    """Make paths that exist beside the TOML absolute: the same file works from any working directory.

    Not those of reward files: ``run.json`` carries them to workers on other machines.
    """
    paths = (("data", "path"), ("eval", "path"), ("model", "name"), ("broker", "ca_file"))
    for name, key in paths:
        table = found if isinstance(found := tree.get(name), dict) else {}
        if isinstance(value := table.get(key), str) and value:
            table[key] = _beside(folder, value)


def _beside(folder: Path, value: str) -> str:
    looks_like_path = "/" in value or value.endswith(DATA_SUFFIXES)
    found = folder / value
    return str(found.resolve()) if looks_like_path and found.exists() else value


def _from_environment(
    environ: Mapping[str, str], problems: list[Problem]
) -> Iterator[tuple[str, str]]:
    flat = {key.replace(".", "_"): key for key in options()}
    for name, text in sorted(environ.items()):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        rest = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        if "__" in rest:
            yield rest.replace("__", "."), text
        elif rest in flat:  # SPOTGRPO_BROKER_URL would be passed over in silence
            right = ENVIRONMENT_PREFIX + flat[rest].replace(".", "__").upper()
            problems.append(Problem(name, _ABSENT, f"unknown; did you mean {right}?"))
        elif rest in tables():
            yield rest, text


def _from_sets(sets: Sequence[str], problems: list[Problem]) -> Iterator[tuple[str, str]]:
    for item in sets:
        key, equals, text = item.partition("=")
        if equals and key.strip():
            yield key.strip(), text.strip()
        else:
            problems.append(Problem("--set", redact(item), "give it as a.b=value"))


def _value(text: str, option: Option | None) -> Any:
    """``text`` as a TOML value, or as it is; an option that takes only text takes it as it is."""
    try:
        parsed = tomllib.loads(f"v = {text}")
    except tomllib.TOMLDecodeError:
        return text
    if set(parsed) != {"v"} or (option and option.is_text and not isinstance(parsed["v"], str)):
        return text
    return parsed["v"]


def _assign(tree: Tree, key: str, text: str) -> list[Problem]:
    """Put the value of ``key`` into ``tree``; tables are merged, the rest is replaced."""
    parts = key.split(".")
    value = _value(text, options().get(_starred(parts)))
    if not _is_known(parts):
        return [Problem(key, value, _unknown_remedy(key))]
    place: Any = tree
    for part, following in zip(parts, [*parts[1:], ""], strict=True):
        if isinstance(place, list):
            if int(part) > len(place):
                return [
                    Problem(
                        key, value, f"the list has {len(place)} elements; the next is {len(place)}"
                    )
                ]
            if int(part) == len(place):
                place.append(None)
            at: Any = int(part)
        else:
            at = part
            place.setdefault(at, None)
        if not following:
            place[at] = _merged(place[at], value)
        elif not isinstance(place[at], dict | list):
            place[at] = [] if following.isdigit() else {}
        place = place[at]
    return []


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    return new


# ---- what is wrong --------------------------------------------------------------------------------------------


def _starred(parts: Sequence[str]) -> str:
    return ".".join("*" if part.isdigit() else part for part in parts)


def _is_known(parts: Sequence[str]) -> bool:
    name = _starred(parts)
    if name in options() or name in tables():
        return True
    return any(o.is_free and name.startswith(f"{o.key}.") for o in options().values())


def _unknown(tree: Tree, prefix: str = "") -> list[Problem]:
    """Problems for keys that no option has, at any depth."""
    found: list[Problem] = []
    for key, value in tree.items():
        name = prefix + key
        if not _is_known(name.split(".")):
            found.append(Problem(name, value, _unknown_remedy(name)))
        elif _starred(name.split(".")) in tables() and isinstance(value, dict):
            found += _unknown(value, f"{name}.")
        elif f"{name}.*" in tables() and isinstance(value, list):
            for index, item in enumerate(value):
                found += _unknown(item, f"{name}.{index}.") if isinstance(item, dict) else []
    return found


def _unknown_remedy(key: str) -> str:
    if key in NOT_SERVED:
        return f"not supported; {NOT_SERVED[key]}"
    right = _nearest(key)
    return f"unknown; did you mean {right}?" if right else "unknown; the README lists every option"


def _nearest(key: str) -> str | None:
    """The option whose dotted name is nearest to ``key``: the same table's first, then by its last part."""
    table, _, last = _starred(key.split(".")).rpartition(".")
    siblings = {o.key.rpartition(".")[2]: o.key for o in options().values() if o.parent == table}
    if near := difflib.get_close_matches(last, siblings, n=1):
        return siblings[near[0]]
    named = [o.key for o in options().values() if o.key.rpartition(".")[2] == last]
    if named and not table:  # the tables that every run has come first
        return named[0]
    candidates = named or [*options(), *(t for t in tables() if not t.endswith("*"))]
    near = difflib.get_close_matches(_starred(key.split(".")), candidates, n=1, cutoff=0.6)
    return near[0] if near else next(iter(named), None)


def _explain(error: ValidationError, tree: Tree) -> list[Problem]:
    """What pydantic found, as problems, those of one option's alternatives joined."""
    found: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        if detail["type"] == "extra_forbidden":
            continue  # _unknown names these, and the nearest right key
        parts = _option_path(detail["loc"])
        key = ".".join(parts)
        problem = _problem(key, detail, _look_up(tree, parts))
        if key in found and problem.remedy not in found[key].remedy:
            head = problem.remedy.split(" (")[0]
            problem = found[key]._replace(remedy=f"{head}, or {found[key].remedy}")
        found[key] = problem
    return list(found.values())


def _option_path(place: tuple[int | str, ...]) -> list[str]:
    """The longest head of pydantic's place that names an option or a table."""
    parts = [str(part) for part in place]
    while len(parts) > 1 and not _is_known(parts):
        parts.pop()
    return parts


def _look_up(tree: Any, parts: Sequence[str]) -> object:
    for part in parts:
        if isinstance(tree, dict) and part in tree:
            tree = tree[part]
        elif isinstance(tree, list) and part.isdigit() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return _ABSENT
    return tree


def _problem(key: str, detail: ErrorDetails, value: object) -> Problem:
    option = options().get(_starred(key.split(".")))
    meaning = f" ({option.meaning.rstrip('.')})" if option else ""
    if detail["type"] == "missing":
        name = ENVIRONMENT_PREFIX + key.replace(".", "__").upper()
        return Problem(key, _ABSENT, f"missing; give it in the TOML or as {name}{meaning}")
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    message = message.replace("Input should be", "should be", 1)
    if detail["type"].startswith("model_"):
        message = "should be a table"
    return Problem(key, value, message + meaning)


def _hidden(key: str, value: object) -> object:
    """``value`` with everything that is or may be a secret blacked out, at any depth."""
    if key == "broker.url" and isinstance(value, str) and "://" in value:
        return redact_url(value)
    option = options().get(_starred(key.split(".")))
    is_secret = option.is_secret if option else bool(_SECRET_NAME.search(key.rpartition(".")[2]))
    if is_secret and value is not None:
        return HIDDEN
    if isinstance(value, dict):
        return {name: _hidden(f"{key}.{name}".lstrip("."), item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(f"{key}.{index}", item) for index, item in enumerate(value)]
    return redact(value) if isinstance(value, str) else value


if __name__ == "__main__":
    sys.stdout.write(option_table())
