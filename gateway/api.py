"""The HTTP API for servers: JSON in, ``{"result": …}`` or ``{"error": {"code", "message"}}`` out.

Source of its form: Centrifugo's server API, whose client libraries it serves.
"""

import re

import msgspec
from msgspec import Raw, Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from gateway import codes
from gateway.codes import ErrorCode
from gateway.writer import Rejected
from outbox.errors import OutboxError
from outbox.names import DEFAULT_TENANT, PAYLOAD_MAX_BYTES, TAGS_MAX_BYTES, tenant_error

BODY_MAX_BYTES = PAYLOAD_MAX_BYTES + TAGS_MAX_BYTES + 4_096


class PublishRequest(Struct, frozen=True):
    """Body of ``POST /api/publish``."""

    channel: str
    data: Raw
    tenant: str = DEFAULT_TENANT
    tags: dict[str, str] | None = None


_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>u[dD][89a-fA-F]..)|.)", re.DOTALL
)
"""An escape of a JSON string: a surrogate pair, half of one, or any other."""
_JSON_TYPES = {
    "str": "a string",
    "int": "a number",
    "float": "a number",
    "bool": "true or false",
    "object": "an object",
    "array": "an array",
    "null": "null",
}
_TYPE = re.compile(rf"`({'|'.join(_JSON_TYPES)})`")


class BadBody(Exception):
    """The body cannot be used; the text says why."""


_decode = msgspec.json.Decoder(PublishRequest).decode


async def publish(request: Request) -> Response:
    """Publish one message; the answer comes after the commit."""
    worker = request.app.state.worker
    if not worker.api_key_matches(request.headers.get("x-api-key", "")):
        return _error(codes.UNAUTHORIZED, 401, "X-API-Key is missing or wrong")
    if not worker.started:
        return _error(codes.INTERNAL, 503, "the gateway is not ready yet, try again")
    try:
        received = await _body(request)
        body = _decode(received)
        if problem := tenant_error(body.tenant):
            raise BadBody(problem)
        txid = await worker.writer.insert(body.tenant, body.channel, bytes(body.data), body.tags)
    except (BadBody, Rejected) as error:
        return _error(codes.BAD_REQUEST, 400, str(error))
    except msgspec.DecodeError as error:
        why = defect(received) or _TYPE.sub(lambda match: _JSON_TYPES[match[1]], str(error))
        return _error(codes.BAD_REQUEST, 400, f"the body is not a publish request: {why}")
    except RecursionError:
        return _error(codes.BAD_REQUEST, 400, "the body is nested too deeply")
    except OutboxError:
        return _error(codes.INTERNAL, 503, "the database cannot be reached, try again")
    return JSONResponse({"result": {"txid": txid}})


def defect(body: bytes) -> str | None:
    """What is wrong with the text of a body, where the decoder's words would mislead."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"it is not valid UTF-8 ({error.reason} at byte {error.start})"
    for match in _ESCAPE.finditer(body):
        if match["half"]:
            return f"it has half of a surrogate pair at byte {match.start()}"
    return None


async def _body(request: Request) -> bytes:
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > BODY_MAX_BYTES:
                raise BadBody(f"the body has more than {BODY_MAX_BYTES} bytes")
            chunks.append(chunk)
    except ClientDisconnect:
        raise BadBody("the client went away") from None
    return b"".join(chunks)


def _error(code: ErrorCode, status: int, detail: str) -> Response:
    message = f"{code.message}: {detail}"
    return JSONResponse({"error": {"code": code.code, "message": message}}, status)
