"""What a worker serves is proven again, from time to time.

consumes:     the versions that requests may be running on
produces:     a verdict for each, every ``every_s``
promises:     generation goes on meanwhile; once a probe has failed, and failed again at once, nothing that the engine
              gave leaves the worker
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotgrpo.shared.errors import IntegrityError, TransientError

if TYPE_CHECKING:
    from spotgrpo.producer.policy import PolicyWatcher

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prover:
    """Proves versions that were proven when they were loaded.

    Args:
        every_s: seconds between two rounds, jittered.
        on_failure: told of a probe that fails (twice: ``PolicyWatcher.prove``), before anything else can happen. An
            engine that changed under its versions has nothing left that could be trusted: the worker has to end.
    """

    policy: PolicyWatcher
    every_s: float
    on_failure: Callable[[IntegrityError], None]

    async def run(self) -> None:
        """Prove for ever.

        Raises:
            IntegrityError: a probe failed, also when it was tried once more.
            SpotGRPOError: the engine died.
        """
        while True:
            await asyncio.sleep(self.every_s * random.uniform(0.8, 1.2))
            try:
                await self._prove_all()
            except TransientError as exc:
                log.info("what is served cannot be proven now: %s", exc)
            except IntegrityError as exc:
                self.on_failure(exc)
                raise

    async def _prove_all(self) -> None:
        for adopted in self.policy.answering():
            if (
                self.policy.loaded(adopted.version) is not adopted
            ):  # it went while others were proven
                continue
            with self.policy.using(adopted) as version:
                try:
                    await self.policy.prove(version, adopted.probe)
                except IntegrityError as exc:
                    raise IntegrityError(
                        f"{version} was loaded well and does not answer as itself any more ({exc}): this worker "
                        "publishes nothing more and ends; its tasks go to others"
                    ) from exc
