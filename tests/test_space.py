"""The folder of a Hugging Face Space: its contents and checks, and that it starts as on the Space."""
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest
from packaging.requirements import Requirement

from playground.cli import main
from playground.cli.serve import use_storage
from playground.cli.space import prepare_space, space_folder
from playground.cli.space.space_folder import CPU_INDEX, README, SPACE_PACKAGES, complaints, settings, write
from playground.cli.space.space_start import start
from playground.errors import Refusal
from playground.request_limits import Rules
from playground.ui.components.run_controls import ModelDropdown
from playground.ui.components.settings import Settings
from playground.ui.server.model_loader import ModelRequest
from playground.ui.server.pages import build
from playground.ui.server.site import Site
from support.folders import links_of

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def space(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("spaces") / "space"
    write(folder)
    return folder


@pytest.fixture
def changed(space, tmp_path) -> Path:
    """A copy of the folder whose README a test may change; the other files are linked."""
    folder = Path(shutil.copytree(space, tmp_path / "changed", copy_function=os.link))
    (folder / README).unlink()
    shutil.copyfile(space / README, folder / README)
    return folder


def test_the_folder_would_start_as_a_space(space):
    assert complaints(space) == []


def test_it_has_what_the_page_needs_and_nothing_else(space):
    top = {path.name for path in space.iterdir()}
    assert {"app.py", "requirements.txt", README, "playground", "strategies", "assets"} <= top
    assert not top & {"tests", ".ci", ".git", "Dockerfile", "setup.py"}
    assert {path.name for path in (space / "docs").iterdir()} == {"page.png", "decoding.svg"}
    assert not list(space.rglob("__pycache__"))


def test_its_readme_has_no_broken_links(space):
    for link in links_of(space / README):
        assert (space / link).exists(), link


def test_the_free_tier_gets_torch_without_cuda_and_zero_gpu_with_it(space, tmp_path):
    write(tmp_path / "zero", zero_gpu=True)
    first = [(folder / "requirements.txt").read_text().splitlines()[0] for folder in (space, tmp_path / "zero")]
    assert first[0] == CPU_INDEX and not first[1].startswith("--")


def test_the_requirements_agree_with_what_every_space_installs(space):
    """gradio[mcp] 6.31 takes pydantic up to 2.12.5: a requirement above that makes the Space's build fail."""
    from importlib.metadata import requires
    pydantic = [Requirement(line).specifier for line in requires("gradio") if line.startswith("pydantic")]
    own = {r.name: r.specifier for r in _requirements(space)}
    assert any("mcp" in package for package in SPACE_PACKAGES)
    assert all(specifier.contains("2.12.5") for specifier in [*pydantic, own["pydantic"]])


def _requirements(folder: Path) -> list[Requirement]:
    lines = [line.split("#")[0].strip() for line in (folder / "requirements.txt").read_text().splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("--")]


@pytest.mark.parametrize("old, new, complaint", [
    ("sdk_version: 6.31.0", "sdk_version: 5.0.0", "do not name the Gradio"),
    ('python_version: "3.11"', "python_version: 3.1", "not quoted"),
    ("app_file: app.py", "app_file: main.py", "main.py, which is missing"),
    ("license: apache-2.0\n", "", "no license"),
    ("colorFrom: indigo", "colorFrom: orange", "colorFrom"),
    ("short_description: Watch", "short_description: " + "Watch " * 20, "60 characters"),
    ("  - Qwen/Qwen3-0.6B\n", "", "hub models"),
    ("(LICENSE)", "(LICENCE)", "links to LICENCE"),
])
def test_a_readme_that_would_not_work_is_refused_with_the_reason(changed, old, new, complaint):
    text = (changed / README).read_text(encoding="utf-8")
    assert old in text
    (changed / README).write_text(text.replace(old, new), encoding="utf-8")
    assert any(complaint in found for found in complaints(changed)), complaints(changed)


def test_missing_models_and_oversized_files_are_refused(changed):
    (changed / "assets/big.bin").touch()
    with (changed / "assets/big.bin").open("wb") as file:
        file.truncate(70_000_000)
    assert len([found for found in complaints(changed) if "bytes" in found]) == 2
    (changed / "assets/models/pocket/model.safetensors").unlink()
    assert complaints(changed) == ["assets/models/pocket/model.safetensors is missing"]


def test_readmes_without_settings_are_refused(changed):
    for text in ("# A page", "---\n- a\n---\n", "---\na: [\n---\n"):
        (changed / README).write_text(text, encoding="utf-8")
        with pytest.raises(Refusal, match="front matter"):
            settings(changed)


@pytest.fixture
def unstarted(monkeypatch):
    """The command without the seconds in which the app starts."""
    monkeypatch.setattr(prepare_space, "start", lambda folder: None)


@pytest.mark.usefixtures("unstarted")
@pytest.mark.parametrize("folder", ["../folder", ".hidden/deep/folder", "./folder/"])
def test_any_path_can_be_named(tmp_path, monkeypatch, capsys, folder):
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    Path(folder).parent.mkdir(parents=True, exist_ok=True)
    assert main(["space", folder]) == 0, capsys.readouterr().err
    assert (here / folder / "app.py").is_file()


@pytest.mark.parametrize("existed", [False, True])
def test_nothing_is_left_of_a_space_that_would_not_work(tmp_path, monkeypatch, existed):
    monkeypatch.setattr(space_folder, "complaints", lambda folder: ["something is wrong"])
    folder = tmp_path / "space"
    if existed:
        folder.mkdir()
    with pytest.raises(Refusal, match="would not work as a Space: something is wrong"):
        write(folder)
    assert folder.exists() == existed and list(tmp_path.rglob("*")) == [folder] * existed


def test_the_guide_says_how_large_the_folder_is(space):
    said = re.search(r"writes the folder `my-space`: (\d+) MB", (ROOT / "docs/deploy.md").read_text(encoding="utf-8"))
    assert abs(int(said[1]) - sum(map(space_folder.size, space_folder.files(space))) / 1e6) < 2


def test_a_folder_with_files_in_it_is_refused(tmp_path, capsys):
    (tmp_path / "note.txt").touch()
    for folder in (tmp_path, tmp_path / "note.txt", tmp_path / "no" / "where"):
        assert main(["space", str(folder)]) == 2
        assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.usefixtures("unstarted")
def test_the_command_says_how_the_folder_is_uploaded(tmp_path, capsys):
    assert main(["space", str(tmp_path / "new"), "--name", "me/page"]) == 0
    out, err = capsys.readouterr()
    assert f"hf upload me/page {tmp_path / 'new'} . --type space" in out and "files" in err


@pytest.mark.slow
def test_the_command_says_how_large_it_is_and_after_how_long_its_page_is_ready(tmp_path, capsys):
    started = monotonic()
    assert main(["space", str(tmp_path / "new")]) == 0
    err = capsys.readouterr().err
    said = re.search(r"packages of this environment: the page was ready after (\d+) s\n", err)
    assert complaints(tmp_path / "new") == [], "nothing that the start made stays there"
    assert re.search(r"\d+ files, \d+\.\d MB;", err) and 1 <= int(said[1]) <= monotonic() - started + 1


def test_an_app_that_ends_at_once_is_refused_with_its_last_words(tmp_path):
    (tmp_path / README).write_text("---\napp_file: app.py\n---\n")
    (tmp_path / "app.py").write_text("raise SystemExit('no memory is left')\n")
    with pytest.raises(Refusal, match="The page does not start: no memory is left"):
        start(tmp_path)


@pytest.mark.parametrize("space", [True, False])
def test_the_storage_of_a_space_holds_its_models_before_the_hubs_library_looks(tmp_path, space):
    """In a fresh process, since that library reads its variable once, when it is imported."""
    tell = ("import sys; from pathlib import Path; from playground.cli.serve import use_storage;"
            "use_storage(Path(sys.argv[1]));"
            "from huggingface_hub.constants import HF_HUB_CACHE as hub;"
            "from playground.engine.checkpoint.catalogue import made_models; print(hub, made_models(), sep='\\n')")
    environment = {"PATH": os.defpath, "HOME": str(tmp_path / "home")} | ({"SPACE_ID": "me/page"} if space else {})
    ended = subprocess.run([sys.executable, "-c", tell, tmp_path], cwd=ROOT, env=environment, text=True, check=True,
                           capture_output=True)
    printed = ended.stdout.splitlines()
    kept = [str(tmp_path / "huggingface/hub"), str(tmp_path / "playground/models")]
    assert (printed[-2:] == kept) == space and (printed[0].startswith(f"Models are kept in {tmp_path}")) == space


def test_a_place_that_was_named_counts_before_the_storage(tmp_path, monkeypatch, capsys):
    for name, value in {"SPACE_ID": "me/page", "HF_HOME": "/named", "PLAYGROUND_HOME": "/named"}.items():
        monkeypatch.setenv(name, value)
    use_storage(tmp_path)
    assert os.environ["HF_HOME"] == os.environ["PLAYGROUND_HOME"] == "/named"
    assert str(tmp_path) not in capsys.readouterr().out


@pytest.mark.long
def test_the_space_starts_in_a_clean_environment_and_answers(tmp_path):
    assert main(["space", str(tmp_path / "new"), "--check"]) == 0


@pytest.mark.slow
def test_a_space_offers_its_models_and_no_field_for_a_folder(monkeypatch):
    monkeypatch.setenv("SPACE_ID", "somebody/page")
    menus = [component["props"] for component in build(Site.from_environment(ModelRequest())).config["components"]
             if component["props"].get("elem_id") in ("model", "draft") and component["type"] == "dropdown"]
    assert len(menus) >= 2 and not any(menu["allow_custom_value"] for menu in menus)


def test_a_model_that_a_space_does_not_offer_is_refused():
    menu = ModelDropdown([("Pocket", "pocket")], allow_custom_value=False)
    assert menu.preprocess("/etc") == "/etc"
    with pytest.raises(Refusal, match="only the models in its list"):
        Site(rules=Rules.for_visitors()).chosen.request(Settings(model="/etc"))
