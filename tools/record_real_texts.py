"""Records what real tokenizers make of answers after prompts: tests/real_texts.json, which test_continuations.py reads.

    python tools/record_real_texts.py FOLDER

FOLDER holds one folder for each tokenizer. Of a tokenizer only its decoder and the names of the few tokens in these
texts are kept, with the texts that the library decodes; the vocabularies themselves are no part of the project.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

FILE = Path(__file__).parents[1] / "tests" / "real_texts.json"
PROMPTS = ("", "The red fox", "Q: why?\n")
ANSWERS = ("The answer", " the answer is", "  x = 1\n\n\treturn", " naïve 日本 😀🙂", " don't, I'm")


def recorded(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The decoder, the names of the tokens by new ids, which of them decoding skips, and the texts."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    new: dict[int, int] = {}
    cases = []
    for prompt in PROMPTS:
        before = tokenizer(prompt, add_special_tokens=True)["input_ids"]
        for answer in ANSWERS:
            ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
            whole, start = (tokenizer.decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                            for part in (before + ids, before))
            if whole.startswith(start):
                prompt_ids, answer_ids = ([new.setdefault(id, len(new)) for id in part] for part in (before, ids))
                cases.append({"prompt": prompt_ids, "answer": answer_ids, "text": whole[len(start):]})
    decoder = tokenizer.backend_tokenizer.decoder
    return {
        "decoder": json.loads(decoder.__getstate__()) if decoder else None,
        "tokens": [tokenizer.convert_ids_to_tokens(id) for id in new],
        "special": [place for id, place in new.items() if id in added and added[id].special],
        "cases": cases,
    }


if __name__ == "__main__":
    folders = sorted(folder for folder in Path(sys.argv[1]).iterdir() if folder.is_dir())
    read = {folder.name: recorded(AutoTokenizer.from_pretrained(folder)) for folder in folders}
    lines = [f"{json.dumps(name)}: {json.dumps(found, ensure_ascii=False)}" for name, found in read.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
