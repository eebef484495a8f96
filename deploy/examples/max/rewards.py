"""The reward of the example: is the first line of the completion the right number?"""


def exact_match(completions: list[str], answer: list[str], **_columns: object) -> list[float]:
    """1 where the completion's first line is the answer, else 0.

    The signature is TRL's: every argument is a list with one entry a completion, and the data set's
    columns (here ``answer``) come by name.
    """
    return [
        float(completion.split("\n")[0].strip() == right)
        for completion, right in zip(completions, answer, strict=True)
    ]
