// What a device's allocator holds, as text: the snapshot that PyTorch's memory_viz page reads, after json -> pickle, and
// the sentences of an out-of-memory.
//
// Keys of the snapshot and their meaning are torch's: segments with their blocks, and a trace for each device. A waiting
// block is "active_pending_free", a free one "inactive"; each mapped run of an expandable segment is a segment. What is
// lent is shown at the address at which it is in use, so no byte is shown twice and each live block where torch knows it.
// Lock: the device's is held during both.
#pragma once

#include <string>
#include <vector>

#include "core/history.h"
#include "core/pool.h"
#include "core/stats.h"

namespace mg {

// JSON.
std::string snapshot_text(int index, const std::vector<Pool*>& pools, const History& history);

// Why `asked` bytes could not be had, and what there is. `free` of `total` bytes of the device; 0 in all: not known.
std::string account(int index, const std::vector<Pool*>& pools, const Stats& stats, size_t asked, const std::string& reason,
                    size_t free, size_t total);

}  // namespace mg
