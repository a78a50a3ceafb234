"""Packages of `pip install .`: the folder `assets` is installed as `playground.assets`. See pyproject.toml."""
from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["playground*", "strategies*"]), "playground.assets"],
    package_dir={"playground.assets": "assets"},
    package_data={
        "playground.assets": ["**/*"],
        "playground.bench.speed": ["*.json"],
        "playground.questions.world": ["plots/*"],
    },
    include_package_data=False,
)
