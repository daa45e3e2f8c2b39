"""Reads that are shared, in turn, and end with those who wait for them."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from gateway.reads import Reads


@dataclass(frozen=True)
class Answer:
    seq: int


class Store:
    """Counts what is under way; each read waits until it is answered."""

    def __init__(self) -> None:
        self.reads: list[asyncio.Future[Answer]] = []
        self.begun = 0

    def read(self) -> Callable[[], Awaitable[Answer]]:
        async def reading() -> Answer:
            answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            self.begun += 1
            self.reads.append(answer)
            try:
                return await answer
            finally:
                self.reads.remove(answer)

        return reading


async def turn() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_only_so_many_are_under_way_and_the_others_follow_in_order() -> None:
    store, reads = Store(), Reads(2)
    done: list[int] = []

    async def ask(number: int) -> None:
        await reads.share((number,), 0, store.read())
        done.append(number)

    asked = asyncio.gather(*map(ask, range(5)))
    while len(done) < 5:
        await turn()
        assert len(store.reads) <= 2
        store.reads[0].set_result(Answer(1))
        await turn()
    await asked
    assert done == [0, 1, 2, 3, 4]


async def test_what_nobody_waits_for_ends_and_is_not_even_begun() -> None:
    store, reads = Store(), Reads(1)
    asked = [asyncio.ensure_future(reads.share((n // 2,), 0, store.read())) for n in range(6)]
    await turn()
    for asking in (asked[0], *asked[2:]):
        asking.cancel()
    await turn()
    assert len(store.reads) == store.begun == 1  # the first has a reader left
    asked[1].cancel()
    await turn()
    assert store.reads == []
    assert store.begun == 1
    # And whoever asks anew is not given what was given up.
    again = asyncio.ensure_future(reads.share((0,), 0, store.read()))
    await turn()
    store.reads[0].set_result(Answer(7))
    assert await again == Answer(7)


async def test_who_asks_in_the_moment_in_which_the_last_reader_leaves_gets_an_answer() -> None:
    store, reads = Store(), Reads(1)
    leaving = asyncio.ensure_future(reads.share((0,), 0, store.read()))
    await turn()
    leaving.cancel()
    coming = asyncio.ensure_future(reads.share((0,), 0, store.read()))
    await turn()
    store.reads[0].set_result(Answer(7))
    assert await coming == Answer(7)


async def test_a_failure_reaches_all_and_is_not_kept() -> None:
    store, reads = Store(), Reads(1)
    asked = [asyncio.ensure_future(reads.share((0,), 0, store.read())) for _ in range(3)]
    await turn()
    store.reads[0].set_exception(ConnectionError("away"))
    for asking in asked:
        with pytest.raises(ConnectionError):
            await asking
    again = asyncio.ensure_future(reads.share((0,), 0, store.read()))
    await turn()
    store.reads[0].set_result(Answer(7))
    assert await again == Answer(7)
