"""How a configuration, or a use of the library that does not fit it, is refused."""

from collections.abc import Callable

import pytest

from ft_hsdp.errors import EXIT_CONFIG, ConfigError


def refused(call: Callable[[], object], words: str = "", key: str = "") -> str:
    """Check that a call is refused with one line, and return that line.

    Args:
        call: what is refused.
        words: a pattern of what the line says.
        key: what the line says first; any key if none is given.
    """
    with pytest.raises(ConfigError, match=words or None) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"{key or caught.value.key}: got ")
    assert caught.value.exit_code == EXIT_CONFIG
    return line
