"""``spotgrpo dead``: tasks that ended without a group that can be trained. From the bucket alone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from spotgrpo.cli.errors import exit_on_errors
from spotgrpo.cli.options import AsJson, ConfigPath, Sets, load, print_json
from spotgrpo.shared.config import WorkerView
from spotgrpo.shared.errors import ConfigError

if TYPE_CHECKING:
    from spotgrpo.consumer.dead import Listing
    from spotgrpo.shared.ids import Keys
    from spotgrpo.shared.ports import ObjectStore

Tasks: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(metavar="TASK...", help="As `dead list` shows them.", show_default=False),
]
All: TypeAlias = Annotated[bool, typer.Option("--all", help="All that there are.")]

app = typer.Typer(
    help="Tasks that failed too often, or whose answers could not be read: list, try again, or drop.",
    no_args_is_help=True,
)


@app.command("list")
def list_command(config: ConfigPath, sets: Sets = None, as_json: AsJson = False) -> None:
    """Show every body that the bucket keeps of dead tasks: what it is, and whether the task is tried again."""
    from dataclasses import asdict

    from spotgrpo.consumer.dead import list_dead

    with exit_on_errors():
        listing = list_dead(*_open(load(config, sets, WorkerView, is_quiet=True)))
        if as_json:
            print_json(asdict(listing))
        else:
            _print_listing(listing)


@app.command("requeue")
def requeue_command(
    config: ConfigPath,
    tasks: Tasks = None,
    is_all: All = False,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Ask the learner for another attempt of dead tasks, beyond train.max_attempts too."""
    from spotgrpo.consumer.dead import ask_again

    with exit_on_errors():
        chosen = _chosen(tasks, is_all=is_all)
        asked = ask_again(*_open(load(config, sets, WorkerView, is_quiet=True)), chosen)
        if as_json:
            print_json({"requeued": asked.tasks, "finished": asked.finished})
            return
        print(f"{len(asked.tasks)} to be tried again {' '.join(asked.tasks)}".rstrip())
        if asked.tasks and asked.finished:
            print(
                "the run is finished: resume its learner with a higher train.max_steps, then they are"
            )
        elif asked.tasks:
            print(
                "the run's learner issues them with its next commits; if none runs now, once one does"
            )


@app.command("drop")
def drop_command(
    config: ConfigPath,
    tasks: Tasks = None,
    is_all: All = False,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Delete bodies that nobody needs to look at any more; the books keep their count."""
    from spotgrpo.consumer.dead import drop

    with exit_on_errors():
        chosen = _chosen(tasks, is_all=is_all)
        dropped = drop(*_open(load(config, sets, WorkerView, is_quiet=True)), chosen)
        if as_json:
            print_json({"dropped": dropped})
        else:
            print(f"{len(dropped)} dropped {' '.join(dropped)}".rstrip())


def _open(view: WorkerView) -> tuple[ObjectStore, Keys]:
    from spotgrpo.shared.ids import Keys
    from spotgrpo.shared.s3 import S3Store

    return S3Store.connect(view.bucket), Keys(view.run.id)


def _chosen(tasks: list[str] | None, *, is_all: bool) -> list[str] | None:
    """The tasks named; None for all of them."""
    if bool(tasks) == is_all:
        raise ConfigError("TASK", " ".join(tasks or []), "name tasks, or give --all instead")
    return None if is_all else tasks


def _print_listing(listing: Listing) -> None:
    print(f"{listing.dead} dead in the books of {listing.run}; {len(listing.tasks)} bodies kept")
    for one in listing.tasks:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.at))
        print(f"{one.task}  {when}  {one.size:,} bytes  {one.stands}")
        print(f"    {one.what}")
