"""``spotgrpo replay``: a step that was skipped, since it was not finite, taken again in memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from spotgrpo.cli.errors import EXIT_ERROR, exit_on_errors
from spotgrpo.cli.extras import require
from spotgrpo.cli.options import AsJson, ConfigPath, Sets, load, print_json
from spotgrpo.shared.config import Config, WorkerView
from spotgrpo.shared.loading import key_of

if TYPE_CHECKING:
    from spotgrpo.consumer.replay import Replayed
    from spotgrpo.shared.ids import Keys
    from spotgrpo.shared.ports import ObjectStore

SHOWN: Final = 6
"""Parameters that are named."""
WRAPPED: Final = "base_model.model."
"""What peft puts before every name."""

Step = Annotated[
    str | None,
    typer.Argument(
        metavar="[STEP]", help="As the listing without it shows them.", show_default=False
    ),
]


def command(
    config: ConfigPath, step: Step = None, sets: Sets = None, as_json: AsJson = False
) -> None:
    """Show the skipped steps that the bucket keeps, or take one of them again and say where it is not finite.

    Takes it from the recorded trainer state with the recorded [loss], [train] and [sampling], and with those of
    --set in their place. Nothing is stored. Exits 1 if it is still not finite.
    """
    with exit_on_errors():
        if step is None:
            view = load(config, sets, WorkerView, is_quiet=True)
            _show_list(view, as_json=as_json)
            return
        loaded = load(config, sets, Config, is_quiet=True)
        require("learner")
        replayed = _replay(loaded, step, sets or [])
        if as_json:
            print_json({"run": loaded.run.id, **replayed.to_dict()})
        else:
            _print(loaded.run.id, replayed)
        if not replayed.is_finite:
            raise typer.Exit(EXIT_ERROR)


def _open(config: Config | WorkerView) -> tuple[ObjectStore, Keys]:
    from spotgrpo.shared.ids import Keys
    from spotgrpo.shared.s3 import S3Store

    return S3Store.connect(config.bucket), Keys(config.run.id)


def _replay(config: Config, step: str, sets: Sequence[str]) -> Replayed:
    from spotgrpo.consumer.replays import check_sets, fetch, settings_of

    check_sets(sets)
    recorded = fetch(*_open(config), step)
    settings = settings_of(recorded.step, sets)
    if not any(key_of(item) == "model.dtype" for item in sets):
        model = config.model.model_copy(update={"dtype": recorded.run.dtype})
        config = config.model_copy(update={"model": model})
    from spotgrpo.consumer.replay import replay  # imports torch: not before all else is right

    return replay(recorded, settings, config)


def _show_list(view: WorkerView, *, as_json: bool) -> None:
    from dataclasses import asdict

    from spotgrpo.consumer.replays import list_kept

    kept = list_kept(*_open(view))
    if as_json:
        print_json({"run": view.run.id, "steps": [asdict(one) for one in kept]})
        return
    print(f"{len(kept)} skipped steps of {view.run.id} can be taken again")
    for one in kept:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.at))
        what = f"loss {one.loss}, gradient norm {one.grad_norm}"
        print(f"{one.step}  {when}  {what}; {one.groups} groups of {', '.join(one.workers)}")


def _print(run: str, replayed: Replayed) -> None:
    then = f"loss {replayed.recorded[0]}, gradient norm {replayed.recorded[1]}"
    now = f"loss {replayed.loss:.6g}, gradient norm {replayed.grad_norm:.6g}"
    print(f"step {replayed.step} of {run}, from version {replayed.version}")
    print(f"then        {then}")
    for key, (before, after) in replayed.changed.items():
        print(f"changed     {key}: {before!r} -> {after!r}")
    if not replayed.is_trained:
        print("now         these settings leave nothing of it to train")
        return
    print(f"now         {now}: {'finite' if replayed.is_finite else 'still not finite'}")
    _print_found(replayed)
    if replayed.cause is not None:
        print(f"likely      {replayed.cause}")


def _print_found(replayed: Replayed) -> None:
    found, one = replayed.found, replayed.found.first
    if one is not None:
        where = "" if found.apart else "; only where sequences share a row"
        mask = "" if one.is_trained else ", not trained"
        values = ", ".join(f"{name} {value:.6g}" for name, value in one.values.items())
        place = (
            f"group {one.task} (worker {replayed.worker}), rollout {one.rollout}, token {one.token}"
        )
        ids = f"id {one.id} after id {replayed.before}{mask}"
        many = f"{found.odd_tokens} of {found.tokens} tokens, in {found.odd_rollouts} rollouts"
        print(f"not finite  {many}{where}")
        print(f"first       {place} ({ids}): {', '.join(one.odd)}")
        print(f"            {values}")
    if found.gradient_tasks:
        tasks = ", ".join(found.gradient_tasks)
        print(f"gradient    not finite since the micro-batch of {tasks}")
    for gradient in found.odd_gradients[:SHOWN]:
        entries = f"{gradient.odd} of {gradient.size} entries"
        what = entries if gradient.odd else "its norm overflows"
        print(f"parameter   {gradient.name.removeprefix(WRAPPED)}: {what}")
    if found.odd_gradients:
        print(f"parameters  {len(found.odd_gradients)} of {found.parameters} in all")
