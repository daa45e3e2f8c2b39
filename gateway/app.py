"""The Starlette application: the WebSocket endpoint, the HTTP API, the probes."""

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from gateway import codes
from gateway.api import publish
from gateway.origins import origin_allowed
from gateway.transport import take_over
from gateway.worker import Worker


def application(worker: Worker) -> Starlette:
    """The routes of a worker; its life is the server's business."""
    app = Starlette(
        routes=[
            WebSocketRoute("/connection/websocket", websocket),
            Route("/api/publish", publish, methods=["POST"]),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
        ]
    )
    app.state.worker = worker
    return app


async def websocket(websocket: WebSocket) -> None:
    """One client: only its handshake, then the socket lives without this task."""
    worker: Worker = websocket.app.state.worker
    headers = websocket.headers
    if worker.draining:
        await websocket.send_denial_response(
            PlainTextResponse("this gateway is shutting down, try another\n", 503)
        )
        return
    if not worker.started:
        await websocket.send_denial_response(
            PlainTextResponse("this gateway is not ready yet, try again or try another\n", 503)
        )
        return
    if not origin_allowed(
        headers.get("origin"), headers.get("host", ""), worker.settings.allowed_origins
    ):
        await websocket.send_denial_response(
            PlainTextResponse("this origin is not in TIDEGATE_ALLOWED_ORIGINS\n", 403)
        )
        return
    try:
        await websocket.accept()
    except WebSocketDisconnect:
        return
    settings = worker.settings
    socket = take_over(websocket.scope, settings.message_max_bytes, settings.client_buffer_bytes)
    if socket is None:
        return
    connection = worker.connect(socket)
    socket.listen(connection)
    if worker.draining:
        # The drain began during the handshake and does not know this connection.
        connection.close(codes.SHUTDOWN)


async def healthz(request: Request) -> Response:
    """Alive: the event loop answers and no background task has died. Asks no store: an outage of
    Redis must not restart the fleet, nor must one that waits for its stores be started again."""
    worker: Worker = request.app.state.worker
    if worker.failed.done():
        return PlainTextResponse("a background task has died\n", 500)
    return PlainTextResponse("ok\n")


async def readyz(request: Request) -> Response:
    """Ready for new clients, or the reason why not: what it lacks, without addresses."""
    worker: Worker = request.app.state.worker
    reason = worker.unready
    state = {
        "ready": reason is None,
        "draining": worker.draining,
        "consuming": worker.consuming,
    }
    if reason is None:
        return JSONResponse(state)
    return JSONResponse(state | {"reason": reason}, 503)
