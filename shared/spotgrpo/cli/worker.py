"""``spotgrpo worker``: take tasks, sample, score, publish, until told to stop or until the run is over."""

from __future__ import annotations

from spotgrpo.cli.errors import exit_on_errors, stop_is_a_normal_end
from spotgrpo.cli.extras import require
from spotgrpo.cli.options import OptionalConfigPath, Sets, folder_of, load
from spotgrpo.shared.config import WorkerView
from spotgrpo.shared.stopping import AT_ONCE_S, Stopping


def command(config: OptionalConfigPath = None, sets: Sets = None) -> None:
    """Generate groups for a run; start as many as you like, anywhere, at any time.

    Needs run id, broker and bucket; the rest comes from the bucket. Ctrl-C or SIGTERM lets it finish what it
    has begun (worker.drain_s), a second Ctrl-C ends it at once.
    """
    with exit_on_errors():
        view = load(config, sets, WorkerView)
        require("vllm", "worker") if view.worker.engine == "auto" else require(_extra(view))
        with Stopping().on_signals(AT_ONCE_S) as stopping, stop_is_a_normal_end(stopping):
            from spotgrpo.producer.run import run_worker

            run_worker(view, folder_of(config), stopping)


def _extra(view: WorkerView) -> str:
    return "vllm" if view.worker.engine == "vllm" else "worker"
