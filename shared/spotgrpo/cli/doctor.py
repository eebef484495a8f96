"""``spotgrpo doctor``: is everything there that a run needs, and if not, what to do?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from spotgrpo.cli import inputs, machine, servers, vllm_servers
from spotgrpo.cli.checks import Check, Finding, State, exit_code, from_error, run_checks
from spotgrpo.cli.errors import exit_on_errors
from spotgrpo.cli.options import AsJson, Sets, folder_of, load, print_json
from spotgrpo.shared.config import Config, WorkerView
from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.loading import ENVIRONMENT_PREFIX, InvalidConfig
from spotgrpo.shared.log import configure_logging

if TYPE_CHECKING:
    from rich.table import Table

WORDS: Final[dict[State, str]] = {
    "ok": "ok",
    "warn": "warn",
    "fail": "FAIL",
    "unreached": "NO ANSWER",
}
COLOURS: Final[dict[State, str]] = {
    "ok": "green",
    "warn": "yellow",
    "fail": "red",
    "unreached": "red",
}

ConfigOrNone = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CONFIG]",
        help="The run's TOML; without it only this machine is looked at, and what SPOTGRPO_… variables name.",
        show_default=False,
    ),
]
ForWorker = Annotated[
    bool, typer.Option("--worker", help="Check what a worker needs, not data and rewards.")
]


def command(
    config: ConfigOrNone = None,
    sets: Sets = None,
    as_json: AsJson = False,
    worker: ForWorker = False,
) -> None:
    """Check installation, broker, bucket, clock, vLLM servers, model, GPU, data and rewards, and say what to do.

    Changes nothing of a run: what it writes is scratch and is removed. Exits 2 where something failed, 3 where
    only a server did not answer.
    """
    with exit_on_errors():
        configure_logging("warning")
        checks = examine(config, sets or [], for_worker=worker)
        if as_json:
            print_json(
                {"ok": exit_code(checks) == 0, "checks": [check.to_dict() for check in checks]}
            )
        else:
            _print(checks)
        raise typer.Exit(exit_code(checks))


def examine(path: Path | None, sets: Sequence[str], *, for_worker: bool = False) -> list[Check]:
    """Every finding about this machine and, where there is a configuration, about the run it describes."""
    checks = run_checks(
        [
            ("installation", machine.check_installation),
            ("extras", machine.check_extras),
            ("gpu", machine.check_gpu),
        ]
    )
    try:
        config = _load(path, sets, for_worker=for_worker)
    except ConfigError as exc:
        return [*checks, *_refused(exc)]
    if config is None:
        detail = "none given: broker, bucket, model, data and rewards were not looked at"
        return [*checks, Check("configuration", "warn", detail, "spotgrpo doctor CONFIG")]
    checks.append(Check("configuration", "ok", str(path or "from the environment")))
    return checks + run_checks(_findings(config, folder_of(path)))


def _load(
    path: Path | None, sets: Sequence[str], *, for_worker: bool
) -> Config | WorkerView | None:
    if path is not None and not for_worker:
        return load(path, sets, Config, is_quiet=True)
    is_given = path or sets or any(name.startswith(ENVIRONMENT_PREFIX) for name in os.environ)
    return load(path, sets, WorkerView, is_quiet=True) if is_given else None


def _refused(error: ConfigError) -> list[Check]:
    """A finding for every problem of a refused configuration."""
    if not isinstance(error, InvalidConfig):
        return [from_error("configuration", error)]
    return [Check("configuration", "fail", p.what, p.remedy) for p in error.problems]


def _findings(config: Config | WorkerView, folder: Path) -> list[tuple[str, Finding]]:
    found: list[tuple[str, Finding]] = [
        ("disk", lambda: machine.check_disk("disk", config.worker.cache_dir)),
        ("broker", lambda: servers.check_broker(config)),
        ("bucket", lambda: servers.check_bucket(config)),
    ]
    if config.worker.engine == "vllm-server":
        found.append((vllm_servers.NAME, lambda: vllm_servers.check_vllm_servers(config)))
    if isinstance(config, Config):
        checks = inputs.InputChecks(config, folder)
        found += [
            ("disk", lambda: machine.check_disk("disk", config.run.output_dir)),
            ("model", checks.check_model),
            ("data", checks.check_data),
            ("eval", checks.check_held_out),
            ("rewards", checks.check_rewards),
        ]
    return found


def _print(checks: Sequence[Check]) -> None:
    """A table on a terminal, plain lines elsewhere."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        console.print(_table(checks))
        return
    for check in checks:
        print(f"{WORDS[check.state]:<9}  {check.name}: {check.detail}")
        if check.remedy:
            print(f"{'':<9}  -> {check.remedy}")


def _table(checks: Sequence[Check]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="spotgrpo doctor", title_justify="left", show_lines=True)
    for heading in ("check", "", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        mark = f"[{COLOURS[check.state]}]{WORDS[check.state]}[/]"
        table.add_row(check.name, mark, escape(check.detail), escape(check.remedy))
    return table
