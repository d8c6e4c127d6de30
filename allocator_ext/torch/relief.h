// Before an allocation fails: a thread of the program is asked to give memory up.
//
// Why: recordings hold memory that can be made again, and only Python can give them up. Python cannot be called from inside of
// an allocation: the thread may hold a lock of torch's around it (the one of cuBLAS's workspaces, say) that another thread
// waits for which has Python's own lock; to wait for that here would stop both for good. So a thread of the program does it.
// It waits here, without Python's lock, and is asked; the allocation waits for its answer, a bounded time. What the two stop
// each other with is then given up by the allocation, which fails as it would have.
// In: how many bytes a device lacks; called under no lock of this library. Out: whether something was given up. False at once,
// where nobody waits to be asked, in a child of a fork, from that thread itself, and where the calling thread has Python's
// lock: the other could not run.
#pragma once

#include <cstddef>

namespace mg::torch_side {

bool relief(int index, size_t bytes) noexcept;

}  // namespace mg::torch_side
