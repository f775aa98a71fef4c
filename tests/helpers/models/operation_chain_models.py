"""Models, fusions and runs of the tests of passes/torch_ir/operation_chains.py."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

import te_dynamo
from te_dynamo.operations import FusedOperation, sliding_window
from te_dynamo.operations.fused.joined import joined_backward

WIDTH = 32
EAGER = {"codegen": "eager", "recipe": te_dynamo.recipe.Float8CurrentScaling(power_of_two_scales=True)}


class Whole(FusedOperation):
    """Its operations one after another, in both halves."""

    def fuser_forward_compute(self, input, params, extra_inputs, *, requires_grad, **keywords):
        outputs, saved = [], []
        for i, op in enumerate(self.ops):
            one = slice(i, i + 1)
            input, extra, kept = op.fuser_forward_compute(
                input, params[one], extra_inputs[one], requires_grad=requires_grad[one], **keywords
            )
            outputs += extra
            saved += kept
        return input, outputs, saved

    def fuser_forward_save_ctx(self, ctxs, tensors_to_save):
        for ctx, tensors in zip(ctxs, tensors_to_save, strict=True):
            ctx.save_for_backward(*tensors)

    def fuser_forward_fake(self, input, params, extra_inputs, **keywords):
        return super().fuser_forward_fake(input, params, extra_inputs, **keywords)

    def fuser_backward(self, ctxs, grad_output, grad_extra_outputs):
        return joined_backward(self.ops, ctxs, grad_output, grad_extra_outputs)


class WholeBackward(FusedOperation):
    """Its operations one after another, backward."""

    def fuser_backward(self, ctxs, grad_output, grad_extra_outputs):
        return joined_backward(self.ops, ctxs, grad_output, grad_extra_outputs)


@contextlib.contextmanager
def fusing(*types, cls=Whole):
    """Inside, a fusion of these operations is registered."""

    def fuse(ops, *, recipe):
        return sliding_window(ops, types, cls)

    register = te_dynamo.register_forward_backward_fusion if cls.has_forward else te_dynamo.register_backward_fusion
    with register(fuse):
        yield


# ---- models


class LlamaNorm(nn.Module):
    """RMSNorm as Hugging Face writes it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        f = x.float()
        f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * f.to(x.dtype)


class NormLinear(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.fc = norm, nn.Linear(WIDTH, 64, bias=False)

    def forward(self, x):
        return self.fc(self.norm(x))


class Block(nn.Module):
    """x + mlp(norm(x)), with a LayerNorm, biases and GELU."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Gated(nn.Module):
    """A gated MLP behind an RMSNorm, with its residual sum."""

    def __init__(self, product=lambda g, u: F.silu(g) * u, bias=False):
        super().__init__()
        self.product = product
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.gate, self.up = nn.Linear(WIDTH, 64, bias=bias), nn.Linear(WIDTH, 64, bias=bias)
        self.down = nn.Linear(64, WIDTH, bias=bias)

    def forward(self, x):
        h = self.norm(x)
        return self.down(self.product(self.gate(h), self.up(h))) + x


class Halves(nn.Module):
    """The same with gate and up in one linear."""

    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 128, bias=False), nn.Linear(64, WIDTH, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(up * F.silu(gate))


# ---- running


def run(model, options=EAGER):
    """(stages, output and gradients) of the compiled model."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(2, 16, WIDTH, dtype=next(model.parameters()).dtype, requires_grad=True)
    with te_dynamo.capture() as graphs:
        y = torch.compile(model, backend="te", fullgraph=True, options=options)(x)
        if not y.requires_grad:
            return graphs, [y]
        grads = torch.autograd.grad(y.float().square().mean(), [x, *model.parameters()])
    return graphs, [y.detach(), *grads]


def check(model, options=EAGER):
    """The stages with the registered fusions, whose numbers are those without."""
    graphs, fused = run(model, options)
    _, unfused = run(model, {**options, "fusions": False})
    for a, b in zip(fused, unfused, strict=True):
        torch.testing.assert_close(a, b, rtol=0.125, atol=0.0675)
    return graphs


def matched(graphs):
    """The graph after matching, without its inputs."""
    return "\n".join(line for line in graphs["match"].splitlines() if not line.endswith(" = input"))
