"""A capacity plan, and the costs that it comes from, as tables for people."""

from collections.abc import Mapping

from gateway.capacity import Cost, Plan

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def table(plan: Plan) -> str:
    """One line for each thing to decide or to watch."""
    work, gateways, relays = plan.work, plan.gateways, plan.relays
    redis, postgres = plan.redis, plan.postgres
    cluster = "" if redis.servers == 1 else f": a cluster of {redis.servers} masters"
    rows = (
        ("deliveries", f"{_count(gateways.deliveries_per_s)}/s",
         f"each message to {_clients(work.listeners)}, {gateways.delivery_us:.2g} µs each"),
        ("", f"{_bytes(gateways.to_clients_bytes_per_s)}/s", "to the clients"),
        ("gateways", f"{gateways.workers} workers",
         f"a core each: {_percent(gateways.load)} of it in use, "
         f"{_percent(gateways.load_with_one_lost)} with one lost"),
        ("", _bytes(gateways.memory_most_bytes),
         f"memory of each, {gateways.connections_most:,} connections with one lost"),
        ("", f"{gateways.return_s:.2g} s", "until all clients are back after all were restarted"),
        ("relays", f"{relays.processes} processes", f"{_cores(relays.cores)} in use, all together"),
        ("schema", f"{relays.shards} shards",
         f"--shards {relays.shards} --spread {relays.spread}; for good"),
        ("postgres", _cores(postgres.cores), "in use by Tidegate"),
        ("", f"{_count(postgres.rows_per_s)} rows/s", "inserted, changed and deleted, at most"),
        ("", f"{_bytes(postgres.wal_bytes_per_s)}/s", "WAL"),
        ("", _bytes(postgres.disk_bytes), f"log, {work.retention_days} days"),
        ("redis", _cores(redis.cores), f"in use{cluster}"),
        ("", f"{_count(redis.commands_per_s)}/s", "commands, at most"),
        ("", _bytes(redis.memory_bytes), "memory"),
        ("", f"{_bytes(redis.to_gateways_bytes_per_s)}/s", "to the gateways"),
    )  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(
        f"{name:<{widths[0]}}  {figure:>{widths[1]}}  {what}" for name, figure, what in rows
    )


def costs_table(costs: Mapping[str, Cost]) -> str:
    """The costs as Markdown."""
    rows = (
        f"| {cost.what} | {cost.value:,.10g} {cost.unit} | `{cost.source}` |"
        for cost in costs.values()
    )
    return "\n".join(("| one … | costs | scenario |", "|---|---|---|", *rows))


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _clients(value: float) -> str:
    return "1 client" if value == 1 else f"{_count(value)} clients"


def _cores(value: float) -> str:
    return f"{value:.2f} cores"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _bytes(value: float) -> str:
    """In decimal units, two digits."""
    power = 0
    while value >= 1_000 and power < len(_UNITS) - 1:
        value /= 1_000
        power += 1
    return f"{value:.3g} {_UNITS[power]}"
