"""What `explain` says of a GPU holds under the model's autocast: the answer of an fp32 model in autocast is that of its 16-bit twin."""

import contextlib

import pytest
import torch
from torch import nn

import te_dynamo
from te_dynamo.errors import UnsupportedError

BF16 = torch.bfloat16
OPTIONS = {"codegen": "eager"}
ROWS, WIDTH, INNER = 8192, 1024, 4096
"""Large enough for FP8 beside products in fp32, and too small beside those in bf16."""


class Net(nn.Module):
    def __init__(self, autocast=lambda x: contextlib.nullcontext()):
        super().__init__()
        self.up, self.down, self.autocast = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), autocast

    def forward(self, x):
        with self.autocast(x):
            return self.down(torch.relu(self.up(x)))


class Breaks(Net):
    def forward(self, x):
        with torch.autocast(x.device.type, BF16):
            x = self.up(x)
            torch._dynamo.graph_break()
            return self.down(x)


class Decorated(Net):
    forward = torch.autocast("cpu", BF16)(Net.forward)


def forecast(model, around=contextlib.nullcontext(), x=torch.ones(ROWS, WIDTH)):  # noqa: B008
    with around:
        return te_dynamo.explain(model, x, options=OPTIONS, device="h200").coverage


@pytest.mark.cost_rule
def test_the_twin_in_bf16_and_the_model_in_fp32_differ():
    assert forecast(Net().bfloat16(), x=torch.ones(ROWS, WIDTH, dtype=BF16)) == 0.0 and forecast(Net()) == 1.0


IN_FORWARD = {
    "the tensor's device": Net(lambda x: torch.autocast(x.device.type, BF16)),
    "its default dtype": Net(lambda x: torch.autocast(x.device.type)),
    "cuda": Net(lambda x: torch.autocast("cuda", BF16)),
    "torch.cuda.amp": Net(lambda x: torch.cuda.amp.autocast(dtype=BF16)),
    "cpu": Net(lambda x: torch.autocast("cpu", BF16)),
    "a graph break": Breaks(),
    "a decorator": Decorated(),
    "made before": Net((lambda made: lambda x: made)(torch.autocast("cpu", BF16))),
}


@pytest.mark.cost_rule
@pytest.mark.filterwarnings("ignore:.*autocast.*:FutureWarning")
@pytest.mark.parametrize("where", IN_FORWARD)
def test_autocast_in_forward(where):
    assert forecast(IN_FORWARD[where]) == 0.0


@pytest.mark.cost_rule
@pytest.mark.h200_too
def test_autocast_around_the_call():
    with torch.autocast("cpu", BF16):
        assert forecast(Net()) == 0.0
        assert te_dynamo.explain(Net(), torch.ones(32, WIDTH), options=OPTIONS).headline.endswith(
            "0 of 2 linears, 0.0%"
        )
        for device in ("cpu", "cuda"):
            assert forecast(Net(lambda x, device=device: torch.autocast(device, enabled=False))) == 1.0
    assert not torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is torch.float16


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch turns autocast off where there is no GPU")
@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.h200_too
def test_autocast_that_torch_turned_off_is_not_known():
    off = torch.autocast("cuda", BF16)
    for model, around in ((Net(), off), (Net(lambda x: off), contextlib.nullcontext())):
        with pytest.raises(UnsupportedError, match=r"torch\.autocast that is off"):
            forecast(model, around)
        with around:
            found = te_dynamo.explain(model, torch.ones(32, WIDTH), options=OPTIONS)
        assert "H200 would take is not known: UnsupportedError" in found.to_dict()["notes"][0]
        assert "would take" not in found.headline
