"""A comparison without a run: SNRs fall by half a decibel from linear to linear."""

from te_dynamo.accuracy.comparison import Comparison
from te_dynamo.accuracy.rows import LinearAccuracy, TensorAccuracy


def comparison(modules, worst=(), **summary):
    """Of linears of these paths; those in `worst` have 20 dB less."""
    rows = [_row(module, 32 - place / 2 - 20 * (module in worst)) for place, module in enumerate(modules)]
    whole = {
        "linears": len(rows),
        "linears_in_all": len(rows) + 1,
        "coverage": 1.0,
        "steps": 2,
        "loss": 2.5,
        "loss_recipe": 2.499925,
        "loss_change": -3e-5,
        "snr_output_db": 30.25,
        "snr_gradients_db": 21.5,
        "gradients": {"head.bias": 12.25},
    }
    return Comparison("float8_current_scaling", rows, whole | summary)


def _row(module, snr):
    x = TensorAccuracy(snr + 3, saturated=0.0, flushed=0.0125, zero=0.0, amax=4.0, amax_spread=1.0)
    return LinearAccuracy(
        module=module,
        source="model.py:123",
        recipe="float8_current_scaling",
        shape=("64", "64", "64"),
        dtype="bf16",
        flops=2 * 64**3,
        output_snr_db=snr,
        dx_snr_db=snr + 1,
        dw_snr_db=None,
        tensors={"x": x},
        note="",
        finite=True,
    )
