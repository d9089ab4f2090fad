import subprocess
import sys

import pytest

import ft_hsdp


def test_importing_the_package_and_the_configuration_imports_no_torch() -> None:
    code = (
        "import sys, ft_hsdp, ft_hsdp.config, ft_hsdp.errors, ft_hsdp.train.tokens; "
        "sys.exit('torch' in sys.modules or ft_hsdp.Config().replicas != 3)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_public_names_are_listed_and_strangers_refused() -> None:
    assert set(ft_hsdp.__all__) <= set(dir(ft_hsdp))
    assert ft_hsdp.ConfigError.exit_code == 64
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = ft_hsdp.no_such_name
