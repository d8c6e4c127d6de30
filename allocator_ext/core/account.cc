// What the allocator holds, as text: the snapshot that PyTorch's memory_viz page reads, after json -> pickle.
//
// Keys and their meaning are torch's: segments with their blocks, and a trace for each device. A waiting block is
// "active_pending_free", a free one "inactive".

#include <cinttypes>
#include <cstdio>

#include "core/device.h"

namespace mg {

namespace {

void put(std::string& text, const char* key, uint64_t value) {
  char number[64];
  snprintf(number, sizeof number, "\"%s\": %" PRIu64 ", ", key, value);
  text += number;
}

const char* state_of(const Block& block) {
  switch (block.state) {
    case BlockState::live:
      return "active_allocated";
    case BlockState::waiting:
      return "active_pending_free";
    case BlockState::free:
      return "inactive";
    case BlockState::unmapped:
      break;
  }
  return "";
}

const char* name_of(HistoryEntry::Action action) {
  const char* names[] = {"alloc", "free_completed", "segment_alloc", "segment_free", "oom"};
  return names[action];
}

uint64_t number(Stream stream) { return reinterpret_cast<uint64_t>(stream); }

}  // namespace

std::string Device::snapshot() {
  Lock lock(mutex_);
  std::string text = "{\"segments\": [";
  const char* comma = "";
  for (Pool* pool : pool_list_) {
    for (auto& [address, segment] : pool->segments()) {
      uint64_t allocated = 0, active = 0, requested = 0;
      std::string blocks;
      for (Block* block = segment->first; block != nullptr; block = block->next) {
        bool live = block->state == BlockState::live;
        if (live) allocated += block->size;
        if (live) requested += block->requested;
        if (block->state != BlockState::free) active += block->size;
        blocks += block == segment->first ? "{" : ", {";
        put(blocks, "address", block->address);
        put(blocks, "size", block->size);
        put(blocks, "requested_size", live ? block->requested : 0);
        blocks += std::string("\"state\": \"") + state_of(*block) + "\", \"frames\": []}";
      }
      text += std::string(comma) + "{";
      put(text, "device", static_cast<uint64_t>(index_));
      put(text, "address", address);
      put(text, "total_size", segment->size);
      put(text, "allocated_size", allocated);
      put(text, "active_size", active);
      put(text, "requested_size", requested);
      put(text, "stream", number(segment->home));
      text += std::string("\"segment_type\": \"") + (segment->small ? "small" : "large") + "\", \"segment_pool_id\": [";
      text += std::to_string(pool->id.first) + ", " + std::to_string(pool->id.second);
      text += "], \"is_expandable\": false, \"frames\": [], \"blocks\": [" + blocks + "]}";
      comma = ", ";
    }
  }
  text += "], \"device_traces\": [[";
  comma = "";
  for (const HistoryEntry& entry : history_) {
    text += std::string(comma) + "{\"action\": \"" + name_of(entry.action) + "\", ";
    put(text, "addr", entry.address);
    put(text, "size", entry.size);
    put(text, "stream", number(entry.stream));
    text += "\"frames\": []}";
    comma = ", ";
  }
  return text + "]]}";
}

}  // namespace mg
