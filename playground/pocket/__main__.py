"""Make items of the small world, and train and measure the pocket models on them.

    python -m playground.pocket world --task records --n 5 [--grade 2] [--seed 1] [--held-out] [--json]
    python -m playground.pocket {tokenizer,data,train,distill,evaluate} --corpus DIR --out DIR

`world` prints items of one task, each with its answer; the same seed gives the same items. The other commands are the steps
of training, in order; each reads what the one before left in --out. `--minutes` is the budget of `train` or `distill`,
`--resume` goes on from a checkpoint with the same budget. `evaluate` writes the finished models to --assets.
"""
import argparse
import os
import sys
from pathlib import Path

from playground.errors import Refusal

# Large tensors come and go every step. Left alone, glibc gives them back to the system each time and a quarter of
# the run goes into page faults; these settings are read when a process starts, so it is started again with them.
ALLOCATOR = dict(
    MALLOC_ARENA_MAX="1", MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_="16000000000", MALLOC_TOP_PAD_="268435456",
)
STEPS = dict(
    tokenizer="train the tokenizer", data="write the training windows", train="train the target",
    distill="train the draft on the target", evaluate="measure both and write them to --assets",
)


def main():
    options = parse()
    if options.command == "world":
        return show(options)
    trains = options.command in ("train", "distill")
    if sys.platform == "linux" and trains and not ALLOCATOR.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, "-m", "playground.pocket", *sys.argv[1:]], os.environ | ALLOCATOR)
    import torch
    torch.set_num_threads(options.threads)
    from playground.pocket import steps
    steps.COMMANDS[options.command](options)


def show(options):
    """Print some items of the small world."""
    from playground.pocket.world import show
    try:
        found = show.items(options.task, options.n, options.seed, grade=options.grade, held_out=options.held_out)
    except Refusal as refusal:
        sys.exit(str(refusal))
    print("\n".join(map(show.as_json if options.json else show.as_text, found)))


def parse(words=None):
    """The options; `words` are those of the command line where none are given."""
    shape = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser("python -m playground.pocket", description=__doc__, formatter_class=shape)
    commands = parser.add_subparsers(dest="command", required=True)
    _world_options(commands.add_parser("world", help="print items of one task"))
    for name, does in STEPS.items():
        _training_options(commands.add_parser(name, help=does))
    return parser.parse_args(words)


def _world_options(parser):
    parser.add_argument("--task", required=True, help="facts, context_qa, arithmetic, records, edit, lists, ...")
    parser.add_argument("--n", type=int, default=5, help="how many items")
    parser.add_argument("--grade", type=int, help="how hard, from 1 on; all grades where it is not given")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--held-out", action="store_true", help="items that training never shows")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, with all that an item carries")


def _training_options(parser):
    parser.add_argument("--corpus", type=Path, required=True, help="where tales.jsonl.gz and gsm8k_train.jsonl.gz are")
    parser.add_argument("--out", type=Path, required=True, help="working folder: data, checkpoints")
    parser.add_argument("--assets", type=Path, default=Path("assets/models"), help="where the finished models go")
    parser.add_argument("--minutes", type=float, default=95, help="training budget")
    parser.add_argument("--tokens", type=float, default=24e6, help="how many training tokens `data` prepares")
    parser.add_argument("--items", type=int, default=60, help="held-out items per row in `evaluate`")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu", help="where `train` and `distill` compute")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")


if __name__ == "__main__":
    main()
