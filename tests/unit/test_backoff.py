from outbox.backoff import Backoff


def test_an_outage_of_any_length_is_waited_out() -> None:
    backoff = Backoff(0.05, 1.0)
    assert 0.025 <= backoff.next_s() <= 0.05
    # Beyond 1,074 doublings a float holds nothing any more.
    for _ in range(5_000):
        assert 0.05 <= backoff.next_s() <= 1.0
    backoff.reset()
    assert backoff.next_s() <= 0.05
