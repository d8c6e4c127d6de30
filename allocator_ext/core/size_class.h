// How many bytes a request takes, from which kind of segment, and what is worth splitting off.
//
// Pure arithmetic. In: bytes asked for. Out: rounded bytes, segment bytes.
// Invariant: rounded >= asked, a multiple of 512; a segment holds at least one rounded request.
#pragma once

#include <cstddef>

namespace mg::size_class {

constexpr size_t kib = 1024;
constexpr size_t mib = 1024 * kib;
constexpr size_t grain = 512;
constexpr size_t small_limit = 1 * mib;     // up to here: small segments
constexpr size_t small_segment = 2 * mib;
constexpr size_t medium_limit = 10 * mib;   // up to here: shared large segments
constexpr size_t medium_segment = 20 * mib;
constexpr size_t large_grain = 2 * mib;     // above: a segment for each

// Larger requests are refused before arithmetic on them could overflow.
constexpr size_t largest = size_t{1} << 60;

constexpr size_t up(size_t bytes, size_t grain_) { return (bytes + grain_ - 1) / grain_ * grain_; }

constexpr size_t rounded(size_t asked) { return asked < grain ? grain : up(asked, grain); }

constexpr bool is_small(size_t rounded_) { return rounded_ <= small_limit; }

constexpr size_t segment(size_t rounded_) {
  if (is_small(rounded_)) return small_segment;
  if (rounded_ < medium_limit) return medium_segment;
  return up(rounded_, large_grain);
}

constexpr size_t granule(bool small) { return small ? small_segment : medium_segment; }

// Small rests of large blocks are left on: they would only be holes.
constexpr bool worth_splitting(size_t rest, bool small) { return small ? rest >= grain : rest > small_limit; }

}  // namespace mg::size_class
