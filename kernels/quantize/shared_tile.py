"""A tile of words on its way from the threads that hold its columns to those that hold its rows, through shared memory.

Rows could read x a second time, from the first-level cache. But loads are answered in order, also behind those of other warps that
the cache has not; shared memory answers at once.

Each group of 16 rows is written and read by one warp, which waits for no other: in the tensors below a group is a row, or four
neighbouring ones, and Triton gives these to one warp. tests/test_kernels_compile_nvfp4.py holds it to that.

Threads write two words, and read pieces of four: eight threads at a time every other piece of a row, which are 32 bytes apart. So
that these lie in eight different banks, neighbouring pieces of a row's second half are exchanged.

Nothing but what it reads keeps a piece of assembly in its place: what must come later takes a token, a zero that Triton cannot see
through, from what must come first.
"""

# Tuples of tensors grow in unrolled loops, of which mypy sees one turn.
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from te_dynamo.kernels.runtime._triton import tl, triton

__all__: list[str] = []

SHAPE = (64, 128)
"""Rows and columns of the tile, of bf16."""
STRIDE = 2 * SHAPE[1]
"""Bytes from a row to the next."""
BYTES = SHAPE[0] * STRIDE

ROWS: tl.constexpr = tl.constexpr(SHAPE[0])
COLUMNS: tl.constexpr = tl.constexpr(SHAPE[1])
ROW_BYTES: tl.constexpr = tl.constexpr(STRIDE)
GROUP_BYTES: tl.constexpr = tl.constexpr(16 * STRIDE)


def write_group() -> str:
    """PTX that writes two neighbouring words of each of 16 rows, $1 to $16 the left and $17 to $32 the right ones, the first row's to
    $33, after all that the warp has read and before all that it will. $0: a token."""
    stores = [f"st.shared.v2.b32 [$33+{i * STRIDE}], {{${1 + i}, ${17 + i}}};" for i in range(16)]
    wait = "bar.warp.sync 0xffffffff;"
    return " ".join([wait, *stores, wait, "mov.b32 $0, 0;"])


def read_block() -> str:
    """PTX that reads eight words, $0 to $3 at $9 and $4 to $7 at $10. $8: a token."""
    left, right = (f"ld.shared.v4.b32 {{{', '.join(f'${i + n}' for n in range(4))}}}" for i in (0, 4))
    return f"{left}, [$9]; {right}, [$10]; mov.b32 $8, 0;"


RESERVE: tl.constexpr = tl.constexpr(f"{{ .shared .align 16 .b8 tile[{BYTES}]; mov.u32 $0, tile; }}")
WRITE: tl.constexpr = tl.constexpr(write_group())
WRITE_REGISTERS: tl.constexpr = tl.constexpr(",".join(["=r"] + 33 * ["r"]))
READ: tl.constexpr = tl.constexpr(read_block())
READ_REGISTERS: tl.constexpr = tl.constexpr(",".join(9 * ["=r"] + 2 * ["r"]))


@triton.jit
def shared_tile():
    """The address in shared memory of the program's tile. A kernel asks for it once."""
    return tl.inline_asm_elementwise(RESERVE, "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def first_token():
    """That of a tile which nobody has read yet."""
    return tl.zeros((ROWS // 16, COLUMNS // 4), tl.int32)


@triton.jit
def place_of_piece(piece):
    """Bytes from the beginning of a row to its piece of that number."""
    return (piece ^ (piece // 8)) * 16


@triton.jit
def write_tile(address, token, w):
    """Writes w, `nvfp4_words.load_column_blocks`, when the tile that `token` is of has been read: a token."""
    G: tl.constexpr = ROWS // 16
    PAIRS: tl.constexpr = COLUMNS // 4
    pair = tl.arange(0, PAIRS)[None, :]
    place = address + tl.arange(0, G)[:, None] * GROUP_BYTES + place_of_piece(pair // 2) + pair % 2 * 8
    left, right = (), ()
    for i in tl.static_range(16):
        even, odd = tl.split(tl.reshape(w[i], (G, PAIRS, 2)))
        left += (even,)
        right += (odd,)
    arguments = left + right + (place + token,)
    return tl.inline_asm_elementwise(WRITE, WRITE_REGISTERS, arguments, dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def read_rows(address, token):
    """(`nvfp4_words.load_row_blocks` of the tile when what `token` is of has been written, a token)."""
    BLOCKS: tl.constexpr = COLUMNS // 16
    row, block = tl.arange(0, ROWS // 4)[:, None], tl.arange(0, BLOCKS)[None, :]
    left = address + row // 4 * GROUP_BYTES + row % 4 * ROW_BYTES + place_of_piece(2 * block)
    right = left ^ 16
    token = tl.reshape(token, (ROWS // 4, BLOCKS))
    rows = ()
    for q in tl.static_range(4):
        down = 4 * q * ROW_BYTES + token
        w0, w1, w2, w3, w4, w5, w6, w7, token = tl.inline_asm_elementwise(
            READ, READ_REGISTERS, [left + down, right + down], dtype=(tl.int32,) * 9, is_pure=True, pack=1
        )
        rows += ((w0, w1, w2, w3, w4, w5, w6, w7),)
    return rows, tl.reshape(token, (ROWS // 16, COLUMNS // 4))
