"""The mode of a command says which buffers the device reads and which it writes."""

import pytest

pytest.importorskip("triton", reason="triton is not installed (pip install triton)")

from ft_hsdp.core.ring import OperationKind
from ftar_kernels.flags import FROM_LOCAL, FROM_RECV, TO_OUT, TO_SEND, Command


@pytest.mark.parametrize(
    ("kind", "recv", "contributes", "mode"),
    [
        (OperationKind.COPY_SEND, None, True, FROM_LOCAL | TO_SEND),
        (OperationKind.COPY_SEND, None, False, 0),
        (OperationKind.REDUCE_SEND, 0, True, FROM_RECV | FROM_LOCAL | TO_SEND),
        (OperationKind.REDUCE_SEND, 0, False, FROM_RECV | TO_SEND),
        (OperationKind.REDUCE_SEND, None, True, FROM_LOCAL | TO_SEND),
        (OperationKind.REDUCE_SEND, None, False, 0),
        (OperationKind.REDUCE_STORE_SEND, 0, True, FROM_RECV | FROM_LOCAL | TO_SEND | TO_OUT),
        (OperationKind.REDUCE_STORE_SEND, None, False, TO_SEND | TO_OUT),
        (OperationKind.STORE_SEND, 0, True, FROM_RECV | TO_SEND | TO_OUT),
        (OperationKind.STORE, 0, True, FROM_RECV | TO_OUT),
        (OperationKind.STORE, None, True, FROM_LOCAL | TO_OUT),
    ],
)
def test_a_command_says_what_is_read_and_written(kind, recv, contributes, mode):
    assert Command(kind, 0, 4, recv, 0 if kind.sends else None).mode(contributes) == mode
