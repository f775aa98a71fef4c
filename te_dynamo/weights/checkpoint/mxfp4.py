"""quant_method "mxfp4", of gpt-oss: the experts, [E, N, K / 32, 16] bytes and [E, N, K / 32] scales.

P_blocks  P_scales     of a parameter [E, K, N] in transformers' models, the input before the output
"""

from __future__ import annotations

from torch import nn

from te_dynamo.weights.checkpoint.form import Config, Form


class MXFP4(Form):
    method = "mxfp4"
    transposes = True
    names = ({"codes": "{m}{p}_blocks", "scale": "{m}{p}_scales"},)

    def kind(self, config: Config, path: str, parameter: str, module: nn.Module) -> str:
        return "mxfp4"
