"""Where the bundled files are: `assets` beside the packages in a clone, inside this package when it is installed.

pyproject.toml maps the folder into the package. Imports neither torch nor gradio.
"""
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
INSTALLED = _PACKAGE / "assets"
ASSETS = INSTALLED if INSTALLED.is_dir() else _PACKAGE.parent / "assets"
