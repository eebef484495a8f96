"""The worker's folder for downloaded versions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spotgrpo.producer.cache import LOCK, PREFIX, cache_folder
from spotgrpo.shared.errors import ConfigError

HOLDER = """
import sys, time
from pathlib import Path
from spotgrpo.producer.cache import cache_folder
with cache_folder(Path(sys.argv[1])) as folder:
    (folder / "version").write_text("x")
    print(folder, flush=True)
    time.sleep(600)
"""


def left(parent: Path) -> set[str]:
    return {path.name for path in parent.iterdir()}


def test_the_folder_goes_with_the_block(tmp_path: Path) -> None:
    with cache_folder(tmp_path / "new") as folder:
        (folder / "version").write_text("x")
        assert left(tmp_path / "new") == {folder.name, folder.name + LOCK}
    assert left(tmp_path / "new") == set()


def test_what_a_killed_worker_left_is_removed_and_what_a_living_one_has_stays(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        theirs = Path(holder.stdout.readline().strip())
        with cache_folder(tmp_path) as mine:
            assert (theirs / "version").exists()
            assert left(tmp_path) >= {theirs.name, mine.name}
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    assert (theirs / "version").exists()
    with cache_folder(tmp_path) as mine:
        assert left(tmp_path) == {mine.name, mine.name + LOCK}


def test_two_folders_of_one_process_are_two(tmp_path: Path) -> None:
    with cache_folder(tmp_path) as one, cache_folder(tmp_path) as other:
        assert one.exists()
        assert other.exists()
        assert one != other


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}not-ours").mkdir()
    (tmp_path / "other.lock").touch()
    with cache_folder(tmp_path):
        pass
    assert left(tmp_path) == {f"{PREFIX}not-ours", "other.lock"}


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"worker\.cache_dir"), cache_folder(tmp_path / "file"):
        pass
