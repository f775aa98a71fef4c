"""A fusion of one's own in one file: linear + bias + squared ReLU, in Triton on CUDA and in plain PyTorch elsewhere.

    python examples/custom_fusion.py

docs/writing-a-fusion.md explains it step by step.
"""

import torch
import triton
import triton.language as tl
from torch import nn
from torch.library import triton_op, wrap_triton

import te_dynamo
from te_dynamo.ops import BasicLinear, Bias, FusedOperation, SReLU, sliding_window


@triton.jit
def bias_squared_relu_kernel(h, bias, y, size, features, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    z = tl.load(h + at, inside).to(tl.float32) + tl.load(bias + at % features, inside).to(tl.float32)
    r = tl.where(z < 0, 0.0, z)  # keeps NaN
    tl.store(y + at, (r * r).to(y.dtype.element_ty), inside)


@triton.jit
def bias_squared_relu_backward_kernel(dy, h, bias, dz, size, features, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    z = tl.load(h + at, inside).to(tl.float32) + tl.load(bias + at % features, inside).to(tl.float32)
    r = tl.where(z < 0, 0.0, z)
    grad = tl.load(dy + at, inside).to(tl.float32) * 2 * r
    tl.store(dz + at, grad.to(dz.dtype.element_ty), inside)


BLOCK = 1024


@triton_op("custom_fusion::bias_squared_relu", mutates_args=())
def bias_squared_relu(h: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """relu(h + bias)^2 in fp32, rounded once to h's dtype."""
    if not h.is_cuda:
        return torch.relu(h.float() + bias.float()).square().to(h.dtype)
    y = torch.empty_like(h)
    grid = (triton.cdiv(h.numel(), BLOCK),)
    wrap_triton(bias_squared_relu_kernel)[grid](h, bias, y, h.numel(), h.shape[-1], BLOCK=BLOCK)
    return y


@triton_op("custom_fusion::bias_squared_relu_backward", mutates_args=())
def bias_squared_relu_backward(dy: torch.Tensor, h: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """dy * 2 * relu(h + bias)."""
    if not h.is_cuda:
        return (dy.float() * 2 * torch.relu(h.float() + bias.float())).to(h.dtype)
    dz = torch.empty_like(h)
    grid = (triton.cdiv(h.numel(), BLOCK),)
    wrap_triton(bias_squared_relu_backward_kernel)[grid](dy, h, bias, dz, h.numel(), h.shape[-1], BLOCK=BLOCK)
    return dz


class LinearSquaredReLU(FusedOperation):
    """y [..., N] = relu(x [..., K] @ weight [N, K]^T + bias [N])^2.

    Saves h = x @ weight^T and the bias: their sum is never in memory.
    """

    def fuser_forward_compute(self, input, params, extra_inputs, *, requires_grad, **keywords):
        linear = self.ops[0]
        (bias,) = params[1]
        h, saved = linear.op_forward_compute(input, params[0], requires_grad=requires_grad[0], **keywords)
        return bias_squared_relu(h, bias), [(), (), ()], [saved, [bias], [h]]

    def fuser_forward_save_ctx(self, ctxs, tensors_to_save):
        for ctx, tensors in zip(ctxs, tensors_to_save, strict=True):
            ctx.save_for_backward(*tensors)

    def fuser_forward_fake(self, input, params, extra_inputs, *, requires_grad, **keywords):
        linear = self.ops[0]
        y, saved = linear.op_forward_fake(input, params[0], requires_grad=requires_grad[0], **keywords)
        h = te_dynamo.TensorProto(y.shape, y.dtype, device=y.device)
        return y, [(), (), ()], [saved, [params[1][0]], [h]]

    def fuser_backward(self, ctxs, grad_output, grad_extra_outputs):
        linear, (bias,), (h,) = self.ops[0], ctxs[1].saved_tensors, ctxs[2].saved_tensors
        dz = bias_squared_relu_backward(grad_output.contiguous(), h, bias)
        dx, of_linear = linear.op_backward(ctxs[0], dz)
        dbias = None
        if ctxs[1].requires_grad.params[0]:
            dbias = dz.flatten(0, -2).sum(0, dtype=torch.float32).to(bias.dtype)
        return dx, [of_linear, (dbias,), ()], [(), (), ()]


@te_dynamo.register_forward_backward_fusion
def fuse_linear_squared_relu(ops, *, recipe):
    """BasicLinear, Bias, SReLU -> LinearSquaredReLU."""
    return sliding_window(ops, (BasicLinear, Bias, SReLU), LinearSquaredReLU)


def gradients(run, model, x):
    """The output, and the gradients of the parameters."""
    model.zero_grad()
    y = run(x)
    y.float().square().mean().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]


def in_a_sequential(x):
    recipe = te_dynamo.recipe.Float8CurrentScaling()
    ops = (BasicLinear(64, 256), Bias(256), SReLU(), BasicLinear(256, 64), Bias(64))
    fused = te_dynamo.Sequential(*ops, recipe=recipe, device=x.device, dtype=x.dtype)
    plain = te_dynamo.Sequential(*ops, recipe=recipe, fusions=False, device=x.device, dtype=x.dtype)
    plain.load_state_dict(fused.state_dict())
    for group in te_dynamo.OperationFuser(fused.ops, recipe=recipe).fuse().forward:
        print("runs", type(group.op).__name__)
    for ours, theirs in zip(gradients(fused, fused, x), gradients(plain, plain, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.125, atol=0.0675)


class MLP(nn.Module):
    """Nothing of te_dynamo in it."""

    def __init__(self, hidden, intermediate):
        super().__init__()
        self.up = nn.Linear(hidden, intermediate)
        self.down = nn.Linear(intermediate, hidden)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)) ** 2)


def in_an_unmodified_model(x):
    model = MLP(64, 256).to(x.device, x.dtype)
    # "eager" needs no C++ compiler. The rule forces FP8: a GPU runs layers as narrow as these faster in bf16.
    options = {"codegen": "inductor" if x.is_cuda else "eager", "rules": [("", "float8_current_scaling")]}
    print(te_dynamo.explain(model, x, options=options))
    compiled = torch.compile(model, backend="te", options=options)
    with te_dynamo.capture() as graphs:
        ours = gradients(compiled, model, x)
    print(graphs["match"])
    torch._dynamo.reset()
    unfused = torch.compile(model, backend="te", options={**options, "fusions": False})
    for a, b in zip(ours, gradients(unfused, model, x), strict=True):
        torch.testing.assert_close(a, b, rtol=0.125, atol=0.0675)


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(1024, 64, dtype=torch.bfloat16, device="cuda" if torch.cuda.is_available() else "cpu")
    in_a_sequential(x)
    in_an_unmodified_model(x)
    print("fused and unfused agree")
