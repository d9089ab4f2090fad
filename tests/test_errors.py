from ft_hsdp import errors


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
