"""What the plugin says of an SGLang that it does not fit: the first cause."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvctl_agent.integrations.sglang import versions

ENGINE = {
    "__init__.py": "",
    "queues.py": "from ailing_engine import images\nclass Queue:\n    def pop(self, count): ...\n",
    "images.py": """
try:
    import package_for_images
except ImportError as error:
    raise RuntimeError("images need more") from error
""",
    "pools.py": "def reserve(pages): ...\n",
}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that imports another, which needs a package that is not installed."""
    package = tmp_path / "ailing_engine"
    package.mkdir()
    for name, text in ENGINE.items():
        (package / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(versions, "installed", lambda: versions.SUPPORTED[-1])


def test_every_interface_names_its_module() -> None:
    """Otherwise an import that fails looks like a name that is missing in the package."""
    for name in (*versions.INTERFACES, *versions.OBSERVED_INTERFACES):
        assert name.count(":") == 1, name


@pytest.mark.usefixtures("engine")
def test_a_module_that_cannot_be_imported_names_the_package_that_is_missing() -> None:
    """Not the name in it, which would be missing too."""
    assert versions.mismatch({"ailing_engine.queues:Queue.pop": ("self", "count")}) == (
        "SGLang 0.5.23 cannot be imported: ModuleNotFoundError: No module named 'package_for_images'"
    )


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("reserve", None),
        ("release", "has no ailing_engine.pools:release"),
    ],
)
def test_a_function_that_is_missing_is_told_apart(name: str, said: str | None) -> None:
    found = versions.mismatch({f"ailing_engine.pools:{name}": ("pages",)})
    assert (found is None) if said is None else (found is not None and said in found)


def test_as_a_program_it_prints_the_difference() -> None:
    """What `kvctl doctor` and `kvctl demo` run in the Python of a server."""
    command = [sys.executable, "-m", versions.__name__]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (1, "SGLang None is not supported (supported: 0.5.21, 0.5.22, 0.5.23)\n")
