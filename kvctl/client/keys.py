"""The keys for agents on other machines: which files, and what to do where there are none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl_agent.contract.keys import SECRET_SUFFIX, KeyFileError, KeyPair, keys_dir, read_pair, read_public

if TYPE_CHECKING:
    import zmq

DEFAULT_NAME = "default"


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """Who we are, and whom we want to talk to."""

    own: KeyPair
    server: bytes

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Before the connect."""
        socket.curve_publickey = self.own.public
        socket.curve_secretkey = self.own.secret
        socket.curve_serverkey = self.server


@dataclass(frozen=True, slots=True)
class KeyNames:
    """What the user said.

    Attributes:
        own: `--key`: path of a secret file, or a name in the directory of keys; None for the default name.
        server: `--server-key`: a public key, or the path of a public file.
    """

    own: str | None = None
    server: str | None = None

    def load(self, address: str) -> ClientKeys:
        """Reads them.

        Raises:
            CliError: one is missing or cannot be used; says how to come by it.
        """
        path = secret_path(self.own or DEFAULT_NAME)
        if self.own is None and not path.exists():
            raise CliError(
                f"{address}: agents on other machines want to know who asks, and there is no key {path}: make one with "
                "`kvctl key new`, have its public half added to the agent's admin_clients, or name another with --key",
                ExitCode.USAGE,
            )
        if self.server is None:
            raise CliError(
                f"{address}: give the public half of the agent's fleet_key with --server-key (a file or 64 digits)",
                ExitCode.USAGE,
            )
        try:
            return ClientKeys(read_pair(path), read_public(self.server))
        except KeyFileError as error:
            raise CliError(f"{address}: {error}", ExitCode.USAGE) from None


NO_KEYS = KeyNames()


def secret_path(name: str) -> Path:
    """Where the secret half of a key lies: a path as it is, a name in the directory of keys."""
    if "/" in name or name.endswith(SECRET_SUFFIX):
        return Path(name).expanduser()
    return keys_dir() / f"{name}{SECRET_SUFFIX}"
