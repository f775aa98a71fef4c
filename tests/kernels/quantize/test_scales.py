"""The order of swizzled scales."""

from __future__ import annotations

import itertools

import pytest
import torch

from te_dynamo.kernels.layouts.tiled_scales import plain_scales, scale_shape, swizzle_scales


@pytest.mark.parametrize("shape", [(128, 4), (256, 12), (384, 8)])
def test_swizzle_is_the_formula(shape):
    scales = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    swizzled = swizzle_scales(scales)
    assert swizzled.shape == scale_shape(*shape, swizzled=True) and swizzled.is_contiguous()
    flat, tiles = swizzled.flatten().tolist(), shape[1] // 4
    of_tiles = swizzled.view(shape[0] // 128, tiles, 32, 4, 4)
    for i, j in itertools.product(range(shape[0]), range(shape[1])):
        place = ((i // 128) * tiles + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4
        assert flat[place] == scales[i, j] == of_tiles[i // 128, j // 4, i % 32, i % 128 // 32, j % 4]
    assert torch.equal(plain_scales(swizzled), scales)
    assert swizzle_scales(swizzled) is swizzled and plain_scales(scales) is scales
