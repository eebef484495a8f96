"""The base install: no torch, and still of use.

It is built for real, as a folder of links to just the distributions that the base depends on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
ROOTS = [str(ROOT / name) for name in ("producer", "consumer", "shared")]
HEAVY = ("torch", "transformers", "vllm", "peft", "datasets")

IMPORT_ALL = """
import importlib, json, pkgutil, sys
import spotgrpo.shared
names = [m.name for m in pkgutil.walk_packages(spotgrpo.shared.__path__, "spotgrpo.shared.")]
scripts = ("spotgrpo.shared.services.launcher",)
for name in [n for n in names if n not in scripts] + ["spotgrpo.cli.main", "spotgrpo.cli.doctor"]:
    importlib.import_module(name)
print(json.dumps([names, sorted({name.partition(".")[0] for name in sys.modules})]))
"""

CONFIG = """
run.id = "r"
broker.url = "amqp://u:hunter22@127.0.0.1:1/"
broker.start_deadline_s = 0.2
model.name = "{model}"
data.path = "prompts.jsonl"
rewards = [{{function = "rewards.py:length"}}]
[bucket]
url = "s3://bucket"
endpoint_url = "http://127.0.0.1:1"
access_key_id = "a"
secret_access_key = "topsecret"
start_deadline_s = 0.2
"""


def needed(name: str, extras: set[str], found: dict[str, Distribution]) -> dict[str, Distribution]:
    """The distribution and all that it requires, by name."""
    found[name] = distribution(name)
    for text in found[name].requires or []:
        requirement = Requirement(text)
        applies = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in extras | {""}
        )
        if applies and requirement.name not in found:
            needed(requirement.name, set(requirement.extras), found)
    return found


@pytest.fixture(scope="module")
def base_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site folder with the base dependencies and nothing else."""
    site = tmp_path_factory.mktemp("base-site")
    for dist in needed("spotgrpo", set(), {}).values():
        for top in {file.parts[0] for file in dist.files or []} - {"..", "__pycache__"}:
            source = Path(str(dist.locate_file(top)))
            if not top.endswith(".pth") and not (site / top).exists():
                (site / top).symlink_to(source)
    return site


def run(*args: str, site: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Python in the base install (``site``), else as it is."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SPOTGRPO_", "AWS_"))}
    environ["PYTHONPATH"] = os.pathsep.join([*([str(site)] if site else []), *ROOTS])
    command = [sys.executable, *(["-S"] if site else []), *args]
    return subprocess.run(command, capture_output=True, text=True, env=environ, check=False)


def test_importing_shared_and_the_commands_imports_nothing_heavy() -> None:
    result = run("-c", IMPORT_ALL)
    assert result.returncode == 0, result.stderr
    names, modules = json.loads(result.stdout)
    assert "spotgrpo.shared.config" in names
    assert not set(HEAVY) & set(modules)


def test_everything_shared_imports_in_the_base_install(base_site: Path) -> None:
    assert not any((base_site / name).exists() for name in HEAVY)
    result = run("-c", IMPORT_ALL, site=base_site)
    assert result.returncode == 0, result.stderr


def test_the_doctor_of_a_base_install_says_which_extras_are_missing(base_site: Path) -> None:
    result = run("-m", "spotgrpo.cli.main", "doctor", "--json", site=base_site)
    assert result.returncode == 0, result.stderr
    checks = json.loads(result.stdout)["checks"]
    extras = {c["detail"].partition(" ")[0]: c for c in checks if c["name"] == "extras"}
    for name in ("learner", "worker"):
        assert extras[name]["state"] == "warn"
        assert "torch" in extras[name]["detail"]
        assert f"pip install 'spotgrpo[{name}]'" in extras[name]["remedy"]


def test_the_doctor_of_a_base_install_checks_what_it_can(base_site: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    settings = {"model_type": "llama", "max_position_embeddings": 77}
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings))
    (tmp_path / "rewards.py").write_text(
        "def length(completions, **_): return [0.0] * len(completions)"
    )
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(model=tmp_path / "model"))
    result = run("-m", "spotgrpo.cli.main", "doctor", str(path), "--json", site=base_site)
    assert result.returncode == 3, result.stdout + result.stderr
    assert "hunter22" not in result.stdout + result.stderr
    assert "topsecret" not in result.stdout + result.stderr
    states = {c["name"]: c["state"] for c in json.loads(result.stdout)["checks"]}
    assert (states["broker"], states["bucket"]) == ("unreached", "unreached")
    assert (states["model"], states["data"], states["rewards"]) == ("ok", "warn", "warn")


@pytest.mark.parametrize(("command", "extra"), [("learner", "learner"), ("worker", "worker")])
def test_a_role_whose_extra_is_missing_says_how_to_install_it(
    base_site: Path, tmp_path: Path, command: str, extra: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(model="m"))
    settings = ["--set", "worker.engine=transformers"]
    result = run("-m", "spotgrpo.cli.main", command, str(path), *settings, site=base_site)
    assert result.returncode == 2
    assert f"pip install 'spotgrpo[{extra}]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_replay_of_a_base_install_says_what_it_needs(base_site: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(model="m"))
    arguments = ["replay", str(path), "v00000001.e0001.1"]
    result = run("-m", "spotgrpo.cli.main", *arguments, site=base_site)
    assert result.returncode == 2
    assert "pip install 'spotgrpo[learner]'" in result.stderr
    listing = run("-m", "spotgrpo.cli.main", *arguments[:-1], site=base_site)
    assert listing.returncode == 3, "it needs the bucket alone, which does not answer here"


def test_help_and_version_work_in_the_base_install(base_site: Path) -> None:
    assert "learner" in run("-m", "spotgrpo.cli.main", "--help", site=base_site).stdout
    assert run("-m", "spotgrpo.cli.main", "--version", site=base_site).stdout.startswith(
        "spotgrpo "
    )
