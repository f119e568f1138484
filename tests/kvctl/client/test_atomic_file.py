"""Files that are there whole or not at all."""

from __future__ import annotations

from pathlib import Path

from kvctl.client.atomic_file import atomic_file


def test_writers_with_one_process_id_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_file(path) as first:
        first.write(b"first")
        with atomic_file(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]
