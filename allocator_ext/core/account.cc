#include "core/account.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "core/readable.h"

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
    case BlockState::lent:
      break;
  }
  return "";
}

const char* name_of(HistoryEntry::Action action) {
  const char* names[] = {"alloc",        "free_requested", "free_completed", "segment_alloc",
                         "segment_free", "segment_map",    "segment_unmap",  "oom"};
  return names[action];
}

uint64_t number(Stream stream) { return reinterpret_cast<uint64_t>(stream); }

std::string counted(size_t count, const char* what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

}  // namespace

std::string snapshot_text(int index, const std::vector<Pool*>& pools, const History& history) {
  std::string text = "{\"segments\": [";
  const char* comma = "";
  for (const Pool* pool : pools) {
    for (auto& [address, segment] : pool->segments()) {
      const Segment* in = segment.get();
      in->each_run([&](const Block* first, const Block* end, size_t bytes) {
        uint64_t allocated = 0, active = 0, requested = 0;
        std::string blocks;
        for (const Block* block = first; block != end; block = block->next) {
          bool live = block->state == BlockState::live;
          if (live) allocated += block->size;
          if (live) requested += block->requested;
          if (block->state != BlockState::free) active += block->size;
          blocks += block == first ? "{" : ", {";
          put(blocks, "address", block->address);
          put(blocks, "size", block->size);
          put(blocks, "requested_size", live ? block->requested : 0);
          blocks += std::string("\"state\": \"") + state_of(*block) + "\", \"frames\": []}";
        }
        text += std::string(comma) + "{";
        put(text, "device", static_cast<uint64_t>(index));
        put(text, "address", first->address);
        put(text, "total_size", bytes);
        put(text, "allocated_size", allocated);
        put(text, "active_size", active);
        put(text, "requested_size", requested);
        put(text, "stream", in->home == nobody ? 0 : number(in->home));
        text += std::string("\"segment_type\": \"") + (in->kind == size_class::Kind::small ? "small" : "large") + "\", \"segment_pool_id\": [";
        text += std::to_string(pool->id.first) + ", " + std::to_string(pool->id.second) + "], \"is_expandable\": ";
        text += std::string(in->expandable ? "true" : "false") + ", \"frames\": [], \"blocks\": [" + blocks + "]}";
        comma = ", ";
      });
    }
  }
  text += "], \"device_traces\": [";
  for (int other = 0; other < index; other++) text += "[], ";  // a trace stands at the number of its device
  text += "[";
  comma = "";
  history.read([&](const HistoryEntry& entry) {
    text += std::string(comma) + "{\"action\": \"" + name_of(entry.action) + "\", ";
    put(text, entry.action == HistoryEntry::oom ? "device_free" : "addr", entry.address);
    put(text, "size", entry.size);
    put(text, "stream", number(entry.stream));
    put(text, "time_us", static_cast<uint64_t>(entry.microseconds));
    text += "\"frames\": []}";
    comma = ", ";
  });
  return text + "]], \"external_annotations\": []}";
}

std::string account(int index, const std::vector<Pool*>& pools, const Stats& stats, size_t asked, const std::string& reason,
                    size_t free, size_t total) {
  std::string text = "out of memory: tried to allocate " + readable(asked) + " on device " + std::to_string(index) +
                     "; " + reason + ".";
  if (total != 0) {
    text += " The device has " + readable(free) + " free of " + readable(total) + ".";
  }
  size_t live = static_cast<size_t>(stats.allocated_bytes.current);
  size_t active = static_cast<size_t>(stats.active_bytes.current);
  size_t reserved = static_cast<size_t>(stats.reserved_bytes.current);
  text += " Of " + readable(reserved) + " reserved here, " + readable(live) + " are allocated, " +
          readable(active - live) + " are freed and wait for other streams or the end of a capture, " +
          readable(reserved - active) + " are cached.";
  for (const Pool* pool : pools) {
    if (pool->reserved == 0) continue;
    bool is_default = pool->id == PoolId{};
    size_t bytes[block_states] = {}, counts[block_states] = {}, largest[block_states] = {};  // by state
    for (auto& [address, segment] : pool->segments()) {
      for (const Block* block = segment->first; block != nullptr; block = block->next) {
        auto state = static_cast<size_t>(block->state);
        bytes[state] += block->size;
        counts[state]++;
        largest[state] = std::max(largest[state], block->size);
      }
    }
    auto is = [](BlockState state) { return static_cast<size_t>(state); };
    text += is_default ? " The default pool"
                                  : " Pool (" + std::to_string(pool->id.first) + ", " + std::to_string(pool->id.second) + ")";
    text += " holds " + readable(pool->reserved);
    if (counts[is(BlockState::live)] != 0) {
      text += ": " + counted(counts[is(BlockState::live)], "block") + " of " + readable(bytes[is(BlockState::live)]) +
              ", the largest of " + readable(largest[is(BlockState::live)]);
    }
    if (counts[is(BlockState::waiting)] != 0) {
      text += "; waiting: " + counted(counts[is(BlockState::waiting)], "block") + " of " +
              readable(bytes[is(BlockState::waiting)]);
    }
    if (counts[is(BlockState::free)] != 0) {
      text += "; free: " + counted(counts[is(BlockState::free)], "piece") + " of " + readable(bytes[is(BlockState::free)]) +
              ", the largest of " + readable(largest[is(BlockState::free)]);
    }
    if (!is_default && pool->users > 0) text += "; it is held";
    if (pool->limit != 0) text += "; it may use " + readable(pool->limit);
    text += ".";
  }
  return text;
}

}  // namespace mg
