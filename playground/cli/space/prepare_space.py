"""`space`: prepares the folder that is uploaded to a Hugging Face Space, and starts it as the Space would."""
from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from pathlib import Path

from playground.cli.shared_options import CommandParser
from playground.cli.space.space_folder import size, write
from playground.cli.space.space_start import check, start


def prepare_options(command: CommandParser) -> None:
    command.add_argument("folder", metavar="FOLDER", help="a new folder, for the files that are uploaded")
    command.add_argument("--name", default="YOU/decoding-playground", metavar="OWNER/NAME",
                         help="of the Space, in the commands that upload it")
    command.add_argument("--zero-gpu", action="store_true", help="for ZeroGPU hardware: torch with CUDA")
    command.add_argument("--check", action="store_true",
                         help="start it in a new environment as the Space would, and wait for an answer; minutes. "
                              "Without it, it starts with the packages of this one, and stops once its page is ready")


def prepare(options: Namespace) -> bool:
    """Write the folder, check and start it, and print the commands that upload it; raises Refusal."""
    folder = Path(options.folder)
    written = write(folder, options.zero_gpu)
    largest = max(written, key=size)
    print(f"wrote {folder}: {len(written)} files, {_megabytes(sum(map(size, written)))}; the largest is "
          f"{largest.relative_to(folder)}, {_megabytes(size(largest))}", file=sys.stderr)
    (check if options.check else start)(folder)
    print(_upload(options.name, folder, options.zero_gpu))
    return False


def _upload(name: str, folder: Path, zero_gpu: bool) -> str:
    """The commands; `hf upload` stores the weights as large files by itself."""
    name, hardware = shlex.quote(name), " --flavor zero-a10g" if zero_gpu else ""
    return (f"hf repos create {name} --type space --space-sdk gradio{hardware} --exist-ok\n"
            f"hf upload {name} {shlex.quote(str(folder))} . --type space --delete '*'")


def _megabytes(size_: int) -> str:
    return f"{size_ / 1e6:.1f} MB"
