"""The activations of kernels/activation/activation.py and their derivatives, fp32 to fp32, as device functions.

The same ones serve every kernel, and no multiply in them can be contracted with an addition that the source does not write
as `tl.fma`: what a fused kernel computes has the bits of the unfused one.
"""

from __future__ import annotations

from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.tiles.fp8 import larger_or_nan, mul_rn


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), 0 and 1 where exp overflows and vanishes; relative error 1e-6, no denormals."""
    return _sigmoid_of_power(x * -1.4426950408889634)


@triton.jit
def _sigmoid_of_power(p):
    """1 / (1 + 2^p): sigmoid(x) where p = -x / log(2).

    Three instructions: `tl.exp2` and `/` take five more to treat denormals, which no rounding to 16 bits shows.
    """
    return _approximate("rcp", 1.0 + _approximate("ex2", p))


@triton.jit
def _approximate(FUNCTION: tl.constexpr, x):
    """2^x ("ex2") or 1 / x ("rcp") by the hardware's own function, denormals flushed to zero."""
    INSTRUCTION: tl.constexpr = FUNCTION + ".approx.ftz.f32 $0, $1;"
    return tl.inline_asm_elementwise(INSTRUCTION, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _gelu_tanh_sigmoid(x, square):
    """sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), square = x^2; the factors hold that of `_sigmoid_of_power` too."""
    return _sigmoid_of_power(x * tl.fma(square, -0.1029432395800235, -2.302208198144325))


@triton.jit
def _normal_tail(t):
    """(R, G) with Phi(-t) = R * G and G = exp(-t^2/2), t >= 0, relative error 1e-6 for R.

    R = Phi(-t) exp(t^2/2) is smooth: a polynomial in s = 1 / (1 + 0.36 t), fitted (minimax, relative) on t
    <= 13.2, beyond which fp32 underflows. Unlike 1 + erf, nothing cancels in the tail, and backward needs
    the same G.
    """
    s = _approximate("rcp", tl.fma(t, 0.36, 1.0))
    r = tl.fma(s, 0.0475255511701107, -0.1813708394765854)
    r = tl.fma(r, s, 0.18314078450202942)
    r = tl.fma(r, s, 0.02504204958677292)
    r = tl.fma(r, s, 0.14027069509029388)
    r = tl.fma(r, s, 0.14167150855064392)
    r = tl.fma(r, s, 0.14372023940086365)
    return r * s, _approximate("ex2", t * t * -0.7213475204444817)


@triton.jit
def _normal_cdf(x, tail, gauss):
    """Phi(x) from `_normal_tail(|x|)`."""
    return tl.where(x < 0.0, tail * gauss, tl.fma(-tail, gauss, 1.0))


@triton.jit
def activate(x, KIND: tl.constexpr):
    """f(x) of that kind, fp32. NaN gives NaN."""
    if KIND == "relu":
        return larger_or_nan(x, 0.0)
    elif KIND == "relu2":
        return tl.where(x <= 0.0, 0.0, x * x)
    elif KIND == "identity":
        return x
    elif KIND == "sigmoid":
        return sigmoid(x)
    elif KIND == "silu":
        return x * sigmoid(x)
    elif KIND == "quick_gelu":
        return x * sigmoid(x * 1.702)
    elif KIND == "gelu_tanh":
        return x * _gelu_tanh_sigmoid(x, x * x)
    else:
        tail, gauss = _normal_tail(tl.abs(x))
        return x * _normal_cdf(x, tail, gauss)


@triton.jit
def activate_backward(dy, x, KIND: tl.constexpr):
    """dy * f'(x) of that kind, fp32."""
    if KIND == "relu":
        return tl.where(x <= 0.0, 0.0, dy)
    elif KIND == "relu2":
        return tl.where(x <= 0.0, 0.0, mul_rn(dy, x + x))
    elif KIND == "identity":
        return dy
    elif KIND == "sigmoid":
        s = sigmoid(x)
        return mul_rn(dy, s * (1.0 - s))
    elif KIND == "silu":
        s = sigmoid(x)
        return mul_rn(dy, s * tl.fma(x, 1.0 - s, 1.0))
    elif KIND == "quick_gelu":
        s = sigmoid(x * 1.702)
        return mul_rn(dy, tl.fma(x * s, 1.702 * (1.0 - s), s))  # x * s first: 1.702 x may overflow where s is 0
    elif KIND == "gelu_tanh":
        s = _gelu_tanh_sigmoid(x, x * x)  # as in `activate`: a gated unit's backward computes it once for both
        # f' is 0 or 1 far before 30; without the clamp, x^2 overflows there and meets a zero.
        x = tl.clamp(x, -30.0, 30.0, propagate_nan=tl.PropagateNan.ALL)
        square = x * x
        slope = x * tl.fma(square, 0.21406444881780073, 1.5957691216057308)
        return mul_rn(dy, s * tl.fma(slope, 1.0 - s, 1.0))
    else:
        tail, gauss = _normal_tail(tl.abs(x))
        return mul_rn(dy, tl.fma(x * 0.3989422804014327, gauss, _normal_cdf(x, tail, gauss)))


@triton.jit
def gradients(dy, gate, up, KIND: tl.constexpr):
    """(dgate, dup) of a gated unit of that kind, fp32."""
    return activate_backward(dy * up, gate, KIND), dy * activate(gate, KIND)
