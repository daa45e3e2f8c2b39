from gateway import codes


def test_codes_are_unique() -> None:
    for table in (codes.ERRORS, codes.CLOSES, codes.UNSUBSCRIBES):
        numbers = [entry.code for entry in table]
        assert len(numbers) == len(set(numbers))
        assert numbers == sorted(numbers)


def test_every_code_of_the_module_stands_in_its_table() -> None:
    tables = {
        codes.ErrorCode: codes.ERRORS,
        codes.CloseCode: codes.CLOSES,
        codes.UnsubscribeCode: codes.UNSUBSCRIBES,
    }
    for name, value in vars(codes).items():
        if type(value) in tables:
            assert value in tables[type(value)], name
            assert value.meaning, name


def test_what_an_sdk_does_with_a_code() -> None:
    assert codes.INTERNAL.retried
    assert codes.TOKEN_EXPIRED.retried
    assert not codes.PERMISSION_DENIED.retried
    assert codes.SHUTDOWN.reconnect
    assert codes.SLOW.reconnect
    assert not codes.INVALID_TOKEN.reconnect
    assert not codes.MESSAGE_TOO_BIG.reconnect
    assert codes.CloseCode(1006, "").reconnect
    assert codes.CloseCode(4000, "").reconnect
    assert not codes.CloseCode(4500, "").reconnect
    assert codes.RESUBSCRIBE.resubscribe
    assert not codes.UNSUBSCRIBED.resubscribe


def test_reasons_fit_into_a_close_frame() -> None:
    for close in codes.CLOSES:
        assert len(close.reason.encode()) <= 123
