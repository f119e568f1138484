"""Loads the CURVE keys for agents on TCP."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl_agent.host.keys import SECRET_SUFFIX, KeyFileError, KeyPair, keys_dir, read_pair, read_public

if TYPE_CHECKING:
    import zmq

DEFAULT_NAME = "default"


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """CURVE keys: the key pair of this client, and the public key of the fleet's agents."""

    own: KeyPair
    server: bytes

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Sets the keys of a socket that is not connected yet."""
        socket.curve_publickey = self.own.public
        socket.curve_secretkey = self.own.secret
        socket.curve_serverkey = self.server


@dataclass(frozen=True, slots=True)
class KeyNames:
    """Values of the command-line options that name the keys.

    Attributes:
        own: `--key`: path of a secret file, or a name in the key directory; None for the default name.
        server: `--server-key`: a public key, the path of a public file, or a name in the key directory.
    """

    own: str | None = None
    server: str | None = None

    def check(self) -> None:
        """Reads the keys that are named.

        Raises:
            CliError: one is missing or unusable; the message names the remedy.
        """
        try:
            if self.own is not None:
                read_pair(secret_path(self.own))
            if self.server is not None:
                read_public(self.server)
        except KeyFileError as error:
            raise CliError(str(error), ExitCode.USAGE) from None

    def load(self, address: str) -> ClientKeys:
        """Reads the keys for agents on TCP; `address` is for error texts.

        Raises:
            CliError: a key is missing or unusable; the message names the remedy.
        """
        path = secret_path(self.own or DEFAULT_NAME)
        if self.own is None and not path.exists():
            raise CliError(
                f"{address}: tcp:// agents require a key, and there is no key {path}: create one with `kvctl key new` "
                "and have its public half added to the agent's admin_clients, or name another key with --key",
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
    """Returns the path of a secret key file; `name` is a path, or a name in the key directory."""
    if "/" in name or name.endswith(SECRET_SUFFIX):
        return Path(name).expanduser()
    return keys_dir() / f"{name}{SECRET_SUFFIX}"
