"""The Triton kernel behind `staging`: many tensors, copied by one launch.

A module of its own, because it needs Triton, which torch works without on the CPU.  With TRITON_INTERPRET=1 it runs
there too.
"""

import triton
import triton.language as tl

from multigraph_backend.cudagraphs.devices.known_kernels import known


@known
@triton.jit(do_not_specialize=["sources"])  # type: ignore[untyped-decorator]
def copy_words(table, sources, ROW: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program copies up to BLOCK words of 4 bytes, as its row of `table` says (see `staging.rows`).

    table: a pointer to numbers of 64 bits.  sources: a tuple of addresses, all on ALIGNED bytes; those that are copied
    to, where the row says so.
    """
    row = table + ROW * tl.program_id(0)
    which = tl.load(row)
    given = sources[0]
    for number in tl.static_range(1, len(sources)):
        given = tl.where(which == number, sources[number], given)
    fixed, outwards = tl.load(row + 3), tl.load(row + 4) != 0
    words = tl.multiple_of(tl.where(outwards, fixed, given), ALIGNED).to(tl.pointer_type(tl.int32))
    target = tl.multiple_of(tl.where(outwards, given, fixed), ALIGNED).to(tl.pointer_type(tl.int32))
    at = tl.multiple_of(tl.load(row + 1), BLOCK) + tl.arange(0, BLOCK)
    inside = at < tl.load(row + 2)
    tl.store(target + at, tl.load(words + at, mask=inside), mask=inside)
