"""The watch for a cloud's notice that this machine will vanish, which asks the worker to drain.

consumes:     what the cloud's metadata server says, once every few seconds
waits for:    nothing that the worker needs: a daemon thread of its own, which neither start nor exit waits for
produces:     ``Stopping.ask`` with the seconds left
on stop:      goes on until it is closed, since SIGTERM or a mere risk may come before the time is known
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Self

from spotgrpo.producer.clouds import TIMEOUT_S, Aws, Azure, Cloud, Gcp, MetadataServer, Notice
from spotgrpo.shared.config import WorkerConfig
from spotgrpo.shared.errors import TransientError
from spotgrpo.shared.stopping import Stopping

log = logging.getLogger(__name__)

FIND_TRIES = 3
FIND_AGAIN_S = 2.0
"""A metadata server may come a moment later than the machine's first processes."""
FAILURES_BEFORE_WORD = 3
"""In a row, before a silent metadata server is worth a line: single answers get lost."""


class NoticeWatch:
    """Watches while its block runs, where ``worker.notices`` wants it.

    Args:
        poll_s: seconds between two looks; None: what suits the cloud.
        timeout_s: of one request.
        again_s: seconds between two tries to find out which cloud this is.
    """

    def __init__(
        self,
        config: WorkerConfig,
        stopping: Stopping,
        *,
        poll_s: float | None = None,
        timeout_s: float = TIMEOUT_S,
        again_s: float = FIND_AGAIN_S,
    ) -> None:
        self._config = config
        self._stopping = stopping
        self._poll_s, self._again_s = poll_s, again_s
        server = MetadataServer(config.notice_url, timeout_s)
        self._clouds: dict[str, Cloud] = {
            "gcp": Gcp(server),
            "azure": Azure(server),
            "aws": Aws(server, drain_on_rebalance=config.drain_on_rebalance),
        }
        self._closed = threading.Event()
        self._failures = 0
        self._has_asked = False
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)

    def __enter__(self) -> Self:
        if self._config.notices != "none":
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed.set()  # not joined: it may be waiting for an answer

    @property
    def is_watching(self) -> bool:
        """True until the notice came, or no cloud was found, or the block ended."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            cloud = self._find()
            if cloud is not None:
                self._watch(cloud)
        except Exception:
            log.exception("notices of the cloud are no longer watched for")

    def _find(self) -> Cloud | None:
        if self._config.notices != "auto":
            return self._clouds[self._config.notices]
        for _ in range(FIND_TRIES):
            for cloud in self._clouds.values():
                if self._closed.is_set():
                    return None
                if _answers(cloud):
                    log.info("this machine is %s's: its notices drain this worker", cloud.name)
                    return cloud
            self._closed.wait(self._again_s)
        log.debug("no cloud's metadata server answers: no notices are watched for")
        return None

    def _watch(self, cloud: Cloud) -> None:
        """Look until the end is known; a risk is passed on once and watched further."""
        is_over = False
        while not is_over and not self._closed.is_set():
            notice = self._look(cloud)
            if notice is not None and not self._closed.is_set():
                is_over = self._pass_on(notice)
            if not is_over:
                self._closed.wait(cloud.poll_s if self._poll_s is None else self._poll_s)

    def _look(self, cloud: Cloud) -> Notice | None:
        """What the cloud says; a server that does not answer is said once, and once when it does again."""
        try:
            notice = cloud.look()
        except TransientError as exc:
            self._failures += 1
            if self._failures == FAILURES_BEFORE_WORD:
                log.warning("notices of %s: %s; trying again", cloud.name, exc)
            return None
        if self._failures >= FAILURES_BEFORE_WORD:
            log.info("notices of %s: works again", cloud.name)
        self._failures = 0
        return notice

    def _pass_on(self, notice: Notice) -> bool:
        """Ask the worker to drain; True where no later notice could say more."""
        is_end = notice.within_s is not None
        if is_end or not self._has_asked:
            log.warning("%s: draining", notice)
            self._stopping.ask(notice.what, notice.within_s)
            self._has_asked = True
        return is_end


def _answers(cloud: Cloud) -> bool:
    try:
        return cloud.is_here()
    except TransientError as exc:
        log.debug("not %s: %s", cloud.name, exc)
        return False
