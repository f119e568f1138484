"""Tells which lane carried the bytes of a connection, and how that is known: engine, counters of devices, or rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvctl.health.answers import NO_ROW, Row, inner, number, rows, text, texts
from kvctl.render.units import three_digits

SHARED_MEMORY = "shared memory"
_SHARE = 0.5  # of the bytes, that a device must have carried to be the one that carries them
_RAIL_SHARE = 0.01
_MIXED = 1.5  # a device that carried so many times the bytes carried others' bytes, too


def carried_by(before: Sequence[Row], after: Sequence[Row], moved: float) -> tuple[str, dict[str, int]]:
    """Returns the lane of a host's bytes, and the bytes that each device carried, by the counters of its devices.

    Args:
        before, after: the devices before and after the transfer, each a `Nic`.

    Returns:
        "rdma", "tcp", or "" if no device of the host has carried most of the bytes, as over shared memory or NVLink.
    """
    for kind, lane in (("rdma", "rdma"), ("interface", "tcp")):
        devices = {
            name: nbytes
            for (of, name), nbytes in _grown(before, after).items()
            if of == kind and nbytes > _RAIL_SHARE * moved
        }
        if sum(devices.values()) >= _SHARE * moved:
            return lane, devices
    return "", {}


def _grown(before: Sequence[Row], after: Sequence[Row]) -> dict[tuple[str, str], int]:
    """Returns the bytes that each device of both readings has sent in between, by kind and name."""
    earlier = {text(nic, "name"): number(nic, "sent_bytes_total") for nic in before}
    return {
        (text(nic, "kind"), text(nic, "name")): int((number(nic, "sent_bytes_total") or 0) - then)
        for nic in after
        if (then := earlier.get(text(nic, "name"))) is not None
    }


def measured_lane(name: str, before: Row, after: Row, probe: Row) -> dict[str, Any]:
    """Returns the lane of a probe's writes as columns `lane`, `lane_source`, `carried` and `moved_bytes`.

    The engine's word counts first, then the counters of the devices, then the rate. Counters prove nothing while
    others use the same device; `lane_source` then says so.

    Args:
        before: the writer's answers by command before the probe: `nics`, if it gave one.
        after: those after it: `nics` and `peers`.
        probe: its answer to `probe`; an older agent does not tell `moved_bytes`.
    """
    moved = number(probe, "moved_bytes")
    nics = rows(inner(before, "nics").get("nics")), rows(inner(after, "nics").get("nics"))
    peer = next((row for row in rows(after.get("peers")) if text(row, "peer") == name), NO_ROW)
    lane, source = _told(peer, inner(after, "nics"))
    carried: dict[str, int] = {}
    if moved and all(nics):
        by_counters, carried = carried_by(*nics, moved)
        most = max(_grown(*nics).values(), default=0)
        unused = most < _SHARE * moved and not number(inner(after, "nics"), "left_out")
        if by_counters and source != "engine":
            if max(carried.values()) > _MIXED * moved:
                source = f"{source or 'nothing'}: counters have other traffic"
            else:
                lane, source = by_counters, "counters"
        elif unused and not lane and peer.get("same_host") is True:
            lane, source = SHARED_MEMORY, "counters: no device carried them"
    return {"lane": lane or None, "lane_source": source or None, "carried": carried, "moved_bytes": moved}


def _told(peer: Row, nics: Row) -> tuple[str, str]:
    """Returns the lane that the engine tells or the rate suggests, and which of the two; "" if neither does."""
    if kind := text(peer, "lane_kind"):
        return kind, text(peer, "lane_source")
    protocol = text(inner(nics, "lane"), "protocol")
    return protocol, "engine" if protocol else ""


def lane_evidence(peer: Row, nics: Row) -> list[str]:
    """Returns what is known of the lane to a peer without a measurement, and from where; best first.

    Args:
        peer: a rank's row about the peer, a `PeerRow`.
        nics: the rank's answer to `nics`; empty if it gave none.
    """
    found = []
    lane, source = _told(peer, nics)
    rate = number(peer, "lane_gb_per_s")
    if lane:
        found.append(f"{lane}: {source}" + (f", {three_digits(rate)} GB/s" if rate is not None else ""))
    if direct := text(peer, "lane_direct"):
        found.append(f"path direct by {direct}: mapping")
    choice = inner(nics, "lane")
    if peer.get("same_host") is False and (devices := texts(choice, "devices")):
        found.append(f"{' '.join(devices)}: {text(choice, 'source')}")
    return found
