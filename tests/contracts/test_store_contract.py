"""What ports.ObjectStore promises, asked of the store in memory and of the one on a real S3 server."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from spotgrpo.shared.asked_store import PatientStore
from spotgrpo.shared.config import BucketConfig
from spotgrpo.shared.errors import IntegrityError, NotStored
from spotgrpo.shared.memory.store import MemoryStore
from spotgrpo.shared.s3 import S3Store, require_compare_and_swap

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from spotgrpo.shared.ports import ObjectStore
    from spotgrpo.shared.services import PrivateS3

BODIES = [b"", b"x", bytes(range(256)) * 20_000]
STALE = '"0123456789abcdef0123456789abcdef"'


def s3_config(server: PrivateS3, **settings: object) -> BucketConfig:
    given: dict[str, object] = {
        "url": f"s3://{server.bucket}/{secrets.token_hex(4)}",
        "endpoint_url": server.endpoint_url,
        "access_key_id": server.access_key_id,
        "secret_access_key": server.secret_access_key,
    }
    return BucketConfig.model_validate(given | settings)


@pytest.fixture(
    scope="module", params=["memory", "patient", "s3", "s3-when-required", "s3-no-prefix"]
)
def store(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    if request.param == "memory":
        yield MemoryStore()
        return
    if request.param == "patient":
        yield PatientStore(MemoryStore())
        return
    server: PrivateS3 = request.getfixturevalue("s3_server")
    settings = {
        "s3": {},
        "s3-when-required": {"checksums": "when_required"},
        "s3-no-prefix": {"url": f"s3://{server.bucket}"},
    }[request.param]
    with closing(S3Store.connect(s3_config(server, **settings))) as connected:
        yield connected


@pytest.fixture
def key() -> str:
    return f"run-{secrets.token_hex(6)}/object"


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


# ---- create, get ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", BODIES, ids=len)
def test_what_is_created_is_read_back(store: ObjectStore, key: str, body: bytes) -> None:
    store.create(key, body)
    assert store.get(key).body == body


def test_creating_the_same_bytes_again_is_fine(store: ObjectStore, key: str) -> None:
    store.create(key, b"the same")
    etag = store.get(key).etag
    store.create(key, b"the same")
    assert store.get(key).etag == etag


@pytest.mark.parametrize("other", [b"The same", b"the same, longer", b"", b"the sam"])
def test_creating_other_bytes_is_refused_and_changes_nothing(
    store: ObjectStore, key: str, other: bytes
) -> None:
    store.create(key, b"the same")
    with pytest.raises(IntegrityError, match="object"):
        store.create(key, other)
    assert store.get(key).body == b"the same"


def test_a_missing_object_is_not_stored_whatever_is_asked(
    store: ObjectStore, key: str, tmp_path: Path
) -> None:
    with pytest.raises(NotStored, match="object"):
        store.get(key)
    with pytest.raises(NotStored, match="object"):
        store.get_if_changed(key, None)
    with pytest.raises(NotStored, match="object"):
        store.get_if_changed(key, STALE)
    with pytest.raises(NotStored, match="object"):
        store.download(key, tmp_path / "file", 1, digest(b"x"))
    assert list(tmp_path.iterdir()) == []


def test_a_key_is_not_the_folder_it_begins(store: ObjectStore, key: str) -> None:
    store.create(f"{key}/inside", b"1")
    with pytest.raises(NotStored):
        store.get(key)
    assert store.compare_and_swap(key + "s", b"2", None) is not None
    assert [info.key for info in store.list(key)] == [f"{key}/inside", f"{key}s"]


def test_a_body_does_not_change_with_the_buffer_it_came_from(store: ObjectStore, key: str) -> None:
    buffer = bytearray(b"before")
    store.create(key, bytes(buffer))
    buffer[:] = b"after!"
    assert store.get(key).body == b"before"


# ---- polling ----------------------------------------------------------------------------------------------------


def test_a_poll_tells_only_of_a_change(store: ObjectStore, key: str) -> None:
    etag = store.compare_and_swap(key, b"1", None)
    assert store.get_if_changed(key, etag) is None
    second = store.compare_and_swap(key, b"2", etag)
    found = store.get_if_changed(key, etag)
    assert found is not None
    assert (found.body, found.etag) == (b"2", second)
    assert store.get_if_changed(key, found.etag) is None


def test_a_first_poll_reads_the_object(store: ObjectStore, key: str) -> None:
    store.create(key, b"1")
    assert store.get_if_changed(key, None) == store.get(key)


# ---- compare and swap -------------------------------------------------------------------------------------------


def test_a_swap_from_the_current_state_lands_and_names_the_new_one(
    store: ObjectStore, key: str
) -> None:
    first = store.compare_and_swap(key, b"1", None)
    second = store.compare_and_swap(key, b"2", first)
    assert first != second
    assert store.get(key).etag == second
    assert store.get(key).body == b"2"


def test_a_swap_from_a_stale_state_is_refused(store: ObjectStore, key: str) -> None:
    first = store.compare_and_swap(key, b"1", None)
    store.compare_and_swap(key, b"2", first)
    assert store.compare_and_swap(key, b"3", first) is None
    assert store.get(key).body == b"2"


def test_a_swap_from_nothing_is_refused_where_something_is(store: ObjectStore, key: str) -> None:
    store.compare_and_swap(key, b"1", None)
    assert store.compare_and_swap(key, b"2", None) is None
    assert store.compare_and_swap(key, b"1", None) is None, "not even with the same bytes"
    assert store.get(key).body == b"1"


def test_a_swap_from_something_is_refused_where_nothing_is(store: ObjectStore, key: str) -> None:
    assert store.compare_and_swap(key, b"1", STALE) is None
    with pytest.raises(NotStored):
        store.get(key)


def test_one_of_several_racing_swaps_lands(store: ObjectStore, key: str) -> None:
    parent = store.compare_and_swap(key, b"parent", None)
    start = threading.Barrier(4)

    def race(name: bytes) -> str | None:
        start.wait()
        return store.compare_and_swap(key, name, parent)

    with ThreadPoolExecutor(4) as pool:
        etags = list(pool.map(race, [b"a", b"b", b"c", b"d"]))
    landed = [
        name for name, etag in zip([b"a", b"b", b"c", b"d"], etags, strict=True) if etag is not None
    ]
    assert landed == [store.get(key).body]


def test_one_of_several_racing_creations_lands(store: ObjectStore, key: str) -> None:
    start = threading.Barrier(3)

    def race(name: bytes) -> bool:
        start.wait()
        try:
            store.create(key, name)
        except IntegrityError:
            return False
        return True

    with ThreadPoolExecutor(3) as pool:
        won = list(pool.map(race, [b"a", b"b", b"c"]))
    assert [name for name, is_winner in zip([b"a", b"b", b"c"], won, strict=True) if is_winner] == [
        store.get(key).body
    ]


def test_the_store_honours_conditions(store: ObjectStore) -> None:
    require_compare_and_swap(store)
    assert list(store.list(".doctor/")) == [], "the scratch objects are gone"


# ---- download ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", BODIES, ids=len)
def test_a_download_writes_the_file(
    store: ObjectStore, key: str, tmp_path: Path, body: bytes
) -> None:
    store.create(key, body)
    store.download(key, tmp_path / "file", len(body), digest(body))
    assert (tmp_path / "file").read_bytes() == body
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_download_replaces_the_file(store: ObjectStore, key: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"what stood here before")
    store.create(key, b"new")
    store.download(key, tmp_path / "file", 3, digest(b"new"))
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize(
    ("size", "sha256"),
    [(3, digest(b"old")), (4, digest(b"new")), (2, digest(b"ne")), (0, digest(b""))],
)
def test_a_download_of_other_bytes_leaves_the_file_alone(
    store: ObjectStore, key: str, tmp_path: Path, size: int, sha256: str
) -> None:
    (tmp_path / "file").write_bytes(b"before")
    store.create(key, b"new")
    with pytest.raises(IntegrityError, match="object"):
        store.download(key, tmp_path / "file", size, sha256)
    assert (tmp_path / "file").read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ---- list, delete -----------------------------------------------------------------------------------------------


def test_a_listing_is_in_key_order_with_sizes_and_times(store: ObjectStore, key: str) -> None:
    names = ["a.b", "a/b", "a-b", "a/c/d", "z", "ä", "a b+c%d", "B"]
    for size, name in enumerate(names):
        store.create(f"{key}/{name}", b"x" * size)
    found = list(store.list(f"{key}/"))
    assert [info.key for info in found] == sorted(
        (f"{key}/{name}" for name in names), key=str.encode
    )
    assert {info.key: info.size for info in found} == {
        f"{key}/{name}": size for size, name in enumerate(names)
    }
    assert all(abs(info.modified - time.time()) < 60 for info in found)


def test_a_listing_goes_by_prefix_not_by_folder(store: ObjectStore, key: str) -> None:
    for name in ("v1", "v10", "v2"):
        store.create(f"{key}/{name}", b"1")
    assert [info.key for info in store.list(f"{key}/v1")] == [f"{key}/v1", f"{key}/v10"]
    assert list(store.list(f"{key}/v3")) == []


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "s3"], indirect=True)
def test_a_listing_and_a_deletion_reach_beyond_a_thousand(store: ObjectStore, key: str) -> None:
    names = [f"{key}/{number:05d}" for number in range(1001)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.create(name, b"1"), names))
    assert [info.key for info in store.list(f"{key}/")] == names
    store.delete(names)
    assert list(store.list(f"{key}/")) == []


def test_deleting_what_is_missing_is_fine(store: ObjectStore, key: str) -> None:
    store.create(f"{key}/a", b"1")
    store.create(f"{key}/b", b"2")
    store.delete([f"{key}/a", f"{key}/never"])
    store.delete([f"{key}/a"])
    store.delete([])
    assert [info.key for info in store.list(f"{key}/")] == [f"{key}/b"]


def test_a_deleted_object_can_be_created_anew(store: ObjectStore, key: str) -> None:
    store.create(key, b"1")
    store.delete([key])
    store.create(key, b"2")
    assert store.get(key).body == b"2"


# ---- threads, prefixes ------------------------------------------------------------------------------------------


def test_many_threads_share_one_store(store: ObjectStore, key: str) -> None:
    def there_and_back(number: int) -> bytes:
        store.create(f"{key}/{number}", b"%d" % number)
        return store.get(f"{key}/{number}").body

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(there_and_back, range(40))) == [b"%d" % number for number in range(40)]


def test_two_prefixes_of_a_bucket_do_not_meet(s3_server: PrivateS3, key: str) -> None:
    with (
        closing(S3Store(s3_config(s3_server))) as one,
        closing(S3Store(s3_config(s3_server))) as other,
    ):
        one.create(key, b"1")
        with pytest.raises(NotStored):
            other.get(key)
        assert list(other.list("")) == []
