"""Arguments that several commands share, and what they are turned into."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

import typer

from spotgrpo.shared.config import Config, WorkerView
from spotgrpo.shared.loading import load_config, secrets_of
from spotgrpo.shared.log import configure_logging
from spotgrpo.shared.metrics import as_json

ConfigPath: TypeAlias = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="The run's TOML.", show_default=False)
]
OptionalConfigPath: TypeAlias = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CONFIG]",
        help="The run's TOML; without it everything comes from SPOTGRPO_… variables and --set.",
        show_default=False,
    ),
]
Sets: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="a.b=c", help="Override one setting; repeatable.", show_default=False
    ),
]
AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on stdout.")
]

C = TypeVar("C", Config, WorkerView)


def load(
    path: Path | None, sets: Sequence[str] | None, kind: type[C], *, is_quiet: bool = False
) -> C:
    """The configuration, and logging set up as it says. Raises ConfigError.

    ``is_quiet`` is for commands whose output is a report: no less than warnings, unless all is wanted.
    """
    config = load_config(path, sets or [], kind)
    level = "warning" if is_quiet and config.log.level == "info" else config.log.level
    configure_logging(level, secrets_of(config))
    return config


def folder_of(path: Path | None) -> Path:
    """The folder that relative reward files are looked for in: the TOML's, else the working directory."""
    return (path.parent if path else Path()).resolve()


def print_json(value: Mapping[str, object]) -> None:
    """Print ``value`` to stdout as one JSON object."""
    sys.stdout.write(json.dumps(as_json(value), indent=1, ensure_ascii=False) + "\n")
    sys.stdout.flush()
