"""The worlds that the explorer walks, and the faults allowed in each history.

`SMALL` is walked completely by `make test-all`, and every twelfth world of it by `make test`. `LARGE` is for `make
explore`, which walks as far as its bounds allow.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.explore.explorer.flow import Budget
from tests.explore.explorer.scene import Scene
from tests.explore.explorer.search import Bounds, Explored, explore
from tests.support.protocol.invariants import Broken
from tests.support.protocol.simulation import direct, mixed

D, D1, P0, P1 = "decode-0", "decode-1", "prefill-0", "prefill-1"
# Two writers whose workers take the rooms in different orders, which locks them out of each other's way to the ring
# if a part that waits holds anything.
OTHER_ORDER = ((P0, 7), (P0, 8), (P1, 8), (P1, 7))


class Configuration(NamedTuple):
    """One world and its faults."""

    name: str
    scene: Scene
    budget: Budget

    def explore(self, bounds: Bounds) -> Explored:
        """Walks the world.

        Raises:
            Broken: with the name of this configuration and the history.
        """
        try:
            return explore(self.scene.start(), self.budget, bounds)
        except Broken as broken:
            raise Broken(f"{self.name}: {broken}") from None


def _of(name: str, scene: Scene, **budget: object) -> Configuration:
    return Configuration(name, scene, Budget(**budget))  # type: ignore[arg-type]


def two_pairs(**scene: object) -> Scene:
    """Room 7 between two prefill and two decode ranks, each of which writes to its counterpart; decode-0 keeps it."""
    return Scene(writers=2, readers=2, paths=direct, **scene)  # type: ignore[arg-type]


def _recalled(*recalled: tuple[str, int], **scene: object) -> Scene:
    return Scene(recalled=recalled, **scene)  # type: ignore[arg-type]


SMALL = (
    # What the network does.
    _of("one room, anything lost", Scene(), losses=2, copies=1, overtakings=1, early=1),
    _of("from the first call on", Scene(opened=False, asked=False), losses=1, copies=1, overtakings=1),
    _of("aux row", Scene(aux=3), losses=1, copies=1, overtakings=1),
    _of("aux row with the last part", Scene(aux=3, together=True), losses=1, copies=1, overtakings=1),
    _of("state", Scene(states=(1,)), losses=1, copies=1, overtakings=1),
    _of("past the ring", Scene(pages=2, paths=direct), losses=1, copies=1, overtakings=1),
    _of("two parts wait for each other", Scene(pages=2), losses=1, copies=1, overtakings=1),
    _of("two layer groups wait for each other", Scene(ring=1, groups=(1,)), losses=2, overtakings=1),
    _of("some parts past the ring", Scene(ring=1, groups=(1,), paths=mixed), losses=1, copies=1),
    _of("two context parallel ranks", Scene(cp=2, pages=2), losses=1),
    _of("two rooms gate each other", Scene(rooms=2), losses=2, early=1),
    _of("three rooms", Scene(rooms=3, granted=True), losses=1),
    _of("a ring with a rest", Scene(rooms=2, ring=3), losses=1, overtakings=1, early=1),
    _of("two writers", Scene(writers=2, ring=1), losses=1, overtakings=1),
    _of(
        "two writers with other queue orders",
        Scene(rooms=2, writers=2, ring=1, granted=True, computed=OTHER_ORDER),
        losses=1,
    ),
    # The prefill engine never calls finish().
    _of("finish is never called", Scene(finished=False), losses=1, copies=1, overtakings=1),
    _of("finish is never called, and a room is given up", Scene(finished=False), losses=1, aborts=((D, 7), (P0, 7))),
    # An operator takes regions back.
    _of("regions are taken back", Scene(rooms=2), releases=2),
    _of("a region is taken back from a paused writer", Scene(granted=True), releases=2, pauses=(P0,)),
    _of("a region is taken back as its room ends", Scene(granted=True), releases=2, aborts=((D, 7),), losses=1),
    # A device fails.
    _of("a scatter fails", Scene(rooms=2), failures=1, losses=1),
    _of("scatters fail as their room is given up", Scene(pages=2), failures=2, aborts=((D, 7),), losses=1),
    # Engines give up.
    _of("decode aborts", Scene(rooms=2), losses=1, aborts=((D, 7),)),
    _of("prefill aborts", Scene(writers=2, ring=1), losses=1, aborts=((P0, 7),)),
    _of("both abort", Scene(rooms=2, granted=True), copies=1, aborts=((D, 7), (P0, 8))),
    _of("a number is used again", Scene(again=(7,)), again=(7,), aborts=((D, 7),), losses=1, copies=1, overtakings=1),
    # Engines take pages back and go on later, or never open a room.
    _of("prefill recalls", _recalled((P0, 7)), recalls=((P0, 7),), losses=1, copies=1, overtakings=1),
    _of("prefill recalls past the ring", _recalled((P0, 7), paths=direct, pages=2), recalls=((P0, 7),), losses=1),
    _of("prefill recalls twice", _recalled((P0, 7), (P0, 7)), recalls=((P0, 7), (P0, 7)), losses=1),
    _of(
        "prefill recalls twice past the ring",
        _recalled((P0, 7), (P0, 7), paths=direct, pages=2),
        recalls=((P0, 7), (P0, 7)),
        losses=1,
    ),
    _of("prefill recalls final parts", _recalled((P0, 7), aux=3, states=(1,)), recalls=((P0, 7),), losses=1),
    _of("prefill recalls a part with its row", _recalled((P0, 7), aux=3, together=True), recalls=((P0, 7),), losses=1),
    _of("prefill recalls one of two rooms", _recalled((P0, 7), rooms=2), recalls=((P0, 7),), early=1),
    _of("one of two writers recalls", _recalled((P0, 7), writers=2, ring=1), recalls=((P0, 7),), losses=1),
    _of("prefill recalls as a region is taken back", _recalled((P0, 7)), recalls=((P0, 7),), releases=1, losses=1),
    _of("prefill recalls and is paused", _recalled((P0, 7), paths=direct), recalls=((P0, 7),), pauses=(P0,)),
    _of(
        "prefill recalls parts that wait for a lease",
        _recalled((P0, 7), paths=direct, pages=2, computed=((P0, 7),)),
        recalls=((P0, 7),),
        pauses=(P0,),
    ),
    _of("prefill recalls, and the room is given up", _recalled((P0, 7)), recalls=((P0, 7),), aborts=((D, 7),)),
    _of("decode recalls", _recalled((D, 7)), recalls=((D, 7),), losses=1, copies=1, overtakings=1),
    _of("decode recalls past the ring", _recalled((D, 7), paths=direct, pages=2), recalls=((D, 7),), losses=1),
    _of("decode recalls final parts", _recalled((D, 7), aux=3, states=(1,)), recalls=((D, 7),), losses=1),
    _of("decode recalls from two writers", _recalled((D, 7), writers=2, ring=1), recalls=((D, 7),)),
    _of("decode recalls and a writer is killed", _recalled((D, 7)), recalls=((D, 7),), kills=(P0,), restarts=(P0,)),
    _of(
        "decode recalls and a writer is frozen",
        _recalled((D, 7), paths=direct, pages=2),
        recalls=((D, 7),),
        freezes=(P0,),
        restarts=(P0,),
        losses=1,
    ),
    _of(
        "decode recalls and is given up", _recalled((D, 7), paths=direct), recalls=((D, 7),), deaf=((P0, D),), losses=1
    ),
    _of("decode recalls and starts anew", _recalled((D, 7)), recalls=((D, 7),), kills=(D,), restarts=(D,)),
    _of("both recall", _recalled((D, 7), (P0, 7)), recalls=((D, 7), (P0, 7)), losses=1),
    _of("a computed room is opened late", Scene(opened=False, asked=False, aux=3), lapses=1, losses=2, copies=1),
    _of("decode recalls and opens late", _recalled((D, 7), aux=3), recalls=((D, 7),), lapses=1, losses=1),
    # Somebody is silent. What was queued before is not posted until its reader is heard again.
    _of("leases expire before queued parts begin", Scene(paths=direct, aux=3, computed=((P0, 7),)), pauses=(P0,)),
    _of("leases expire before parts through the ring begin", Scene(computed=((P0, 7),)), pauses=(P0,), losses=1),
    _of("a writer is paused", Scene(), pauses=(P0,), losses=1, copies=1),
    _of("a writer is paused twice", Scene(granted=True), pauses=(P0, P0)),
    _of("one of two writers is paused", Scene(writers=2, ring=1), pauses=(P0,)),
    _of("a writer of two rooms is paused", Scene(rooms=2), pauses=(P0,)),
    _of("a writer of two rooms with a rest is paused", Scene(rooms=2, ring=3, granted=True), pauses=(P0,)),
    _of("the reader is paused", Scene(rooms=2), pauses=(D,)),
    _of("both sides are paused", Scene(), pauses=(D, P0)),
    _of("a writer is given up that is well", Scene(rooms=2), deaf=((D, P0),), losses=1),
    _of("the reader is given up that is well", Scene(rooms=2), deaf=((P0, D),), losses=1),
    _of("each gives the other up", Scene(rooms=2), deaf=((D, P0), (P0, D))),
    _of("paused with aux", Scene(aux=3, together=True), pauses=(P0,), losses=1),
    _of("the reader is paused, with aux", Scene(aux=3), pauses=(D,), losses=1),
    _of("paused past the ring", Scene(pages=2, paths=direct), pauses=(P0,), losses=1, aborts=((D, 7),)),
    _of(
        "paused with some parts past the ring", Scene(ring=1, groups=(1,), paths=mixed), pauses=(P0,), aborts=((D, 7),)
    ),
    _of("paused from the first call on", Scene(opened=False, asked=False), pauses=(P0,), losses=1),
    _of("given up from the first call on", Scene(opened=False, asked=False), deaf=((P0, D), (D, P0)), losses=1),
    _of("a number is used again by one given up", Scene(again=(7,)), again=(7,), deaf=((P0, D),), losses=1),
    _of("paused and aborted", Scene(granted=True), pauses=(P0,), aborts=((D, 7),), losses=1),
    # Somebody ends.
    _of("a writer is killed", Scene(writers=2, ring=1), kills=(P0,)),
    _of("a writer is killed while paused", Scene(rooms=2), kills=(P0,), pauses=(P0,)),
    _of("a writer starts anew", Scene(revived=(P0,)), kills=(P0,), restarts=(P0,), losses=1),
    _of("a writer of two rooms starts anew", Scene(rooms=2, granted=True, revived=(P0,)), kills=(P0,), restarts=(P0,)),
    _of("the reader is killed", Scene(writers=2, ring=1), kills=(D,)),
    _of("the reader starts anew", Scene(revived=(D,)), kills=(D,), restarts=(D,), losses=1),
    _of("the reader of two rooms starts anew", Scene(rooms=2, granted=True, revived=(D,)), kills=(D,), restarts=(D,)),
    _of("both start anew", Scene(revived=(P0,)), kills=(P0, D), restarts=(P0, D)),
    # Somebody is frozen, is replaced, and goes on: what it had posted is written, before or after.
    _of("a writer is frozen and replaced", Scene(revived=(P0,)), freezes=(P0,), restarts=(P0,), losses=1),
    _of("a writer of two rooms is frozen and replaced", Scene(rooms=2, granted=True), freezes=(P0,), restarts=(P0,)),
    _of("one of two writers is frozen and replaced", Scene(writers=2, ring=1), freezes=(P0,), restarts=(P0,)),
    _of("frozen past the ring", Scene(pages=2, paths=direct, revived=(P0,)), freezes=(P0,), restarts=(P0,), losses=1),
    _of(
        "frozen with some parts past the ring",
        Scene(ring=1, groups=(1,), paths=mixed, revived=(P0,)),
        freezes=(P0,),
        restarts=(P0,),
    ),
    _of(
        "frozen with aux and state",
        Scene(aux=3, states=(1,), together=True),
        freezes=(P0,),
        restarts=(P0,),
        aborts=((D, 7),),
    ),
    _of("frozen, and replaced twice", Scene(granted=True), freezes=(P0, P0), restarts=(P0, P0)),
    _of("given up, frozen and replaced", Scene(granted=True), deaf=((D, P0),), freezes=(P0,), restarts=(P0,)),
    _of("the reader is frozen and replaced", Scene(revived=(D,)), freezes=(D,), restarts=(D,), losses=1),
    _of("a frozen writer's regions are taken back", Scene(rooms=2), freezes=(P0,), restarts=(P0,), releases=1),
    _of("a writer leaves", Scene(writers=2, ring=1), leaves=(P0,)),
    _of("the reader leaves", Scene(rooms=2), leaves=(D,), losses=1),
    # What was lost is forgotten, and meets the others again.
    _of("a reader that is well is given up and forgotten", Scene(rooms=2), deaf=((P0, D),), forgets=((P0, D),)),
    _of("a reader is forgotten, with a loss", Scene(), deaf=((P0, D),), forgets=((P0, D),), losses=1),
    _of("a writer is forgotten and found again", Scene(rooms=2), forgets=((D, P0),), losses=1),
    _of(
        "a frozen writer is forgotten, and goes on",
        Scene(pages=2, paths=direct),
        forgets=((D, P0),),
        freezes=(P0,),
        restarts=(P0,),
    ),
    # A room of two decode ranks, through whose keeper alone its other ranks are connected.
    _of("two pairs", two_pairs(), losses=1),
    _of("two pairs from the first call on", two_pairs(opened=False, asked=False)),
    _of("two pairs, opened with losses", two_pairs(opened=False), losses=1),
    _of("two pairs, and a rank aborts before it knows the keeper", two_pairs(opened=False), aborts=((P1, 7),)),
    _of("two pairs through rings", Scene(writers=2, readers=2, ring=1), losses=1),
    _of("two pairs, and the keeper aborts", two_pairs(), aborts=((D, 7),)),
    _of("two pairs, and the other decode rank aborts", two_pairs(), aborts=((D1, 7),)),
    _of("two pairs, and the rank that the keeper waits for aborts", two_pairs(), aborts=((P1, 7),)),
    _of("two pairs, and the keeper recalls", two_pairs(recalled=((D, 7),)), recalls=((D, 7),)),
    _of("two pairs, and the other decode rank recalls", two_pairs(recalled=((D1, 7),)), recalls=((D1, 7),)),
    _of("two pairs, and the keeper is given up that is well", two_pairs(), deaf=((P1, D),)),
    _of("two pairs, and the keeper gives a rank up that is well", two_pairs(), deaf=((D, P1),)),
    _of("two pairs, and a failure elsewhere meets a silence", two_pairs(), deaf=((D, P0),), aborts=((D1, 7),)),
    _of("two pairs, and the keeper is paused", two_pairs(), pauses=(D,)),
    _of("two pairs, and the keeper is killed", two_pairs(), kills=(D,)),
    _of("two pairs, and the other decode rank is killed", two_pairs(), kills=(D1,)),
    _of("two pairs, and the rank that the keeper waits for is killed", two_pairs(), kills=(P1,)),
    _of("two pairs, and the keeper leaves", two_pairs(), leaves=(D,)),
)

LARGE = (
    _of("two pairs, two losses", two_pairs(), losses=2),
    _of("two pairs, overtaken and copied", two_pairs(), losses=1, copies=1, overtakings=1),
    _of("two pairs with final parts", two_pairs(aux=3, states=(1,)), losses=1, copies=1),
    _of("two pairs, two rooms", two_pairs(rooms=2)),
    _of("two pairs, two aborts", two_pairs(), aborts=((D1, 7), (P1, 7)), losses=1),
    _of("two pairs, both decode ranks recall", two_pairs(recalled=((D, 7), (D1, 7))), recalls=((D, 7), (D1, 7))),
    _of("two pairs, a keeper given up, losses", two_pairs(), deaf=((P1, D),), losses=1, aborts=((D1, 7),)),
    _of("two pairs, a reader given up, losses", two_pairs(), deaf=((P1, D1),), losses=1),
    _of("two pairs, the keeper starts anew", two_pairs(revived=(D,)), kills=(D,), restarts=(D,)),
    _of("two pairs, a writer is frozen and replaced", two_pairs(), freezes=(P1,), restarts=(P1,)),
    _of("two pairs, a number is used again", two_pairs(again=(7,)), again=(7,), losses=1),
    _of("two pairs, one opened late", two_pairs(opened=False, asked=False), lapses=1, losses=1),
    _of("2 rooms, scatters fail", Scene(rooms=2), failures=2, losses=1),
    _of("2 writers, one paused, a scatter fails", Scene(writers=2, ring=1), failures=1, pauses=(P0,)),
    _of("2 rooms, regions are taken back from a paused writer", Scene(rooms=2, granted=True), releases=2, pauses=(P0,)),
    _of("2 rooms with a rest, 1 writer, paused", Scene(rooms=2, ring=3), pauses=(P0,), losses=1, early=1),
    _of("2 rooms, 2 writers", Scene(rooms=2, writers=2, ring=3), losses=1, copies=1, overtakings=1),
    _of("3 rooms, 2 writers", Scene(rooms=3, writers=2, ring=4, granted=True), losses=1),
    _of("3 rooms, 1 writer", Scene(rooms=3, ring=4), losses=1, early=1, aborts=((D, 7),)),
    _of("2 rooms, 2 writers, aborts", Scene(rooms=2, writers=2, ring=3), losses=1, aborts=((D, 7), (P0, 8))),
    _of("2 rooms, 2 writers, one paused", Scene(rooms=2, writers=2, ring=3), losses=1, pauses=(P0,)),
    _of("2 rooms, 2 writers, reader paused", Scene(rooms=2, writers=2, ring=3), losses=1, pauses=(D,)),
    _of(
        "2 rooms, 2 writers, one paused, the other given up",
        Scene(rooms=2, writers=2, ring=4, granted=True),
        pauses=(P0,),
        deaf=((D, P1),),
    ),
    _of(
        "2 rooms, 2 writers, a writer starts anew",
        Scene(rooms=2, writers=2, ring=3, revived=(P0,)),
        kills=(P0,),
        restarts=(P0,),
        pauses=(P0,),
    ),
    _of(
        "2 rooms, 2 writers, one frozen and replaced",
        Scene(rooms=2, writers=2, ring=3, revived=(P0,)),
        losses=1,
        freezes=(P0,),
        restarts=(P0,),
    ),
    _of(
        "2 rooms, 2 writers, the reader starts anew",
        Scene(rooms=2, writers=2, ring=3, revived=(D,)),
        losses=1,
        kills=(D,),
        restarts=(D,),
    ),
)
