"""Generate items of the small world, and train and evaluate the pocket models on them.

    python -m playground.pocket world --task records --n 5 [--grade 2] [--seed 1] [--held-out] [--json]
    python -m playground.pocket tokenizer --corpus DIR --out DIR
    python -m playground.pocket data --corpus DIR --out DIR --tokens 60e6
    python -m playground.pocket train --out DIR --minutes 300 [--piece 60]     again with --resume until finished
    python -m playground.pocket samples --out DIR                              target texts, for its drafts
    python -m playground.pocket {data,train} --role draft ...                  then the draft
    python -m playground.pocket {tokenizer,data,train} --role other-draft ...  the draft with its own tokenizer
    python -m playground.pocket {data,train,evaluate,publish} --role diffusion ...   a denoiser, from --begin
    python -m playground.pocket {data,train,evaluate,publish} --role block-diffusion ...   the same, block by block
    python -m playground.pocket {data,train,evaluate,publish} --role experts ...     the mixture, from --begin
    python -m playground.pocket evaluate --out DIR [--items 12]
    python -m playground.pocket publish --corpus DIR --out DIR [--replace]

`world` prints items of one task, each with its answer; the same seed gives the same items. The other commands are the
steps of the training pipeline, in order. Each reads the previous step's output in --out, and none overwrites the output
of an earlier run. `train` has a budget of --minutes, stops after --piece minutes or at Ctrl-C, and continues with
--resume. `publish` writes the finished models with their cards to --assets. `COMMAND --help` lists the options of each.
"""
import argparse
import math
import os
import sys
from pathlib import Path

from playground.errors import Refusal

# Large tensors are allocated and freed at every step. By default glibc returns them to the system each time, and a
# quarter of the run time goes into page faults. glibc reads these settings at process start, hence the re-exec.
ALLOCATOR = dict(
    MALLOC_ARENA_MAX="1", MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_="16000000000", MALLOC_TOP_PAD_="268435456",
)
ROLES = ("target", "draft", "other-draft", "diffusion", "block-diffusion", "experts")
STEPS = dict(
    tokenizer="train a tokenizer", data="write the training windows", train="train a model, or resume its training",
    samples="sample texts from the target for its drafts", evaluate="evaluate the trained models",
    publish="write the finished models to --assets",
)


def main():
    options = parse()
    if sys.platform == "linux" and options.command == "train" and not ALLOCATOR.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, "-m", "playground.pocket", *sys.argv[1:]], os.environ | ALLOCATOR)
    try:
        show(options) if options.command == "world" else work(options)
    except Refusal as refusal:
        sys.exit(str(refusal))
    except KeyboardInterrupt:
        sys.exit("Interrupted: earlier results are unchanged, and this command has written nothing.")


def work(options):
    """Run one step of the training pipeline."""
    import torch
    torch.set_num_threads(options.threads)
    from playground.pocket import pipeline as steps
    steps.COMMANDS[options.command](options)


def show(options):
    """Print some items of the small world."""
    from playground.questions.world import show
    found = show.items(options.task, options.n, options.seed, grade=options.grade, held_out=options.held_out)
    print("\n".join(map(show.as_json if options.json else show.as_text, found)))


def parse(words=None):
    """Parse the command-line options from `words`, by default those of the process."""
    shape = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser("python -m playground.pocket", description=__doc__, formatter_class=shape)
    commands = parser.add_subparsers(dest="command", required=True)
    _world_options(commands.add_parser("world", help="print items of one task"))
    for name, does in STEPS.items():
        _step_options(commands.add_parser(name, help=does), name)
    return parser.parse_args(words)


def _world_options(parser):
    parser.add_argument("--task", required=True, help="facts, context_qa, arithmetic, records, edit, lists, ...")
    parser.add_argument("--n", type=int, default=5, help="number of items")
    parser.add_argument("--grade", type=int, help="difficulty, from 1; default: all grades")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--held-out", action="store_true", help="only held-out items, which are never trained on")
    parser.add_argument("--json", action="store_true", help="one JSON object per line, with all fields of an item")


def _step_options(parser, command):
    parser.add_argument(
        "--out", type=Path, required=True, help="working folder: tokenizers, data, checkpoints, metrics"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    if command in ("tokenizer", "data", "train", "evaluate", "publish"):
        parser.add_argument("--role", choices=ROLES, default="target")
    if command in ("tokenizer", "data", "publish"):
        parser.add_argument(
            "--corpus", type=Path,
            help="folder with tales.jsonl.gz and gsm8k_train.jsonl.gz; not for diffusion and experts",
        )
    if command in ("train", "samples"):
        parser.add_argument("--device", default="cpu", help="device: cpu, cuda or auto")
    OPTIONS.get(command, lambda parser: None)(parser)


def _data_options(parser):
    parser.add_argument("--tokens", type=float, default=24e6, help="number of training tokens to prepare")


def _train_options(parser):
    parser.add_argument(
        "--minutes", type=float, help="total budget, default 95; with --resume, replaces the previous budget"
    )
    parser.add_argument(
        "--piece", type=float, default=math.inf, help="stop after this many minutes; continue with --resume"
    )
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint")
    parser.add_argument(
        "--begin", type=Path, metavar="FOLDER", help="start from the weights of a published model, not from random ones"
    )
    parser.add_argument("--size", choices=["nano", "small", "large"],
                        help="size of the model; default: small on a CPU, large on a GPU; nano for trying the commands")
    parser.add_argument(
        "--compile", action="store_true", help="compile the layers: a fifth faster on a CPU, needs a C++ compiler"
    )
    parser.add_argument("--batch", type=int, help="tokens per step; default: 2048 on a CPU, 65536 on a GPU")


def _samples_options(parser):
    parser.add_argument("--texts", type=int, default=15000, help="number of texts")


def _evaluate_options(parser):
    parser.add_argument("--items", type=int, default=60, help="held-out items per table row; 12 for a quick look")


def _publish_options(parser):
    parser.add_argument("--assets", type=Path, default=Path("assets/models"), help="folder for the finished models")
    parser.add_argument("--replace", action="store_true", help="replace models that are already there")


OPTIONS = dict(
    data=_data_options,
    train=_train_options,
    samples=_samples_options,
    evaluate=_evaluate_options,
    publish=_publish_options,
)


if __name__ == "__main__":
    main()
