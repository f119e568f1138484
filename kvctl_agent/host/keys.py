"""Reads and formats key files: key pairs, public keys, and an agent's list of permitted clients.

Keys are CURVE keys (Curve25519, 32 bytes), written as 64 hexadecimal digits: they need no quoting in a shell, and a
double click selects a whole key.

- `NAME.key`, mode 0600: TOML with `public` and `secret`. Whoever can read this file can authenticate as NAME.
- `NAME.pub`: one line with the public key and a name; give this file to others.
- client file of an agent: one line `LEVEL PUBLIC-KEY COMMENT` per client, such as `operate 3f…c1 alice`; `#` begins a
  comment.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from kvctl_agent.contract import toml_files
from kvctl_agent.contract.commands import Level

KEY_BYTES = 32
SECRET_SUFFIX = ".key"
PUBLIC_SUFFIX = ".pub"
MAX_FILE_BYTES = 1 << 20
_LEVELS = {level.label: level for level in Level}


class KeyFileError(ValueError):
    """A key or key file cannot be used; the text names the file and the remedy, and never contains a secret."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key and its secret key, 32 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Client:
    """A permitted client: one line of an agent's client file."""

    level: Level
    comment: str


def keys_dir() -> Path:
    """Returns the directory in which `kvctl key new` writes and names are looked up: `$XDG_CONFIG_HOME/kvctl/keys`."""
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "kvctl" / "keys"


def read_pair(path: Path) -> KeyPair:
    """Reads a key pair from its `.key` file.

    Raises:
        KeyFileError: the file cannot be read, other users can read it, or it is not a key file.
    """
    text = _read(path, private=True)
    try:
        table = toml_files.parse(text)
    except ValueError:  # the text of the ValueError would show the secret
        raise KeyFileError(f"{path} is not a key file: create one with `kvctl key new`") from None
    halves = [table.get(name) for name in ("public", "secret")]
    if not all(isinstance(half, str) for half in halves) or len(table) != len(halves):
        raise KeyFileError(f"{path} is not a key file: it must have `public` and `secret` and nothing else")
    public, secret = (_key(str(half)) for half in halves)
    if public is None or secret is None:
        raise KeyFileError(f"{path} is not a key file: a key has {2 * KEY_BYTES} hexadecimal digits")
    return KeyPair(public, secret)


def read_public(text: str) -> bytes:
    """Reads a public key from its hexadecimal digits, or from a `.pub` file.

    Args:
        text: the digits, the path of the file, or its name in the key directory, with or without `.pub`.

    Raises:
        KeyFileError: `text` is no key, or there is no such file, or it is not a public key file.
    """
    if (key := _key(text)) is not None:
        return key
    path = Path(text).expanduser()
    if not path.exists() and "/" not in text:
        path = keys_dir() / f"{text.removesuffix(PUBLIC_SUFFIX)}{PUBLIC_SUFFIX}"
    if not path.exists():
        where = "" if "/" in text else f", here or in {keys_dir()}: copy the fleet's {PUBLIC_SUFFIX} file there"
        raise KeyFileError(
            f"{text!r:.80} is neither a public key ({2 * KEY_BYTES} hexadecimal digits) nor an existing "
            f"{PUBLIC_SUFFIX} file{where}"
        )
    words = _read(path).split()
    if not words or (key := _key(words[0])) is None:
        raise KeyFileError(f"{path} is not a public key file: it must begin with {2 * KEY_BYTES} hexadecimal digits")
    return key


def read_clients(path: Path) -> dict[bytes, Client]:
    """Reads an agent's client file; returns the clients by public key.

    Raises:
        KeyFileError: the file cannot be read, other users can write to it, or a line is malformed. One malformed line
            rejects the whole file, because that line may be the one that lowers a client's level.
    """
    clients: dict[bytes, Client] = {}
    for number, line in enumerate(_read(path, guarded=True).splitlines(), 1):
        words = line.split(maxsplit=2)
        if not words or words[0].startswith("#"):
            continue
        level = _LEVELS.get(words[0])
        key = _key(words[1]) if len(words) > 1 else None
        if level is None or key is None:
            raise KeyFileError(
                f"{path} line {number}: write LEVEL PUBLIC-KEY COMMENT, with a level of {', '.join(_LEVELS)} and a key "
                f"of {2 * KEY_BYTES} hexadecimal digits"
            )
        if key in clients:
            raise KeyFileError(f"{path} line {number}: an earlier line has the same key: keep one of them")
        clients[key] = Client(level, words[2] if len(words) > 2 else "")
    return clients


def secret_text(name: str, pair: KeyPair) -> str:
    """Returns the content of a `.key` file."""
    return (
        f"# kvctl key {name}. Secret: whoever reads this file can act as {name}. Give others {name}{PUBLIC_SUFFIX}.\n"
        f'public = "{pair.public.hex()}"\nsecret = "{pair.secret.hex()}"\n'
    )


def public_text(name: str, pair: KeyPair) -> str:
    """Returns the content of a `.pub` file; prefixed with a level it is a line of a client file."""
    return f"{pair.public.hex()} {name}\n"


def _key(text: str) -> bytes | None:
    if len(text) != 2 * KEY_BYTES or not set(text) <= set("0123456789abcdefABCDEF"):
        return None
    return bytes.fromhex(text)


def _read(path: Path, *, private: bool = False, guarded: bool = False) -> str:
    """Reads a small text file; refuses it if other users can read it (`private`) or write it (`guarded`).

    The group may read a secret that belongs to root if this user is not root: so Kubernetes mounts secrets.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            mode = status.st_mode
            others = 0o037 if status.st_uid == 0 and os.geteuid() != 0 else 0o077
            if not stat.S_ISREG(mode):
                raise KeyFileError(f"{path} is not a regular file")
            if private and mode & others:
                raise KeyFileError(
                    f"{path} holds a secret and other users can read it (mode {stat.S_IMODE(mode):04o}): "
                    f"chmod 600 {path}"
                )
            if guarded and mode & 0o022:
                raise KeyFileError(f"other users can write {path} (mode {stat.S_IMODE(mode):04o}): chmod 644 {path}")
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise KeyFileError(f"{path} has more than {MAX_FILE_BYTES} bytes: it is not a key file")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise KeyFileError(f"{path} is not UTF-8 text") from None
