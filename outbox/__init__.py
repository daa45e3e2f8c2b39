"""Outbox table, message log, relay and streams: the way from a commit to the bus."""
