"""The status as a table for people."""

from collections.abc import Sequence

from gateway.operate.status import Status

UNKNOWN = "?"
NONE = "-"


def table(status: Status) -> str:
    """All of ``status`` but its problems, in aligned columns."""
    waiting = UNKNOWN if status.waiting is None else f"{status.waiting:,}"
    oldest = "" if status.oldest_s is None else f", the oldest for {status.oldest_s:.1f} s"
    lines = [
        f"epoch     {status.epoch or UNKNOWN}",
        f"outbox    {waiting} waiting{oldest}",
        f"relays    {', '.join(status.relays) or NONE}",
    ]
    if status.also_lag is not None:
        lines.append(f"also      the additional Redis lacks {status.also_lag:,} messages")
    if status.shards:
        rows = [
            (
                str(shard.shard),
                _number(shard.head),
                _number(shard.last),
                _number(shard.lag),
                _number(shard.waiting),
                shard.relay or NONE,
            )
            for shard in status.shards
        ]
        lines += ["", *_columns(("shard", "log", "bus", "lag", "outbox", "relay"), rows)]
    gateways = [
        (
            gateway.id,
            f"{gateway.host}:{gateway.port}",
            _number(gateway.connections),
            _number(gateway.subscriptions),
            _number(gateway.shards),
            _number(gateway.lag),
        )
        for gateway in status.gateways
    ]
    head = ("gateway", "address", "connections", "subscriptions", "shards", "lag")
    lines += ["", *(_columns(head, gateways) if gateways else ["no gateway has reported itself"])]
    return "\n".join(lines)


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join(
            cell.rjust(width) if cell[:1].isdigit() or cell == UNKNOWN else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in (head, *rows)
    ]
