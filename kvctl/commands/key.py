"""`kvctl key`: creates CURVE key pairs for fleets and for operators who query agents over the network."""

from __future__ import annotations

import os
from pathlib import Path

import click
import zmq
from zmq.utils import z85

from kvctl.client.keys import DEFAULT_NAME, secret_path
from kvctl.commands.options import KvctlGroup
from kvctl.commands.output import Output
from kvctl.commands.settings import Settings
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl.render.report import Report
from kvctl.render.view import Column, View
from kvctl_agent.host.keys import PUBLIC_SUFFIX, SECRET_SUFFIX, KeyPair, public_text, secret_text

KEY = View("key", (Column("key"), Column("public"), Column("secret_file"), Column("public_file")))


@click.group(cls=KvctlGroup)
def key() -> None:
    """Key pairs (CURVE): for a fleet, and for operators who query it over the network."""


@key.command(
    short_help="Create a key pair.",
    examples=[
        ("Your own key, in the configuration directory", "kvctl key new"),
        ("A key for a fleet, as files in this directory", "kvctl key new ./fleet.key"),
    ],
)
@click.argument("name", default=DEFAULT_NAME)
def new(settings: Settings, name: str) -> None:
    """Create a key pair, NAME.key (secret) and NAME.pub (public), and print the public key.

    NAME is a name in $XDG_CONFIG_HOME/kvctl/keys or a path that ends in .key. Existing files are never overwritten. Key
    of a fleet: copy NAME.key to its machines and set fleet_key. Your own key: ask for `LEVEL` and the line in NAME.pub
    to be added to the agents' admin_clients.
    """
    secret = secret_path(name)
    if secret.suffix != SECRET_SUFFIX:
        raise click.UsageError(f"{name}: the path of a secret key ends in {SECRET_SUFFIX}")
    public = secret.with_suffix(PUBLIC_SUFFIX)
    pair = KeyPair(*(z85.decode(half) for half in zmq.curve_keypair()))
    for path in (secret, public):
        if path.exists():
            raise CliError(f"{path} exists and is not overwritten: choose another name, or remove it first")
    try:
        secret.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _create(secret, 0o600, secret_text(secret.stem, pair))
        _create(public, 0o644, public_text(secret.stem, pair))
    except OSError as error:
        raise CliError(f"cannot write {error.filename}: {error.strerror}", ExitCode.FAILED) from None
    row = {"key": secret.stem, "public": pair.public.hex(), "secret_file": str(secret), "public_file": str(public)}
    Output(settings).emit(Report(KEY, [row], answered=1))


def _create(path: Path, mode: int, text: str) -> None:
    """Creates a file with exactly this mode, and returns after it is synced to disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, mode)  # independent of the umask
        file.write(text)
        file.flush()
        os.fsync(descriptor)
