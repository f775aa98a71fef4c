"""`te-dynamo calibrate`: what it keeps of a made-up clock's times, and when it keeps nothing."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable, Iterator

import pytest
import torch

from te_dynamo import remembered as files
from te_dynamo.command_line import calibrate, doctor
from te_dynamo.command_line.failure import Failure
from te_dynamo.command_line.main import main
from te_dynamo.kernels.runtime import availability
from te_dynamo.kernels.runtime.availability import Availability
from te_dynamo.kernels.runtime.target import TARGETS
from te_dynamo.rates import H200, KIND, calibrated, rates_of

HERE = {
    "_copy": 110.0,
    "_bf16_product": 340.0,
    "_fp8_product": 230.0,
    "_launches": 4.0,
    "_step": 2800.0,
    "_quantize": 60.0,
}


class MadeUp:
    """Says how long each thing takes, without doing it; `spread` is that between the fastest and the slowest repetition."""

    def __init__(self, spread: float = 0.02, of_cpu: float = 0.02) -> None:
        self.spread, self.of_cpu = spread, of_cpu

    def gpu(self, make: Callable[[], object]) -> list[float]:
        given = getattr(make, "args", ())
        share = math.prod(given) / (8192 * 4096 if len(given) == 2 else 1)
        middle = HERE[getattr(make, "func", make).__name__] * share
        return self._around(middle, self.spread)

    def cpu(self, make: Callable[[], object]) -> list[float]:
        return self._around(HERE["_step"], self.of_cpu)

    def _around(self, middle: float, spread: float) -> list[float]:
        return [middle * (1 + spread * (i / 10 - 0.5)) for i in range(11)]


@pytest.fixture(autouse=True)
def an_h100(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU to ask, and an empty cache folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(availability, "kernels_available", lambda device: Availability(True))
    monkeypatch.setattr(calibrate, "_GpuClock", MadeUp)
    monkeypatch.setattr("te_dynamo.rates.target_of", lambda device: TARGETS["h100"])
    files._read.cache_clear()
    yield
    files._read.cache_clear()


def test_what_is_found_has_the_keys_of_the_h200() -> None:
    facts = calibrate.measure(MadeUp())
    assert facts.keys() == H200.keys()
    assert facts["copy_tbps"] == pytest.approx(2 * 2 * 8192 * 14336 / 110 / 1e6)
    assert facts["bf16_tflops"] == pytest.approx(2 * 8192 * 4096 * 4096 / 340 / 1e6)
    assert (facts["launch_us"], facts["cpu_step_us"]) == (pytest.approx(4), pytest.approx(2800))
    assert facts["quantize_us"] == pytest.approx([60, 210])


def test_the_rule_follows_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    device = torch.device("cuda")
    assert str(rates_of(device)) == "estimated for an NVIDIA H100"
    assert main(["calibrate"]) == 0
    text = capsys.readouterr().out
    assert "| copy tbps | 4.27 | 4.1 |" in " ".join(text.split()) and "rates-nvidia-h100-80gb-hbm3.json" in text
    assert str(rates_of(device)) == "calibrated on this GPU"
    assert rates_of(device).launch == pytest.approx(4 / H200["launch_us"]) and rates_of(device).cpu == pytest.approx(2)
    assert rates_of(device) == calibrated(TARGETS["h100"], files.remembered(KIND))


def test_as_plain_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == files.remembered(KIND)


def test_a_busy_gpu_is_said_and_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "_GpuClock", lambda: MadeUp(spread=0.3))
    assert main(["calibrate"]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("te-dynamo: the GPU or the CPU is busy: copy took") and "nothing is kept" in line
    assert files.remembered(KIND) == {}


def test_an_idle_cpu_varies_more_than_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "_GpuClock", lambda: MadeUp(of_cpu=0.35))
    assert main(["calibrate"]) == 0
    monkeypatch.setattr(calibrate, "_GpuClock", lambda: MadeUp(of_cpu=0.6))
    assert main(["calibrate"]) == 1 and "step by the CPU took" in capsys.readouterr().err


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["calibrate"]) == 1
    assert (
        capsys.readouterr().err
        == "te-dynamo: calibrate measures this GPU, and there is none: run it where there is one\n"
    )


def test_on_a_gpu_without_kernels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reason = "compute capability 8.0 is below 9.0"
    monkeypatch.setattr(availability, "kernels_available", lambda device: Availability(False, reason))
    assert main(["calibrate"]) == 1
    assert "which do not run here: compute capability 8.0 is below 9.0" in capsys.readouterr().err


def test_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(calibrate, "remember", full)
    with pytest.raises(Failure, match=r"no space left; TORCHINDUCTOR_CACHE_DIR"):
        calibrate.run(calibrate.argparse.Namespace(json=False))


def test_doctor_says_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._calibration().startswith("none: published figures; `python -m te_dynamo calibrate`")
    main(["calibrate", "--json"])
    assert "launch_us 4.0" in doctor._calibration() and "rates-nvidia-h100-80gb-hbm3.json" in doctor._calibration()
    monkeypatch.setattr(files, "_made_with", lambda: {"driver": "999"})
    files._read.cache_clear()
    assert doctor._calibration().startswith("not used: it was made with driver ")
    assert str(rates_of(torch.device("cuda"))) == "estimated for an NVIDIA H100"


def test_the_step_has_every_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model: model)
    assert [tuple(gradient.shape) for gradient in calibrate._step("cpu")()] == [(128, 256), (1024, 256), (256, 1024)]


@pytest.mark.gpu
def test_on_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    try:
        facts = calibrate.measure(calibrate._GpuClock())
    except Failure as busy:  # with the tests beside this one
        pytest.skip(str(busy))
    assert facts["fp8_tflops"] > facts["bf16_tflops"] > 0
