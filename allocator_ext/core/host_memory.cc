#include "core/host_memory.h"

#include <algorithm>

namespace mg {

namespace {
// At most so much is pinned by one call, so that parts can be used again for less.
constexpr size_t most_pinned = size_t{256} << 20;
}  // namespace

bool HostMemory::take(const Driver& driver, size_t bytes, HostCopy& out) {
  HostCopy taken;
  size_t most = pieces_ + bytes / most_pinned + 1;
  taken.reserve(most);
  spare_.reserve(most);  // so that giving back cannot fail
  size_t has = 0;
  while (has < bytes) {
    HostPiece piece{nullptr, std::min(bytes - has, most_pinned)};
    if (!spare_.empty()) {
      piece = spare_.back();
      spare_.pop_back();
    } else {
      void* made = nullptr;
      if (driver.host_alloc(&made, piece.size, host_memory_for_all_contexts) != result::success) {
        give_back(taken);
        return false;
      }
      piece.address = static_cast<char*>(made);
      pieces_++;
    }
    has += piece.size;
    taken.push_back(piece);
  }
  out.swap(taken);
  return true;
}

void HostMemory::give_back(HostCopy& copy) noexcept {
  for (const HostPiece& piece : copy) spare_.push_back(piece);
  copy.clear();
}

size_t HostMemory::give_back_all(const Driver& driver) noexcept {
  size_t bytes = 0;
  for (const HostPiece& piece : spare_) {
    driver.host_free(piece.address);
    bytes += piece.size;
  }
  pieces_ -= spare_.size();
  spare_.clear();
  return bytes;
}

bool Copies::begun() {
  if (stream_ == nullptr && ok_) ok_ = driver_.stream_create(&stream_, stream_beside_all) == result::success;
  return ok_;
}

Copies::~Copies() {
  if (stream_ == nullptr) return;
  driver_.stream_synchronize(stream_);
  driver_.stream_destroy(stream_);
}

template <class Part>
void Copies::each_part(const HostCopy& host, size_t at, size_t size, Part part) {
  size_t begin = 0, done = 0;
  for (const HostPiece& piece : host) {
    size_t end = begin + piece.size;
    if (done < size && at + done < end) {
      size_t offset = at + done - begin, bytes = std::min(piece.size - offset, size - done);
      part(piece.address + offset, done, bytes);
      done += bytes;
    }
    begin = end;
  }
}

void Copies::to_host(Address address, size_t size, const HostCopy& host, size_t at) {
  each_part(host, at, size, [&](char* there, size_t offset, size_t bytes) {
    ok_ = begun() && driver_.copy_to_host(there, address + offset, bytes, stream_) == result::success;
  });
}

void Copies::from_host(Address address, size_t size, const HostCopy& host, size_t at) {
  each_part(host, at, size, [&](char* there, size_t offset, size_t bytes) {
    ok_ = begun() && driver_.copy_from_host(address + offset, there, bytes, stream_) == result::success;
  });
}

void Copies::fill(Address address, size_t size, unsigned char byte) {
  ok_ = begun() && driver_.fill(address, byte, size, stream_) == result::success;
}

bool Copies::done() {
  if (stream_ != nullptr) ok_ = driver_.stream_synchronize(stream_) == result::success && ok_;
  return ok_;
}

}  // namespace mg
