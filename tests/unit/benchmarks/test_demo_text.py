"""The text that the demo trains on: read from the machine, the same in every run."""

from __future__ import annotations

from pathlib import Path

import pytest

from train_gpt import STANDARD_LIBRARY, TEXT_BYTES_MAX, draw_batch, load_text


def test_a_file_is_taken_whole(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 3)
    assert bytes(load_text(path).tolist()) == path.read_bytes()


def test_sources_of_a_folder_are_joined_by_name_up_to_the_limit(tmp_path: Path) -> None:
    for name, content in {"b.py": b"B" * TEXT_BYTES_MAX, "a.py": b"A" * 10, "c.py": b"C", "a.txt": b"T"}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper/a.py").write_bytes(b"D")
    assert bytes(load_text(tmp_path).tolist()) == b"A" * 10 + b"B" * (TEXT_BYTES_MAX - 10)


def test_the_standard_library_has_enough_text() -> None:
    text = load_text(STANDARD_LIBRARY)
    assert len(text) == TEXT_BYTES_MAX
    assert len(text.unique()) > 90  # letters of both cases, digits, punctuation


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_text_that_is_not_there_names_the_option(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="^--data .*" + name):
        load_text(tmp_path / name)


def test_a_text_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"abc")
    with pytest.raises(SystemExit, match="--length 3 needs more"):
        draw_batch(load_text(path), 1, 3, None)  # type: ignore[arg-type]  # refused before a number is drawn
