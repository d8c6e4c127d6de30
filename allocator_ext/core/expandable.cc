// Expandable segments: a range of addresses for each pool, stream and kind of size, of which granules are mapped as they
// are needed.
//
// Why: blocks of all sizes share one range, so that what a freed large block leaves is joined by what is mapped behind it,
// instead of waiting for a request of its size. In: requests that no free block serves. Out: a free block at the end of
// what is mapped, or in a hole; at the other end of life, whole granules that are free go back.
// Each granule is one physical allocation, and its handle is released once it is mapped: the mapping keeps it.
// Invariant: a block is mapped and accessible as a whole, or it is an unmapped block.

#include <algorithm>

#include "core/device.h"
#include "core/relaxed_capture.h"

namespace mg {

// Free mapped memory before the end, and what has to be mapped behind it.
Pool::Room Pool::room(size_t size, Stream stream, bool small) const {
  Room best;
  for (auto& [address, segment] : segments_) {
    if (segment->granule == 0 || segment->home != stream || segment->small != small) continue;
    for (Block* block = segment->first; block != nullptr; block = block->next) {
      if (block->state != BlockState::unmapped) continue;
      const Block* before = block->previous;
      bool joins = before != nullptr && before->state == BlockState::free && before->tag == settled && before->stream == stream;
      size_t has = joins ? before->size : 0;
      size_t bytes = has < size ? size_class::up(size - has, segment->granule) : segment->granule;
      if (bytes <= block->size && (best.unmapped == nullptr || bytes < best.bytes)) best = {block, bytes};
    }
  }
  return best;
}

Segment* Pool::add_range(Address address, size_t size, Stream stream, bool small) {
  auto segment = std::make_unique<Segment>();
  auto block = std::make_unique<Block>();
  segment->address = block->address = address;
  segment->size = block->size = size;
  segment->granule = size_class::granule(small);
  segment->home = block->stream = stream;
  segment->pool = this;
  segment->small = small;
  block->segment = segment.get();
  block->state = BlockState::unmapped;
  segment->first = block.release();
  Segment* made = segment.get();
  segments_.emplace(address, std::move(segment));
  return made;
}

Block* Pool::mapped(Block* block, size_t bytes) {
  if (bytes < block->size) {
    auto rest = new Block(*block);
    rest->address += bytes;
    rest->size -= bytes;
    rest->previous = block;
    if (rest->next != nullptr) rest->next->previous = rest;
    block->next = rest;
    block->size = bytes;
  }
  Segment& segment = *block->segment;
  block->stream = segment.home;
  block->tag = settled;
  block->point = 0;
  list(block);
  segment.mapped += bytes;
  reserved += bytes;
  // Not with what is free under a condition: then this would be under it too.
  auto plain = [](const Block* b) { return b != nullptr && b->state == BlockState::free && b->tag == settled; };
  if (plain(block->next)) merge(block, block->next);
  Block* previous = block->previous;
  return plain(previous) && merge(previous, block) ? previous : block;
}

Address Pool::free_granule(const Segment& segment, Address from) {
  Address start = 0, end = 0;  // of a run of free blocks
  for (const Block* block = segment.first; block != nullptr; block = block->next) {
    if (block->state != BlockState::free || block->tag != settled) continue;
    if (block->address != end) start = block->address;
    end = block->address + block->size;
    Address granule = segment.address + size_class::up(std::max(start, from) - segment.address, segment.granule);
    if (granule + segment.granule <= end) return granule;
  }
  return 0;
}

void Pool::unmapped(Block* block) {
  Segment& segment = *block->segment;
  block->state = BlockState::unmapped;
  block->markers.clear();
  segment.mapped -= block->size;
  reserved -= block->size;
  auto absorb = [](Block* left, Block* right) {
    left->size += right->size;
    left->next = right->next;
    if (left->next != nullptr) left->next->previous = left;
    delete right;
  };
  auto open = [](const Block* b) { return b != nullptr && b->state == BlockState::unmapped; };
  if (open(block->next)) absorb(block, block->next);
  if (open(block->previous)) absorb(block->previous, block);
}

void Pool::drop(Segment& segment) { segments_.erase(segment.address); }

Segment* Device::reserve(Pool& pool, const Request& request, std::string& reason) {
  bool small = size_class::is_small(request.size);
  size_t free = 0, total = 0;
  Address address = 0;
  RelaxedCapture relaxed(driver_);
  bool told = relaxed.ok && driver_.memory_info(&free, &total) == result::success;
  // An eighth more than there is, so that holes in the range do not end it.
  size_t bytes = size_class::up(total + total / 8, size_class::granule(small));
  if (!told || request.size > total || driver_.address_reserve(&address, bytes, 0, 0, 0) != result::success) {
    reason = "the driver has no range of addresses for this";
    return nullptr;
  }
  try {
    return pool.add_range(address, bytes, request.stream, small);
  } catch (...) {
    driver_.address_free(address, bytes);
    throw;
  }
}

// All of it or, where the driver refuses, nothing.
bool Device::map(Address address, size_t bytes, size_t granule) {
  RelaxedCapture relaxed(driver_);
  int ordinal = 0;
  unmap_stuck();
  for (auto& [stuck, size] : stuck_) {
    if (stuck < address + bytes && address < stuck + size) return false;
  }
  stuck_.reserve(stuck_.size() + bytes / granule);
  if (!relaxed.ok || driver_.device_get(&ordinal, index_) != result::success) return false;
  PhysicalMemory memory{};
  memory.type = 1;
  memory.location = {1, ordinal};
  MemoryAccess access{{1, ordinal}, 3};
  size_t done = 0;
  for (; done < bytes; done += granule) {
    Physical handle = 0;
    if (driver_.physical_create(&handle, granule, &memory, 0) != result::success) break;
    bool mapped = driver_.memory_map(address + done, granule, 0, handle, 0) == result::success;
    driver_.physical_release(handle);
    if (!mapped) break;
  }
  if (done == bytes && driver_.memory_access(address, bytes, &access, 1) == result::success) return true;
  for (size_t at = 0; at < done; at += granule) {
    if (driver_.memory_unmap(address + at, granule) != result::success) stuck_.push_back({address + at, granule});
  }
  return false;
}

void Device::unmap_stuck() {
  for (size_t i = stuck_.size(); i-- > 0;) {
    if (driver_.memory_unmap(stuck_[i].first, stuck_[i].second) == result::success) {
      stuck_[i] = stuck_.back();
      stuck_.pop_back();
    }
  }
}

Block* Device::extend(Pool& pool, const Request& request, std::string& reason, bool& no_range) {
  bool small = size_class::is_small(request.size);
  Pool::Room room = pool.room(request.size, request.stream, small);
  if (room.unmapped == nullptr) {
    no_range = reserve(pool, request, reason) == nullptr;
    if (no_range) return nullptr;
    room = pool.room(request.size, request.stream, small);
  }
  if (!room_for(pool, room.bytes, reason)) return nullptr;
  Segment& segment = *room.unmapped->segment;
  Address address = room.unmapped->address;
  if (!map(address, room.bytes, segment.granule)) {
    reason = "the driver has no " + std::to_string(room.bytes / size_class::mib) + " MiB to map";
    return nullptr;
  }
  if (segment.mapped == 0) stats_.segments.add(1);
  stats_.reserved_bytes.add(static_cast<int64_t>(room.bytes));
  history_.add(HistoryEntry::segment_map, address, room.bytes, request.stream);
  return pool.mapped(room.unmapped, room.bytes);
}

// Granules that are free go back to the driver, and ranges of which nothing is mapped. Unmapping waits for nobody, so the
// device is waited for first.
size_t Device::shrink(Pool& pool, uint64_t not_used_since) {
  size_t bytes = 0;
  bool waited = false;
  unmap_stuck();
  std::vector<Segment*> ranges;
  for (auto& [address, segment] : pool.segments()) {
    if (segment->granule != 0 && segment->last_use < not_used_since) ranges.push_back(segment.get());
  }
  for (Segment* segment : ranges) {
    Address from = segment->address;
    while (Address start = Pool::free_granule(*segment, from)) {
      from = start + segment->granule;
      waited = waited || driver_.context_synchronize() == result::success;
      if (!waited) return bytes;
      Block* granule = pool.take_at(start, segment->granule);
      if (driver_.memory_unmap(start, segment->granule) != result::success) {
        pool.give(granule, segment->home, settled, never_covered, {});  // nothing runs that uses it
        continue;
      }
      bytes += granule->size;
      stats_.reserved_bytes.add(-static_cast<int64_t>(granule->size));
      history_.add(HistoryEntry::segment_unmap, granule->address, granule->size, segment->home);
      pool.unmapped(granule);
      if (segment->mapped == 0) stats_.segments.add(-1);
    }
    bool stuck = std::any_of(stuck_.begin(), stuck_.end(), [&](auto& s) {
      return s.first >= segment->address && s.first < segment->address + segment->size;
    });
    if (segment->mapped == 0 && !stuck && driver_.address_free(segment->address, segment->size) == result::success) {
      pool.drop(*segment);
    }
  }
  return bytes;
}

void Device::unmap_all(const Segment& segment) {
  unmap_stuck();
  segment.each_run([&](const Block* first, const Block*, size_t bytes) {
    for (size_t at = 0; at < bytes; at += segment.granule) driver_.memory_unmap(first->address + at, segment.granule);
  });
  driver_.address_free(segment.address, segment.size);
}

}  // namespace mg
