"""Packages of `pip install .`: the folder `assets` is installed as `playground.assets`, and the files that a Hugging
Face Space has besides the packages as `playground/space_files`. Nothing is written beside the sources. See
pyproject.toml.
"""
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

SPACE_FILES = ("README.md", "app.py", "requirements.txt", "LICENSE", "NOTICE", "SECURITY.md", "CITATION.cff",
               "docs/page.png", "docs/decoding.svg")


class BuildWithSpaceFiles(build_py):
    """Also copies the files at the root of the sources that `playground space` needs."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for file in SPACE_FILES:
            target = Path(self.build_lib, "playground", "space_files", file)
            target.parent.mkdir(parents=True, exist_ok=True)
            copyfile(file, target)


with TemporaryDirectory() as place:
    setup(
        cmdclass={"build_py": BuildWithSpaceFiles},
        options={"build": {"build_base": place}, "egg_info": {"egg_base": place}},
        packages=[*find_packages(include=["playground*", "strategies*"]), "playground.assets"],
        package_dir={"playground.assets": "assets"},
        package_data={
            "playground.assets": ["**/*"],
            "playground.bench.speed": ["*.json"],
            "playground.questions.world": ["plots/*"],
        },
        include_package_data=False,
    )
