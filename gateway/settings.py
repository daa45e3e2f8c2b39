"""Every setting of the relay and the gateway, in one class.

A setting comes from the environment (``TIDEGATE_`` and its name in capitals), else from the TOML
file (its name), else from its default. ``docs/configuration.md`` is made from the descriptions
here (``tidegate config --docs``). The constructor takes just what it is given;
``gateway.sources.load`` reads the environment and the file.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
)

from gateway.namespaces import EVERY_OTHER, Namespace
from gateway.origins import ANY, normal_origin
from outbox.names import namespace, room_error
from outbox.redis.url import parse_redis_url

PREFIX = "TIDEGATE_"
SECRET_MIN_BYTES = 32
"""RFC 7518, section 3.2: an HMAC key of the size of the hash or larger."""
NOT_SET = SecretStr("")
"""What a secret without a value holds: it is false in a condition (its length is 0)."""

LogFormat = Literal["auto", "json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]


class SettingsError(Exception):
    """Settings that are wrong or missing: one line for each, with the name and the remedy."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def _origins(value: object) -> object:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _namespaces(value: object) -> object:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(
                'must be JSON, like {"orders": {"publish": "authenticated"}}'
            ) from None
    if not isinstance(value, Mapping):
        raise ValueError("must be a table of namespaces")
    known = [field.name for field in fields(Namespace)]
    for name, entry in value.items():
        if name != EVERY_OTHER and (room_error(name) or namespace(name) is not None):
            raise ValueError(f"has an entry {name!r}, which is no namespace's name")
        for key in entry if isinstance(entry, Mapping) else ():
            if key not in known:
                raise ValueError(f"has {name}.{key}, which is not one of {', '.join(known)}")
    return value


class Settings(BaseModel):
    """Settings, checked; immutable. The unit of a number stands at the end of its name."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )

    # Stores and secrets
    postgres_dsn: SecretStr = Field(
        NOT_SET,
        description="Connection string of the Postgres primary: a URL "
        "(`postgresql://user:password@host/db`) or libpq's `key=value` form.",
    )
    redis_url: SecretStr = Field(
        NOT_SET,
        description="URL of Redis or Valkey: `redis://[user:password@]host:port/0`, `rediss://` "
        "with TLS, `unix://` for a socket, `redis+sentinel://host:26379,…/master`, "
        "`redis+cluster://host:6379,…`. One Redis, or database number, for each installation. "
        "See [Redis](operate/redis.md).",
    )
    redis_url_also: SecretStr = Field(
        NOT_SET,
        description="URL of a second Redis that relays keep the same as the first, while gateways "
        "move to it.",
    )
    token_hmac_secret: SecretStr = Field(
        NOT_SET,
        description="Secret with which the application signs client tokens (JWT, HS256), at least "
        f"{SECRET_MIN_BYTES} bytes. Without it only anonymous clients can connect.",
    )
    api_key: SecretStr = Field(
        NOT_SET,
        description="Key of the HTTP API (header `X-API-Key`). Without it the API answers 401.",
    )
    allow_anonymous: bool = Field(
        False,
        description="Whether clients without a token may connect. They belong to tenant `default`.",
    )

    # Where the gateway listens
    host: str = Field(
        "127.0.0.1", min_length=1, description="Address to listen on; `0.0.0.0` for all."
    )
    port: int = Field(
        8000, ge=0, le=65_535, description="TCP port to listen on; 0 for any free one."
    )
    workers: int = Field(1, ge=1, le=256, description="Gateway processes that share the port.")
    allowed_origins: Annotated[tuple[str, ...], BeforeValidator(_origins)] = Field(
        (),
        description="Web pages that may connect: exact origins (`https://app.example.com`), in the "
        "environment separated by commas; `*` for every page. Empty: only pages of the host that "
        "they connect to. Clients that are not browsers send no origin and pass.",
    )

    # Connections
    handshake_timeout_s: float = Field(
        10, gt=0, le=300, description="Time from the handshake to the `connect` command."
    )
    ping_interval_s: float = Field(
        25,
        ge=1,
        le=3_600,
        description="Time between pings. Keep it below the idle limit of proxies.",
    )
    pong_timeout_s: float = Field(
        8, gt=0, le=300, description="Time that a client has to answer a ping; below the interval."
    )
    message_max_bytes: int = Field(
        65_536, ge=1_024, le=16_777_216, description="Largest frame that a client may send."
    )
    client_buffer_bytes: int = Field(
        1_048_576,
        ge=16_384,
        description="Bytes that wait for one client before the gateway stops pushing and lets the "
        "client pull at its own pace.",
    )
    client_stall_timeout_s: float = Field(
        30,
        gt=0,
        description="Time after which a client that reads nothing of what waits for it is closed "
        "(3008); it can resume.",
    )
    subscriptions_per_connection_max: int = Field(
        128, ge=1, description="Most channels that one connection may be subscribed to."
    )
    namespaces: Annotated[dict[str, Namespace], BeforeValidator(_namespaces)] = Field(
        {},
        description="What holds for the rooms of a namespace (`orders:42` → `orders`); `*` for all "
        "rooms without an entry. Tables `[namespaces.NAME]`, in the environment one JSON object.",
    )

    # Replay
    room_ring_messages: int = Field(
        512, ge=0, description="Newest messages of each room in use that a worker keeps in memory."
    )
    room_ring_bytes: int = Field(
        262_144, ge=0, description="Most bytes of payload that these messages of a room may have."
    )
    replay_memory_bytes: int = Field(
        268_435_456,
        ge=0,
        description="Most bytes that a worker keeps of all rooms together for those who return: "
        "newest messages (each with 512 bytes beside its payload), pages that were just read, and "
        "what was encoded of them. Beyond it the rooms that were idle for longest lose theirs, and "
        "who returns to them is served from Redis.",
    )
    room_linger_s: float = Field(
        30,
        ge=0,
        description="Time that a room stays in memory after its last subscriber left, for those "
        "who come back.",
    )
    replay_page_messages: int = Field(
        500, ge=1, le=10_000, description="Most messages that one read of a replay brings."
    )
    replay_page_bytes: int = Field(
        1_048_576,
        ge=4_096,
        description="Most bytes of payload that one read of a replay brings (a single message may "
        "be larger).",
    )
    log_pool_size: int = Field(
        4,
        ge=1,
        le=1_000,
        description="Connections to Postgres per worker for reading the log: the ceiling of the "
        "load that returning clients cause.",
    )
    log_timeout_s: float = Field(
        5,
        gt=0,
        description="Time that one read of the log may take, with its wait for a connection.",
    )
    publish_pool_size: int = Field(
        4, ge=1, le=1_000, description="Connections to Postgres per worker for publishing."
    )

    # Shutdown
    drain_timeout_s: float = Field(
        20,
        gt=0,
        description="Time from SIGTERM to the exit, whatever the clients do. Keep it below the "
        "grace period of the platform.",
    )
    drain_connections_per_s: int = Field(
        500,
        ge=1,
        description="Connections that a worker closes per second while it drains; more if they "
        "would not all fit into the time.",
    )

    # Relay and streams
    lease_s: float = Field(
        3,
        ge=0.5,
        le=60,
        description="Time after which another relay takes over a silent relay's shards.",
    )
    relay_batch_messages: int = Field(
        500, ge=1, le=10_000, description="Most messages of a shard that a relay takes at once."
    )
    bus_messages: int = Field(
        10_000, ge=100, description="Entries that each shard's stream keeps in Redis."
    )
    room_stream_messages: int = Field(
        300, ge=1, description="Entries that each room's replay stream keeps in Redis."
    )
    room_stream_idle_s: int = Field(
        600,
        ge=1,
        description="Time after its last message at which a room's replay stream expires.",
    )
    retention_days: int = Field(
        7,
        ge=1,
        le=36_500,
        description="Days that messages stay in the log. Who is away for longer is told that "
        "continuity was lost.",
    )

    # Logs
    log_format: LogFormat = Field(
        "auto", description="`json`, `console`, or `auto`: console on a terminal, else JSON."
    )
    log_level: LogLevel = Field("info", description="`debug`, `info`, `warning` or `error`.")

    @field_validator("postgres_dsn")
    @classmethod
    def _dsn(cls, value: SecretStr) -> SecretStr:
        text = value.get_secret_value()
        if "://" in text:
            if urlsplit(text).scheme not in ("postgresql", "postgres"):
                raise ValueError("must begin with postgresql://")
        elif text and "=" not in text:
            raise ValueError("must be like postgresql://user:password@host:5432/database")
        return value

    @field_validator("redis_url", "redis_url_also")
    @classmethod
    def _url(cls, value: SecretStr) -> SecretStr:
        if text := value.get_secret_value():
            parse_redis_url(text)
        return value

    @field_validator("token_hmac_secret")
    @classmethod
    def _secret(cls, value: SecretStr) -> SecretStr:
        size = len(value.get_secret_value().encode())
        if 0 < size < SECRET_MIN_BYTES:
            raise ValueError(
                f"must have at least {SECRET_MIN_BYTES} bytes, not {size}: make one with "
                "`openssl rand -hex 32`"
            )
        return value

    @field_validator("allowed_origins")
    @classmethod
    def _exact(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            parts = urlsplit(origin)
            if origin != ANY and (
                "*" in origin
                or not parts.scheme
                or not parts.netloc
                or origin.rstrip("/") != f"{parts.scheme}://{parts.netloc}"
            ):
                raise ValueError(f"must hold origins like https://app.example.com, not {origin!r}")
        return tuple(normal_origin(origin.rstrip("/")) for origin in value)

    @field_validator("pong_timeout_s")
    @classmethod
    def _below_interval(cls, value: float, info: ValidationInfo) -> float:
        interval = info.data.get("ping_interval_s")
        if interval is not None and value >= interval:
            raise ValueError(
                f"must be below TIDEGATE_PING_INTERVAL_S ({interval:g}), not {value:g}"
            )
        return value

    def require(self, *names: str) -> None:
        """Raise SettingsError if one of these settings, empty by default, is not set."""
        missing = [name for name in names if not getattr(self, name)]
        if missing:
            raise SettingsError(
                f"{variable(name)} is not set: {type(self).model_fields[name].description}"
                for name in missing
            )


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return f"{PREFIX}{name.upper()}"
