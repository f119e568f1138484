"""Packs `kubectl kvctl` for krew: an archive with kvctl and all that it needs, and the manifest that names it.

`python release/krew.py --wheel dist/kvctl-….whl --uri https://…/kubectl-kvctl.tar.gz`. The packages in the archive are
for the Python and the processor that run this; the plugin needs the same Python.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
ARCHIVE, MANIFEST, PLUGIN = "kubectl-kvctl.tar.gz", "kvctl.yaml", "kubectl-kvctl"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
LAUNCHER = f"""#!/bin/sh
command -v {PYTHON} >/dev/null || {{ echo "kubectl kvctl: {PYTHON} is not in PATH: install it" >&2; exit 1; }}
here=$(dirname "$(readlink -f "$0")")
PYTHONPATH="$here/lib" exec {PYTHON} -P -c "from kvctl.kubectl import main; main()" "$@"
"""


def main() -> None:
    """Writes the archive and the manifest."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wheel", type=Path, required=True, help="of kvctl")
    parser.add_argument("--uri", required=True, help="where the archive will be")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="directory of both files (default: dist)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    archive = arguments.out / ARCHIVE
    with tempfile.TemporaryDirectory() as folder:
        lib = Path(folder) / "lib"
        install = ["install", "-q", "--no-compile", "--target", str(lib), "-c", str(ROOT / "constraints.txt")]
        subprocess.run([sys.executable, "-m", "pip", *install, f"{arguments.wheel}[kubernetes]"], check=True)
        shutil.rmtree(lib / "kubernetes" / "aio")  # an asynchronous copy of the client (38 MB), as in the Dockerfile
        with tarfile.open(archive, "w:gz") as packed:
            launcher = tarfile.TarInfo(PLUGIN)
            launcher.mode, launcher.size = 0o755, len(LAUNCHER)
            packed.addfile(launcher, io.BytesIO(LAUNCHER.encode()))
            packed.add(ROOT / "LICENSE", "LICENSE")  # krew wants it
            packed.add(lib, "lib")
    version = arguments.wheel.name.split("-")[1]
    text = yaml.safe_dump(manifest(f"v{version}", arguments.uri, archive.read_bytes()), sort_keys=False)
    (arguments.out / MANIFEST).write_text(text)


def manifest(version: str, uri: str, archive: bytes) -> dict[str, object]:
    """Returns krew's manifest of the plugin."""
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "kvctl"},
        "spec": {
            "version": version,
            "shortDescription": "Watch KV cache transfers of LLM serving",
            "description": "Shows, measures and checks the transfer of KV caches from prefill to decode workers in a "
            "namespace, as `kvctl` does: kubectl kvctl status -n NAMESPACE.\n",
            "caveats": f"Needs {PYTHON}. The agents require a key: kubectl kvctl key new.\n",
            "platforms": [
                {
                    "selector": {"matchLabels": {"os": "linux", "arch": ARCHITECTURES[platform.machine()]}},
                    "uri": uri,
                    "sha256": hashlib.sha256(archive).hexdigest(),
                    "bin": PLUGIN,
                }
            ],
        },
    }


if __name__ == "__main__":
    main()
