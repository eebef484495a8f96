"""Ask an exported adapter with plain peft: python use_adapter.py BASE_MODEL ADAPTER heldout.jsonl"""

import json
import sys
from pathlib import Path

from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base, adapter, heldout = sys.argv[1:4]
tokenizer = AutoTokenizer.from_pretrained(base)
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
rows = [json.loads(line) for line in Path(heldout).read_text().splitlines()]
right = 0
for row in rows:
    asked = tokenizer(row["prompt"], return_tensors="pt")
    tokens = model.generate(**asked, max_new_tokens=5, do_sample=False)[0]
    answer = tokenizer.decode(tokens[asked["input_ids"].shape[1] :]).split("\n")[0]
    right += answer.strip() == row["answer"]
print(f"{right} of {len(rows)} right: {right / len(rows):.3f}")
