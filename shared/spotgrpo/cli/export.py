"""``spotgrpo export``: a version of a run as a PEFT folder, or merged into its base model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spotgrpo.cli.errors import exit_on_errors
from spotgrpo.cli.extras import require
from spotgrpo.cli.options import AsJson, ConfigPath, Sets, load, print_json
from spotgrpo.shared.config import Config
from spotgrpo.shared.errors import ConfigError, NotStored
from spotgrpo.shared.ids import Keys, PolicyVersion
from spotgrpo.shared.manifest import Latest
from spotgrpo.shared.ports import ObjectStore

Out = Annotated[
    Path, typer.Option("--out", help="Folder to write; must be new or empty.", show_default=False)
]
Version = Annotated[
    int | None,
    typer.Option(
        "--version", min=0, help="Version number; default: the newest.", show_default=False
    ),
]
Best = Annotated[
    bool, typer.Option("--best", help="The version with the best reward on held-out prompts.")
]
Merge = Annotated[
    bool, typer.Option("--merge", help="Write a full model instead of an adapter (needs torch).")
]


def command(
    config: ConfigPath,
    out: Out,
    version: Version = None,
    best: Best = False,
    merge: Merge = False,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Write a version, verified against its manifest, as a folder that peft, vLLM and others load as it is."""
    with exit_on_errors():
        loaded = load(config, sets, Config)
        if merge:
            require("learner", "worker")
        if best and version is not None:
            raise ConfigError("--version", version, "name it, or the best with --best, not both")
        exported = _export(loaded, out, version, best=best, merge=merge)
        if as_json:
            print_json(
                {
                    "run": loaded.run.id,
                    "version": exported,
                    "folder": str(out.resolve()),
                    "merged": merge,
                }
            )
        else:
            print(f"{exported} of {loaded.run.id} is in {out}")


def _export(
    config: Config, out: Path, number: int | None, *, best: bool, merge: bool
) -> PolicyVersion:
    from spotgrpo.consumer.export import best_version, export_version
    from spotgrpo.shared.s3 import S3Store

    store, keys = S3Store.connect(config.bucket), Keys(config.run.id)
    version = None if number is None else _newest_of(store, keys, number)
    if best:
        version = best_version(store, keys)
    return export_version(store, keys, version, out, merge=merge, model_config=config.model)


def _newest_of(store: ObjectStore, keys: Keys, number: int) -> PolicyVersion:
    """The version of that number in the run's line; where takeovers left several, the one of the newest epoch."""
    try:
        newest = Latest.from_bytes(store.get(keys.latest).body).serving.version
    except NotStored as exc:
        raise ConfigError(
            "run.id", keys.run, "the bucket has no run of this id; name one that was started"
        ) from exc
    there = {
        PolicyVersion.parse(info.key.removeprefix(keys.versions).partition("/")[0])
        for info in store.list(keys.versions)
        if info.key.endswith("/manifest.json")
    }
    there = {
        version for version in there if version.number <= newest
    }  # beyond: given up in a takeover
    found = [version for version in there if version.number == number]
    if not found:
        numbers = ", ".join(str(n) for n in sorted({version.number for version in there})[-20:])
        raise ConfigError(
            "--version", number, f"the bucket keeps {numbers or 'no version of this run'}"
        )
    return max(found)
