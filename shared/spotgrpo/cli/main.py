"""The ``spotgrpo`` command."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from spotgrpo.cli import audit, dead, doctor, export, learner, replay, services, worker

app = typer.Typer(
    name="spotgrpo",
    help="Asynchronous GRPO with LoRA over a message queue and a bucket.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("learner")(learner.command)
app.command("worker")(worker.command)
app.command("doctor")(doctor.command)
app.command("export")(export.command)
app.command("audit")(audit.command)
app.add_typer(dead.app, name="dead")
app.command("replay")(replay.command)
app.command("services")(services.command)


@app.command(
    "demo",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def demo(ctx: typer.Context) -> None:
    """Train a small real model through a private broker and bucket; `spotgrpo demo --help` for its options."""
    from spotgrpo.cli.demo import command  # its options are its own, and so are its imports

    inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    inner.command()(command)
    inner(args=ctx.args, prog_name="spotgrpo demo")


def _print_version(value: bool) -> None:
    if value:
        print(f"spotgrpo {version('spotgrpo')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Asynchronous GRPO with LoRA over a message queue and a bucket."""


def main() -> None:
    """Run the command line; ends the process with the exit code."""
    app(prog_name="spotgrpo")


if __name__ == "__main__":
    main()
