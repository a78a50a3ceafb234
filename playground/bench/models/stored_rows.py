"""The table of docs/models.md on the forms in which weights may be stored, and how each was compared with the library.

Unlike the types, these rows are not measured when the page is written: each names the test that compares it, or the
versions with which it was compared by hand.
"""
from __future__ import annotations

NOTE = (
    "Weights that are stored quantised are read by the quantizers of the transformers library, as by its "
    '`from_pretrained`. Header, status line and trace name the method, for example "fp8 (stored)". Where a package '
    "or a device is missing, the refusal names it before any weights are read. *Test*: in "
    "`tests/test_stored_weights.py` the text is that of `generate` and the logits are those of `from_pretrained`, "
    "on a CPU in float32. *By hand*: the same was compared with the versions given. No form was compared on CUDA, "
    "where several have kernels of their own; the check at loading runs there too. If quantised layers round their "
    "inputs as well, the last bits of a text depend on how many rows a forward has, so that check allows 15 % of "
    "the largest logit in place of 0.1 %: measured on random networks of 2 and 8 layers, the library differs from "
    "itself by up to 9 % for int8, 3.4 % for torchao with rounded activations and 2.5 % for nf4 on a CPU with "
    "bfloat16 products."
)
ROWS = [
    ["stored form", "packages", "on a CPU", "layers round their inputs", "compared with the library"],
    ["bitsandbytes int8", "", "yes", "to int8", "test"],
    ["bitsandbytes nf4, fp4", "", "yes", "to bfloat16, if the CPU has such products", "test"],
    ["`fp8`, blocks with scales (DeepSeek, Qwen)", "",
     "dequantised to the dtype of the run, as on a GPU without FP8 or `kernels`", "no",
     "test; also in bfloat16, and stored beside bfloat16"],
    ["`mxfp4` (gpt_oss)", "", "dequantised to the dtype of the run", "no", "test"],
    ["`bitnet`", "", "yes", "to int8", "test"],
    ["`compressed-tensors` int-quantized (W8A8)", "compressed-tensors", "dequantised by the first forward", "to int8",
     "test, with the package of `tests/requirements.txt`"],
    ["`compressed-tensors` pack-quantized (W4A16), float-quantized (FP8)", "compressed-tensors",
     "dequantised by the first forward", "FP8 only", "by hand: compressed-tensors 0.20.0"],
    ["`torchao` int8 and float8 weights", "torchao", "yes", "no", "test where torchao is installed; by hand: 0.18.0"],
    ["`torchao` int8 weights and activations", "torchao", "yes", "to int8", "by hand: torchao 0.18.0"],
    ["`gptq`, `awq`, 4 bits", "gptqmodel; `gptq` also optimum", "yes", "no",
     "by hand, in float32 and bfloat16: gptqmodel 7.3.6, optimum 2.3.0 (gptqmodel 7.7 asks for a newer torch)"],
    ["`hqq`", "hqq", "refused: the library's reader wants a GPU", "", "not compared"],
    ["`nvfp4`", "", "refused: the library does not read it from files", "", "not compared"],
    ["other methods that the library names", "as the refusal says", "as the refusal says", "", "not compared"],
    ["methods that the library does not know", "", "refused", "", ""],
]
UNUSED = (
    "Stored tensors that the network leaves unused are refused if they belong to one of its modules: adapters that "
    "are not merged, biases and layers that config.json denies, scales. Parts beside the language model (towers for"
    " images and sound, layers for multi-token prediction, heads of other tasks), masks and rotations of older "
    "releases, biases of zeros and scales of a quantised KV cache are named in the log."
)
