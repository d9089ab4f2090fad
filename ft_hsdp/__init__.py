"""Fault-tolerant hybrid-sharded data-parallel training.

    job = ft_hsdp.join(config)

Importing this package imports no torch: what needs it is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ft_hsdp.config import Config as Config
    from ft_hsdp.config import load as load_config
    from ft_hsdp.errors import ConfigError as ConfigError
    from ft_hsdp.errors import FtHsdpError as FtHsdpError
    from ft_hsdp.train.job import Job as Job
    from ft_hsdp.train.join import join as join

__version__ = "0.1.0"

_PUBLIC = {
    "Config": ("ft_hsdp.config", "Config"),
    "ConfigError": ("ft_hsdp.errors", "ConfigError"),
    "FtHsdpError": ("ft_hsdp.errors", "FtHsdpError"),
    "Job": ("ft_hsdp.train.job", "Job"),
    "join": ("ft_hsdp.train.join", "join"),
    "load_config": ("ft_hsdp.config", "load"),
}

__all__ = ["Config", "ConfigError", "FtHsdpError", "Job", "__version__", "join", "load_config"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
