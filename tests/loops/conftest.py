"""What loop tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.loop_world import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A broker and a bucket in memory, for one test."""
    world = World(tmp_path)
    yield world
    world.close()
