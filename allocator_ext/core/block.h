// A segment and the blocks that it is divided into.
//
// A segment owns its blocks: they are linked by address from `first`, without holes, and die with it. The driver's
// memory itself is given back by the pool, which owns the segment. An expandable segment is a range of addresses of which
// whole pages are mapped, in chunks; memory that is not mapped is a block too, in no list. A shared segment serves captures,
// whichever streams are in them, so its home is `nobody`. Its blocks that are lent are in use at other addresses, those of a
// window (windows.h); the live block at these addresses is the only block of a segment of its own.
// Guarantee: blocks of a segment tile it; two free neighbours differ in stream or tag, else they are one.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <unordered_map>
#include <vector>

#include "core/size_class.h"
#include "core/types.h"

namespace mg {

class Pool;
struct Block;
struct Segment;
struct Window;

enum class BlockState : uint8_t { free, live, waiting, unmapped, lent };
constexpr size_t block_states = 5;

// Stands for no stream. A settled block of `nobody` is free for any stream that captures.
inline const Stream nobody = reinterpret_cast<Stream>(~uintptr_t{0});

struct BySize {
  using is_transparent = void;
  bool operator()(const Block* a, const Block* b) const;
  bool operator()(const Block* a, size_t size) const;
};
using FreeList = std::set<Block*, BySize>;

using ByAddress = std::unordered_map<Address, Block*>;

struct Block {
  Address address = 0;
  size_t size = 0;
  size_t requested = 0;
  Segment* segment = nullptr;
  Block* previous = nullptr;
  Block* next = nullptr;
  BlockState state = BlockState::free;

  Stream stream = nullptr;        // whose free list it is in, or for which it was allocated
  Tag tag = settled;              // while free
  uint64_t point = 0;             // while free: how many terminals of `stream` had been seen then, or never_covered
  std::vector<Node> markers;      // while free, when verifying: what must precede its next life

  std::vector<Stream> users;      // other streams that used it (record_stream), while live or waiting
  uint64_t capture = 0;           // serial of the capture that it was allocated in, 0: in none
  uint64_t born = 0;              // that capture's clock then
  bool used_outside = false;      // its memory was in use outside of captures, on this stream
  bool by_proof = false;          // its memory was another stream's, or used on one, earlier in that capture
  uint64_t life = 0;              // while live: which, of all that there were
  bool adopted = false;           // while live: a free of it is not the end, or nobody knows of it
  unsigned events = 0;            // not yet passed
  bool borrowed = false;          // while live or waiting: its pool serves somebody else with it

  // While free in a shared segment: of a hole, which is free neighbours. The first block knows its bytes, and first and
  // last know each other.
  size_t hole_bytes = 0;
  Block* hole_other = nullptr;

  FreeList* in = nullptr;         // while listed elsewhere, and where
  FreeList::iterator place;
  // Memory of the host for both kinds of entry is asked for once and then kept: from one listing of the block to the next,
  // and from one of its lives to the next.
  FreeList::node_type node;
  ByAddress::node_type live;
};

inline bool BySize::operator()(const Block* a, const Block* b) const {
  return a->size != b->size ? a->size < b->size : a->address < b->address;
}
inline bool BySize::operator()(const Block* a, size_t size) const { return a->size < size; }

// What one call has mapped. Of pages of shared segments the handles are kept, so that they can be mapped again.
struct Chunk {
  size_t size;
  Physical handle = 0;
  size_t windows = 0;    // how many windows map it too
  bool away = false;     // its pool sleeps, and its memory is the device's
  size_t kept_at = 0;    // where its contents begin in what the host keeps of the pool
};

struct Segment {
  Address address = 0;
  size_t size = 0;
  size_t mapped = 0;   // how much of it is mapped: all, but of an expandable one
  bool expandable = false;
  size_class::Kind kind = size_class::Kind::large;
  std::map<Address, Chunk> chunks;   // of an expandable segment
  std::map<Address, Block*> open;    // its unmapped blocks
  Stream home = nullptr;
  Pool* pool = nullptr;
  Block* first = nullptr;
  Window* window = nullptr;          // of a window's segment
  uint64_t last_use = 0;
  bool captured = false;             // a capture was served from it, so graphs may use it on whichever stream

  Segment() = default;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment() {
    for (Block* block = first; block != nullptr;) {
      Block* next = block->next;
      delete block;
      block = next;
    }
  }

  // Whose a block is when nothing binds it to a capture any more.
  Stream home_of(const Block& block) const { return home == nobody ? block.stream : home; }

  bool cached() const {
    for (const Block* block = first; block != nullptr; block = block->next) {
      if (block->state == BlockState::unmapped) continue;
      if (block->state != BlockState::free || block->tag != settled) return false;
    }
    return true;
  }

  // For each run of mapped memory: its first block, the one behind it, its bytes. What is lent is in the window's run.
  template <class Run>
  void each_run(Run run) const {
    for (const Block* block = first; block != nullptr;) {
      const Block* begin = block;
      size_t bytes = 0;
      for (; block != nullptr && here(*block); block = block->next) bytes += block->size;
      if (bytes != 0) run(begin, block, bytes);
      if (block != nullptr) block = block->next;
    }
  }
  static bool here(const Block& block) {
    return block.state != BlockState::unmapped && block.state != BlockState::lent;
  }
};

}  // namespace mg
