"""The floor: ``floor.c``, a loop over ``send()``."""

from typing import Self

from benchmarks.native import compiled
from benchmarks.program import Program


class Floor:
    """One thread that sends the same bytes to all its sockets."""

    def __init__(self, cores: frozenset[int]) -> None:
        self._program = Program("floor", [str(compiled("floor"))], cores)
        self.port: int = self._program.answer()["port"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._program.stop()

    @property
    def pid(self) -> int:
        return self._program.pid

    def accept(self, count: int) -> None:
        """Take so many connections, which are being opened meanwhile; see ``accepted``."""
        self._program.tell(f"accept {count}\n".encode())

    def accepted(self) -> None:
        self._program.answer()

    def send(self, frames: bytes) -> None:
        """Send these bytes to every socket."""
        self._program.tell(b"send %d\n%b" % (len(frames), frames))
