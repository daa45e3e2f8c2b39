"""Every form of the Centrifuge JSON protocol, there and back, and what is none of them."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import commands as c
from gateway.protocols.base import ProtocolViolation
from gateway.protocols.centrifuge_json import CentrifugeJSON
from outbox.message import Message
from tests.property.world import texts

PROTOCOL = CentrifugeJSON()


def message(payload: bytes, *, binary: bool = False, tags: dict[str, str] | None = None) -> Message:
    return Message(0, 1, "acme", "a:1", 7, "b", "99", tags, payload, binary, 0)


@pytest.mark.parametrize(
    ("frame", "command"),
    [
        ('{"id":1,"connect":{}}', c.Command(1, c.Connect())),
        (
            '{"id":1,"connect":{"token":"t","data":{"x":1},"name":"js","version":"5","subs":'
            '{"a":{"recover":true}},"headers":{}}}',
            c.Command(1, c.Connect("t", "js", "5")),
        ),
        ('{"id":2,"subscribe":{"channel":"a","flag":1}}', c.Command(2, c.Subscribe("a"))),
        (
            '{"subscribe":{"channel":"a","recover":true,"offset":5,"epoch":"e","token":"",'
            '"positioned":true,"recoverable":true,"join_leave":false,"delta":"fossil"},"id":3}',
            c.Command(3, c.Subscribe("a", True, 5, "e")),
        ),
        ('{"id":4,"unsubscribe":{"channel":"a"}}', c.Command(4, c.Unsubscribe("a"))),
        ('{"id":5,"history":{"channel":"a"}}', c.Command(5, c.History("a"))),
        (
            '{"id":6,"history":{"channel":"a","limit":-1,"reverse":true,"since":'
            '{"offset":9007199254740993,"epoch":"e"}}}',
            c.Command(6, c.History("a", -1, c.Since(9007199254740993, "e"), True)),
        ),
        ('{"id":7,"refresh":{"token":"t"}}', c.Command(7, c.Refresh("t"))),
        ('{"id":8,"presence":{"channel":"a"}}', c.Command(8, c.Unsupported("presence"))),
        ('{"id":8,"presence_stats":{}}', c.Command(8, c.Unsupported("presence_stats"))),
        ('{"id":8,"rpc":{"method":"m"}}', c.Command(8, c.Unsupported("rpc"))),
        ('{"id":8,"sub_refresh":{}}', c.Command(8, c.Unsupported("sub_refresh"))),
        ('{"send":{"data":1}}', c.Command(0, c.Ignored())),
        ("{}", c.Command(0, c.Pong())),
        (
            '{"id":4294967295,"unsubscribe":{"channel":"é"}}',
            c.Command(2**32 - 1, c.Unsubscribe("é")),
        ),
    ],
)
def test_a_command(frame: str, command: c.Command) -> None:
    assert PROTOCOL.decode(frame) == [command]


def test_published_data_is_passed_as_it_stands() -> None:
    (command,) = PROTOCOL.decode('{"id":1,"publish":{"channel":"a","data": {"b" : 1.0e2,"b":[]} }}')
    assert isinstance(command.body, c.Publish)
    assert bytes(command.body.data) == b'{"b" : 1.0e2,"b":[]}'


def test_several_commands_in_a_frame_keep_their_order() -> None:
    frame = '{"id":1,"connect":{}}\n\n{}\r\n{"id":2,"unsubscribe":{"channel":"a"}}\n'
    assert [command.id for command in PROTOCOL.decode(frame)] == [1, 0, 2]


@pytest.mark.parametrize(
    "frame",
    [
        "",
        "\n \n",
        "nonsense",
        "null",
        "1",
        "[]",
        '"connect"',
        "{} {}",
        '{"id":1}',
        '{"id":1,"unknown":{}}',
        '{"id":1,"connect":null}',
        '{"id":1,"connect":[]}',
        '{"connect":{}}',
        '{"id":0,"connect":{}}',
        '{"id":-1,"connect":{}}',
        '{"id":4294967296,"connect":{}}',
        '{"id":1e400,"connect":{}}',
        '{"id":1.5,"connect":{}}',
        '{"id":"1","connect":{}}',
        '{"id":true,"connect":{}}',
        '{"id":1,"connect":{},"rpc":{}}',
        '{"id":1,"connect":{"token":7}}',
        '{"id":1,"subscribe":{}}',
        '{"id":1,"subscribe":{"channel":"a","offset":"5"}}',
        '{"id":1,"subscribe":{"channel":"a","offset":NaN}}',
        '{"id":1,"subscribe":{"channel":"\\ud800"}}',
        '{"id":1,"publish":{"channel":"a","data":"}}',
        '{"id":0,"publish":{"channel":"a","data":NaN}}',
        '{"a":' * 10_000,
        "\ufeff{}",
        '{"id":1,"connect":{"token":"\ud800"}}',
    ],
)
def test_what_is_no_command(frame: str) -> None:
    with pytest.raises(ProtocolViolation) as caught:
        PROTOCOL.decode(frame)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "publish",
    [
        '{"channel":"a"}',
        '{"channel":"a","data":NaN}',
        '{"channel":"a","data":"half an emoji: \\ud83d"}',
        '{"channel":"a","data":' + "[" * 30_000 + "]" * 30_000 + "}",
    ],
)
def test_a_message_that_no_parser_takes_is_refused_by_itself(publish: str) -> None:
    refused, pong = PROTOCOL.decode(f'{{"id":7,"publish":{publish}}}\n{{}}')
    assert refused.id == 7
    assert isinstance(refused.body, c.Malformed)
    assert isinstance(pong.body, c.Pong)


@given(st.text(alphabet=st.characters(codec="utf-8")) | st.text('{}[]":,id1connetsubrh\n'))
def test_any_text_is_commands_or_a_violation(frame: str) -> None:
    with contextlib.suppress(ProtocolViolation):
        assert PROTOCOL.decode(frame)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (
            c.Connected("id", "v", 25, None),
            {"connect": {"client": "id", "version": "v", "ping": 25, "pong": True}},
        ),
        (
            c.Connected("id", "v", 25, 60),
            {
                "connect": {
                    "client": "id",
                    "version": "v",
                    "ping": 25,
                    "pong": True,
                    "expires": True,
                    "ttl": 60,
                }
            },
        ),
        (
            c.Subscribed("a", "e", 5, False, False),
            {"subscribe": {"recoverable": True, "positioned": True, "epoch": "e", "offset": 5}},
        ),
        (
            c.Subscribed("a", "e", 5, True, True, b'{"offset":6},{"offset":7}'),
            {
                "subscribe": {
                    "recoverable": True,
                    "positioned": True,
                    "epoch": "e",
                    "offset": 5,
                    "was_recovering": True,
                    "recovered": True,
                    "publications": [{"offset": 6}, {"offset": 7}],
                }
            },
        ),
        (c.Unsubscribed(), {"unsubscribe": {}}),
        (c.Published(), {"publish": {}}),
        (
            c.HistoryRead("e", 9, b"{}"),
            {"history": {"epoch": "e", "offset": 9, "publications": [{}]}},
        ),
        (
            c.Refreshed("id", "v", 30),
            {"refresh": {"client": "id", "version": "v", "expires": True, "ttl": 30}},
        ),
        (c.Failed(103, "no", False), {"error": {"code": 103, "message": "no"}}),
        (
            c.Failed(100, 'a "bad"\nday', True),
            {"error": {"code": 100, "message": 'a "bad"\nday', "temporary": True}},
        ),
    ],
)
def test_a_reply(reply: c.Reply, expected: dict[str, object]) -> None:
    encoded = PROTOCOL.reply(3, reply)
    assert b"\n" not in encoded
    assert json.loads(encoded) == {"id": 3, **expected}


def test_pushes() -> None:
    assert PROTOCOL.push(c.Ping()) == b"{}"
    assert json.loads(PROTOCOL.push(c.Evicted("a", 2500, "again"))) == {
        "push": {"channel": "a", "unsubscribe": {"code": 2500, "reason": "again"}}
    }


@pytest.mark.parametrize(
    ("sent", "data"),
    [
        (message(b'{"a": [1, "\\ud800"]}'), {"a": [1, "\ud800"]}),
        (message(b'""'), ""),
        (message(b"\x00\n\xff", binary=True), "AAr/"),
        (message(b"", binary=True), ""),
    ],
)
def test_a_publication(sent: Message, data: object) -> None:
    encoded = PROTOCOL.deliver('a"\n:1', PROTOCOL.publication(sent))
    assert b"\n" not in encoded
    assert json.loads(encoded) == {
        "push": {"channel": 'a"\n:1', "pub": {"data": data, "offset": 7, "tags": {"txid": "99"}}}
    }


def test_tags_travel_and_the_transaction_is_among_them() -> None:
    encoded = PROTOCOL.publication(message(b"1", tags={"a": 'x"\n', "b": ""}))
    assert b"\n" not in encoded
    assert json.loads(encoded)["tags"] == {"a": 'x"\n', "b": "", "txid": "99"}


@given(st.lists(st.binary(max_size=70_000).map(lambda b: json.dumps(b.hex()).encode()), min_size=1))
def test_a_frame_holds_its_parts_one_on_each_line(parts: list[bytes]) -> None:
    (text,) = texts(bytearray(PROTOCOL.frame(parts)))
    assert text.split("\n") == [part.decode() for part in parts]
