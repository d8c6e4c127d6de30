// What the files that define exported functions share, beside the functions themselves (multigraph_allocator.h).
#pragma once

#include "core/outcome.h"
#include "core/types.h"
#include "multigraph_allocator.h"

namespace mg {

// Keeps the sentence for the calling thread; the status.
int told(const Outcome& outcome) noexcept;

// What mg_set_options has set.
Config configured() noexcept;

}  // namespace mg
