"""``spotgrpo services``: a private RabbitMQ and S3 server in the foreground, to try things out."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spotgrpo.cli.errors import exit_on_errors
from spotgrpo.shared.errors import SpotGRPOError
from spotgrpo.shared.log import configure_logging
from spotgrpo.shared.stopping import Stopping

if TYPE_CHECKING:
    from spotgrpo.shared.services import PrivateRabbitMQ, PrivateS3

LOOK_S = 1.0
"""Seconds between looks at whether both servers still run."""

Dir = Annotated[
    Path, typer.Option("--dir", help="Folder for the servers' data, logs and passwords.")
]


def command(folder: Dir = Path(".spotgrpo/services")) -> None:
    """Run a private RabbitMQ and S3 server on this machine until Ctrl-C.

    Prints the variables that make every other command use them, passwords included. Data stays in the folder.
    """
    with exit_on_errors():
        configure_logging()
        from spotgrpo.shared.services import PrivateRabbitMQ, PrivateS3

        with (
            Stopping().on_signals() as stopping,
            PrivateRabbitMQ(folder / "rabbitmq") as broker,
            PrivateS3(folder / "s3") as bucket,
        ):
            for name, value in variables(broker, bucket).items():
                print(f"export {name}={shlex.quote(value)}", flush=True)
            print("# ready; Ctrl-C stops both", flush=True)
            while not stopping.wait(LOOK_S):
                _look_after(broker, bucket)


def variables(broker: PrivateRabbitMQ, bucket: PrivateS3) -> dict[str, str]:
    """Environment variables that point the other commands at these servers."""
    return {
        "SPOTGRPO_BROKER__URL": broker.url,
        "SPOTGRPO_BUCKET__URL": f"s3://{bucket.bucket}/runs",
        "SPOTGRPO_BUCKET__ENDPOINT_URL": bucket.endpoint_url,
        "SPOTGRPO_BUCKET__REGION": bucket.region,
        "SPOTGRPO_BUCKET__ACCESS_KEY_ID": bucket.access_key_id,
        "SPOTGRPO_BUCKET__SECRET_ACCESS_KEY": bucket.secret_access_key,
    }


def _look_after(broker: PrivateRabbitMQ, bucket: PrivateS3) -> None:
    for server in (broker, bucket):
        if not server.is_running:
            raise SpotGRPOError(f"{type(server).__name__} ended; its log is under {server.folder}")
