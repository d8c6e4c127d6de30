// Pinned memory of the host for the contents of pools that sleep.
//
// Why: to pin memory takes the host several times as long as a copy into it takes. So what a wake no longer needs is kept for
// the next sleep, of whichever pool, until somebody asks for it back.
// In: how many bytes are to be kept, and of which addresses. Out: a `HostCopy`, pieces of host memory that are one run of
// bytes; copies between it and the device, which are complete when `Copies::done` is true.
// Guarantee: a piece is in one copy or spare. Lock: of whoever has the object.
#pragma once

#include <cstddef>
#include <vector>

#include "driver.h"

namespace mg {

struct HostPiece {
  char* address;
  size_t size;
};

// The host's copy of something; no pieces: there is none.
using HostCopy = std::vector<HostPiece>;

class HostMemory {
 public:
  // Room for `bytes`. False: the host has none, and nothing has changed.
  bool take(const Driver& driver, size_t bytes, HostCopy& out);
  void give_back(HostCopy& copy) noexcept;
  // All that is spare goes back to the host; bytes.
  size_t give_back_all(const Driver& driver) noexcept;

 private:
  std::vector<HostPiece> spare_;
  size_t pieces_ = 0;  // that there are
};

// Copies on a stream of their own, while nothing else uses the memory. In the relaxed mode.
class Copies {
 public:
  explicit Copies(const Driver& driver) : driver_(driver) {}
  ~Copies();
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;

  // Of `size` bytes between this address and the place `at` in a host's copy.
  void to_host(Address address, size_t size, const HostCopy& host, size_t at);
  void from_host(Address address, size_t size, const HostCopy& host, size_t at);
  void fill(Address address, size_t size, unsigned char byte);

  // Waits for all of them; false: one failed, and none of them can be relied on.
  bool done();

 private:
  template <class Part>
  void each_part(const HostCopy& host, size_t at, size_t size, Part part);

  bool begun();

  const Driver& driver_;
  Stream stream_ = nullptr;  // made for the first copy
  bool ok_ = true;
};

}  // namespace mg
