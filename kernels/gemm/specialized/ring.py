"""What the warp-specialized GEMMs share: how operands come and results leave.

One warp copies tiles of A and B, and vectors of scales where there are any, into a ring of slots in shared memory; GROUPS
groups of four warps multiply, each its own rows of the tile in an upper and a lower half. The groups wait for the copies only,
never for each other: one adds while the other multiplies, which one program whose warps all run the same code cannot do.
"""

from __future__ import annotations

from te_dynamo.kernels.runtime._gluon import async_load, async_store, gl, gluon, hopper, mbarrier, reinterpret, tma

GROUPS = gl.constexpr(2)  # of warps that multiply
GROUP_WARPS = gl.constexpr(4)
GROUP_REGISTERS = gl.constexpr(240)
COPY_REGISTERS = gl.constexpr(24)


@gluon.jit
def make_ring(
    a,
    b,
    M,
    N,
    K,
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    PIECES: gl.constexpr = 1,
):
    """(descriptors of A and B, the ring: its slots for tiles of A and of B, and two barriers a slot).

    A tile of B is copied in that many pieces, one below the other.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    a_desc = tma.make_tensor_descriptor(a, [M, K], [K, 1], [BLOCK_M, BLOCK_K], layout)
    b_desc = tma.make_tensor_descriptor(b, [N, K], [K, 1], [BLOCK_N // PIECES, BLOCK_K], layout)
    a_tiles = gl.allocate_shared_memory(a.dtype.element_ty, [STAGES, BLOCK_M, BLOCK_K], layout)
    b_tiles = gl.allocate_shared_memory(b.dtype.element_ty, [STAGES, BLOCK_N, BLOCK_K], layout)
    # Of each slot of the ring: "its tiles have arrived" and "every group has read them".
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    hopper.fence_async_shared()
    return (a_desc, b_desc), (a_tiles, b_tiles, full, empty)


@gluon.jit
def make_result(c, M, N, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """(C's descriptor, a buffer for each group): what `store` sends results of [ROWS, COLUMNS] through."""
    layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=c.dtype.element_ty.primitive_bitwidth, rank=2
    )
    c_desc = tma.make_tensor_descriptor(c, [M, N], [N, 1], [ROWS, COLUMNS], layout)
    return c_desc, gl.allocate_shared_memory(c.dtype.element_ty, [GROUPS, ROWS, COLUMNS], layout)


@gluon.jit
def fill(descs, ring, scales, stage, phase, row, column, first, last, distance=0):
    """Copies the blocks of one tile from k = `first` up to `last`; returns the next slot.

    distance: from one piece of B's tile to the next, in rows of B.

    scales: for A, or for A and B, (descriptor of the scales of every block, one after the other, elements from one block
    to the next, slots of the ring); empty where a tile comes without.
    """
    a_desc, b_desc = descs
    a_tiles, b_tiles, full, empty = ring
    BLOCK_M: gl.constexpr = a_tiles.shape[1]
    BLOCK_N: gl.constexpr = b_tiles.shape[1]
    BLOCK_K: gl.constexpr = a_tiles.shape[2]
    PIECE: gl.constexpr = b_desc.block_shape[0]
    PIECES: gl.constexpr = BLOCK_N // PIECE
    b_pieces = reinterpret(b_tiles, b_tiles.dtype, [b_tiles.shape[0] * PIECES, PIECE, BLOCK_K], b_tiles.layout)
    SCALES: gl.constexpr = len(scales)
    SCALES_BYTES: gl.constexpr = 4 * (SCALES > 0) * BLOCK_M + 4 * (SCALES > 1) * BLOCK_N
    for block in range(gl.cdiv(last - first, BLOCK_K)):
        k = first + block * BLOCK_K
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), (BLOCK_M + BLOCK_N) * BLOCK_K + SCALES_BYTES)
        async_load(a_desc, [row, k], full.index(stage), a_tiles.index(stage))
        for piece in gl.static_range(PIECES):
            place = column + piece * distance
            async_load(b_desc, [place, k], full.index(stage), b_pieces.index(stage * PIECES + piece))
        for operand in gl.static_range(SCALES):
            desc, stride, slots = scales[operand]
            place = k // BLOCK_K * stride + (row if operand == 0 else column)
            async_load(desc, [place], full.index(stage), slots.index(stage))
        stage, phase = next_slot(stage, phase, a_tiles.shape[0])
    return stage, phase


@gluon.jit
def next_slot(stage, phase, STAGES: gl.constexpr):
    stage += 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def tile_origin(index, tiles_m, tiles_n, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr):
    """(first row, first column) of a tile; GROUP_M rows of tiles are walked together, column by column."""
    group = index // (GROUP_M * tiles_n)
    rows_in_group = gl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    row = (group * GROUP_M + index % rows_in_group) * BLOCK_M
    return row, (index % (GROUP_M * tiles_n)) // rows_in_group * BLOCK_N


@gluon.jit
def split_columns(value):
    """The left and the right half of a product; no register moves."""
    ROWS: gl.constexpr = value.shape[0]
    COLUMNS: gl.constexpr = value.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [GROUP_WARPS, 1], [16, COLUMNS, 32])
    left, right = value.reshape((ROWS, 2, COLUMNS)).permute((0, 2, 1)).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def store(c_tile, c_desc, value, row, column):
    """Rounds to C's dtype and stores through shared memory; the last store must have read it first."""
    value = value.to(c_desc.dtype)
    if c_tile.shape[1] < value.shape[1]:
        # One after the other: a buffer for half of it suffices.
        left, right = split_columns(value)
        _store(c_tile, c_desc, left, row, column)
        _store(c_tile, c_desc, right, row, column + left.shape[1])
    else:
        _store(c_tile, c_desc, value, row, column)


@gluon.jit
def _store(c_tile, c_desc, value, row, column):
    tma.store_wait(0)
    c_tile.store(value)
    hopper.fence_async_shared()
    async_store(c_desc, [row, column], c_tile)
