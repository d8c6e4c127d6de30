#include "cuda/libcuda.h"

#include <dlfcn.h>

namespace mg::cuda {

namespace {

struct Loaded {
  Driver table;
  std::string reason;

  // The library stays loaded: torch has it open for the life of the process.
  Loaded() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      reason = "there is no CUDA driver on this machine (libcuda.so.1)";
      return;
    }
#define MG_RESOLVE(name, symbol, parameters)                                                     \
  table.name = reinterpret_cast<Result(*) parameters>(dlsym(library, symbol));                   \
  if (table.name == nullptr && reason.empty()) reason = std::string("this CUDA driver has no ") + symbol;
    MG_DRIVER_FUNCTIONS(MG_RESOLVE)
#undef MG_RESOLVE
  }
};

}  // namespace

const Driver* driver(std::string& reason) {
  static const Loaded loaded;
  reason = loaded.reason;
  return reason.empty() ? &loaded.table : nullptr;
}

}  // namespace mg::cuda
