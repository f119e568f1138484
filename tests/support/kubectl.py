"""The plugin of kubectl as pip installs it: an executable file that calls the entry point of pyproject.toml."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def install_plugin(folder: Path) -> None:
    """Writes kubectl-kvctl into a folder, which belongs at the beginning of PATH."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["kubectl-kvctl"].partition(":")
    folder.mkdir()
    plugin = folder / "kubectl-kvctl"
    lines = [
        f"#!{sys.executable}",
        "import sys",
        f"sys.path.insert(0, {str(ROOT)!r})",
        f"from {module} import {function}",
        f"{function}()",
    ]
    plugin.write_text("\n".join(lines) + "\n")
    plugin.chmod(0o755)
