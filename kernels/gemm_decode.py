"""FP8 GEMM of a few rows, whose time is that of reading the weight: the product of kernels/gemm.py, its operands exchanged.

    C[M, N] = round((B[N, K] @ A[M, K]^T)^T * (a_scale_inv * b_scale_inv) + bias[N]),  M at most 64

The weight has the tensor core's 64 rows and A its columns, of which there may be 16, so that nothing is loaded for rows that
do not exist. One tile a program, several programs a multiprocessor: what is in flight, not what is computed, decides. Loads
are by pointers: a tensor descriptor takes a program about as long to make as some blocks to read.
"""

from __future__ import annotations

from te_dynamo.kernels._triton import libdevice, tl, triton

__all__ = ["gemm_decode_kernel"]


@triton.jit
def gemm_decode_kernel(
    a,
    a_scale_inv,
    b,
    b_scale_inv,
    bias,
    c,
    M,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    FAST: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """C, or with SPLIT_K > 1 the unscaled fp32 sums of each part of K as c [SPLIT_K, M, N]. EVEN: N and K fill whole tiles."""
    tile = tl.program_id(0) // SPLIT_K
    part = tl.program_id(0) % SPLIT_K
    blocks = tl.cdiv(K, BLOCK_K * SPLIT_K)
    rows = tl.arange(0, BLOCK_M)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    scale = tl.load(a_scale_inv) * tl.load(b_scale_inv)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in tl.range(blocks, num_stages=STAGES):
        k = (part * blocks + block) * BLOCK_K + ks
        x_mask = (rows < M)[:, None] if EVEN else (rows < M)[:, None] & (k < K)[None, :]
        x = tl.load(a + rows[:, None] * K + k[None, :], mask=x_mask, other=0.0)
        b_at = b + columns.to(tl.int64)[:, None] * K + k[None, :]
        if EVEN:
            y = tl.load(b_at, eviction_policy="evict_first")
        else:
            y = tl.load(b_at, mask=(columns < N)[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
        if FAST:
            total = tl.dot(y, x.T, total)
        else:
            total += tl.dot(y, x.T)
    inside = (columns < N)[:, None] & (rows < M)[None, :]
    if SPLIT_K == 1:
        total = libdevice.mul_rn(total, scale)
        if HAS_BIAS:
            total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    target = c + part.to(tl.int64) * M * N
    tl.store(target + rows.to(tl.int64)[None, :] * N + columns[:, None], total.to(c.dtype.element_ty), mask=inside)
