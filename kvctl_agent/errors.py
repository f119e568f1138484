"""Every exception kvctl_agent raises on purpose, drawn once.

```
KvctlError
├── ConfigError            a configuration key, its value or its source is wrong
│   └── UnknownModel         no geometry preset has that name
├── LayoutError            two layouts cannot exchange KV (the arithmetic is in the message)
├── MemoryLayoutError      a pool, slab or buffer has a shape we do not serve
├── ProtocolError
│   ├── LocalProtocolError   our own caller broke the order of calls
│   └── RemoteProtocolError  a peer sent what it must not; carries nothing we act on
├── DeviceError            a device (a GPU), its driver or its memory failed or cannot do what is asked
│   └── DeviceUnavailable    there is none, or what drives it is not installed
├── TransportError         an engine failed
│   ├── TransportUnavailable the engine or a system library it needs is not installed
│   └── PeerDisconnected     the engine says that the peer is gone
├── AdminError             the admin socket cannot be served
│   └── RequestRefused       one admin request is refused; carries the code the client sees
├── RecordingError         a recording cannot be read: no recording, cut short, damaged
│   └── RecordingVersionError it is one of another version or build
└── DeadlineExceeded       a wait ran out; the message names what was waited for
```
"""

from __future__ import annotations


class KvctlError(Exception):
    """Root of all errors raised on purpose; its text says what, to what, and what to do next."""


class ConfigError(KvctlError):
    """A configuration key, value or source is wrong."""


class UnknownModel(ConfigError, ValueError):
    """No geometry preset has that name; the message suggests the nearest ones."""


class LayoutError(KvctlError, ValueError):
    """Two layouts cannot exchange KV; the message carries the arithmetic."""


class MemoryLayoutError(KvctlError, ValueError):
    """A pool, slab or buffer has a shape, dtype or alignment that is not served."""


class ProtocolError(KvctlError):
    """The agent-to-agent protocol was broken."""


class LocalProtocolError(ProtocolError):
    """Our own caller broke the order of calls (for example pages after finish)."""


class RemoteProtocolError(ProtocolError):
    """A peer sent something malformed, oversized, unknown or out of place."""


class DeviceError(KvctlError):
    """A device, its driver or its memory failed, or cannot do what was asked; says what to change."""


class DeviceUnavailable(DeviceError):
    """There is no such device here, or what drives it is not installed; says which and how to get it."""


class TransportError(KvctlError):
    """A transfer engine failed."""


class TransportUnavailable(TransportError):
    """The engine, or a system library it needs, is not installed; says which and how to get it."""


class PeerDisconnected(TransportError):
    """The engine reports that the peer is gone."""


class AdminError(KvctlError):
    """The admin socket cannot be served."""


class RequestRefused(AdminError):
    """One admin request is refused.

    Attributes:
        code: a `contract.admin.ErrorCode`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class RecordingError(KvctlError):
    """A recording cannot be read: it is none, was cut short, or is damaged."""


class RecordingVersionError(RecordingError):
    """A recording of another version, or of machines that are built otherwise than these."""


class DeadlineExceeded(KvctlError, TimeoutError):
    """A wait ran out; the message names what was waited for."""
