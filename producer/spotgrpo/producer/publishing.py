"""A scored group on its way out: to the rollouts queue until confirmed, through the bucket where it is big."""

from __future__ import annotations

import asyncio
import functools
import threading

from spotgrpo.shared.ids import Keys
from spotgrpo.shared.manifest import sha256_hex
from spotgrpo.shared.ports import Message, ObjectStore, Publisher
from spotgrpo.shared.retry import retry
from spotgrpo.shared.threads import in_thread
from spotgrpo.shared.wire import (
    MAX_MESSAGE_BYTES,
    SCHEMA,
    Group,
    GroupRef,
    encode_group,
    encode_group_ref,
)


class Outlet:
    """Where groups and handed-back tasks leave the worker. Lives in the worker's event loop.

    Broker and bucket may be away for as long as they like. Each is asked one thing at a time on a thread of its own, so
    that neither holds up the other, nor takes and adoptions, nor the end.
    """

    def __init__(self, store: ObjectStore, keys: Keys, publisher: Publisher) -> None:
        self._store, self._keys, self._publisher = store, keys, publisher
        # A full window blocks publish, and a bucket that is away the storing.
        self._publishing, self._storing = asyncio.Semaphore(1), asyncio.Semaphore(1)
        self._over = threading.Event()

    async def message(self, group: Group) -> Message:
        """``group`` as a message. One that is too big for that is stored first, and the message names it."""
        body, kind = encode_group(group), "group"
        if len(body) > MAX_MESSAGE_BYTES:
            async with self._storing:
                body = await in_thread(functools.partial(self._store_body, group, body))
            kind = "group_ref"
        headers: dict[str, str | int] = {
            "run": group.run,
            "task": str(group.task_id),
            "schema": SCHEMA,
            "worker": group.worker,
            "kind": kind,
        }
        return Message(body, message_id=f"{group.task_id}/{group.worker}", headers=headers)

    async def confirmed(self, queue: str, message: Message) -> None:
        """Publish ``message``, and wait until the broker has confirmed it."""
        async with self._publishing:
            publish = functools.partial(self._publisher.publish, queue, message)
            confirmed = await in_thread(publish, "publishing")
        await asyncio.wrap_future(confirmed)

    def close(self) -> None:
        """Give up what is not out yet, once the publisher is closed."""
        self._over.set()

    def _store_body(self, group: Group, body: bytes) -> bytes:
        digest = sha256_hex(body)
        key = self._keys.group(group.task_id, digest)
        retry(f"storing {key}", lambda: self._store.create(key, body), stopping=self._over)
        return encode_group_ref(GroupRef(group.run, group.task_id, key, digest, len(body)))
