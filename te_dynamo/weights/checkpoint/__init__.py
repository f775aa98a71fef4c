"""Files of quantized weights: read as QuantizedTensors of the same codes and scales, and written back.

files.py      the safetensors format: headers, tensors one at a time, shards
kinds.py      how the values of one weight lie (its codes, its scales), whatever they are called
form.py       what a library's files call these, and what its configuration says; one file a form beside it
forms.py      the table of forms
plan.py       every tensor of a file against every parameter of a model: all that can be wrong is found here
load.py       `load_checkpoint`, `load_quantized`
from_pretrained.py  the same by transformers (`register_in_transformers`)
save.py       `save_checkpoint`
"""
