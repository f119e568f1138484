"""Which Unix sockets are trusted; error texts for missing file descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl_agent.host.sockets import UntrustedPathError, check_path, connect_unix, shortage
from tests.support.users import NOBODY, listen_as, needs_root


@pytest.fixture
def limit() -> Iterator[int]:
    """Limits this process to about ten more descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir()) + 11
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_enough_is_nothing_to_tell_of(limit: int) -> None:
    assert shortage(5) is None


def test_too_few_are_counted_with_the_limit(limit: int) -> None:
    text = shortage(10_000)
    assert text is not None
    assert text.startswith("10000 more file descriptors are needed and ")
    assert f"the limit is {limit} (ulimit -n)" in text


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        connect_unix(client, path)


def test_a_listener_of_this_user_is_trusted(socket_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(socket_dir / "r"))
        listener.listen()
        connect(socket_dir / "r")
        (socket_dir / "link").symlink_to("r")
        connect(socket_dir / "link")
    (socket_dir / "r").unlink()
    with pytest.raises(FileNotFoundError):
        connect(socket_dir / "r")


@needs_root
def test_a_listener_of_another_user_is_refused_by_path_and_uid(socket_dir: Path) -> None:
    """The directory has the sticky bit, as /tmp has."""
    socket_dir.chmod(0o1777)
    with listen_as(NOBODY, socket_dir / "r"), pytest.raises(UntrustedPathError) as refused:
        connect(socket_dir / "r")
    assert str(refused.value).startswith(f"uid {NOBODY} listens on {socket_dir}/r, not uid 0 or root: use a socket in ")
    (socket_dir / "r").unlink()


@needs_root
def test_root_trusts_the_user_to_whom_it_has_given_a_directory() -> None:
    # Nobody else may write to a directory above, as with /run/user/1000.
    directory = Path("/run/kvctl-test")
    directory.mkdir(mode=0o700)
    try:
        os.chown(directory, NOBODY, NOBODY)
        with listen_as(NOBODY, directory / "r"):
            connect(directory / "r")
        with pytest.raises(UntrustedPathError, match=f"belongs to uid {NOBODY}"):
            check_path(directory / "r", of_socket=False)
    finally:
        (directory / "r").unlink(missing_ok=True)
        directory.rmdir()


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o702])
@pytest.mark.parametrize("where", ["", "inner"])
def test_a_directory_in_which_others_may_replace_files_is_refused(socket_dir: Path, mode: int, where: str) -> None:
    (socket_dir / "inner").mkdir()
    (socket_dir / where).chmod(mode)
    path = socket_dir / "inner" / "r"
    path.touch()
    for of_socket in (False, True) if where else (False,):
        with pytest.raises(UntrustedPathError) as refused:
            check_path(path, of_socket=of_socket)
        text = f", on the path of {path}, (uid {os.geteuid()}, mode {mode:04o}) lets other users write to it: chmod "
        assert text in str(refused.value)
    (socket_dir / where).chmod(0o1777)
    assert check_path(path.parent) == {0, os.geteuid()}


def test_a_socket_may_lie_in_a_directory_of_a_volume_that_all_may_write_to(socket_dir: Path) -> None:
    """As an emptyDir of Kubernetes: who replaces the directory cannot listen as this user."""
    socket_dir.chmod(0o777)
    (socket_dir / "sockets").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(socket_dir / "sockets" / "r"))
        listener.listen()
        connect(socket_dir / "sockets" / "r")


def test_a_link_is_followed_to_the_directories_of_its_target(socket_dir: Path) -> None:
    open_one, own = socket_dir / "open", socket_dir / "own"
    open_one.mkdir()
    open_one.chmod(0o777)
    own.mkdir()
    (own / "link").symlink_to("../open")
    (own / "r").symlink_to("../own/link/r")
    (open_one / "r").touch()
    for path in (own / "link" / "r", own / "r"):
        with pytest.raises(UntrustedPathError, match=r"open, on .* lets other users write to it"):
            check_path(path)
    (own / "endless").symlink_to("endless")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        check_path(own / "endless" / "r")


@pytest.mark.parametrize(("mode", "refused"), [(0o600, False), (0o644, False), (0o646, True), (0o602, True)])
def test_a_file_that_others_may_write_is_refused(socket_dir: Path, mode: int, refused: bool) -> None:
    socket_dir.chmod(0o1777)  # the sticky bit does not protect what is in a file
    file = socket_dir / "config.toml"
    file.touch()
    file.chmod(mode)
    with pytest.raises(UntrustedPathError) if refused else contextlib.nullcontext() as caught:
        check_path(file)
    if caught is not None:
        text = f"{file} (uid {os.geteuid()}, mode {mode:04o}) lets other users write to it: chmod go-w {file}"
        assert str(caught.value) == text


@needs_root
@pytest.mark.parametrize("kind", ["directory", "link"])
def test_a_directory_or_link_of_another_user_is_refused(socket_dir: Path, kind: str) -> None:
    socket_dir.chmod(0o1777)
    theirs = socket_dir / "theirs"
    if kind == "directory":
        theirs.mkdir(mode=0o700)
    else:
        theirs.symlink_to(socket_dir)
    os.chown(theirs, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(UntrustedPathError, match=rf"theirs, on the path .*, belongs to uid {NOBODY}, not to uid 0"):
        check_path(theirs / "r")
