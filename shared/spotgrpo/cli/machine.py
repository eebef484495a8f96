"""Checks of ``spotgrpo doctor`` that are about this machine alone."""

from __future__ import annotations

import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Final

from spotgrpo.cli.checks import Check, State
from spotgrpo.cli.extras import MODULES, missing

GIB: Final = 1 << 30
ENOUGH_DISK: Final = 5 * GIB
TOO_LITTLE_DISK: Final = GIB // 2


def check_installation() -> Check:
    """Which version of this package on which Python."""
    detail = f"spotgrpo {version('spotgrpo')} on Python {platform.python_version()}"
    return Check("installation", "ok", detail)


def check_extras() -> Iterator[Check]:
    """Which extras are there. None is needed by every role, so a missing one is a warning at most."""
    there = [extra for extra in MODULES if not missing(extra)]
    gone = {extra: missing(extra) for extra in MODULES if missing(extra)}
    yield Check("extras", "ok", f"installed: {', '.join(there) or 'none'}")
    for extra, modules in gone.items():
        state: State = "warn" if extra in ("learner", "worker") else "ok"
        detail = f"{extra} is missing ({', '.join(modules)})"
        yield Check(
            "extras", state, detail, f"where this machine needs it: pip install 'spotgrpo[{extra}]'"
        )


def check_gpu() -> Check:
    """The GPUs that torch sees, or the driver where torch is not installed."""
    return _gpu_by_driver() if missing("worker") else _gpu_by_torch()


def _gpu_by_torch() -> Check:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
        return Check("gpu", "ok", names)
    seen = _gpu_by_driver()
    if seen.detail != "none":
        remedy = "install a torch that is built for CUDA and for this driver"
        return Check(
            "gpu", "warn", f"{seen.detail}, but torch {torch.__version__} sees none", remedy
        )
    return Check("gpu", "ok", "none: models run on the CPU")


def _gpu_by_driver() -> Check:
    program = shutil.which("nvidia-smi")
    if program is None:
        return Check("gpu", "ok", "none")
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as exc:
        return Check("gpu", "warn", f"nvidia-smi failed: {exc}", "reinstall the NVIDIA driver")
    return Check("gpu", "ok", "; ".join(answer.stdout.split("\n")).strip("; ") or "none")


def check_disk(name: str, folder: Path | None) -> Check:
    """Free space where versions are kept; the folder need not exist yet."""
    place = (folder or Path(tempfile.gettempdir())).resolve()
    existing = next(parent for parent in (place, *place.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    detail = f"{free / GIB:.1f} GiB free for {place}"
    if free >= ENOUGH_DISK:
        return Check(name, "ok", detail)
    state: State = "fail" if free < TOO_LITTLE_DISK else "warn"
    return Check(
        name, state, detail, "free space, or set worker.cache_dir or run.output_dir elsewhere"
    )
