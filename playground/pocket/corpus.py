"""Natural text for the pocket models: public-domain tales, grade-school problems (MIT), and Python's standard library.

The texts are not part of the project: `folder` holds `tales.jsonl.gz` ({title, source, text}) and
`gsm8k_train.jsonl.gz` ({question, answer}); the code is that of the running Python. Each reader returns
(training, validation), split by whole books, files and problems.
"""
import gzip
import hashlib
import json
import random
import re
import sysconfig
from pathlib import Path

from playground.errors import Refusal
from playground.questions.world import Item, is_held_out

PLAIN = str.maketrans({"“": '"', "”": '"', "’": "'", "‘": "'", "—": "-", "–": "-", "\u00a0": " "})
FRONT_MATTER = 3000               # characters of titles and contents at the start of most books
SOURCES = ("tales.jsonl.gz", "gsm8k_train.jsonl.gz")
SKIPPED = re.compile(r"/(tests?|site-packages|dist-packages|idlelib|lib2to3|pydoc_data|encodings|ensurepip)/")


def tales(folder, held_out=4):
    """The books as strings; the last `held_out` of a fixed shuffle are for validation."""
    texts = [row["text"].translate(PLAIN) for row in _rows(Path(folder) / SOURCES[0])]
    texts = [text[min(FRONT_MATTER, len(text) // 10):] for text in texts]
    random.Random(5).shuffle(texts)
    return texts[:-held_out], texts[-held_out:]


def problems(folder, held_out=150):
    """Grade-school problems as items, without the calculator annotations `<<...>>`."""
    items = [_problem(row) for row in _rows(Path(folder) / SOURCES[1])]
    random.Random(6).shuffle(items)
    return items[:-held_out], items[-held_out:]


def code(limit=4_000_000):
    """Files of the standard library, until `limit` characters are exceeded."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [p for p in sorted(root.rglob("*.py")) if not SKIPPED.search(p.as_posix()[len(root.as_posix()):])]
    random.Random(7).shuffle(paths)
    training, validation, seen = [], [], 0
    for path in paths:
        text = path.read_text(errors="ignore")
        (validation if is_held_out(path.name) else training).append(text)
        seen += len(text)
        if seen > limit:
            break
    return training, validation


def natural(folder, size=60_000):
    """A sample of the natural text, without the small world, for a tokenizer not trained on its names."""
    yield from (text[:size] for text in tales(folder)[0])
    yield from code()[0][:60]
    yield from (f" {item.prompt} {item.answer}" for item in problems(folder)[0][:2000])


def require(folder):
    """Raise Refusal if no folder is given, or if a source file is missing from it."""
    if folder is None:
        raise Refusal(
            f"This needs natural text: give the folder that holds {' and '.join(SOURCES)} with --corpus.", "corpus"
        )
    for name in SOURCES:
        if not (Path(folder) / name).is_file():
            raise Refusal(
                f"There is no {name} in {folder}: give the folder that holds {' and '.join(SOURCES)} with --corpus.",
                "corpus",
            )


def checksums(folder):
    """{file name: sha256} of the sources, for the model card."""
    return {name: hashlib.sha256((Path(folder) / name).read_bytes()).hexdigest() for name in SOURCES}


def _rows(path):
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _problem(row):
    answer = re.sub(r"<<.*?>>", "", row["answer"]).translate(PLAIN)
    final = int(re.sub(r"[^\d-]", "", answer.split("####")[1]))
    return Item(row["question"].translate(PLAIN), answer, "arithmetic", dict(kind="gsm8k", final=final))
