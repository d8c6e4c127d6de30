// The driver's functions from libcuda, found when first asked for.
#pragma once

#include <string>

#include "driver.h"

namespace mg::cuda {

// The table, the same for the whole process; null where it cannot be had, and `reason` says why.
const Driver* driver(std::string& reason);

}  // namespace mg::cuda
