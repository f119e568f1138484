"""Ids, trace contexts and prompt digests of an engine's requests; room numbers of requests that are named by texts."""

from __future__ import annotations

import hashlib
import re
import sys
from array import array
from collections.abc import Iterable

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


def prompt_digest(tokens: Iterable[int], *, lora: str = "", salt: str = "", media: Iterable[str] = ()) -> int:
    """Returns a digest of a prompt, by which both ends of a room see whether they have the same one.

    It is the BLAKE2b hash of 8 bytes, read as a big-endian integer, of the number of tokens, the tokens, and the UTF-8
    bytes of each of `lora`, `salt` and the texts in `media`, which their number precedes. All numbers are little-endian
    int64. It is the same in every process and will not change in later versions, and it is never 0. Two prompts have
    equal digests with the probability 2**-64. 100,000 tokens take a few milliseconds: call it once per request.

    Args:
        tokens: ids of the tokens whose KV is transferred or cached.
        lora: name of the LoRA adapter; "" without one.
        salt: what separates the prefix caches of tenants, such as `cache_salt`; "" without one.
        media: hash of each image and the like in the prompt, in prompt order.

    Raises:
        LocalProtocolError: the tokens are not a flat list of integers of 64 bits.
    """
    try:
        ids = array("q", list(tokens) if isinstance(tokens, bytes | bytearray) else tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"tokens is {shown(tokens)}: it must be a list of integers: {error}") from None
    if sys.byteorder == "big":
        ids.byteswap()
    found = hashlib.blake2b(len(ids).to_bytes(8, "little"), digest_size=8)
    found.update(ids)
    for text in (each.encode(errors="surrogatepass") for each in (lora, salt, *media)):
        found.update(len(text).to_bytes(8, "little") + text)
    return int.from_bytes(found.digest(), "big") or 1


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
