"""``spotgrpo audit``: do the books of a run balance? From the bucket alone."""

from __future__ import annotations

from collections.abc import Mapping

import typer

from spotgrpo.cli.errors import EXIT_ERROR, complain, exit_on_errors
from spotgrpo.cli.options import AsJson, ConfigPath, Sets, load, print_json
from spotgrpo.shared.config import WorkerView


def command(config: ConfigPath, sets: Sets = None, as_json: AsJson = False) -> None:
    """Add up every ledger of the run; exit 1 unless issued = trained + flat + stale + dead + outstanding."""
    with exit_on_errors():
        view = load(config, sets, WorkerView)
        report, is_balanced = _audit(view)
        if as_json:
            print_json(report)
        else:
            _print_table(view.run.id, report)
    if not is_balanced:
        complain(f"the books of run {view.run.id} do not balance")
        raise typer.Exit(EXIT_ERROR)


def _audit(view: WorkerView) -> tuple[Mapping[str, object], bool]:
    from spotgrpo.consumer.audit import audit_run
    from spotgrpo.shared.ids import Keys
    from spotgrpo.shared.s3 import S3Store

    report = audit_run(S3Store.connect(view.bucket), Keys(view.run.id))
    return report.to_dict(), report.balanced


def _print_table(run: str, report: Mapping[str, object]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "", title=f"books of {run}", show_header=False)
    for name, value in report.items():
        table.add_row(name.replace("_", " "), str(value))
    Console().print(table)
