"""Where a demo keeps its things, and the configuration that it writes out for the commands it runs."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spotgrpo.cli.demo_parts.toml import to_toml
from spotgrpo.shared.errors import ConfigError

EXAMPLE = Path("deploy", "examples", "max")
HEADER = """\
# What this demo ran: deploy/examples/max/run.toml with its own name, model and folders.
# The broker's URL and the bucket's keys came by environment (SPOTGRPO_BROKER__URL, SPOTGRPO_BUCKET__…).

"""


@dataclass(frozen=True)
class DemoFolder:
    """The folder of one demo, ``<root>/<run id>``; the model beside it is shared by all."""

    root: Path
    run: str

    @classmethod
    def create(cls, root: Path, seed: int, now: datetime | None = None) -> DemoFolder:
        """Make a folder with a run id that was never used under ``root``.

        Raises:
            ConfigError: ``root`` cannot be written.
        """
        now = now or datetime.now(UTC)
        try:
            root.mkdir(parents=True, exist_ok=True)
            (root / ".gitignore").write_text("*\n")
            for number in range(1, 1000):
                suffix = f"-{number}" if number > 1 else ""
                folder = cls(root.absolute(), f"demo-{seed}-{now:%Y%m%d-%H%M%S}{suffix}")
                if not folder.path.exists():
                    folder.path.mkdir()
                    folder._point_latest()
                    return folder
        except OSError as exc:
            raise ConfigError("--dir", str(root), f"{exc.strerror}; choose another") from exc
        raise ConfigError("--dir", str(root), "a thousand demos in one second; choose another")

    def _point_latest(self) -> None:
        """``latest`` leads to the newest demo. Replaced by renaming: another demo may start just now."""
        link = self.root / f".latest-{self.run}"
        link.symlink_to(self.run)
        link.replace(self.root / "latest")

    @property
    def path(self) -> Path:
        return self.root / self.run

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def toml(self) -> Path:
        return self.path / "run.toml"

    @property
    def services(self) -> Path:
        return self.path / "services"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def metrics(self) -> Path:
        """Written by the learner, since ``run.output_dir`` is ``root``."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def plot(self) -> Path:
        return self.path / "reward.png"

    @property
    def evaluation(self) -> Path:
        return self.path / "evaluation.json"

    def log(self, name: str) -> Path:
        return self.path / f"{name}.log"


def find_example(start: Path | None = None) -> Path:
    """The example's folder, in the repository that this code or the working directory belongs to.

    Raises:
        ConfigError: neither does.
    """
    here = Path(__file__).resolve()
    for folder in (start,) if start else (*here.parents, Path.cwd(), *Path.cwd().parents):
        if (folder / EXAMPLE / "run.toml").is_file():
            return folder / EXAMPLE
    raise ConfigError(
        "working directory", str(Path.cwd()), f"{EXAMPLE} is not there: run it in a clone"
    )


def write_run_toml(
    folder: DemoFolder, example: Path, changes: Mapping[str, Mapping[str, object]]
) -> dict[str, Any]:
    """Write ``example``'s TOML to the demo's folder with ``changes`` (section, name, value), and return it.

    Paths become absolute. What is secret is left out: it goes to the commands by environment.
    """
    tables: dict[str, Any] = tomllib.loads((example / "run.toml").read_text(encoding="utf-8"))
    del tables["broker"]["url"]
    tables["run"] |= {"id": folder.run, "output_dir": str(folder.root)}
    tables["model"]["name"] = str(folder.model)
    tables["data"]["path"] = str(example / tables["data"]["path"])
    for reward in tables["rewards"]:
        reward["function"] = str(example / reward["function"])
    for section, values in changes.items():
        tables.setdefault(section, {}).update(values)
    folder.toml.write_text(HEADER + to_toml(tables), encoding="utf-8")
    return tables
