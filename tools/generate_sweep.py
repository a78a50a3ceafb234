"""Sweep: greedy lanes and `generate` of the library, over tokenizers, chat templates, ends and stored forms.

    python tools/generate_sweep.py [--vocabularies FOLDER] [--every N] [--out sweep.json]

Each case is a tiny checkpoint, written as `save_pretrained` writes it and then read by both sides. Tokens, text, reason
and the pieces that a lane streams are compared. One line for each difference, and exit code 1 if there is one.
FOLDER holds one folder for each tokenizer, with its tokenizer.json and tokenizer_config.json, and with its own chat
template as one more case; without it the tokenizers are those of `support/tokenizer_kinds.py`. `--every 7` takes every
7th case.

Only two kinds of cases are no plain equality, and both are counted: tokens of networks in half precision or quantised
that differ where the library's two best logits are nearly equal, and texts with stray bytes, of which the library drops
whole characters.
"""
from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from itertools import product
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils import logging

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the file is run as a script

import playground  # noqa: E402
from support.scripted_networks import chain, scripted  # noqa: E402
from support.tokenizer_kinds import BYTES, KINDS  # noqa: E402

QUESTION = "The red fox reads the answer"
ANSWERS = (" the green bird sings, and", " naïve café 日本語 😀", '\n\n    {"answer": 1.5e3}')
LENGTH = 24
NEAR = 0.05  # difference of two logits that bfloat16 does not tell apart
HALF = ("bfloat16", "float16")
QUANTISED = {"int8": {"load_in_8bit": True}, "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
TURNS = "{% for m in messages %}"
TEMPLATES = {
    "none": "",
    "chatml": TURNS + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "control": "{{ bos_token }}" + TURNS + "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "inst": "{{ bos_token }}" + TURNS + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
    "spaced": TURNS + "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
}
TokenizerOf = Callable[[str], PreTrainedTokenizerFast]
OWN = "own"  # the template that a tokenizer of FOLDER brings


# --- cases ---

@dataclass(frozen=True)
class Case:
    tokenizer: str
    template: str
    ends: str
    form: str


ENDS: dict[str, Callable[[int, int], tuple[object, object]]] = {  # of config.json and generation_config.json
    "config": lambda own, other: (own, None),
    "generation": lambda own, other: (None, own),
    "several": lambda own, other: (own, [other, own]),
    "listed": lambda own, other: ([other, own], None),
    "another": lambda own, other: (own, other),
    "no end": lambda own, other: (None, None),
}
FORMS = ("float32", "bfloat16", "float16", "sharded", "tied", "padded")
# further forms, for whose networks AutoTokenizer changes the tokenizers of other families
NETWORKS = ("gpt2", "qwen2", *QUANTISED)


def cases(tokenizers: Iterable[str], templates: Iterable[str], forms: Sequence[str], every: int = 1) -> list[Case]:
    """Every `every`-th case, by a stride with which each choice meets many others."""
    whole = [Case(*chosen) for chosen in product(tokenizers, templates, ENDS, forms)]
    return [case for number, case in enumerate(whole) if (number * 7 + number // len(forms)) % every == 0]


# --- checkpoints ---

def network_of(case: Case, tokenizer: PreTrainedTokenizerFast, prompt: list[int], other: int) -> PreTrainedModel:
    """A random network, or one that writes one of ANSWERS and an end, by case."""
    rows = len(tokenizer) + (37 if case.form == "padded" else 0)
    torch.manual_seed(len(prompt) + rows)
    sizes = dict(vocab_size=rows, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    if case.form == "gpt2":
        shape = dict(n_embd=64, n_layer=2, n_head=4, n_positions=512, initializer_range=0.4)
        return GPT2LMHeadModel(GPT2Config(**shape, **sizes))
    if case.form == "qwen2" or case.form in QUANTISED:
        shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.4)
        return Qwen2ForCausalLM(Qwen2Config(**shape, **sizes))
    answer = tokenizer(ANSWERS[sum(map(ord, case.tokenizer + case.ends)) % 3], add_special_tokens=False)["input_ids"]
    end = other if case.ends in ("another", "several", "listed") else tokenizer.eos_token_id
    tie = case.form == "tied"
    network = scripted(rows, chain([prompt[-1], *answer[:12], end, *answer[:3]]), tie_word_embeddings=tie)
    return network.to(getattr(torch, case.form)) if case.form in HALF else network


def write(case: Case, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """The checkpoint of a case, with its ends in the files that the case names."""
    tokenizer.chat_template = tokenizer.own_template if case.template == OWN else TEMPLATES[case.template] or None
    own, other = tokenizer.eos_token_id, other_end(tokenizer)
    network = network_of(case, tokenizer, prompt_of(case, tokenizer), other)
    in_config, in_generation = ENDS[case.ends](own, other)
    network.config.eos_token_id = in_config
    network.generation_config.eos_token_id = in_generation
    network.save_pretrained(folder, max_shard_size="60KB" if case.form == "sharded" else "5GB")
    if case.form in QUANTISED:
        config = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float32, **QUANTISED[case.form])
        network = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": "cpu"})
        network.save_pretrained(folder)
    _write_tokenizer(tokenizer, folder)
    if in_generation is None:
        (folder / "generation_config.json").unlink(missing_ok=True)


def _write_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """The files that a stored tokenizer has, since saving it may change what it does; else those of `save_pretrained`.
    """
    files = getattr(tokenizer, "own_files", None)
    if files is None:
        tokenizer.save_pretrained(folder)
        return
    for file in files.iterdir():
        shutil.copy(file, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["chat_template"] = tokenizer.chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").unlink(missing_ok=True)


def other_end(tokenizer: PreTrainedTokenizerFast) -> int:
    """A second end: a special token that is not the tokenizer's own, or else an ordinary token."""
    own = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id}
    special = (id for id, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special and id not in own)
    return next(special, len(tokenizer) // 2)


def prompt_of(case: Case, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    if case.template == "none":
        return tokenizer(QUESTION)["input_ids"]
    turns = [{"role": "user", "content": QUESTION}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)


# --- both sides ---

@dataclass
class Found:
    """What differs in a case, and what was excused."""

    differences: list[str] = field(default_factory=list)
    excused: list[str] = field(default_factory=list)


def compare(case: Case, folder: Path, tokenizer: PreTrainedTokenizerFast) -> Found:
    """Run both sides on a checkpoint that was written with a tokenizer."""
    models = playground.load(str(folder), draft="none", device="cpu", dtype="auto")
    result = playground.run(
        "greedy", QUESTION, models=models, max_new_tokens=LENGTH, chat=case.template != "none"
    )
    network = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
    prompt, found = prompt_of(case, tokenizer), Found()
    ends = network.generation_config.eos_token_id
    listed = set(ends if isinstance(ends, list) else [ends]) - {None}
    if not listed <= models.target.end_ids:
        found.differences.append(f"ends {sorted(listed - models.target.end_ids)} of the library are not ours")
    if result.trace.headers[0].prompt_ids != prompt:
        found.differences.append(f"prompt {result.trace.headers[0].prompt_ids} instead of {prompt}")
        return found
    theirs = generated(network, prompt, sorted(models.target.end_ids))
    _compare_ids(found, case, network, prompt, result.token_ids, theirs)
    _compare_texts(found, tokenizer, prompt, result)
    reason = "end" if result.token_ids[-1:] and result.token_ids[-1] in models.target.end_ids else "length"
    if result.reason != reason:
        found.differences.append(f"reason {result.reason} instead of {reason}")
    return found


def generated(network: PreTrainedModel, prompt: list[int], ends: list[int]) -> list[int]:
    """The library's greedy continuation, with the end tokens that our side shows at loading."""
    ids = torch.tensor([prompt])
    out = network.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=LENGTH,
                           eos_token_id=ends or None, pad_token_id=0)
    return out[0, len(prompt):].tolist()


def _compare_ids(
    found: Found, case: Case, network: PreTrainedModel, prompt: list[int], ours: list[int], theirs: list[int]
) -> None:
    if ours == theirs:
        return
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    if (case.form in HALF or case.form in QUANTISED) and place < min(len(ours), len(theirs)):
        with torch.no_grad():
            logits = network(torch.tensor([prompt + theirs[:place]])).logits[0, -1].float()
        if abs(float(logits[ours[place]] - logits[theirs[place]])) < NEAR * float(logits.abs().max()):
            found.excused.append("near tie")
            return
    found.differences.append(f"token {place}: {ours[place:place + 4]} instead of {theirs[place:place + 4]}")


def _compare_texts(found: Found, tokenizer: PreTrainedTokenizerFast, prompt: list[int], result) -> None:
    """Against the library's text of prompt and answer, without that of the prompt."""
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    whole = tokenizer.decode(prompt + result.token_ids, skip_special_tokens=True)
    streamed = "".join(
        stamped.event.text for stamped in result.trace.lane(0).events if stamped.event.kind == "commit"
    )
    if streamed != result.text:
        found.differences.append(f"streamed {streamed!r}, text {result.text!r}")
    if not whole.startswith(before):
        found.excused.append("the answer changes the text of the prompt")
    elif whole[len(before):] != result.text:
        stray = "\ufffd" in whole and not set(tokenizer.convert_ids_to_tokens(result.token_ids)).isdisjoint(BYTES)
        if stray and loosely(whole[len(before):]).fullmatch(result.text):
            found.excused.append("stray bytes")
        else:
            found.differences.append(f"text {result.text!r} instead of {whole[len(before):]!r}")


def loosely(text: str) -> re.Pattern[str]:
    """A text whose runs of U+FFFD may be characters that the library dropped with a run of byte tokens."""
    parts = re.split("(\ufffd+)", text)
    return re.compile("".join(f"(?s:.{{1,{len(part)}}})" if "\ufffd" in part else re.escape(part) for part in parts))


# --- the sweep ---

def sweep(asked: Iterable[Case], tokenizer_of: TokenizerOf) -> Iterator[tuple[Case, Found]]:
    """Each case with what was found."""
    for case in asked:
        folder = Path(tempfile.mkdtemp(prefix="sweep-"))
        try:
            tokenizer = tokenizer_of(case.tokenizer)
            write(case, tokenizer, folder)
            yield case, compare(case, folder, tokenizer)
        except playground.Refusal as refused:
            yield case, Found(excused=[f"refused: {refused}"])
        finally:
            shutil.rmtree(folder)


def stored(vocabularies: Path, name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the folder, with its chat template as `own_template` and its files as `own_files`."""
    tokenizer = AutoTokenizer.from_pretrained(vocabularies / name, local_files_only=True)
    tokenizer.own_template, tokenizer.own_files = tokenizer.chat_template, vocabularies / name
    return tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=Path, help="a folder of folders with tokenizers")
    parser.add_argument("--every", type=int, default=1, help="take every n-th case only")
    parser.add_argument("--out", type=Path, help="write all cases as JSON")
    asked = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    names = sorted(p.name for p in asked.vocabularies.iterdir() if p.is_dir()) if asked.vocabularies else list(KINDS)
    read = cache(partial(stored, asked.vocabularies)) if asked.vocabularies else lambda name: KINDS[name]()
    forms, templates = (FORMS, [*TEMPLATES, OWN]) if asked.vocabularies else ((*FORMS, *NETWORKS), [*TEMPLATES])
    asked_cases = [case for case in cases(names, templates, forms, asked.every)
                   if case.template != OWN or getattr(read(case.tokenizer), "own_template", None)]
    counts, lines, excused = Counter(), [], Counter()
    for case, found in sweep(asked_cases, read):
        counts["differ" if found.differences else "refused" if "refused" in str(found.excused) else "agree"] += 1
        excused.update(found.excused)
        lines.append({**asdict(case), **asdict(found)})
        if found.differences:
            print(*asdict(case).values(), found.differences, flush=True)
    print(dict(counts), dict(excused))
    if asked.out:
        asked.out.write_text(json.dumps(lines, indent=1, ensure_ascii=False), encoding="utf-8")
    return 1 if counts["differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
