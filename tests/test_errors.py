import pytest

from ft_hsdp import errors


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.FtHsdpError, 75),
        (errors.LighthouseUnreachable, 69),
        (errors.Retryable, 75),
        (errors.LocalSystemError, 76),
        (errors.FTARError, 75),
        (errors.PeerDead, 75),
        (errors.ProtocolViolation, 75),
        (errors.DataCorruption, 75),
        (errors.InvalidArgument, 64),
    ],
)
def test_each_error_stands_for_an_exit_code(kind: type[errors.FtHsdpError], code: int) -> None:
    assert kind("why").exit_code == code
    assert issubclass(kind, errors.FtHsdpError)
    assert str(kind("why")) == "why"


def test_config_error_is_one_line_whatever_the_value() -> None:
    error = errors.ConfigError("train.steps", "a\nb\r\n" + "c" * 500, "a number\nabove 0")
    assert error.exit_code == 64
    assert len(str(error).splitlines()) == 1
    assert str(error).startswith("train.steps: got 'a\\nb\\r\\nccc")
    assert str(error).endswith("...; allowed: a number above 0")
    assert len(str(error)) < 200
    assert (error.key, error.allowed) == ("train.steps", "a number\nabove 0")


def test_config_error_stays_one_line_when_the_key_or_the_repr_is_not() -> None:
    class Odd:
        def __repr__(self) -> str:
            return "two\nlines"

    assert "\n" not in str(errors.ConfigError("a\nb", Odd(), "x"))


def test_a_suspect_is_named() -> None:
    assert str(errors.PeerDead("connection reset", suspect=2)) == "connection reset (suspect: replica 2)"
    assert errors.PeerDead("connection reset", suspect=2).suspect == 2
    assert str(errors.PeerTimeout(suspect=0)) == "PeerTimeout (suspect: replica 0)"
    assert errors.RemoteAbort("x").suspect is None
