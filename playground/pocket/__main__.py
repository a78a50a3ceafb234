"""Train and measure the pocket models.

    python -m playground.pocket {tokenizer,data,train,distill,evaluate} --corpus DIR --out DIR

The steps in order; each reads what the one before left in --out. `--minutes` is the budget of `train` or `distill`,
`--resume` goes on from a checkpoint with the same budget. `evaluate` writes the finished models to --assets.
"""
import argparse
import os
import sys
from pathlib import Path

# Large tensors come and go every step. Left alone, glibc gives them back to the system each time and a quarter of
# the run goes into page faults; these settings are read when a process starts, so it is started again with them.
ALLOCATOR = dict(
    MALLOC_ARENA_MAX="1", MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_="16000000000", MALLOC_TOP_PAD_="268435456",
)


def main():
    options = parse()
    trains = options.command in ("train", "distill")
    if sys.platform == "linux" and trains and not ALLOCATOR.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, "-m", "playground.pocket", *sys.argv[1:]], os.environ | ALLOCATOR)
    import torch
    torch.set_num_threads(options.threads)
    from playground.pocket import steps
    steps.COMMANDS[options.command](options)


def parse():
    shape = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser("python -m playground.pocket", description=__doc__, formatter_class=shape)
    parser.add_argument("command", choices=["tokenizer", "data", "train", "distill", "evaluate"])
    parser.add_argument("--corpus", type=Path, required=True, help="where tales.jsonl.gz and gsm8k_train.jsonl.gz are")
    parser.add_argument("--out", type=Path, required=True, help="working folder: data, checkpoints")
    parser.add_argument("--assets", type=Path, default=Path("assets/models"), help="where the finished models go")
    parser.add_argument("--minutes", type=float, default=95, help="training budget")
    parser.add_argument("--tokens", type=float, default=24e6, help="how many training tokens `data` prepares")
    parser.add_argument("--items", type=int, default=60, help="held-out items per task in `evaluate`")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu", help="where `train` and `distill` compute")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
