"""The state of an iterator as JSON: what `state_dict` of data loaders returns, without pickle.

A list, a text, a number, a truth value and None stand for themselves. Anything else is an object of the form
{"is": kind, "value": ...}. Mappings are such objects, too: their keys need not be text.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

ALLOWED = "numbers, text, bytes, tensors, numpy arrays, and lists, tuples and mappings of them"


def encode(value: Any) -> Any:
    """Return ``value`` as what JSON can express.

    Raises:
        TypeError: Something in it is of another type, which the message names.
    """
    if value is None or isinstance(value, bool | str) or (isinstance(value, int) and type(value) is int):
        return value
    if isinstance(value, float) and type(value) is float:
        return value if math.isfinite(value) else {"is": "float", "value": repr(value)}
    if type(value) is list:
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {"is": "mapping", "value": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"is": "tuple", "value": [encode(item) for item in value]}
    if isinstance(value, bytes):
        return {"is": "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        return {"is": "tensor", "value": encode(value.detach().cpu().numpy())}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {"is": kind, "value": [value.dtype.str, list(value.shape), data]}
    raise TypeError(type(value).__name__)


def decode(value: Any) -> Any:
    """Return what `encode` was given.

    Raises:
        ValueError: `encode` has not made it.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    try:
        kind, inner = value["is"], value["value"]
        match kind:
            case "float":
                return float(inner)
            case "mapping":
                return {decode(key): decode(item) for key, item in inner}
            case "tuple":
                return tuple(decode(item) for item in inner)
            case "bytes":
                return base64.b64decode(inner, validate=True)
            case "tensor":
                return torch.from_numpy(decode(inner))
            case "array" | "scalar":
                dtype, shape, data = inner
                array = np.frombuffer(base64.b64decode(data, validate=True), dtype).reshape(shape).copy()
                return array if kind == "array" else array[()]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"no state: {error!r}") from None
    raise ValueError(f"no state: {kind!r}")
