// What a call of a device's allocator answers beside its result: a status, and where it is not `ok` a sentence.
#pragma once

#include <string>

namespace mg {

enum class Status : int { ok = 0, out_of_memory = 1, invalid = 2, driver_failed = 3, no_host_memory = 4 };

struct Outcome {
  Status status = Status::ok;
  std::string message;
};

}  // namespace mg
