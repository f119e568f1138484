"""Key files: round trip, and refusal of unsafe or malformed files without revealing secrets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl_agent.contract.commands import Level
from kvctl_agent.host.keys import (
    MAX_FILE_BYTES,
    KeyFileError,
    KeyPair,
    public_text,
    read_clients,
    read_pair,
    read_public,
    secret_text,
)

PAIR = KeyPair(bytes(range(32)), bytes(range(100, 132)))
OTHER = "ab" * 32


def write(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_a_pair_survives_the_round_trip(tmp_path_factory: pytest.TempPathFactory, public: bytes, secret: bytes) -> None:
    folder = tmp_path_factory.mktemp("keys")
    pair = KeyPair(public, secret)
    assert read_pair(write(folder / "a.key", secret_text("a", pair))) == pair
    assert read_public(str(write(folder / "a.pub", public_text("a", pair)))) == public


def test_a_secret_is_not_shown_by_accident() -> None:
    assert PAIR.secret.hex() not in repr(PAIR)
    assert repr(PAIR.secret) not in repr(PAIR)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a file that belongs to root")
@pytest.mark.parametrize(("mode", "permitted"), [(0o440, True), (0o640, True), (0o644, False), (0o660, False)])
def test_the_group_may_read_a_secret_of_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, permitted: bool
) -> None:
    """As Kubernetes mounts a secret for a container with fsGroup that does not run as root."""
    path = write(tmp_path / "fleet.key", secret_text("fleet", PAIR), mode)
    monkeypatch.setattr("kvctl_agent.host.keys.os.geteuid", lambda: 1000)
    if permitted:
        assert read_pair(path) == PAIR
    else:
        with pytest.raises(KeyFileError, match="other users can read it"):
            read_pair(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660])
def test_a_secret_that_others_can_read_is_refused_with_what_to_do(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "a.key", secret_text("a", PAIR), mode)
    with pytest.raises(KeyFileError, match=rf"mode {mode:04o}\): chmod 600 {path}"):
        read_pair(path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "\0",
        b"\xff\xfe",
        "public = 1\nsecret = 2\n",
        f'secret = "{OTHER}"\n',
        f'public = "{OTHER}"\nsecret = "{OTHER[:-1]}"\n',
        f'public = "{OTHER}"\nsecret = "{OTHER}"\nmore = 1\n',
        f'public = "{OTHER}"\nsecret = "{OTHER}',  # cut off: no TOML
        f'public = "{OTHER}"\nsecret = "{"٣" * 64}"\n',  # digits, but not of these
        "#" * (MAX_FILE_BYTES + 1),
    ],
)
def test_what_is_no_key_file_is_refused_without_its_content(tmp_path: Path, content: str | bytes) -> None:
    path = write(tmp_path / "a.key", content)
    with pytest.raises(KeyFileError, match=r"a\.key") as refused:
        read_pair(path)
    assert OTHER[:8] not in str(refused.value)


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"cannot read .*none\.key: No such file"):
        read_pair(tmp_path / "none.key")
    with pytest.raises(KeyFileError, match="Is a directory"):
        read_pair(tmp_path)


class TestPublic:
    def test_the_digits_themselves(self) -> None:
        assert read_public(OTHER) == read_public(OTHER.upper()) == bytes.fromhex(OTHER)

    def test_a_secret_file_is_no_public_one(self, tmp_path: Path) -> None:
        with pytest.raises(KeyFileError, match="is not a public key file") as refused:
            read_public(str(write(tmp_path / "a.key", secret_text("a", PAIR))))
        assert PAIR.secret.hex() not in str(refused.value)

    @pytest.mark.parametrize("text", ["ab", OTHER + "a", "x" * 64])
    def test_anything_else_is_told_what_a_key_looks_like(self, text: str) -> None:
        with pytest.raises(KeyFileError, match="64 hexadecimal digits"):
            read_public(text)


class TestClients:
    def test_levels_comments_and_gaps(self, tmp_path: Path) -> None:
        text = f"# who may\n\nread {OTHER} alice at home\n  operate   {'cd' * 32}\nadmin {'ef' * 32} # bob\n"
        clients = read_clients(write(tmp_path / "clients", text, 0o644))
        assert [(key.hex()[:2], who.level, who.comment) for key, who in clients.items()] == [
            ("ab", Level.READ, "alice at home"),
            ("cd", Level.OPERATE, ""),
            ("ef", Level.ADMIN, "# bob"),
        ]

    @pytest.mark.parametrize(
        "line", [OTHER, f"root {OTHER}", "read", f"read {OTHER[:-2]}", f"READ {OTHER}", f"admin {'x' * 64} eve"]
    )
    def test_one_wrong_line_spoils_the_file_and_is_named(self, tmp_path: Path, line: str) -> None:
        path = write(tmp_path / "clients", f"read {'cd' * 32} alice\n{line}\n")
        with pytest.raises(KeyFileError, match="line 2: write LEVEL PUBLIC-KEY COMMENT"):
            read_clients(path)

    def test_one_key_with_two_levels_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(KeyFileError, match="line 2: an earlier line has the same key"):
            read_clients(write(tmp_path / "clients", f"read {OTHER} a\nadmin {OTHER.upper()} a\n"))

    def test_a_file_that_others_can_change_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(KeyFileError, match="other users can write"):
            read_clients(write(tmp_path / "clients", f"read {OTHER} a\n", 0o666))
