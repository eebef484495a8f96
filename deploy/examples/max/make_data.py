"""Write train.jsonl and heldout.jsonl: which of two two-digit numbers is the larger one?

    python make_data.py

Every prompt shows two solved examples and then asks. A pair of numbers stands in one of the two files only, in
whichever order, so that what the held-out file measures cannot have been memorised.

Why two: with them a prompt has 38 tokens, and vLLM computes a prompt once for all completions of its group only from 32
tokens on. One example is enough for the model, and makes generation twice as slow.
"""

import itertools
import json
import random
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SHOWN = ((12, 45), (28, 73))
TRAINING_ROWS = 2000
HELDOUT_ROWS = 320
SEED = 20


def row(pair: tuple[int, int]) -> dict[str, str]:
    """One line of the data set."""
    shown = "".join(f"max({first}, {second}) = {max(first, second)}\n" for first, second in SHOWN)
    return {"prompt": f"{shown}max({pair[0]}, {pair[1]}) =", "answer": str(max(pair))}


def make_pairs(random_: random.Random) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Training pairs and held-out pairs; no unordered pair is in both, and the shown ones are in none."""
    pairs = [pair for pair in itertools.combinations(range(10, 100), 2) if pair not in SHOWN]
    random_.shuffle(pairs)
    ordered = [random_.choice([(low, high), (high, low)]) for low, high in pairs]
    return ordered[HELDOUT_ROWS : HELDOUT_ROWS + TRAINING_ROWS], ordered[:HELDOUT_ROWS]


def write(name: str, pairs: list[tuple[int, int]]) -> None:
    """Write one file of the data set."""
    lines = [json.dumps(row(pair)) + "\n" for pair in pairs]
    (FOLDER / name).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    train, heldout = make_pairs(random.Random(SEED))
    write("train.jsonl", train)
    write("heldout.jsonl", heldout)
