"""Postgres and Redis servers of our own, for development, the demo and the tests.

They listen on loopback only, ask for a password, and die with the process that started them.
"""

from gateway.embedded.postgres import EmbeddedPostgres
from gateway.embedded.process import EmbeddedServerError
from gateway.embedded.redis import EmbeddedRedis

__all__ = ["EmbeddedPostgres", "EmbeddedRedis", "EmbeddedServerError"]
