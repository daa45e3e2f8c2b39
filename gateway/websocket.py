"""A client's WebSocket after its handshake: a small protocol object on the transport.

No task, no queue and no timer belongs to a connection at rest. The hub writes finished frames
straight to the transport; what the client sends is taken apart here and handed to a ``Listener``
synchronously. Every way to an end has a time limit: a peer that reads nothing or answers nothing
is cut.
"""

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import Protocol

import structlog

from gateway.frames import FrameError, Opcode, Parser, close_code, close_frame, pong_frame

CLOSE_TIMEOUT_S = 5.0
"""How long a peer has to answer a close frame before the transport is cut."""

log = structlog.get_logger(__name__)


class Listener(Protocol):
    """What is told, synchronously, of what happens to the socket."""

    def received(self, text: str) -> None:
        """A text message has come."""
        ...

    def refused(self) -> None:
        """A binary message has come, which belongs to protocols that were not negotiated."""
        ...

    def filled(self) -> None:
        """The write buffer passed its ceiling."""
        ...

    def drained(self) -> None:
        """The write buffer is nearly empty again."""
        ...

    def closed(self) -> None:
        """Nothing can be written any more: a close frame was sent or has come. Told once,
        before ``lost`` at the latest."""
        ...

    def lost(self) -> None:
        """The transport is gone. The last call, made once."""
        ...


class WebSocket(asyncio.Protocol):
    """Implements ``gateway.connection.Socket``."""

    __slots__ = (
        "_cut_timer",
        "_discarding",
        "_early",
        "_ending",
        "_held",
        "_inbox",
        "_listener",
        "_merging",
        "_parser",
        "_siblings",
        "_to_kernel",
        "_waiter",
        "full",
        "send",
        "transport",
    )

    def __init__(
        self,
        transport: asyncio.Transport,
        siblings: "set[WebSocket]",
        message_max_bytes: int,
        buffer_bytes: int,
        early: bytes = b"",
    ) -> None:
        """Takes over a transport that is open and whose handshake is complete.

        ``siblings`` is where its server looks for connections to shut down at its end.
        ``buffer_bytes`` is the ceiling of the write buffer, ``early`` what has been read already.
        """
        self.transport = transport
        self.full = False
        # The descriptor is open until `connection_lost` was told, and then nothing is sent.
        self._to_kernel = partial(os.write, transport.get_extra_info("socket").fileno())
        # The answer to the handshake may wait in the transport still.
        self.send: Callable[[bytes], int] = self._in_order
        """See ``gateway.room.Sink``. Straight to the kernel while nothing waits before it, by no
        code of ours: the transport would take each frame through a round of the event loop."""
        self._siblings = siblings
        self._parser = Parser(message_max_bytes)
        self._listener: Listener | None = None
        self._inbox: list[tuple[Opcode, bytes]] | None = None
        """What came while held."""
        self._early = early
        self._held = False
        self._merging = False
        self._ending = False
        """Whether nothing may be written any more: a close frame was sent or has come."""
        self._discarding = False
        """Whether what comes is of no interest any more."""
        self._waiter: asyncio.Future[None] | None = None
        self._cut_timer: asyncio.TimerHandle | None = None
        transport.set_write_buffer_limits(buffer_bytes)
        transport.set_protocol(self)
        siblings.add(self)

    def listen(self, listener: Listener) -> None:
        """Reports to ``listener`` from now on, at first what came early."""
        self._listener = listener
        early, self._early = self._early, b""
        if early:
            self.data_received(early)

    # To the peer

    def spill(self, frame: bytes, sent: int) -> None:
        """See ``gateway.room.Sink``."""
        self.write(frame[sent:])

    def write(self, frame: bytes) -> None:
        """Writes a finished frame without waiting; drops it once the socket is closed."""
        if not self._ending:
            self.send = self._in_order
            # An error that the kernel gave for a frame the transport meets itself, and reports.
            self.transport.write(frame)

    def merge(self, merging: bool) -> None:
        """Whether frames of one round of the event loop go to the kernel in one piece: right for a
        client that is in several rooms."""
        self._merging = merging
        if merging and not self._ending:
            self.send = self._in_order

    def _in_order(self, frame: bytes) -> int:
        """Sends while something may wait in the transport's buffer, which comes first."""
        if self._merging or self.transport.get_write_buffer_size():
            self.transport.write(frame)
            return len(frame)
        self.send = self._to_kernel
        return self.send(frame)

    def buffered_bytes(self) -> int:
        """What is not yet with the kernel."""
        return self.transport.get_write_buffer_size()

    async def room_to_write(self) -> None:
        """Waits until the write buffer is below its ceiling, or the socket is closed."""
        while self.full and not self._ending:
            if self._waiter is None:
                self._waiter = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._waiter)

    def close(self, code: int, reason: str) -> None:
        """Sends a close frame; the transport is cut if the peer does not answer in time."""
        if not self._ending:
            self.write(close_frame(code, reason))
            self._end()

    def shutdown(self) -> None:
        """The server ends: called by it for each of ``siblings`` that is left."""
        self.close(1012, "server ends")
        self.transport.close()

    def _end(self) -> None:
        # `transport.close` waits for the buffer, and a peer that reads nothing would keep its
        # socket for ever.
        if self._cut_timer is None:
            loop = asyncio.get_running_loop()
            self._cut_timer = loop.call_later(CLOSE_TIMEOUT_S, self.transport.abort)
        if self._ending:
            return
        self._ending = True
        self.send = len  # nothing is sent, and nothing is missed
        self._inbox = None
        if self._held:
            self.release()
        self._woken()
        if self._listener is not None:
            self._listener.closed()

    def _woken(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None

    # From the peer

    def hold(self) -> None:
        """Hands nothing over and reads nothing until ``release``."""
        if not self._held and not self._ending:
            self._held = True
            self.transport.pause_reading()

    def release(self) -> None:
        """Ends ``hold``: what came in the meantime is handed over soon."""
        if self._held:
            self._held = False
            if self._inbox:
                asyncio.get_running_loop().call_soon(self._hand_over, [])
            if not self.transport.is_closing():
                self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            return
        received = self._parser.feed(data)
        if received:
            self._hand_over(received)
        if self._parser.error is not None:
            self._fail(self._parser.error)

    def _hand_over(self, received: list[tuple[Opcode, bytes]]) -> None:
        if self._inbox:
            received = self._inbox + received
            self._inbox = None
        for index, (opcode, payload) in enumerate(received):
            if self._held:
                self._inbox = received[index:]
                return
            try:
                self._handle(opcode, payload)
            except FrameError as error:
                self._fail(error)
            if self._discarding:
                return

    def _handle(self, opcode: Opcode, payload: bytes) -> None:
        if opcode is Opcode.CLOSE:
            self._closed_by_peer(payload)
        elif self._ending:
            pass  # only the answer to the close frame is awaited
        elif opcode is Opcode.PING:
            # A peer that pings and does not read gets no pongs: they would have no bound.
            if not self.full:
                self.write(pong_frame(payload))
        elif self._listener is None or opcode is Opcode.PONG:
            pass
        elif opcode is Opcode.TEXT:
            try:
                text = payload.decode()
            except UnicodeDecodeError:
                raise FrameError(1007, "invalid UTF-8") from None
            self._listener.received(text)
        else:
            self._listener.refused()

    def _closed_by_peer(self, payload: bytes) -> None:
        code = close_code(payload)
        self.write(close_frame(code))
        self._discarding = True
        self._end()
        self.transport.close()

    def _fail(self, error: FrameError) -> None:
        self._discarding = True
        if self._ending:
            self.transport.abort()
            return
        log.info("client broke the WebSocket protocol", error=error.reason)
        self.close(error.code, error.reason)
        # Closed with data unread, TCP would drop the close frame: what comes is discarded.
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()

    def eof_received(self) -> None:
        # The transport closes itself once its buffer is empty.
        self._discarding = True
        self._end()

    # From the transport

    def pause_writing(self) -> None:
        self.full = True
        if self._listener is not None:
            self._listener.filled()

    def resume_writing(self) -> None:
        self.full = False
        self._woken()
        if self._listener is not None:
            self._listener.drained()

    def connection_lost(self, exc: Exception | None) -> None:
        self._discarding = True
        self._end()
        if self._cut_timer is not None:
            self._cut_timer.cancel()
            self._cut_timer = None
        self._siblings.discard(self)
        if self._listener is not None:
            self._listener.lost()
            self._listener = None
