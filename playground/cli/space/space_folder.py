"""The folder that becomes a Hugging Face Space: which files of a clone, or of the installed package, belong in it, and
whether it would start there.

A Space reads its settings from the front matter of README.md and installs requirements.txt together with
SPACE_PACKAGES (https://huggingface.co/docs/hub/spaces-config-reference). On the free tier, which has no GPU, torch
comes from the index of CPU builds: the default build includes several gigabytes of CUDA libraries.
"""
from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from playground.asset_files import ASSETS, INSTALLED
from playground.engine.checkpoint.catalogue import BUNDLED, SUGGESTED, TABLES
from playground.errors import Refusal

CLONE = Path(__file__).resolve().parents[3]  # or the folder that the packages are installed in
INSTALLED_FILES = CLONE / "playground" / "space_files"  # where setup.py installs README and FILES
FILES = ("app.py", "requirements.txt", "LICENSE", "NOTICE", "SECURITY.md", "CITATION.cff", "docs/page.png",
         "docs/decoding.svg")
FOLDERS = ("playground", "strategies", "assets")
README = "README.md"
WEIGHTS = tuple(f"assets/models/{entry.name}/model.safetensors" for entry in BUNDLED if entry.name not in TABLES)
NEEDED = (README, *FILES, *WEIGHTS)
SPACE_PACKAGES = ("gradio[oauth,mcp]=={sdk_version}", "uvicorn>=0.14.0", "spaces")  # what every Space installs besides
CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"
WHOLE, EACH = 150_000_000, 30_000_000  # bytes of the folder and of one file: a larger one does not belong there
SHORT = 60  # characters of a Space's short description
SETTINGS = ("title", "emoji", "colorFrom", "colorTo", "sdk", "sdk_version", "python_version", "app_file", "license",
            "short_description", "suggested_hardware", "models")
COLOURS = ("red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray")
FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?://|#)([^)#]+)[^)]*\)")


def write(folder: Path, zero_gpu: bool = False) -> list[Path]:
    """Write the folder, which must be new or empty, and check it; returns its files. Raises Refusal.

    zero_gpu: for ZeroGPU hardware, with torch built for CUDA.
    """
    _check_places(folder)
    with _whole_or_nothing(folder):
        for path, source in _sources():
            _copy(source, folder / path)
        (folder / README).write_text(_readme(_root_file(README).read_text(encoding="utf-8"), folder), encoding="utf-8")
        if not zero_gpu:
            _prepend(folder / "requirements.txt", f"{CPU_INDEX}\n")
        if wrong := complaints(folder):
            raise Refusal(f"{folder} would not work as a Space: {'; '.join(wrong)}.")
    return files(folder)


@contextmanager
def _whole_or_nothing(folder: Path) -> Iterator[None]:
    """Leave the folder as it was, missing or empty, if anything goes wrong while it is written."""
    existed = folder.exists()
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if existed:
            folder.mkdir()
        raise


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def settings(folder: Path) -> dict[str, Any]:
    """The front matter of the folder's README.md. Raises Refusal."""
    front = FRONT.match((folder / README).read_text(encoding="utf-8"))
    try:
        read = yaml.safe_load(front[1]) if front else None
    except yaml.YAMLError as reason:
        why = " ".join(str(reason).split())
        raise Refusal(f"The front matter of {README} is not YAML ({why}): correct it.") from None
    if not isinstance(read, dict):
        raise Refusal(f"{README} does not begin with front matter: write the Space's settings between two lines `---`.")
    return read


def complaints(folder: Path) -> list[str]:
    """Everything that would prevent the Space from starting, as sentences; empty if nothing would."""
    missing = [f"{name} is missing" for name in NEEDED if not (folder / name).is_file()]
    return missing or [*_wrong_files(folder), *_wrong_settings(folder)]


def _wrong_files(folder: Path) -> Iterator[str]:
    found = files(folder)
    yield from (f"{path.relative_to(folder)} has more than {EACH:,} bytes" for path in found if size(path) > EACH)
    if sum(map(size, found)) > WHOLE:
        yield f"the files have more than {WHOLE:,} bytes together"
    yield from (f"{path.relative_to(folder)} does not belong there" for path in found
                if _is_foreign(path.relative_to(folder)))
    text = (folder / README).read_text(encoding="utf-8")
    yield from (f"{README} links to {link[2]}, which is missing" for link in LINK.finditer(text)
                if not (folder / link[2]).exists())


def _wrong_settings(folder: Path) -> Iterator[str]:
    given = settings(folder)
    yield from (f"the front matter has no {name}" for name in SETTINGS if not given.get(name))
    if given.get("sdk") != "gradio" or str(given.get("sdk_version")) not in _gradio_range(folder):
        yield "sdk and sdk_version do not name the Gradio of requirements.txt"
    if not (folder / str(given.get("app_file"))).is_file():
        yield f"app_file names {given.get('app_file')}, which is missing"
    if not isinstance(given.get("python_version"), str):
        yield "python_version is not quoted, so YAML reads it as a number"
    if not {given.get("colorFrom"), given.get("colorTo")} <= set(COLOURS):
        yield f"colorFrom and colorTo must be among {', '.join(COLOURS)}"
    if len(str(given.get("short_description"))) > SHORT:
        yield f"short_description has more than {SHORT} characters"
    if given.get("models") != [entry.name for entry in SUGGESTED]:
        yield "models does not list the hub models of the page's menu"


def _gradio_range(folder: Path):
    """The versions of Gradio that requirements.txt allows."""
    from packaging.requirements import Requirement
    lines = (folder / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return next(Requirement(line.split("#")[0]).specifier for line in lines if line.startswith("gradio"))


def size(path: Path) -> int:
    return path.stat().st_size


def _check_places(folder: Path) -> None:
    if missing := [name for name in (README, *FILES) if not _root_file(name).is_file()]:
        raise Refusal(f"{missing[0]}, which a Space needs, is missing: install the package again, or run this in a "
                      "clone of the repository.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refusal(f"{folder} is not empty: name a folder that does not exist yet.", "folder")
    if not folder.parent.is_dir():
        raise Refusal(f"{folder} cannot be made: name a folder within one that exists.", "folder")


def _sources() -> Iterator[tuple[Path, Path]]:
    """The place of each file in the Space, and the file."""
    yield from ((Path(name), _root_file(name)) for name in FILES)
    for name in FOLDERS:
        folder = ASSETS if name == ASSETS.name else CLONE / name
        for file in files(folder):
            path = Path(name, file.relative_to(folder))
            if not _is_foreign(path) and not {ASSETS, INSTALLED_FILES} & {*file.parents} - {folder}:
                yield path, file


def _root_file(name: str) -> Path:
    """A file at the root of a clone, which an installed package has in a folder of its own."""
    return (INSTALLED_FILES if INSTALLED.is_dir() else CLONE) / name


def _is_foreign(path: Path) -> bool:
    """Whether a file is made while the project is used, or hidden; the path is relative to the project's folder."""
    return path.suffix in (".pyc", ".pyo", ".pyi") or any(part.startswith((".", "__pycache__")) for part in path.parts)


def _copy(source: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    except OSError as reason:
        raise Refusal(f"{target} cannot be written ({reason.strerror}): name another folder.", "folder") from None


def _prepend(path: Path, line: str) -> None:
    path.write_text(line + path.read_text(encoding="utf-8"), encoding="utf-8")


def _readme(text: str, folder: Path) -> str:
    """The README with links to pages that are not copied as plain text."""
    return LINK.sub(lambda link: link[0] if (folder / link[2]).exists() else link[1], text)
