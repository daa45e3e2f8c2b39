"""Frames as the websockets library reads them."""

import pytest
from websockets.frames import Frame, Opcode
from websockets.streams import StreamReader

from gateway.frames import text_frame


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 65_535, 65_536, 70_000])
def test_a_client_reads_the_frame(size: int) -> None:
    reader = StreamReader()
    reader.feed_data(text_frame(b"x" * size) + text_frame(b"next"))
    for expected in (b"x" * size, b"next"):
        parsing = Frame.parse(reader.read_exact, mask=False, max_size=None)
        with pytest.raises(StopIteration) as done:
            next(parsing)
        frame = done.value.value
        assert (frame.opcode, frame.fin, bytes(frame.data)) == (Opcode.TEXT, True, expected)
