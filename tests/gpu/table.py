"""What tests/gpu/run measured, as a Markdown table; exits with 1 if something is wrong."""
from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch


def rows_of(folder: Path, name: str) -> list[dict]:
    file = folder / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def numbers(found: list[float]) -> str:
    """The median, and the range of several."""
    middle = f"{sorted(found)[len(found) // 2]:.2f}"
    return middle if len(found) == 1 else f"{middle} ({min(found):.2f} to {max(found):.2f})"


def times(found: list[dict]) -> Iterator[str]:
    columns = list(dict.fromkeys((row["shape"], row["context"]) for row in found))
    cells = {(row["what"], row["shape"], row["context"]): numbers(row["ms"]) for row in found}
    yield "| ms | " + " | ".join(f"{shape}, {context}" for shape, context in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for what in dict.fromkeys(row["what"] for row in found):
        yield f"| {what} | " + " | ".join(cells.get((what, *column), "") for column in columns) + " |"


def lanes(found: list[dict]) -> Iterator[str]:
    yield "| lane, pocket in bfloat16 | ms per token | waits per token |"
    yield "|---|---|---|"
    for row in found:
        if "lane" in row:
            yield f"| {row['lane']} | {numbers(row['ms_per_token'])} | {row['waits_per_token']} |"


def trainings(found: list[dict]) -> Iterator[str]:
    yield "| training | tokens per step | tokens per second |"
    yield "|---|---|---|"
    for row in found:
        kind = row["training"] + ", compiled" * row["compiled"]
        yield f"| {kind} | {row['tokens']} | {row['per_second']} ({row['lowest']} to {row['highest']}) |"


def faults(kernels: list[dict], strategies: list[dict], checks: list[dict]) -> Iterator[str]:
    yield from (f"kernels: {row}" for row in kernels if not row.get("right", True))
    yield from (f"{row['strategy']}: {row}" for row in strategies if row["state"] in ("differs", "failed"))
    yield from (f"{row['check']}: {row['holds']}" for row in checks
                if row["holds"] is False or isinstance(row["holds"], list) and not all(row["holds"]))


def main() -> None:
    folder = Path(sys.argv[1])
    kernels, strategies, found = (rows_of(folder, name) for name in ("kernels", "demonstrations", "lanes"))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    tables = times(rows_of(folder, "times")), lanes(found), trainings(rows_of(folder, "training"))
    print(*(line for table in tables for line in (*table, "")), sep="\n")
    print(*(json.dumps(row) for row in kernels), sep="\n")
    print("demonstrations:", dict(Counter(row["state"] for row in strategies)))
    checks = [row for row in found if "check" in row]
    print("checks:", {row["check"]: row["holds"] for row in checks}, "\n")
    wrong = [*faults(kernels, strategies, checks)]
    print(*(wrong or ["nothing is wrong"]), sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
