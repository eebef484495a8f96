"""The adapter's linear layers as one operation each, forward and backward.

What peft computes, y = W x + s B A x, without the passes over whole activations that it takes for a scale, a sum and
their gradients. In float32 alone: elsewhere peft's own forward has the casts right.

Shape suffixes: N tokens, I input size, O output size, R rank.
"""

# ruff: noqa: N803, N806  (shape suffixes: the legend is above)

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from peft import PeftModel


def fuse_lora(model: PeftModel, adapter: str) -> int:
    """Let the plain float32 linear layers that carry ``adapter`` run as one operation; returns how many do.

    Anything out of the ordinary at the time of a call (another adapter, one that is off, autocast, another dtype) is
    left to peft.
    """
    from peft.tuners.lora import Linear

    fused = 0
    for module in model.modules():
        if isinstance(module, Linear) and _is_plain(module, adapter):
            module.forward = _forward_of(module, adapter)
            fused += 1
    return fused


def _is_plain(module: Any, adapter: str) -> bool:
    return (
        type(module.get_base_layer()) is nn.Linear
        and adapter in module.lora_A
        and adapter not in module.lora_variant
        and isinstance(module.lora_dropout[adapter], nn.Identity)
        and module.lora_A[adapter].bias is None
        and module.lora_B[adapter].bias is None
        and not module.fan_in_fan_out
    )


def _forward_of(module: Any, adapter: str) -> Callable[..., Tensor]:
    theirs, base = module.forward, module.get_base_layer()

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        usual = (
            not args
            and not kwargs
            and not module.disable_adapters
            and not module.merged
            and module.active_adapters == [adapter]
            and x.dtype == base.weight.dtype == torch.float32
            and not base.weight.requires_grad
            and not torch.is_autocast_enabled(x.device.type)
        )
        if not usual:
            found: Tensor = theirs(x, *args, **kwargs)
            return found
        a_RI, b_OR = module.lora_A[adapter].weight, module.lora_B[adapter].weight
        fused: Tensor = _LoraLinear.apply(  # type: ignore[no-untyped-call]
            x, base.weight, base.bias, a_RI, b_OR, module.scaling[adapter]
        )
        return fused

    return forward


class _LoraLinear(torch.autograd.Function):
    """W and its bias are frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        a_RI: Tensor,
        b_OR: Tensor,
        scale: float,
    ) -> Tensor:
        x_NI = x.reshape(-1, x.shape[-1])
        inner_NR = (x_NI @ a_RI.t()).mul_(scale)
        y_NO = nn.functional.linear(x_NI, weight_OI, bias_O)
        y_NO.addmm_(inner_NR, b_OR.t())
        ctx.save_for_backward(x_NI, weight_OI, a_RI, b_OR, inner_NR)
        ctx.scale, ctx.shape = scale, x.shape
        return y_NO.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI, a_RI, b_OR, inner_NR = ctx.saved_tensors
        grad_NO = grad.reshape(-1, grad.shape[-1])
        grad_inner_NR = (grad_NO @ b_OR).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_NO @ weight_OI).addmm_(grad_inner_NR, a_RI).view(ctx.shape)
        grad_b = (inner_NR.t() @ grad_NO).t()
        return grad_x, None, None, grad_inner_NR.t() @ x_NI, grad_b, None
