#include "torch/torch_error.h"

#include <cxxabi.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>
#include <typeinfo>
#include <utility>

namespace mg {

namespace {

// c10's, passed by value in the same way
struct SourceLocation {
  const char* function;
  const char* file;
  uint32_t line;
};

using Constructor = void (*)(void* self, SourceLocation where, std::string text);
using Destructor = void (*)(void* self);

struct TorchError {
  Constructor construct = nullptr;
  Destructor destroy = nullptr;
  std::type_info* type = nullptr;
  void** table = nullptr;  // where the object's pointer to its virtual functions goes; null: the constructor does it
};

TorchError found;
std::atomic<bool> usable{false};

#define MG_TEXT "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
constexpr const char* own_constructor = "_ZN3c1016OutOfMemoryErrorC1ENS_14SourceLocationE" MG_TEXT;
constexpr const char* base_constructor = "_ZN3c105ErrorC1ENS_14SourceLocationE" MG_TEXT;
constexpr const char* type_name = "_ZTIN3c1016OutOfMemoryErrorE";
constexpr const char* table_name = "_ZTVN3c1016OutOfMemoryErrorE";
#undef MG_TEXT

// Python loads torch's libraries without making their names known to others, so each is asked by itself.
void* find(const char* name) {
  if (void* global = dlsym(RTLD_DEFAULT, name)) return global;
  for (const char* library : {"libc10.so", "libc10_cuda.so", "libtorch_cpu.so", "libtorch_python.so"}) {
    void* loaded = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    if (loaded == nullptr) continue;
    void* symbol = dlsym(loaded, name);
    dlclose(loaded);  // only the handle: the process keeps the library
    if (symbol != nullptr) return symbol;
  }
  return nullptr;
}

class PlainOutOfMemory : public std::bad_alloc {
 public:
  explicit PlainOutOfMemory(std::string text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

}  // namespace

std::string torch_errors() {
  if (usable.load(std::memory_order_acquire)) return "";
  TorchError error;
  auto** table = static_cast<void**>(find(table_name));
  error.type = static_cast<std::type_info*>(find(type_name));
  error.construct = reinterpret_cast<Constructor>(find(own_constructor));
  if (table == nullptr || error.type == nullptr) return "no library of torch exports c10::OutOfMemoryError";
  // a table begins with an offset and the type; what an object points to comes after them
  error.destroy = reinterpret_cast<Destructor>(table[2]);
  if (error.construct == nullptr) {
    error.construct = reinterpret_cast<Constructor>(find(base_constructor));
    error.table = table + 2;
  }
  if (error.construct == nullptr) return "no library of torch exports a constructor of c10::Error";
  auto* told = static_cast<std::type_info*>(table[1]);
  if (error.destroy == nullptr || told == nullptr || *told != *error.type) {
    return "torch's table of c10::OutOfMemoryError is not as it was seen";
  }
  found = error;
  usable.store(true, std::memory_order_release);
  return "";
}

void throw_out_of_memory(const std::string& text) {
  if (!usable.load(std::memory_order_acquire)) throw PlainOutOfMemory(text);
  void* object = abi::__cxa_allocate_exception(torch_error_room);
  memset(object, 0, torch_error_room);
  try {
    found.construct(object, SourceLocation{"mg_torch_alloc", "multigraph_allocator", 0}, text);
  } catch (...) {
    abi::__cxa_free_exception(object);
    throw PlainOutOfMemory(text);
  }
  if (found.table != nullptr) *static_cast<void***>(object) = found.table;
  abi::__cxa_throw(object, found.type, found.destroy);
}

}  // namespace mg
