"""A real vLLM server as a child of the test: tiny model, loopback only, ended by its own process group."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import httpx2

ENVIRONMENT: Final = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with the flag below, one process less to start
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
FLAGS: Final = (
    "--host=127.0.0.1",
    "--dtype=float32",
    "--enforce-eager",
    "--enable-lora",
    "--max-loras=5",
    "--max-lora-rank=8",
    "--block-size=32",
    "--no-enable-chunked-prefill",
    "--kv-cache-memory-bytes=67108864",
    "--disable-uvicorn-access-log",
    "--distributed-executor-backend=uni",
    "--logprobs-mode=processed_logprobs",
)
START_S: Final = 180.0
API_KEY: Final = "key-of-the-tests"


class VLLMProcess:
    """``vllm serve``; its log is ``folder/vllm.log``."""

    def __init__(self, model: Path, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "vllm.log"
        # As a module: the command of vllm-cpu looks for a distribution of another name.
        module = ("-m", "vllm.entrypoints.openai.api_server", f"--model={model}", f"--port={port}")
        self._command = [sys.executable, *module, *FLAGS, f"--api-key={API_KEY}"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return once it answers."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=os.environ | ENVIRONMENT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError("".join(self.log.read_text().splitlines(keepends=True)[-20:]))
            time.sleep(0.2)

    def _answers(self) -> bool:
        with contextlib.suppress(httpx2.TransportError):
            return httpx2.get(f"{self.url}/health", timeout=5).is_success
        return False

    def kill(self) -> None:
        """As a machine that vanishes: its engine process goes with it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
