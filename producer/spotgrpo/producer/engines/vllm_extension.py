"""What vLLM's workers are asked about an adapter. Loaded by vLLM into its worker class, wherever that runs."""

from __future__ import annotations

from typing import Any


class AdapterCensus:
    """Mixed into vLLM's worker (``worker_extension_cls``)."""

    model_runner: Any

    def spotgrpo_adapter_modules(self, adapter_id: int) -> list[str]:
        """Names of this worker's modules that apply the adapter; a fused module counts once a part.

        vLLM resets a module that finds no weights of its name, and serves the base without a word.
        """
        manager = self.model_runner.lora_manager._adapter_manager  # noqa: SLF001
        adapter = manager.list_adapters().get(adapter_id)
        if adapter is None or adapter_id not in manager.lora_index_to_id:
            return []
        found: list[str] = []
        for name in manager.modules:
            weights = adapter.get_lora(name)
            if weights is not None:
                parts = weights.lora_a if isinstance(weights.lora_a, list) else [weights.lora_a]
                found += [f"{name}#{part}" for part, a in enumerate(parts) if a is not None]
        return found
