"""The tables of docs/models.md on what people have on disk, and on a type whose library differs from itself.

Unlike the types, these rows are not measured when the page is written: each names the test that compares it.
"""
from __future__ import annotations

NOTE = (
    "What a path or a hub id holds is recognised by its content, for the page, the command line and programs alike. A "
    "public page opens no folders and files and adds no adapters."
)
ROWS = [
    ["on disk", "what happens", "compared with"],
    ["`models--ORG--NAME`, a folder of the hub's cache", "the snapshot of refs/main, or the only one",
     "the same weights, `tests/test_stored_forms.py`"],
    ["`model.fp16.safetensors` and other variants, in one file or several",
     "loads by its variant; a named file chooses among several", "the same weights, `tests/test_stored_forms.py`"],
    ["a path to a `.safetensors` file", "the model in its folder", "the same weights, `tests/test_stored_forms.py`"],
    ["a LoRA adapter of peft (adapter_config.json)", "its base model with the adapter merged, `MODEL + ADAPTER` on "
     "another base, or `adapter:FOLDER` as the weights of one lane; beside quantised weights. Rank and alpha patterns, "
     "rsLoRA, DoRA, modules_to_save, biases, trained tokens", "the logits of peft to 1e-5, `tests/test_adapters.py`"],
    ["other adapters (IA3, prefixes, aLoRA, PiSSA unconverted)", "refused, with what to do", ""],
    ["a GGUF file", "the library's reader, where it knows architecture and quantisation and the package gguf is there; "
     "dequantised", "the text of `generate` for F32, Q8_0 and Q4_0, `tests/test_gguf_files.py`"],
    ["a multimodal checkpoint (27 types, LLaVA, Qwen-VL, Gemma 3 and 4, Mistral 3, Llama 4 among them)",
     "its text part, by the library's class for text", "the logits of the library's multimodal class for text alone, "
     "to 1e-5, `tests/test_text_parts.py`"],
    ["a tokenizer with code of its own", "its tokenizer.json is read; the code is never run",
     "the same tokens, `tests/test_stored_forms.py`"],
    ["a chat template in chat_template.json, where older releases put that of a multimodal model",
     "read where the tokenizer has none", "the text of `apply_chat_template`, `tests/test_chat_templates.py`"],
    ["weights that do not belong to config.json: names of torch.compile or DataParallel, no head, other numbers of "
     "layers or tokens, a quantization_config that was left over", "refused, with what to correct", ""],
    ["pickled weights, ONNX, TensorFlow, Flax, MLX in NumPy's format, Git LFS pointers, unfinished downloads",
     "refused for what they are", ""],
    ["weights that are NaN or infinite; logits that overflow in float16", "refused, with the weight's name or another "
     "dtype", ""],
]
MINIMAX = (
    "`minimax`: in float32 the library agrees with itself with and without its cache, and the playground with both, to "
    "3e-5 of the largest logit. In bfloat16 it does not: on tiny random networks of 64 tokens its logits with its "
    "cache, token by token as in `generate`, differ from those without one by 0.6 to 1.3 times the largest logit. The "
    "playground's logits are then those with the cache: choose float32."
)
SWEEP = (
    "`tools/generate_sweep.py` writes tiny checkpoints in combinations of a tokenizer (ten families), a chat "
    "template, ends (in config.json, in generation_config.json, in both, in lists, nowhere) and a stored form "
    "(float32, bfloat16, float16, in shards, tied, padded, GPT-2, Qwen2, int8, nf4), and compares greedy lanes with "
    "`generate`: prompt, tokens, text, streamed pieces and reason. Of 2,500 combinations every ninth was run, 278, "
    "and 70 drawn from those with eleven real vocabularies: GPT-2, Llama 2 and 3, Mistral, Qwen, DeepSeek, Phi, T5, "
    "BERT and others. All 348 agreed. In 19 a text held stray bytes, beside which the library drops whole characters, "
    "and in 2 the answer changed the text of the prompt."
)
