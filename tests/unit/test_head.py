"""Logprobs of sampled tokens and their gradient, against torch's own log-softmax in float64 with all logits at once."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from spotgrpo.consumer import head as heads  # noqa: E402
from spotgrpo.consumer.head import Head, sampled_logprobs  # noqa: E402

VOCABULARY, HIDDEN = 37, 8


def plain(head: Head, hidden: Any, row: Any, target: Any, temperature: float) -> tuple[Any, Any]:
    logits = hidden @ head.weight_VD.double().t()
    if head.bias_V is not None:
        logits = logits + head.bias_V.double()
    logits = logits * head.scale
    if head.cap is not None:
        logits = head.cap * torch.tanh(logits / head.cap)
    table = torch.log_softmax(logits / temperature, dim=-1)
    return table[row, target], -(table.exp() * table).sum(-1)[row]


def drawn(dtype: Any, *, bias: bool, size: float = 1.0) -> tuple[Any, ...]:
    """Hidden states of which some have several tokens, the same one twice among them."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    row = torch.tensor([0, 1, 1, 1, 2, 3, 4, 4, 5, 6])
    target = torch.randint(0, VOCABULARY, (len(row),), generator=random)
    target[3] = target[1]
    weight = (size * normal(VOCABULARY, HIDDEN)).to(dtype)
    return normal(7, HIDDEN), row, target, weight, normal(VOCABULARY).to(dtype) if bias else None


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize(
    ("scale", "cap", "bias"), [(1.0, None, False), (0.5, None, True), (2.0, 3.0, False)]
)
@pytest.mark.parametrize(("temperature", "entropy"), [(1.0, False), (0.7, True)])
def test_values_and_gradients_are_those_of_all_logits_at_once(
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    scale: float,
    cap: float | None,
    bias: bool,
    temperature: float,
    entropy: bool,
) -> None:
    monkeypatch.setattr(heads, "TILE_ELEMENTS", rows * VOCABULARY)
    hidden, row, target, weight, bias_V = drawn(torch.float32, bias=bias)  # noqa: N806
    head = Head(weight, bias_V, scale, cap)
    random = torch.Generator().manual_seed(1)
    lean, other = torch.randn(2, len(row), generator=random, dtype=torch.float64)
    exact = hidden.clone().requires_grad_()
    logprobs, entropies = plain(head, exact, row, target, temperature)
    ((logprobs * lean).sum() + (entropies * other).sum() * entropy).backward()
    ours = hidden.float().requires_grad_()
    found = sampled_logprobs(head, ours, row, target, temperature, entropy_gradient=entropy)
    loss = (found[0] * lean.float()).sum()
    if entropy:
        loss = loss + (found[1] * other.float()).sum()
    loss.backward()
    assert found[1].requires_grad == entropy
    torch.testing.assert_close(found[0], logprobs.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1], entropies.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.grad, exact.grad.float(), atol=1e-5, rtol=1e-4)


def test_a_token_that_is_nearly_certain_keeps_its_gradient_in_half_precision() -> None:
    """It is a small difference of large vectors, which bfloat16 has no digits for unless it is taken first."""
    hidden, row, _, weight, _ = drawn(torch.bfloat16, bias=False, size=2.0)
    head = Head(weight, None, 1.0, None)
    hidden = hidden.to(torch.bfloat16)
    target = (hidden.float() @ weight.float().t()).argmax(-1)[row]
    theirs = hidden.clone().requires_grad_()
    logprobs = torch.log_softmax((theirs @ weight.t()).float(), dim=-1)[row, target]
    logprobs.sum().backward()
    ours = hidden.clone().requires_grad_()
    sampled_logprobs(head, ours, row, target, 1.0)[0].sum().backward()
    certain = logprobs.detach().exp() > 0.98
    assert certain.any()
    for index in row[certain].unique():
        wanted = theirs.grad[index]
        assert float((ours.grad[index] - wanted).norm()) < 0.01 * float(wanted.norm())
