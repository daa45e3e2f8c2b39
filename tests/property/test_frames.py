"""The parser of a client's frames beside the one of the websockets library, on any bytes."""

from itertools import pairwise
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from websockets.exceptions import PayloadTooBig, ProtocolError
from websockets.frames import Close, Frame
from websockets.frames import Opcode as Op
from websockets.streams import StreamReader

from gateway.frames import FrameError, Opcode, Parser, close_code, close_frame, pong_frame

MAX_BYTES = 300


def reference(data: bytes) -> tuple[list[tuple[int, bytes]], int | None]:
    """What the library makes of it: messages and the code of the first violation."""
    reader = StreamReader()
    reader.feed_data(data)
    received: list[tuple[int, bytes]] = []
    begun: tuple[int, bytes] | None = None
    while True:
        left = None if begun is None else MAX_BYTES - len(begun[1])
        reading = Frame.parse(
            reader.read_exact, mask=True, max_size=MAX_BYTES if left is None else left
        )
        try:
            next(reading)
            return received, None  # it waits for more
        except StopIteration as done:
            frame: Any = done.value
        except PayloadTooBig:
            return received, 1009
        except ProtocolError:
            return received, 1002
        payload = bytes(frame.data)
        if frame.opcode in (Op.CLOSE, Op.PING, Op.PONG):
            received.append((frame.opcode, payload))
        elif (frame.opcode is Op.CONT) == (begun is None):
            return received, 1002
        else:
            kind, before = begun or (frame.opcode, b"")
            begun = (kind, before + payload)
            if frame.fin:
                received.append(begun)
                begun = None


def parsed(chunks: list[bytes]) -> tuple[list[tuple[int, bytes]], int | None]:
    parser = Parser(MAX_BYTES)
    received: list[tuple[int, bytes]] = []
    for chunk in chunks:
        received += [(int(opcode), payload) for opcode, payload in parser.feed(chunk)]
    return received, None if parser.error is None else parser.error.code


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """Mostly right, so that something comes of it."""
    opcode = draw(st.sampled_from((0, 0, 1, 1, 2, 8, 9, 10)))
    most = 120 if opcode >= 8 else draw(st.sampled_from((4, 140, 301)))
    payload = draw(st.binary(max_size=most))
    fin = opcode >= 8 or draw(st.booleans())
    return Frame(Op(opcode), payload, fin).serialize(mask=True)


@st.composite
def inputs(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    data = bytearray(b"".join(draw(st.lists(frames(), max_size=8))))
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 2)))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    data += draw(st.binary(max_size=20))
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    bounds = [0, *cuts, len(data)]
    return bytes(data), [bytes(data[a:b]) for a, b in pairwise(bounds)]


@given(inputs())
@example((b"\x81\xfe\x00\x05" + bytes(9), [b"\x81\xfe\x00\x05" + bytes(9)]))
def test_it_reads_what_the_library_reads(given_: tuple[bytes, list[bytes]]) -> None:
    data, chunks = given_
    expected, code = reference(data)
    received, found = parsed(chunks)
    assert received == expected
    # The library reads a whole header before it judges; the first bad byte is enough here.
    assert found == code or (code is None and found is not None and is_premature(data, found))


def is_premature(data: bytes, code: int) -> bool:
    """Whether the library agrees once it has the rest of the header and the payload."""
    return reference(data + bytes(8 + 65_536 + 14))[1] == code


@given(st.binary(max_size=40))
def test_close_payloads(payload: bytes) -> None:
    try:
        expected: int | None = Close.parse(payload).code
        if expected == 1005:
            expected = None
    except ProtocolError:
        expected = -1002
    except UnicodeDecodeError:
        expected = -1007
    try:
        found = close_code(payload)
    except FrameError as error:
        found = -error.code
    assert found == expected


@given(
    st.one_of(st.none(), st.integers(1000, 1003), st.integers(3000, 4999)), st.text(max_size=200)
)
def test_a_client_reads_the_close_frame(code: int | None, reason: str) -> None:
    frame = read(close_frame(code, reason))
    assert frame.opcode is Op.CLOSE
    close = Close.parse(frame.data)
    assert close.code == (1005 if code is None else code)
    assert len(frame.data) <= 125
    assert code is None or reason.startswith(close.reason)


@given(st.binary(max_size=125))
def test_a_client_reads_the_pong(payload: bytes) -> None:
    frame = read(pong_frame(payload))
    assert (frame.opcode, bytes(frame.data)) == (Op.PONG, payload)


def read(data: bytes) -> Any:
    reader = StreamReader()
    reader.feed_data(data)
    reading = Frame.parse(reader.read_exact, mask=False, max_size=None)
    try:
        next(reading)
    except StopIteration as done:
        return done.value
    raise AssertionError("not a whole frame")


def test_a_long_frame_in_small_pieces_and_an_idle_parser_that_keeps_nothing() -> None:
    data = Frame(Op.TEXT, b"x" * MAX_BYTES, True).serialize(mask=True)
    parser = Parser(MAX_BYTES)
    received = [r for i in range(len(data)) for r in parser.feed(data[i : i + 1])]
    assert received == [(Opcode.TEXT, b"x" * MAX_BYTES)]
    assert parser._rest is None
    assert parser._fragments is None
