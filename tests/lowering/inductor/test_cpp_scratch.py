"""lowering/inductor/cpp_scratch.py: in C++ code every program of a launch has scratch memory of its own."""

from torch._inductor.codegen.common import TritonScratchWorkspace
from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

from te_dynamo.lowering.inductor.cpp_scratch import cpp_scratch
from te_dynamo.lowering.inductor.install import install
from te_dynamo.torch_private.private import compiling_ours


def test_torch_allocates_for_the_whole_grid() -> None:
    install()
    workspace = TritonScratchWorkspace(128, lambda: "cached_torch_dtype_uint8")
    with compiling_ours():
        lines, _ = CUDADeviceOpOverrides().cpp_scratch(0, workspace=workspace)  # type: ignore[misc]
    sizes = [line for line in lines if "_size[] =" in line]
    assert sizes == ["int64_t scratch_0_size[] = {static_cast<int64_t>(128) * grid_0 * grid_1 * grid_2};"]


def test_one_piece_becomes_one_for_each_program() -> None:
    def as_in_2_11(idx: int) -> tuple[list[str], str]:
        return ["int64_t scratch_7_size[] = {384};", "int64_t scratch_7_stride[] = {1};"], "scratch_7"

    assert cpp_scratch(as_in_2_11, 7) == (
        [
            "int64_t scratch_7_size[] = {static_cast<int64_t>(384) * grid_0 * grid_1 * grid_2};",
            "int64_t scratch_7_stride[] = {1};",
        ],
        "scratch_7",
    )
