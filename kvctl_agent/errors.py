"""Exceptions of kvctl_agent; `KvctlError` is the base class of all of them."""

from __future__ import annotations


class KvctlError(Exception):
    """Base class of all exceptions of kvctl_agent; the message names the object, the problem and the remedy."""


class ConfigError(KvctlError):
    """A configuration key, value or source is invalid."""


class UnknownModel(ConfigError, ValueError):
    """No geometry preset has this name; the message suggests similar names."""


class LayoutError(KvctlError, ValueError):
    """A layout or size is invalid, or two ranks cannot exchange KV; the message has the numbers that do not fit."""


class MemoryLayoutError(KvctlError, ValueError):
    """A pool, slab or buffer has an unsupported shape, dtype or alignment."""


class ProtocolError(KvctlError):
    """A peer violated the protocol between agents, or the caller the rules of the API."""


class LocalProtocolError(ProtocolError):
    """The caller of the public API broke its rules, for example called `pages` after `finish` or used a room twice."""


class RemoteProtocolError(ProtocolError):
    """A peer sent a message that is malformed, oversized, unknown or unexpected; it is ignored."""


class DeviceError(KvctlError):
    """A device, its driver or its memory failed, or does not support the operation; the message names the remedy."""


class DeviceUnavailable(DeviceError):
    """The device or its driver library is missing; the message says how to install it."""


class TransportError(KvctlError):
    """The transfer engine (NIXL, Mooncake or loopback) reports an error."""


class TransportUnavailable(TransportError):
    """The transfer engine or a system library that it needs is not installed; the message says how to install it."""


class PeerDisconnected(TransportError):
    """The transfer engine reports that it has lost the connection to the peer."""


class AdminError(KvctlError):
    """The admin socket or its directory cannot be used."""


class RequestRefused(AdminError):
    """An admin request is refused.

    Attributes:
        code: the `contract.admin.ErrorCode` sent to the client.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class DeadlineExceeded(KvctlError, TimeoutError):
    """A wait timed out; the message names the awaited event."""


class RegionError(KvctlError):
    """A region in shared memory cannot be created, or what is there is no region of this version."""
