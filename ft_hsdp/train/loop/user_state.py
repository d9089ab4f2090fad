"""State of the user that is part of the committed state: averages of weights, statistics, a curriculum.

Each registered state is a pair of functions, as a torch module has: ``state_dict`` and ``load_state_dict``. Its
tensors are packed behind those of the model and the optimizer, so snapshots, fetches, digests and checkpoints hold
them. Its other values are JSON and stand in the manifest. `UserState.refresh` reads both after the callbacks on a
commit: what they say then is the committed state.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ft_hsdp.core import state_id
from ft_hsdp.errors import ConfigError
from ft_hsdp.train.loop.callbacks import called

MAX_JSON = 1 << 20  # characters of the JSON values of all registered states
MAX_KEY = 512  # characters
MAX_DEPTH = 16  # of lists and dicts in each other
MAX_INT = 2**63

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SURROGATE = re.compile("[\ud800-\udfff]")

Values = dict[str, dict[str, Any]]
"""The JSON values of each registered state, by its name and their keys."""


@dataclass(frozen=True, slots=True)
class Registered:
    name: str
    state_dict: Callable[[], Mapping[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], object]


class UserState:
    def __init__(self) -> None:
        self._registered: dict[str, Registered] = {}
        self._fixed = False
        self.tensors: dict[str, torch.Tensor] = {}  # by "name/key", as they were read last; DTensors or plain ones
        self.values: Values = {}  # as they were read last

    def register(self, made: Registered) -> None:
        """Add a state. Does not read it."""
        key = "job.register_state"
        if not isinstance(made.name, str) or not _NAME.fullmatch(made.name):
            raise ConfigError(key, made.name, "a name of 1 to 64 letters, digits and . _ -")
        if made.name in self._registered:
            raise ConfigError(key, made.name, "a name that is not registered yet")
        if not callable(made.state_dict) or not callable(made.load_state_dict):
            raise ConfigError(
                f"{key}({made.name})", "something else", "two functions: state_dict, load_state_dict"
            )
        if self._fixed:
            raise ConfigError(key, made.name, "a call before the first batch of job.batches")
        self._registered[made.name] = made

    def fix(self) -> None:
        """Read all states for the first time: from now on they keep their keys, shapes and types."""
        self._fixed = True
        for each in self._registered.values():
            tensors, values = self._of(each)
            self.tensors |= tensors
            if values:
                self.values[each.name] = values
        self._check_size()

    @property
    def encoded(self) -> bytes:
        """The JSON values as bytes; b"" if there are none."""
        return state_id.canonical(self.values).encode() if self.values else b""

    def refresh(self) -> None:
        """Read all states again.

        Raises:
            CallbackFailed: A function of the user failed, or a value is not what it was in kind.
        """
        for each in self._registered.values():
            called(f"job.register_state({each.name})", self._refresh, each)

    def load(self, values: Values) -> None:
        """Give the tensors, which hold another state now, and its ``values`` to the user's functions.

        Raises:
            CallbackFailed: A function of the user failed, or the values are of other states.
        """
        for each in self._registered.values():
            called(f"job.register_state({each.name})", self._load, each, values.get(each.name, {}))
        self.refresh()

    def _load(self, each: Registered, values: dict[str, Any]) -> None:
        if set(values) != set(self.values.get(each.name, {})):
            expected = ", ".join(sorted(self.values.get(each.name, {}))) or "none"
            raise ConfigError(
                _key(each.name), f"values {sorted(values)} in a state to load", f"those of {expected}"
            )
        start = f"{each.name}/"
        tensors = {name.removeprefix(start): t for name, t in self.tensors.items() if name.startswith(start)}
        each.load_state_dict(tensors | json.loads(json.dumps(values)))

    def _refresh(self, each: Registered) -> None:
        tensors, values = self._of(each)
        known = {name: t for name, t in self.tensors.items() if name.startswith(f"{each.name}/")}
        before = self.values.get(each.name, {})
        if differing := (set(tensors) ^ set(known)) | {f"{each.name}/{key}" for key in set(values) ^ set(before)}:
            one = min(differing).removeprefix(f"{each.name}/")
            raise ConfigError(
                _key(each.name, one), "a key that came, went or changed its kind", "the keys of the start"
            )
        for name, tensor in tensors.items():
            if (found := _form(tensor)) != (wanted := _form(known[name])):
                raise ConfigError(
                    _key(each.name, name.removeprefix(f"{each.name}/")), found, f"{wanted}, as before"
                )
        self.tensors.update(tensors)
        if values:
            self.values[each.name] = values
            self._check_size()

    def _check_size(self) -> None:
        if (size := len(self.encoded)) > MAX_JSON:
            raise ConfigError("job.register_state", f"values of {size} bytes as JSON", f"{MAX_JSON}: use tensors")

    def _of(self, each: Registered) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the tensors of a state by "name/key", and its other values by key."""
        found = each.state_dict()
        if not isinstance(found, Mapping):
            raise ConfigError(_key(each.name), type(found).__name__, "a state_dict that returns a mapping")
        tensors: dict[str, torch.Tensor] = {}
        values: dict[str, Any] = {}
        for key, value in found.items():
            if not _is_text(key) or not 0 < len(key) <= MAX_KEY:
                raise ConfigError(_key(each.name), key, f"keys of 1 to {MAX_KEY} characters")
            if isinstance(value, torch.Tensor):
                if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
                    raise ConfigError(_key(each.name, key), _form(value), "a dense tensor with memory")
                tensors[f"{each.name}/{key}"] = value
            else:
                values[key] = _plain(_key(each.name, key), value, MAX_DEPTH)
        return tensors, values


def _key(name: str, key: str | None = None) -> str:
    return f"job.register_state({name})" + ("" if key is None else f"[{key}]")


def _form(tensor: torch.Tensor) -> str:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    sharded = "" if local is tensor else f", {list(local.shape)} of it here"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device.type}{sharded}"


def _is_text(value: object) -> bool:
    """Return whether a value is a str that others can read: a manifest with a lone surrogate cannot be decoded."""
    return isinstance(value, str) and _SURROGATE.search(value) is None


def _plain(where: str, value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool) or _is_text(value):
        return value
    if isinstance(value, int) and abs(value) < MAX_INT:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if depth and type(value) is list:
        return [_plain(where, each, depth - 1) for each in value]
    if depth and isinstance(value, dict) and all(map(_is_text, value)):
        return {key: _plain(where, each, depth - 1) for key, each in value.items()}
    shown = value if isinstance(value, int | float) else type(value).__name__
    allowed = "a tensor, or JSON: None, bool, Unicode text, int, a finite float, a list or a dict of them by text"
    raise ConfigError(where, shown, allowed)
