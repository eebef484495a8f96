"""A tiny random Llama with a real character tokenizer, for tests that need a model but not its wit.

0.3 M parameters, float32. The weights are drawn wide, so that the distribution over the next
character is far from flat and two adapters give clearly different logprobs.
"""

from __future__ import annotations

import json
import string
from typing import TYPE_CHECKING, Any, Final

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np

PAD: Final = "<pad>"
END_OF_TEXT: Final = "<|end|>"
END_OF_TURN: Final = "<|im_end|>"
START_OF_TURN: Final = "<|im_start|>"
UNKNOWN: Final = "<unk>"
SPECIAL: Final = (PAD, END_OF_TEXT, END_OF_TURN, START_OF_TURN, UNKNOWN)
CHARACTERS: Final = string.digits + string.ascii_letters + string.punctuation + " \n\t"

INITIALIZER_RANGE: Final = 0.15
MAX_CONTEXT: Final = 512

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable character: text made of ``CHARACTERS`` survives encode and decode."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END_OF_TEXT,
        unk_token=UNKNOWN,
        extra_special_tokens=[END_OF_TURN, START_OF_TURN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_CONTEXT,
    )


def build_tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """Write model, tokenizer and a ``generation_config.json`` with two end tokens into ``folder``.

    The same seed gives the same weights. Returns ``folder``.
    """
    tokenizer = build_tokenizer()
    ends = [
        tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        tokenizer.convert_tokens_to_ids(END_OF_TURN),
    ]
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_CONTEXT,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=ends[0],
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def set_generation_defaults(folder: Path, **defaults: float) -> None:
    """Add ``defaults`` (temperature, …) to ``generation_config.json``, as many hub models have."""
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | defaults))


def build_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8.0,
    target_modules: Sequence[str] = ("q_proj", "v_proj"),
    scale: float = 0.3,
) -> Path:
    """Write a PEFT adapter for ``model`` into ``folder``, as a version's folder holds it.

    B is drawn from N(0, scale²), so the adapter changes every logprob; ``scale`` 0 gives the zero
    adapter of v0. Returns ``folder``.
    """
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(target_modules))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(LlamaForCausalLM.from_pretrained(model), config)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=scale)
    adapted.save_pretrained(folder)
    return folder


def plain_logprobs(model: Path, adapter: Path | None, ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """Logprobs of ``ids[1:]`` at temperature 1 by transformers and peft alone: one sequence, no cache, no batch."""
    network: Any = LlamaForCausalLM.from_pretrained(model)
    if adapter is not None:
        network = PeftModel.from_pretrained(network, adapter)
    tokens = torch.tensor([list(ids)])
    with torch.no_grad():
        table = torch.log_softmax(network.eval()(tokens).logits[0, :-1].float(), dim=-1)
    found: np.ndarray[Any, Any] = table.gather(1, tokens[0, 1:, None])[:, 0].numpy()
    return found
