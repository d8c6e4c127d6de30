// How many bytes a request takes, from which kind of segment, and what is worth splitting off.
//
// Pure arithmetic. In: bytes asked for. Out: rounded bytes, segment bytes, bytes to map.
// Guarantee: rounded >= asked, a multiple of 512; a segment holds at least one rounded request.
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

// Expandable segments are mapped in whole pages. One physical allocation has at most `most_mapped` bytes: it goes back to the
// driver only when all of it is free, and the smaller it is, the sooner that is so.
constexpr size_t page = 2 * mib;
constexpr size_t most_mapped = 20 * mib;

// Which segments serve a request. Shared ones, which captures use, have requests of all sizes side by side; a window is no
// memory of its own but other addresses of pages of shared segments.
enum class Kind : unsigned char { small, large, shared, window };

constexpr Kind kind(size_t rounded_) { return is_small(rounded_) ? Kind::small : Kind::large; }

// How much is mapped at once where `missing` bytes are missing. Requests below 10 MiB are many, and to map a page for each
// would be slow, so 20 MiB are mapped for them. In shared segments only what is missing is mapped: a capture maps once, and
// every replay then has that memory.
constexpr size_t mapped(size_t missing, size_t rounded_, Kind kind_) {
  bool many = kind_ == Kind::large && rounded_ < medium_limit;
  return up(missing, many ? medium_segment : page);
}

// In shared segments, requests up to here are placed at low addresses, so that holes at the end stay large.
constexpr size_t low_limit = 128 * kib;

// Requests from here on, and below medium_limit, may be made of pieces of several pages.
constexpr size_t stitch_limit = 1 * mib;

// What is left of a large block is cut off only where it is of use: small rests would only be gaps.
constexpr bool worth_splitting(size_t rest, Kind kind_) {
  return kind_ == Kind::large ? rest > small_limit : rest >= grain;
}

}  // namespace mg::size_class
