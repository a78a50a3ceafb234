"""Uploaded files: what a form may carry, and how many files stay."""
from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from gradio.utils import get_upload_folder

from playground.ui.benchmark.survey_handlers import SurveyHandlers
from playground.ui.guard.request_shares import Denied, Most
from playground.ui.guard.uploads import PREFIX, StoredFiles, Uploads, check_form, own_folder, remove

FORM = "multipart/form-data; boundary=b"


def part(disposition: bytes = b'form-data; name="files"; filename="a.jsonl"', more: bytes = b"") -> bytes:
    return b"--b\r\nContent-Disposition: " + disposition + more + b"\r\n\r\ntext\r\n"


def stored(folder: Path, name: str, size: int = 10) -> Path:
    path = folder / name / "a.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"a" * size)
    return path


# --- forms ---

def test_the_forms_that_browsers_and_clients_send_are_taken():
    for content_type, body in (
        (FORM, part(more=b"\r\nContent-Type: text/plain") + b"--b--\r\n"),
        ('multipart/form-data; boundary="b"', part() * 4 + b"--b--\r\n"),
        (FORM, part(b'form-data; name="files"; filename=""') + b"--b--"),
    ):
        check_form(content_type, body)


@pytest.mark.parametrize("content_type, body, status", [
    (FORM, part() * 5 + b"--b--", 413),
    (FORM, part() * 1000 + b"--b--", 413),
    (FORM, part(b'form-data; name="other"; filename="a"') + b"--b--", 400),
    (FORM, part(b'form-data; name="files"') + b"--b--", 400),
    (FORM, part(b'form-data; filename="a"; name="files"') + b"--b--", 400),
    (FORM, part(more=b'\r\nContent-Disposition: form-data; name="other"; filename="a"') + b"--b--", 400),
    (FORM, b"--b\r\n\r\ntext\r\n--b--", 400),
    ("multipart/form-data", part(), 400),
    ("application/json", b"{}", 400),
    ("", b"", 400),
])
def test_other_forms_are_refused_before_anything_is_stored(content_type, body, status):
    with pytest.raises(Denied) as refused:
        check_form(content_type, body)
    assert refused.value.status == status


def test_gradio_stores_uploads_in_a_folder_of_the_page(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    own_folder()
    folder = Path(os.environ["GRADIO_TEMP_DIR"])
    assert folder.parent == tmp_path and folder.name.startswith(PREFIX) and folder.stat().st_mode & 0o077 == 0
    assert get_upload_folder() == str(folder)


# --- how many files ---

def test_a_newer_file_takes_the_place_of_the_oldest_of_its_address(tmp_path):
    uploads = Uploads(Most(3, 100), Most(1000, 1000))
    paths = [stored(tmp_path, f"{number}") for number in range(5)]
    for path in paths:
        uploads.add("6.6.6.6", [path])
    assert [path.exists() for path in paths] == [False, False, True, True, True] and len(list(tmp_path.iterdir())) == 3


def test_bytes_are_counted_by_address_and_in_all(tmp_path):
    uploads = Uploads(Most(100, 100), Most(25, 50))
    mine = stored(tmp_path, "mine")
    uploads.add("1.1.1.1", [mine])
    for number in range(20):
        uploads.add(f"6.6.6.{number % 2}", [stored(tmp_path, f"{number}")])
    left = sum(path.stat().st_size for path in tmp_path.rglob("*.jsonl"))
    assert mine.exists() and left == 50


def test_a_file_larger_than_the_share_is_not_kept(tmp_path):
    uploads, path = Uploads(size=Most(25, 50)), stored(tmp_path, "large", 26)
    uploads.add("6.6.6.6", [path, tmp_path / "missing"])
    assert not list(tmp_path.iterdir())


def test_a_file_that_was_read_does_not_count(tmp_path):
    uploads = Uploads(Most(2, 100))
    first, second, third = (stored(tmp_path, name) for name in "abc")
    uploads.add("1.1.1.1", [first, second])
    second.unlink()
    uploads.add("1.1.1.1", [third])
    assert first.exists() and third.exists()


# --- what is deleted ---

@pytest.mark.parametrize("text, taken", [('{"prompt": "a"}', True), ("rubbish", False)])
def test_a_file_is_deleted_with_its_folder_when_it_is_read(text, taken, tmp_path):
    from types import SimpleNamespace
    path = stored(tmp_path, "one")
    path.write_text(text)
    page = SimpleNamespace(own="own", clear_notices=dict, show_refusal=lambda refusal: {"refused": str(refusal)})
    answered = SurveyHandlers.bring(SimpleNamespace(page=page), str(path))
    assert ("own" in answered) == taken and not list(tmp_path.iterdir())


def test_old_files_and_folders_are_swept_only_from_a_folder_of_the_page(tmp_path):
    for name in (PREFIX + "a", "another"):
        folder = tmp_path / name
        paths = [stored(folder, "old"), stored(folder, "new")]
        (folder / "stray").write_text("of a field that Gradio does not mention")
        files = StoredFiles(folder, age=0.2)
        files.sweep()
        time.sleep(0.3)
        paths[1].write_text("the same file, uploaded once more")
        files.sweep()
        assert [path.exists() for path in paths] == ([False, True] if name != "another" else [True, True])
        assert (folder / "old").exists() == (folder / "stray").exists() == (name == "another")
        remove(folder)
    assert [folder.name for folder in tmp_path.iterdir()] == ["another"]


def test_a_folder_that_is_deleted_during_a_sweep_is_passed_over(tmp_path, monkeypatch):
    """An upload is deleted with its folder as soon as it was read, which may be in the middle of a sweep."""
    folder = tmp_path / f"{PREFIX}here"
    for name in ("a", "b", "c"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text("x")
    scan, seen = os.scandir, []

    def scandir(path):
        seen.append(Path(path))
        if Path(path).parent == folder:  # a request reads and deletes it
            (Path(path) / "file").unlink()
            Path(path).rmdir()
        return scan(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", scandir)
        StoredFiles(folder, age=0.2).sweep()
    assert len(seen) == 4
