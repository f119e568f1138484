"""Network addresses as text: the one parser of `ipc://` and `tcp://` endpoints and of `host:port`.

The texts come from settings, command lines, requests, routers, registries and peers. What this module accepts can be
passed to libzmq and to sockets, which may find nobody there but do not reject it.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from functools import lru_cache
from typing import Literal, NamedTuple

from kvctl_agent.contract.admin import MAX_SOCKET_PATH_BYTES
from kvctl_agent.contract.values import shown
from kvctl_agent.errors import ConfigError

_PORTS = 256  # that are tried for an address with a trailing +
_LONGEST = 1024  # characters
_LONGEST_NAME = 253
_PLACE = re.compile(
    r"(?:\[(?P<ip6>[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9_.-]{1,15})?)\]"
    r"|(?P<name>[A-Za-z0-9][A-Za-z0-9_-]{0,62}(?:\.[A-Za-z0-9_-]{1,63})*\.?|\*))"
    r"(?::(?P<port>0|[1-9][0-9]{0,4}|\*))?"
)
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")


class AddressError(ConfigError):
    """A text is not an address, or not one of the required kind; the message says what to write."""


class Address(NamedTuple):
    """Address of a socket; `str` of it is its endpoint, `tcp://[::1]:7000` or `ipc:///path`.

    Attributes:
        host: host name or IP address, which has no brackets; "*" for all addresses of this host; "" for ipc.
        port: port number; 0 for a free one that the system chooses.
        path: absolute path of the Unix socket; "" for tcp.
    """

    scheme: Literal["ipc", "tcp"]
    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The host as an IP address; None for a name."""
        return ip_address(self.host)

    @property
    def is_loopback(self) -> bool:
        """Whether the host is a loopback address, or localhost."""
        return self.host.lower() == "localhost" or ((ip := self.ip) is not None and ip.is_loopback)

    @property
    def is_local(self) -> bool:
        """Whether only this host reaches the address: a Unix socket, or a loopback address."""
        return self.scheme == "ipc" or self.is_loopback

    @property
    def is_wildcard(self) -> bool:
        """Whether the host stands for all addresses of this host, so that nobody can connect to it."""
        return self.host == "*" or ((ip := self.ip) is not None and ip.is_unspecified)

    @property
    def bracketed_host(self) -> str:
        """The host as URLs have it, an IPv6 address in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def place(self) -> str:
        """`host:port`, with an IPv6 address in brackets."""
        return f"{self.bracketed_host}:{self.port}"

    def __str__(self) -> str:
        return f"ipc://{self.path}" if self.scheme == "ipc" else f"tcp://{self.place}"


def parse_endpoint(text: object, *, bound: bool = False) -> Address:
    """Parses `ipc:///path` or `tcp://host:port`.

    Args:
        bound: whether the endpoint is to be bound: the port may then be 0 or *, the host *.

    Raises:
        AddressError: it is another text or no text, the path is not absolute or exceeds the limit of a Unix socket, or
            there is no port to connect to.
    """
    if not isinstance(text, str) or len(text) > _LONGEST:
        raise AddressError(f"{shown(text)} is not an endpoint: write ipc:///path or tcp://address:port")
    return _endpoint(text, bound)


@lru_cache(256)  # requests name the same few endpoints
def _endpoint(text: str, bound: bool) -> Address:
    scheme, _, rest = text.partition("://")
    if scheme == "ipc" and text.isprintable():
        if not rest.startswith("/"):
            raise AddressError(f"{text}: an ipc endpoint needs an absolute path")
        try:
            size = len(os.fsencode(rest))
        except UnicodeEncodeError:
            raise AddressError(f"{text}: the encoding of file names on this host lacks a character of it") from None
        if size > MAX_SOCKET_PATH_BYTES:
            raise AddressError(f"{text}: the path exceeds {MAX_SOCKET_PATH_BYTES} bytes, the limit of a Unix socket")
        return Address("ipc", path=rest)
    address = _place(rest) if scheme == "tcp" else None
    if address is None or address.port < 0 or not (bound or address.host != "*"):
        raise AddressError(f"{shown(text)} is not an endpoint: write ipc:///path or tcp://address:port")
    if not (bound or address.port):
        raise AddressError(
            f"{text}: only the socket that is bound may have port 0, such as the registry of a prefill instance on its "
            "first rank; give the other ranks its Agent.bootstrap"
        )
    return address


def parse_place(text: object, *, default_port: int | None = None) -> Address:
    """Parses `host:port`, the address of a TCP socket without its scheme; a host may be *, and a port * or 0.

    Args:
        default_port: port of a text that has none; None: the text must have one.

    Raises:
        AddressError: it is another text or no text.
    """
    address = _place(text) if isinstance(text, str) and len(text) <= _LONGEST else None
    if address is not None and address.port < 0 and default_port is not None:
        address = address._replace(port=default_port)
    if address is None or address.port < 0:
        raise AddressError(
            f"{shown(text)} is not an address: write address:port, such as 10.0.0.5:7000 or [fd00::5]:7000"
        )
    return address


def parse_listening(text: object, *, numeric: bool = False) -> tuple[Address, ...]:
    """Parses `host:port`, or `host:port+` for the first free port upwards; returns the addresses to try in turn.

    Args:
        numeric: whether the host must be an IP address.

    Raises:
        AddressError: it is another text or no text.
    """
    upwards = isinstance(text, str) and text.endswith("+")
    try:
        first = parse_place(text.removesuffix("+") if isinstance(text, str) else text)
    except AddressError:
        first = None
    if first is None or (numeric and first.ip is None) or (upwards and not first.port):
        raise AddressError(
            f"{shown(text)} is not an address: write address:port, or address:port+ for the first free port upwards"
        )
    last = first.port + (_PORTS if upwards else 1)
    return tuple(first._replace(port=port) for port in range(first.port, min(last, 1 << 16)))


def tcp_address(host: object, port: object) -> Address:
    """Returns the address of a host and a port that are known apart; an IPv6 address may have brackets.

    Raises:
        AddressError: the host is not a host name or IP address to connect to, or the port not a number from 1 to 65535.
    """
    if isinstance(host, str) and isinstance(port, int) and not isinstance(port, bool) and 0 < port < 1 << 16:
        place = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
        address = _place(place) if len(host) <= _LONGEST else None
        if address is not None and address.host != "*":
            return address
    raise AddressError(f"host {shown(host)}, port {shown(port)}: not the address of a TCP socket")


def host_of(endpoint: object) -> str:
    """Returns the host of a `tcp://` endpoint, an IPv6 address without brackets; "" of any other value."""
    try:
        return parse_endpoint(endpoint, bound=True).host
    except AddressError:
        return ""


def is_local(endpoint: object) -> bool:
    """Returns whether a value is an endpoint that only its own host reaches."""
    try:
        return parse_endpoint(endpoint, bound=True).is_local
    except AddressError:
        return False


def ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns an IP address; None for any other text."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _place(text: str) -> Address | None:
    """Parses `host:port` or `host`, whose port is then -1; returns None for any other text."""
    match = _PLACE.fullmatch(text)
    if match is None:
        return None
    port = -1 if match["port"] is None else 0 if match["port"] == "*" else int(match["port"])
    host = match["ip6"] or match["name"]
    # A resolver also takes 127.1 and 0x7f000001 for addresses; here only the usual form is one.
    is_number = match["ip6"] or _NUMBER.fullmatch(host.removesuffix(".").rpartition(".")[2])
    if is_number:
        try:  # much faster than ipaddress
            socket.inet_pton(socket.AF_INET6 if match["ip6"] else socket.AF_INET, host.partition("%")[0])
        except OSError:
            return None
    return Address("tcp", host, port) if port < 1 << 16 and len(host) <= _LONGEST_NAME else None
