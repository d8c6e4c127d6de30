"""Generated code is read before it runs beside copies to the host: it keeps what it offloads, or is refused."""

from __future__ import annotations

import pytest

from multigraph_backend.saved_tensors import output_code

CODE = """
def call(args):
    buf1 = torch.ops.multigraph.offload.default(buf0)
    buf2 = buf1
    buf3 = torch.ops.multigraph.offload.default(reinterpret_tensor(buf9, (4, 8), (8, 1), 0))
    buf4 = buf3
    buf7 = buf5; del buf5  # reuse
    buf6 = torch.ops.multigraph.settle.default([{first}, reinterpret_tensor(buf9, (32, ), (1, ), 0)], [buf2, buf4], [])
    {last}
"""


def code(first: str = "buf0", last: str = "torch.ops.multigraph.settle.default([], [], [buf6])") -> str:
    return CODE.format(first=first, last=last)


def test_what_is_offloaded_is_kept() -> None:
    output_code.check_offloads(code())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (code(first="buf7"), "offloads buf0 and keeps buf7"),
        (code(first="reinterpret_tensor(buf7, (4, 8), (8, 1), 0)"), "offloads buf0 and keeps buf7"),
        (code().replace("[buf2, buf4]", "[buf4, buf2]"), "offloads buf9 and keeps buf0"),
        (code().replace("[buf2, buf4]", "[buf2]"), "is not understood"),
        (code().replace("[buf2, buf4]", "copies"), "is not understood"),
        (code().replace("[buf2, buf4]", "[buf2, buf8]"), "offloads what is not known and keeps buf9"),
        (code().replace("settle", "other"), "offloads buf0, buf9 and keeps nothing for it"),
        (code().replace("offload", "other"), "no call in it does"),
        ("void call() { at::multigraph::offload(buf0); }", "is not in Python"),
    ],
)
def test_what_is_not_kept_is_refused(text: str, said: str) -> None:
    with pytest.raises(output_code.MayOverwrite, match=said):
        output_code.check_offloads(text)
