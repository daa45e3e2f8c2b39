"""The fixtures of conftest.py give what they promise."""

import psycopg
import redis as redis_client


def test_database_is_fresh_and_utf8(database: str) -> None:
    with psycopg.connect(database) as connection:
        row = connection.execute(
            "SELECT current_setting('server_encoding'),"
            " (SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace)"
        ).fetchone()
    assert row == ("UTF8", 0)


def test_redis_is_empty(redis_url: str) -> None:
    with redis_client.Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0
