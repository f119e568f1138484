"""Interfaces that a release of SGLang lacks or has otherwise are named from its sources, and so is code to read."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvctl_agent.integrations.sglang import versions
from tests.support.sglang import compare
from tests.support.sglang.runtime import FOLDER

QUEUES = """
from elsewhere import wrapped

class Queue:
    def __init__(self, pages, *, size=1): ...
    @classmethod
    def register(cls, name): ...
    @wrapped
    def pop(self, count, **more): ...

extend = Queue.pop
"""


def release(folder: Path, text: str) -> Path:
    (folder / "engine").mkdir(parents=True)
    (folder / "engine" / "queues.py").write_text(text)
    return folder


def test_every_interface_of_the_installed_release_is_supported() -> None:
    assert list(compare.unsupported(FOLDER)) == []


def test_interfaces_that_are_missing_or_have_other_parameters_are_named(tmp_path: Path) -> None:
    folder = release(tmp_path, QUEUES)
    fits = {
        "engine.queues:Queue": ("pages", "size"),
        "engine.queues:Queue.register": ("name",),
        "engine.queues:Queue.pop": ("self", "count", "more"),
        "engine.queues:extend": ("values",),  # no function: whatever it takes
    }
    assert list(compare.unsupported(folder, fits)) == []
    wrong = {"engine.queues:Queue.pop": ("self",), "engine.queues:Queue.push": ("self",), "engine.pools:Pool": ()}
    assert list(compare.unsupported(folder, wrong)) == [
        "engine.queues:Queue.pop has parameters (self, count, more), expected (self)",
        "engine.queues:Queue.push is missing",
        "engine.pools:Pool is missing",
    ]


def test_older_forms_that_the_plugin_bridges_are_supported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = release(tmp_path, QUEUES)
    monkeypatch.setattr(
        compare, "OLDER_FORMS", {"engine.queues:Queue.pop": (("self", "count", "more"),), "engine.queues:peek": (None,)}
    )
    assert list(compare.unsupported(folder, {"engine.queues:Queue.pop": ("self",), "engine.queues:peek": ()})) == []


def test_methods_with_other_code_are_named_and_comments_are_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = QUEUES.replace("count, **more): ...", "count, **more):\n        'Takes.'\n        return 1  # one")
    folders = release(tmp_path / "new", other), release(tmp_path / "old", QUEUES)
    monkeypatch.setattr(compare, "CLASSES", ("engine.queues:Queue",))
    assert list(compare.other_code(*folders)) == ["engine.queues:Queue.pop: other code"]
    same = release(tmp_path / "same", QUEUES.replace("**more): ...", "**more):\n        'Takes.'\n        ...  # one"))
    assert list(compare.other_code(same, folders[1])) == []
    more = release(tmp_path / "more", QUEUES.replace("    @wrapped", "    def peek(self): ...\n    @wrapped"))
    assert list(compare.other_code(more, same)) == ["engine.queues:Queue.peek: new"]
    assert list(compare.other_code(same, more)) == ["engine.queues:Queue.peek: gone"]


def test_each_older_form_is_of_an_interface() -> None:
    assert versions.OLDER_FORMS.keys() <= compare.ALL.keys()
