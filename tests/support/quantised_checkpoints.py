"""Tiny checkpoints in the forms in which people have quantised weights on disk, written tensor by tensor."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from toys import byte_tokenizer, save
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GptOssConfig, GptOssForCausalLM

Split = Callable[[Tensor], dict[str, Tensor]]  # a matrix as the tensors that stand for it, by the end of their names
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
BLOCK = 32  # numbers with one scale, in MXFP4 and GPTQ here


def edited(folder: Path, **entries) -> Path:
    """The folder, after its config.json is given these entries."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return folder


def stored(folder: Path, add: dict[str, Tensor], drop: tuple[str, ...] = ()) -> Path:
    """The folder, with further tensors in its weight file, and without those whose names have one of these endings."""
    tensors = {name: tensor for name, tensor in read(folder).items() if not name.endswith(drop or ("nothing",))}
    tensors |= {name: tensor.clone() for name, tensor in add.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def read(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def fp8(folder: Path, rest: torch.dtype = torch.bfloat16) -> Path:
    """Blocks of FP8 with a scale each, as DeepSeek and Qwen publish; all other weights in `rest`."""
    save(folder)
    _split(folder, lambda matrix: _scaled(matrix, matrix.abs().max(), torch.float8_e4m3fn, "weight_scale_inv"))
    others = {name: tensor.to(rest) for name, tensor in read(folder).items() if "proj.weight" not in name}
    entry = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return edited(stored(folder, others), quantization_config=entry)


def bitsandbytes(folder: Path, **settings) -> Path:
    """As `save_pretrained` leaves a network that bitsandbytes quantised while it was read."""
    save(folder)
    config = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float32, **settings)
    quantised = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": "cpu"})
    quantised.save_pretrained(folder)
    return folder


def compressed_tensors(folder: Path) -> Path:
    """W8A8: int8 with a scale for each row, and activations rounded to int8 token by token, as vLLM serves them."""
    save(folder)
    _split(folder, lambda matrix: _scaled(matrix, matrix.abs().amax(1, keepdim=True), torch.int8, "weight_scale"))
    shared = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**shared, "strategy": "channel", "dynamic": False},
        "input_activations": {**shared, "strategy": "token", "dynamic": True},
    }
    return edited(folder, quantization_config={
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group},
    })


def gptq(folder: Path) -> Path:
    """Eight numbers of 4 bits in an int32. The values mean nothing: the packages that read them are not here."""
    save(folder)
    _split(folder, lambda matrix: {
        "qweight": torch.zeros(matrix.shape[1] // 8, len(matrix), dtype=torch.int32),
        "qzeros": torch.zeros(matrix.shape[1] // BLOCK, len(matrix) // 8, dtype=torch.int32),
        "scales": torch.ones(matrix.shape[1] // BLOCK, len(matrix)).half(),
        "g_idx": torch.arange(matrix.shape[1], dtype=torch.int32) // BLOCK,
    })
    return edited(folder, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": BLOCK,
                                               "desc_act": False})


def bitnet(folder: Path) -> Path:
    """Weights of -1, 0 and 1, four in a byte, with one scale for each matrix."""
    save(folder)
    _split(folder, lambda matrix: {
        "weight": torch.randint(3, (4, len(matrix) // 4, matrix.shape[1]), dtype=torch.uint8,
                                generator=torch.Generator().manual_seed(len(matrix)))
        .mul(torch.tensor([1, 4, 16, 64], dtype=torch.uint8)[:, None, None]).sum(0, dtype=torch.uint8),
        "weight_scale": torch.tensor([20.0]),
    })
    return edited(folder, quantization_config={
        "quant_method": "bitnet", "linear_class": "bitlinear", "quantization_mode": "offline",
        "modules_to_not_convert": ["lm_head"],
    })


def torchao(folder: Path) -> Path:
    """int8 weights as `save_pretrained` leaves them; their tensors are a subclass of torch's."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    save(folder)
    config = TorchAoConfig(Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32, device_map={"": "cpu"}
    ).save_pretrained(folder)
    return folder


def mxfp4(folder: Path) -> Path:
    """The experts of gpt_oss in blocks of 32 numbers of 4 bits, with an exponent each."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=320, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=256,
        sliding_window=16, initializer_range=0.2, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )
    GptOssForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    experts = {}
    for name, tensor in read(folder).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, inputs, outputs = tensor.shape
            blocks = count, outputs, inputs // BLOCK
            experts[name + "_blocks"] = torch.randint(256, (*blocks, BLOCK // 2), dtype=torch.uint8)
            experts[name + "_scales"] = torch.randint(122, 126, blocks, dtype=torch.uint8)
    whole = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    entry = {"quant_method": "mxfp4", "modules_to_not_convert": whole}
    return edited(stored(folder, experts, drop=("experts.gate_up_proj", "experts.down_proj")),
                  quantization_config=entry)


def _split(folder: Path, split: Split) -> None:
    parts = {
        name.removesuffix("weight") + end: part
        for name, tensor in read(folder).items() if "proj.weight" in name
        for end, part in split(tensor).items()
    }
    stored(folder, parts, drop=("proj.weight",) if not any(name.endswith("proj.weight") for name in parts) else ())


def _scaled(matrix: Tensor, largest: Tensor, dtype: torch.dtype, end: str) -> dict[str, Tensor]:
    scale = largest.reshape(-1, 1) / LARGEST[dtype]
    whole = matrix / scale if dtype.is_floating_point else (matrix / scale).round()
    return {"weight": whole.to(dtype), end: scale.float()}
