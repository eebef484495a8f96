"""Write train.jsonl and heldout.jsonl: which of two two-digit numbers is the larger one?

    python make_data.py

Every prompt shows one solved example and then asks. A pair of numbers stands in one of the two files only, in whichever
order, so that what the held-out file measures cannot have been memorised.
"""

import itertools
import json
import random
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SHOWN = (12, 45)
TRAINING_ROWS = 2000
HELDOUT_ROWS = 320
SEED = 20


def row(pair: tuple[int, int]) -> dict[str, str]:
    """One line of the data set."""
    first, second = pair
    shown = f"max({SHOWN[0]}, {SHOWN[1]}) = {max(SHOWN)}"
    return {"prompt": f"{shown}\nmax({first}, {second}) =", "answer": str(max(pair))}


def make_pairs(random_: random.Random) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Training pairs and held-out pairs; no unordered pair is in both, and the shown one is in none."""
    pairs = [pair for pair in itertools.combinations(range(10, 100), 2) if pair != SHOWN]
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
