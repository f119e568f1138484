"""Ids of an engine's requests and their trace contexts; room numbers for engines whose requests are named by texts."""

from __future__ import annotations

import hashlib
import re

from kvctl_agent.contract.values import encodable, shown
from kvctl_agent.errors import LocalProtocolError

_LONGEST = 1024
_LONGEST_SHOWN = 256
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def room_number(request_id: str) -> int:
    """Returns the room number of a request id such as "cmpl-7f3a…": its BLAKE2b hash, an unsigned 64-bit number.

    The number is the digest of 8 bytes of the UTF-8 text, read as a big-endian integer. It is the same in every process
    and will not change in later versions. Of n rooms that are open at the same time, two have equal numbers with the
    probability n**2 / 2**65: 3e-12 of 10,000 rooms. Agents take them for one room: mostly one of them fails, but in
    the worst case it receives the KV of the other.

    Args:
        request_id: 1 to 1024 characters.

    Raises:
        LocalProtocolError: not a text of this length, or a text that UTF-8 cannot encode.
    """
    if not isinstance(request_id, str) or not 0 < len(request_id) <= _LONGEST:
        raise LocalProtocolError(f"request id is {shown(request_id)}: it must be text of 1 to {_LONGEST} characters")
    try:
        data = request_id.encode()
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"request id is {shown(request_id)}: {error}") from None
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def check_request_id(room: int, value: object) -> str:
    """Returns the request id that is shown beside a room: at most 256 characters, without lone surrogates.

    Raises:
        LocalProtocolError: not a text.
    """
    if not isinstance(value, str):
        raise LocalProtocolError(f"room {room}: request_id is {shown(value)}: it must be text")
    return encodable(str(value[:_LONGEST_SHOWN]))[:_LONGEST_SHOWN]


def valid_traceparent(value: object) -> str:
    """Returns the first four fields of a W3C `traceparent`; "" if it is invalid, since clients write it.

    Versions other than 00 may have further fields, which are dropped.
    """
    if not isinstance(value, str) or (found := _TRACEPARENT.match(value)) is None:
        return ""
    rest = value[found.end() :]
    return found[0] if not rest or (rest[0] == "-" and found[0][:2] != "00") else ""
