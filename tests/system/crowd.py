"""Clients of all kinds that come and go, and what each of them was told."""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from tests.oracle import Ended, Event, Interrupted, Key, Received, Record, Subscribed
from tests.sdk.client import Diary
from tests.sdk.door import Door
from tests.system.progress import Progress
from tests.system.writers import content

STAY = (300, 2_500)
"""For how many commits a client stays."""
AWAY_BRIEFLY = (1, 60)
AWAY_LONG = (100, 2_000)
FROM_THE_START = (0, "")
"""The position before every message, whatever the epoch."""


class Watcher(Protocol):
    """The part of a client that watching needs."""

    diary: Diary

    async def connect(self) -> None: ...
    async def disconnect(self) -> None: ...
    async def subscribe(self, channel: str, since: tuple[int, str] | None = None) -> None: ...
    async def unsubscribe(self, channel: str) -> None: ...
    async def close(self) -> None: ...


class Member:
    """One client, behind a door of its own, so that it alone comes back on the other gateway."""

    def __init__(
        self, name: str, tenant: str, rooms: Sequence[str], client: Watcher, door: Door, seed: int
    ) -> None:
        self.name = name
        self.tenant = tenant
        self.rooms = list(rooms)
        self.diary = client.diary
        self.absences = 0
        self._client = client
        self._door = door
        self._random = random.Random(seed)

    @property
    def moves(self) -> int:
        """How often it came back on the other gateway."""
        return sum(before != after for before, after in pairwise(self._door.visits))

    async def arrive(self, *, late: bool = False) -> None:
        """Connect and subscribe to all rooms; ``late``: from their first message on."""
        await self._client.connect()
        for room in self.rooms:
            await self._client.subscribe(room, FROM_THE_START if late else None)

    async def settled(self) -> None:
        """Wait until every room is subscribed to."""
        for room in self.rooms:
            await self.diary.count(room, "subscribed")

    async def live(self, progress: Progress) -> None:
        """Come and go until the writers have finished; present at the end."""
        pick = self._random
        while True:
            await progress.reach(progress.count + pick.randint(*STAY))
            if progress.finished:
                return
            away = pick.randint(*(AWAY_BRIEFLY if pick.random() < 0.5 else AWAY_LONG))
            back_at = progress.count + away
            self.absences += 1
            match pick.randrange(4):
                case 0:  # Its link breaks: it comes back by itself at once.
                    self._door.cut()
                case 1:  # It leaves a room.
                    room = pick.choice(self.rooms)
                    await self._client.unsubscribe(room)
                    await progress.reach(back_at)
                    await self._client.subscribe(room)
                case _:  # It goes offline.
                    await self._client.disconnect()
                    await progress.reach(back_at)
                    await self._client.connect()

    async def read_up_to(self, heads: dict[Key, int], timeout_s: float) -> None:
        """Wait until it has been given the last message of each room."""
        await self.diary.wait(
            lambda: all(
                self.diary.last.get(room, 0) >= heads.get((self.tenant, room), 0)
                for room in self.rooms
            ),
            timeout_s,
        )

    async def leave(self) -> None:
        await self._client.close()

    def records(self) -> list[Record]:
        """What it was told of each room, also of those it never asked for."""
        channels = dict.fromkeys(self.rooms)
        channels |= dict.fromkeys(said.channel for said in self.diary.said if said.channel)
        return [
            Record(self.name, (self.tenant, channel), self._events(channel)) for channel in channels
        ]

    def _events(self, channel: str) -> list[Event]:
        events: list[Event] = []
        for said in self.diary.said:
            if said.channel not in (channel, ""):
                continue
            match said.event:
                case "subscribed":
                    at = said.position
                    events.append(
                        Subscribed(at["epoch"], at["offset"], said.was_recovering, said.recovered)
                    )
                case "publication":
                    events.append(
                        Received(said.offset, content(said.tags.get("txid", ""), said.data))
                    )
                case "subscribing":
                    events.append(Interrupted(said.code))
                case "unsubscribed" | "disconnected" if said.code:
                    events.append(Ended(said.code, said.reason))
                case "unsubscribed":
                    events.append(Interrupted(0))
        return events
