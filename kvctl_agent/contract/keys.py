"""Key files: who may talk to an agent over the network, in text that people can copy, compare and edit.

Keys are those of CURVE (Curve25519, 32 bytes), written as 64 hexadecimal digits: safe in a shell, and one double click.

- `NAME.key`, mode 0600: TOML with `public` and `secret`. Whoever has it is its owner.
- `NAME.pub`: one line, the public key and a name. Goes to those who shall know the owner.
- clients of an agent: a line each, `LEVEL PUBLIC-KEY COMMENT`, as in `operate 3f…c1 alice`; `#` begins a comment.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from kvctl_agent.contract.commands import Level

KEY_BYTES = 32
SECRET_SUFFIX = ".key"
PUBLIC_SUFFIX = ".pub"
MAX_FILE_BYTES = 1 << 20
_LEVELS = {level.label: level for level in Level}


class KeyFileError(ValueError):
    """A key or a file of keys cannot be used; the text names the file and what to do, never a secret."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Both halves of a key, as 32 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Client:
    """One line of an agent's file of clients."""

    level: Level
    comment: str


def keys_dir() -> Path:
    """Where `kvctl key new` writes and `--key` looks for names: `$XDG_CONFIG_HOME/kvctl/keys`."""
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "kvctl" / "keys"


def read_pair(path: Path) -> KeyPair:
    """A key pair from its secret file.

    Raises:
        KeyFileError: it cannot be read, others may read it, or it is no key file.
    """
    import tomllib  # only where a key is read: every start of kvctl would pay for it

    text = _read(path, private=True)
    try:
        table = tomllib.loads(text)
    except ValueError:  # its text would show the secret
        raise KeyFileError(f"{path} is no key file: make one with `kvctl key new`") from None
    halves = [table.get(name) for name in ("public", "secret")]
    if not all(isinstance(half, str) for half in halves) or len(table) != len(halves):
        raise KeyFileError(f"{path} is no key file: it must have `public` and `secret` and nothing else")
    public, secret = (_key(str(half)) for half in halves)
    if public is None or secret is None:
        raise KeyFileError(f"{path} is no key file: a key is {2 * KEY_BYTES} hexadecimal digits")
    return KeyPair(public, secret)


def read_public(text: str) -> bytes:
    """A public key: itself, or the path of the `.pub` file that holds it.

    Raises:
        KeyFileError: it is neither.
    """
    if (key := _key(text)) is not None:
        return key
    path = Path(text).expanduser()
    if not path.exists():
        raise KeyFileError(
            f"{text!r:.80} is no public key ({2 * KEY_BYTES} hexadecimal digits), and no {PUBLIC_SUFFIX} file either"
        )
    words = _read(path).split()
    if not words or (key := _key(words[0])) is None:
        raise KeyFileError(f"{path} is no public key file: it must begin with {2 * KEY_BYTES} hexadecimal digits")
    return key


def read_clients(path: Path) -> dict[bytes, Client]:
    """Who may do what, by public key.

    Raises:
        KeyFileError: it cannot be read, or others may write to it, or a line is wrong: then nobody is let in, because
            the line that was meant to keep somebody out may be the wrong one.
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
            raise KeyFileError(f"{path} line {number}: the key of an earlier line again; which level is meant?")
        clients[key] = Client(level, words[2] if len(words) > 2 else "")
    return clients


def secret_text(name: str, pair: KeyPair) -> str:
    """Content of a secret file."""
    return (
        f"# kvctl key {name}. Secret: whoever has this file is its owner. Give {name}{PUBLIC_SUFFIX} away instead.\n"
        f'public = "{pair.public.hex()}"\nsecret = "{pair.secret.hex()}"\n'
    )


def public_text(name: str, pair: KeyPair) -> str:
    """Content of a public file; with a level in front it is a line of a file of clients."""
    return f"{pair.public.hex()} {name}\n"


def _key(text: str) -> bytes | None:
    if len(text) != 2 * KEY_BYTES or not set(text) <= set("0123456789abcdefABCDEF"):
        return None
    return bytes.fromhex(text)


def _read(path: Path, *, private: bool = False, guarded: bool = False) -> str:
    """A small text file; `private`: others must not be able to read it, `guarded`: nor to write to it."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise KeyFileError(f"{path} is no file")
            if private and mode & 0o077:
                raise KeyFileError(
                    f"{path} holds a secret and others may read it (mode {stat.S_IMODE(mode):04o}): chmod 600 {path}"
                )
            if guarded and mode & 0o022:
                raise KeyFileError(f"{path} can be changed by others (mode {stat.S_IMODE(mode):04o}): chmod 644 {path}")
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise KeyFileError(f"{path} has more than {MAX_FILE_BYTES} bytes: it is no file of keys")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise KeyFileError(f"{path} is no text") from None
