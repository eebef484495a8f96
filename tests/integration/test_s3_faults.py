"""The S3 adapter against a real server behind a proxy that plays the faults of networks and servers."""

from __future__ import annotations

import hashlib
import logging
import secrets
import socket
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from spotgrpo.shared.config import BucketConfig
from spotgrpo.shared.errors import ConfigError, Fenced, IntegrityError, NotStored, StoreUnavailable
from spotgrpo.shared.ids import Keys
from spotgrpo.shared.latest import LatestPointer, fresh_nonce
from spotgrpo.shared.manifest import Durable, Latest, Serving
from spotgrpo.shared.s3 import S3Store, inspect, require_compare_and_swap
from tests.tools.faulty_s3 import (
    Answer,
    Cut,
    Fault,
    FaultyS3,
    First,
    Flip,
    IgnoreConditions,
    Late,
    Stall,
    Swallow,
    Truncate,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from spotgrpo.shared.services import PrivateS3

BODY = secrets.token_bytes(3 << 20)
DIGEST = hashlib.sha256(BODY).hexdigest()
SLOW_DOWN = Answer(503, "SlowDown")


@pytest.fixture
def proxy(s3_server: PrivateS3) -> Iterator[FaultyS3]:
    server = s3_server
    with FaultyS3(server.endpoint_url, server.access_key_id, server.secret_access_key) as faulty:
        yield faulty


@pytest.fixture
def config(s3_server: PrivateS3, proxy: FaultyS3) -> BucketConfig:
    return BucketConfig.model_validate(
        {
            "url": f"s3://{s3_server.bucket}/{secrets.token_hex(6)}",
            "endpoint_url": proxy.url,
            "access_key_id": s3_server.access_key_id,
            "secret_access_key": s3_server.secret_access_key,
            "timeout_s": 5.0,
            "start_deadline_s": 20.0,
        }
    )


@pytest.fixture
def store(config: BucketConfig) -> Iterator[S3Store]:
    with closing(S3Store(config)) as made:
        yield made


@pytest.fixture
def impatient(config: BucketConfig) -> Iterator[S3Store]:
    """Its requests time out after half a second."""
    with closing(S3Store(config.model_copy(update={"timeout_s": 0.5}))) as made:
        yield made


def changed(config: BucketConfig, **settings: object) -> BucketConfig:
    given = config.model_dump()
    given["secret_access_key"] = config.secret_access_key
    return BucketConfig.model_validate(given | settings)


# ---- reading ----------------------------------------------------------------------------------------------------


def test_a_proxy_without_faults_is_not_noticed(store: S3Store, proxy: FaultyS3) -> None:
    require_compare_and_swap(store)
    assert proxy.count() > 0


@pytest.mark.parametrize(
    "fault",
    [
        Cut(0),
        Cut(1_000_000),
        Truncate(1_000_000),
        Flip(2_000_000),
        SLOW_DOWN,
        Answer(500, "InternalError"),
        Swallow(True),
    ],
    ids=repr,
)
def test_a_read_that_went_wrong_is_done_again(
    store: S3Store, proxy: FaultyS3, fault: Fault
) -> None:
    store.create("object", BODY)
    proxy.play(fault, "GET", times=2)
    assert store.get("object").body == BODY
    assert proxy.count("GET") == 3


def test_a_poll_that_went_wrong_is_done_again(store: S3Store, proxy: FaultyS3) -> None:
    store.create("object", b"1")
    etag = store.get("object").etag
    proxy.play(SLOW_DOWN, "GET", times=2)
    assert store.get_if_changed("object", etag) is None
    assert proxy.unplayed == 0


def test_a_read_gives_up_after_some_seconds_and_works_again_later(
    store: S3Store, proxy: FaultyS3
) -> None:
    store.create("object", b"1")
    proxy.play(SLOW_DOWN, "GET", times=10_000)
    with pytest.raises(StoreUnavailable, match="503 SlowDown"):
        store.get("object")
    assert 2 < proxy.count("GET") < 1000, "tried again, with pauses"
    proxy.behave()
    assert store.get("object").body == b"1"


def test_a_stalled_read_times_out_and_is_done_again(impatient: S3Store, proxy: FaultyS3) -> None:
    impatient.create("object", b"1")
    proxy.play(Stall(), "GET")
    assert impatient.get("object").body == b"1"
    assert proxy.unplayed == 0


# ---- downloading ------------------------------------------------------------------------------------------------


def test_a_download_goes_on_where_it_was_cut(
    store: S3Store, proxy: FaultyS3, tmp_path: Path
) -> None:
    store.create("object", BODY)
    proxy.play(Cut(1_500_000), "GET")
    proxy.play(Cut(700_000), "GET")
    store.download("object", tmp_path / "file", len(BODY), DIGEST)
    assert (tmp_path / "file").read_bytes() == BODY
    first, *later = (request.headers for request in proxy.seen if request.method == "GET")
    starts = [int(headers["Range"].removeprefix("bytes=").removesuffix("-")) for headers in later]
    assert "Range" not in first
    assert len(starts) == 2
    assert 0 < starts[0] < starts[1], "nothing that arrived is asked for again"
    assert all(headers["If-Match"] for headers in later)


def test_a_download_over_a_link_that_always_breaks_gets_there_piece_by_piece(
    store: S3Store, proxy: FaultyS3, tmp_path: Path
) -> None:
    store.create("object", BODY)
    proxy.play(Cut(1 << 20), "GET", times=1000)
    store.download("object", tmp_path / "file", len(BODY), DIGEST)
    assert (tmp_path / "file").read_bytes() == BODY


def test_a_download_that_was_replaced_meanwhile_never_mixes_two_objects(
    store: S3Store, proxy: FaultyS3, tmp_path: Path
) -> None:
    etag = store.compare_and_swap("object", BODY, None)
    other = BODY[::-1]
    proxy.play(Cut(1_500_000), "GET")
    proxy.play(First(lambda: store.compare_and_swap("object", other, etag)), "GET")
    store.download("object", tmp_path / "file", len(other), hashlib.sha256(other).hexdigest())
    assert (tmp_path / "file").read_bytes() == other


@pytest.mark.parametrize("fault", [Flip(2_000_000), Truncate(1_000_000)], ids=repr)
def test_a_download_that_was_damaged_on_the_way_comes_right(
    store: S3Store, proxy: FaultyS3, tmp_path: Path, fault: Fault
) -> None:
    store.create("object", BODY)
    proxy.play(fault, "GET")
    store.download("object", tmp_path / "file", len(BODY), DIGEST)
    assert (tmp_path / "file").read_bytes() == BODY
    assert proxy.unplayed == 0


def test_a_download_that_stays_damaged_is_an_integrity_error(
    store: S3Store, proxy: FaultyS3, tmp_path: Path
) -> None:
    store.create("object", BODY)
    proxy.play(Flip(7), "GET", times=10)
    with pytest.raises(IntegrityError, match="sha256"):
        store.download("object", tmp_path / "file", len(BODY), DIGEST)
    assert list(tmp_path.iterdir()) == []


def test_a_download_from_a_dead_server_gives_up_and_leaves_nothing(
    store: S3Store, proxy: FaultyS3, tmp_path: Path
) -> None:
    store.create("object", BODY)
    proxy.play(Cut(1_500_000), "GET")
    proxy.play(Swallow(forward=False), "GET", times=10_000)
    with pytest.raises(StoreUnavailable):
        store.download("object", tmp_path / "file", len(BODY), DIGEST)
    assert list(tmp_path.iterdir()) == []


def test_an_object_deleted_during_its_download_is_not_stored(
    store: S3Store, proxy: FaultyS3, tmp_path: Path
) -> None:
    store.create("object", BODY)
    proxy.play(Cut(1_500_000), "GET")
    proxy.play(First(lambda: store.delete(["object"])), "GET")
    with pytest.raises(NotStored, match="object"):
        store.download("object", tmp_path / "file", len(BODY), DIGEST)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_not_taken_for_a_fault_of_the_server(store: S3Store, tmp_path: Path) -> None:
    store.create("object", b"1")
    with pytest.raises(FileNotFoundError):
        store.download("object", tmp_path / "no" / "folder", 1, hashlib.sha256(b"1").hexdigest())


# ---- creating ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        SLOW_DOWN,
        Answer(409, "ConditionalRequestConflict"),
        Answer(500, "InternalError", forward=True),
        Answer(412, "PreconditionFailed", forward=True),
        Swallow(forward=True),
        Swallow(forward=False),
    ],
    ids=repr,
)
def test_a_creation_that_went_wrong_is_settled_by_itself(
    store: S3Store, proxy: FaultyS3, fault: Fault
) -> None:
    proxy.play(fault, "PUT")
    store.create("object", BODY)
    assert store.get("object").body == BODY
    assert proxy.unplayed == 0


def test_a_lost_answer_does_not_hide_that_other_bytes_are_stored(
    store: S3Store, proxy: FaultyS3
) -> None:
    store.create("object", BODY)
    proxy.play(Swallow(forward=True), "PUT")
    with pytest.raises(IntegrityError):
        store.create("object", BODY[:-1] + bytes([BODY[-1] ^ 1]))
    assert store.get("object").body == BODY


def test_damage_on_the_way_back_is_not_taken_for_other_bytes(
    store: S3Store, proxy: FaultyS3
) -> None:
    store.create("object", BODY)
    proxy.play(Flip(2_000_000), "GET")
    proxy.play(Cut(1_000_000), "GET")
    store.create("object", BODY)
    assert proxy.unplayed == 0


# ---- compare and swap -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "landed"),
    [
        (SLOW_DOWN, False),
        (Answer(500, "InternalError", forward=True), True),
        (Answer(409, "ConditionalRequestConflict"), False),
        (Swallow(forward=True), True),
        (Swallow(forward=False), False),
        (Stall(), False),
    ],
    ids=repr,
)
def test_a_swap_is_sent_once_and_an_open_outcome_is_said(
    impatient: S3Store, proxy: FaultyS3, fault: Fault, landed: bool
) -> None:
    etag = impatient.compare_and_swap("pointer", b"1", None)
    sent = proxy.count("PUT")
    proxy.play(fault, "PUT")
    with pytest.raises(StoreUnavailable):
        impatient.compare_and_swap("pointer", b"2", etag)
    assert proxy.count("PUT") == sent + 1
    assert impatient.get("pointer").body == (b"2" if landed else b"1")


def test_a_swap_is_sent_once_where_the_start_of_a_connection_fails(config: BucketConfig) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        accepted = []

        def refuse() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                accepted.append(1)
                connection.close()

        thread = threading.Thread(target=refuse)
        thread.start()
        port = listener.getsockname()[1]
        refused = S3Store(changed(config, endpoint_url=f"http://127.0.0.1:{port}"))
        with closing(refused), pytest.raises(StoreUnavailable):
            refused.compare_and_swap("pointer", b"1", None)
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert accepted == [1]


def latest(version: int, writer: str) -> Latest:
    name, zero = f"v{version}", "0" * 64
    durable = {"manifest": name, "manifest_sha256": zero, "state": name, "state_sha256": zero}
    return Latest(
        epoch=1,
        writer=writer,
        nonce=fresh_nonce(),
        serving=Serving(version=version, epoch=1, manifest=name, sha256=zero),
        durable=Durable(version=version, epoch=1, ledger=name, ledger_sha256=zero, **durable),
    )


@pytest.mark.parametrize(
    "fault",
    [
        Answer(412, "PreconditionFailed", forward=True),
        Answer(409, "ConditionalRequestConflict", forward=True),
        Answer(503, "SlowDown"),
        Swallow(forward=True),
        Swallow(forward=False),
        Late(),
        Stall(),
    ],
    ids=repr,
)
def test_the_pointer_survives_every_kind_of_answer(
    impatient: S3Store, proxy: FaultyS3, fault: Fault
) -> None:
    mine, other = (
        LatestPointer(impatient, Keys("r"), name, longest_wait_s=0.2) for name in ("w1", "w2")
    )
    mine.move(latest(0, "w1"))
    proxy.play(fault, "PUT", "latest.json")
    second = latest(1, "w1")
    mine.move(second)
    assert proxy.unplayed == 0
    assert proxy.land_late_ones() in ([], [412]), "a write that arrives late finds its parent gone"
    mine.check_mine()
    assert other.read() == second
    other.move(latest(2, "w2"))
    with pytest.raises(Fenced, match="w2"):
        mine.move(latest(2, "w1"))


# ---- deleting ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["NotImplemented", "MissingContentMD5", "InvalidRequest"])
def test_a_server_without_batches_is_asked_one_by_one(
    store: S3Store, proxy: FaultyS3, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "abc":
        store.create(name, b"1")
    proxy.play(Answer(501 if code == "NotImplemented" else 400, code), "POST")
    with caplog.at_level(logging.INFO):
        store.delete(["a", "b", "never"])
        store.delete(["c"])
    assert list(store.list("")) == []
    assert proxy.count("POST") == 1, "it is asked for batches only once"
    assert sum("one by one" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("fault", [SLOW_DOWN, Swallow(forward=True)], ids=repr)
def test_a_deletion_that_went_wrong_is_done_again(
    store: S3Store, proxy: FaultyS3, fault: Fault
) -> None:
    store.create("a", b"1")
    proxy.play(fault, "POST", times=2)
    store.delete(["a"])
    assert list(store.list("")) == []


# ---- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"url": "s3://there-is-no-such-bucket/x"}, "bucket.url"),
        ({"url": "s3://not_A-bucket!/x"}, "bucket.url"),
        ({"access_key_id": "SOMEBODYELSE"}, "bucket.access_key_id"),
        ({"secret_access_key": "thewrongsecret"}, "bucket.access_key_id"),
        ({"secret_access_key": None}, "bucket.access_key_id"),
        ({"endpoint_url": "localhost:9000"}, "bucket.endpoint_url"),
    ],
)
def test_wrong_settings_end_the_start_at_once_and_are_named(
    config: BucketConfig, proxy: FaultyS3, settings: dict[str, object], key: str
) -> None:
    wrong = changed(config, **settings)
    with pytest.raises(ConfigError) as caught:
        S3Store.connect(wrong)
    assert caught.value.key == key
    assert proxy.count() <= 1, "nothing is tried again"
    shown = str(caught.value)
    assert "\n" not in shown
    assert "thewrongsecret" not in shown
    assert config.secret_access_key is not None
    assert config.secret_access_key.get_secret_value() not in shown
    report = inspect(wrong)
    assert [problem.what for problem in report.problems] == [shown]


def test_a_bucket_that_goes_missing_later_is_named_too(store: S3Store, proxy: FaultyS3) -> None:
    for method, call in (
        ("GET", lambda: store.get("x")),
        ("PUT", lambda: store.create("x", b"")),
        ("PUT", lambda: store.compare_and_swap("x", b"", '"0"')),
        ("POST", lambda: store.delete(["x"])),
    ):
        proxy.play(Answer(404, "NoSuchBucket"), method)
        with pytest.raises(ConfigError, match=r"bucket\.url"):
            call()
    assert proxy.unplayed == 0


def test_a_denied_read_says_that_the_object_may_be_missing(store: S3Store, proxy: FaultyS3) -> None:
    proxy.play(Answer(403, "AccessDenied"), "GET")
    with pytest.raises(ConfigError, match="s3:ListBucket") as caught:
        store.get("object")
    assert caught.value.key == "bucket.access_key_id"


def test_a_server_that_is_silent_at_start_is_awaited_with_one_line(
    config: BucketConfig, proxy: FaultyS3, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.play(SLOW_DOWN, "GET", times=4)
    with caplog.at_level(logging.INFO), closing(S3Store.connect(config)):
        pass
    told = [record.message for record in caplog.records if "first contact" in record.message]
    assert len(told) == 2
    assert "trying again" in told[0]
    assert "works again" in told[1]


def test_a_server_that_stays_silent_at_start_is_given_up_at_the_deadline(
    config: BucketConfig,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        nobody = changed(config, endpoint_url=f"http://127.0.0.1:{port}", start_deadline_s=0.5)
        with pytest.raises(StoreUnavailable) as caught:
            S3Store.connect(nobody)
        assert caught.value.exit_code == 3
        report = inspect(nobody)
    assert not report.reachable
    assert len(report.problems) == 1


# ---- what a server can do ---------------------------------------------------------------------------------------


def test_a_good_server_passes_inspection_and_nothing_stays_behind(
    config: BucketConfig, store: S3Store
) -> None:
    report = inspect(config)
    assert report.problems == ()
    assert report.ok
    assert all(
        (report.reachable, report.can_list, report.can_write, report.can_read, report.can_delete)
    )
    assert all(
        (report.conditional_create_honoured, report.compare_and_swap_honoured, report.etag_polling)
    )
    assert report.clock_skew_s is not None
    assert abs(report.clock_skew_s) < 30
    assert list(store.list("")) == []


def test_a_server_that_ignores_conditions_is_found_out(
    config: BucketConfig, store: S3Store, proxy: FaultyS3
) -> None:
    proxy.play(IgnoreConditions(), "PUT", times=1000)
    with pytest.raises(ConfigError, match="If-None-Match") as caught:
        require_compare_and_swap(store)
    assert caught.value.key == "bucket.endpoint_url"
    assert caught.value.value == config.endpoint_url
    report = inspect(config)
    assert not report.conditional_create_honoured
    assert not report.compare_and_swap_honoured
    assert report.can_write
    assert len(report.problems) == 3
    assert list(store.list("")) == []


def test_a_server_that_ignores_only_if_match_is_found_out(
    config: BucketConfig, store: S3Store, proxy: FaultyS3
) -> None:
    proxy.play(IgnoreConditions(("if-match",)), "PUT", times=1000)
    with pytest.raises(ConfigError, match="stale ETag"):
        require_compare_and_swap(store)
    report = inspect(config)
    assert report.conditional_create_honoured
    assert not report.compare_and_swap_honoured


def test_a_server_that_never_says_unchanged_is_polled_all_the_same(
    config: BucketConfig, store: S3Store, proxy: FaultyS3
) -> None:
    store.create("object", b"1")
    etag = store.get("object").etag
    proxy.play(IgnoreConditions(), "GET", times=1000)
    assert store.get_if_changed("object", etag) is None
    report = inspect(config)
    assert not report.etag_polling
    assert ["poll_s" in problem.remedy for problem in report.problems] == [True]


def test_a_lost_answer_is_not_taken_for_a_server_that_ignores_conditions(
    store: S3Store, proxy: FaultyS3
) -> None:
    proxy.play(SLOW_DOWN, "PUT")
    proxy.play(Swallow(forward=True), "PUT")
    require_compare_and_swap(store)
    assert proxy.unplayed == 0


def test_a_server_without_conditional_writes_is_found_out(
    config: BucketConfig, proxy: FaultyS3
) -> None:
    proxy.play(Answer(501, "NotImplemented"), "PUT", times=1000)
    report = inspect(config)
    assert not report.can_write
    assert "conditional writes" in report.problems[0].remedy


def test_missing_rights_are_told_one_by_one(
    config: BucketConfig, proxy: FaultyS3, store: S3Store
) -> None:
    proxy.play(Answer(403, "AccessDenied"), "POST", times=1000)
    report = inspect(config)
    assert not report.can_delete
    assert report.can_write
    assert report.compare_and_swap_honoured
    assert [problem.what for problem in report.problems if "deleting" in problem.what]
    proxy.behave()
    store.delete([info.key for info in store.list("")])
