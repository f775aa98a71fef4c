"""compare() of models that go wrong: one clear line each, and the rest of the table stays."""

import pytest
import torch
from torch import nn

import te_dynamo
from te_dynamo.accuracy import probes
from te_dynamo.errors import InputError


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def x(rows=64):
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(1))


def notes(found):
    return found.to_dict()["summary"]["notes"]


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.dropout = model(), nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.body(x))


def test_random_numbers_are_the_same_in_both_runs():
    found = te_dynamo.compare(Dropped().train(), x())
    assert not notes(found) and 20 < found.summary["snr_output_db"] < 60


class Counting(nn.Module):
    """Each call gives another result."""

    def __init__(self):
        super().__init__()
        self.body, self.calls = model(), [0]

    def forward(self, x):
        self.calls[0] += 1
        return self.body(x) + 0.01 * self.calls[0]


def test_a_model_that_differs_without_us_is_said():
    found = te_dynamo.compare(Counting(), x())
    (note,) = notes(found)
    assert note.startswith("two runs of the model in its own precision, from one random state, differ by ")
    assert len(found.rows) == 2 and all(row.snr_db is not None for row in found.rows)
    assert note in str(found)


class NoTensor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = model()

    def forward(self, x):
        return {"label": self.body(x).argmax(-1), "name": "x"}


def test_a_result_without_floating_tensors():
    found = te_dynamo.compare(NoTensor(), x())
    assert notes(found) == ["the model returns no floating tensor: there is no loss, output or gradient to compare"]
    assert found.summary["loss"] is None and len(found.rows) == 2


def test_nan_in_the_reference():
    with_nan = x()
    with_nan[0, 0] = float("nan")
    found = te_dynamo.compare(model(), with_nan)
    assert "the model's own precision gives NaN or infinity: its differences are not known" in notes(found)
    assert found.summary["snr_output_db"] is None and len(found.rows) == 2
    assert str(found)


def test_a_linear_for_which_memory_does_not_suffice(monkeypatch):
    sums = probes.forward_sums

    def too_large(product, x, weight, *rest):
        if weight.shape[0] == 64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        return sums(product, x, weight, *rest)

    monkeypatch.setattr(probes, "forward_sums", too_large)
    found = te_dynamo.compare(model(), x())
    rows = {row["module"]: row for row in found.to_dict()["rows"]}
    assert "out of memory while it was measured" in rows["0"]["note"]
    assert rows["2"]["snr_output_db"] > 20 and not rows["2"]["note"]


class Large(nn.Module):
    """Its second call with gradients finds no memory."""

    def __init__(self):
        super().__init__()
        self.body = model()

    @torch._dynamo.disable
    def full(self, x):
        if x.shape[0] > 100:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        return x

    def forward(self, x):
        return self.full(self.body(x))


def test_a_step_for_which_memory_does_not_suffice():
    found = te_dynamo.compare(Large(), batches=[x(), x(128)])
    assert notes(found)[0].startswith("step 2 ran out of memory in the model's own precision")
    assert len(found.rows) == 2 and found.summary["snr_output_db"] > 20


def test_buffers_and_gradients_are_left_as_they_were():
    net = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)).train()
    net(x()).sum().backward()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    gradients = [p.grad.clone() for p in net.parameters()]
    te_dynamo.compare(net, x(), steps=2)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(net.parameters(), gradients, strict=True))


class WritesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.fc(x.mul_(scale.add_(1)))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("tool", [te_dynamo.compare, te_dynamo.explain])
def test_inputs_that_the_model_writes_are_left_as_they_were(tool, inference: bool):
    """Each run has the same ones: else the second multiplies what the first has made."""
    with torch.inference_mode(inference):
        model, given = WritesItsInput(), (torch.randn(8, 32), torch.ones(32))
        model.register_buffer("calls", torch.zeros(()))
        before = [tensor.clone() for tensor in given]
        found = tool(model, *given)
    assert all(map(torch.equal, given, before)) and not model.calls
    if tool is te_dynamo.compare:
        assert not found.notes and found.summary["snr_output_db"] > 20


@pytest.mark.parametrize("called", [False, True])
def test_a_model_whose_weights_are_dropped(called: bool) -> None:
    net = te_dynamo.freeze(model().requires_grad_(False), drop_weights=True)
    if called:
        torch.compile(net, backend="te", options={"codegen": "eager"})(x())
    with pytest.raises(InputError, match=r"weights were dropped by te_dynamo\.freeze: compare it before"):
        te_dynamo.compare(net, x())


def test_a_model_that_raises():
    with pytest.raises(RuntimeError, match="reduction dim"):
        te_dynamo.compare(model(), torch.randn(4, 33))


def test_a_model_without_values() -> None:
    model, x = nn.Linear(64, 64).to("meta"), torch.zeros(32, 64)
    for given in ((model, x), (nn.Linear(64, 64), x.to("meta"))):
        with pytest.raises(InputError, match="on cuda or cpu, got some on the device 'meta', which have no values"):
            te_dynamo.compare(*given)
