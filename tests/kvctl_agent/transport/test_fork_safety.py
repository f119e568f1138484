"""A forked child never runs an engine's destructor, however its interpreter ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from kvctl_agent.transport.fork_safety import disown_in_children

class Engine:
    def __init__(self, name):
        self.name = name
    def __del__(self):
        os.write(1, f"{self.name} destroyed in the {role}\\n".encode())

role = "parent"
kept, gone = Engine("kept"), Engine("gone")
disown_in_children(kept)
disown_in_children(gone)
del gone
child = os.fork()
if not child:
    role = "child"
    del kept
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("ends", ["sys.exit(0)", "raise SystemExit", "pass"])
def test_only_the_parent_destroys_an_engine(ends: str) -> None:
    script = SCRIPT.replace("    sys.exit(0)\n", f"    {ends}\n", 1)
    if ends == "pass":
        script = script.replace("assert os.waitpid", "if child: assert os.waitpid")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout.splitlines() == ["gone destroyed in the parent", "kept destroyed in the parent"]
