// Blocks out of pieces: when one is made, its window's mapping, and its end.
//
// In: a request of a capture for which no hole is right, though pieces of pages have enough. Out: a live block in a
// window, or the same memory at home where the pages lie side by side already. What a stream may have of the shared
// segment is asked of each piece as of each neighbour of a run, so a window adds nothing to the proofs.
// Where kernels begin early there are no windows: memory is seen by its other addresses once what wrote it is complete.
// Invariant: no window is unmapped while its pool is held after a capture, and no page goes back while a window maps it.

#include <algorithm>

#include "core/device.h"
#include "core/driver_guard.h"

namespace mg {

namespace {

using size_class::page;

// Windows of a pool have so many pages, for each page of the pool; then there are no more.
constexpr size_t most_windows = 10;

}  // namespace

// Whether the beginning of a run, taken, would end within a page that lies in it as a whole.
bool Device::cuts_a_page(const Run& run, size_t size) {
  Address base = run.first->segment->address, start = run.first->address;
  auto whole = [base](Address from, Address to) {
    size_t first = size_class::up(from - base, page) / page, last = (to - base) / page;
    return last > first ? last - first : 0;
  };
  Address at = start + size, end = start + run.bytes;
  return whole(start, end) > whole(start, at) + whole(at, end);
}

// Of what is mapped; `fits`: there is a place, and only something better is wanted.
Block* Device::stitch_cached(const Request& request, const May& may, bool fits) {
  Ends found = request.pool->holes().ends(may);
  auto plan = choose(found, request.size, fits ? Stitch::replace : Stitch::fill);
  return plan ? stitch(request, *plan) : nullptr;
}

// With pages that are mapped now, of which `room` has the place; no more than would be missing without pieces.
Block* Device::stitch_fresh(const Request& request, const May& may, Pool::Room room) {
  Ends found = request.pool->holes().ends(may);
  auto plan = choose(found, request.size, Stitch::grow);
  if (!plan || plan->fresh == 0 || plan->fresh * page > room.bytes) return nullptr;
  std::string unused;
  room.bytes = plan->fresh * page;
  Address next = room.unmapped->address;
  if (map_more(*request.pool, room, request.stream, unused) == nullptr) return nullptr;
  for (Address& at : plan->pages) {
    if (at != 0) continue;
    at = next;
    next += page;
  }
  return stitch(request, *plan);
}

Block* Device::stitch(const Request& request, const Plan& plan) {
  Pool& pool = *request.pool;
  size_t count = plan.pages.size();
  bool side_by_side = true;
  for (size_t i = 0; i < count; i++) {
    const Chunk* chunk = pool.chunk_at(plan.pages[i]);
    if (chunk == nullptr || chunk->handle == 0) return nullptr;
    if (i > 0) side_by_side = side_by_side && plan.pages[i] == plan.pages[i - 1] + page;
  }
  std::vector<Piece> parts = pieces_of(plan.pages, plan.offset, request.size);
  if (side_by_side && pool.maps(parts[0].address, request.size)) return out_of(request, pool.free_from(parts[0].address));

  if (pool.windows().pages() + count > most_windows * (pool.reserved / page)) return nullptr;
  std::vector<Block*> pieces;
  pieces.reserve(parts.size());
  Window* window = map_window(pool, plan.pages);
  if (window == nullptr) return nullptr;
  for (const Piece& part : parts) {
    Block* piece = gather(request, pool.free_from(part.address), part.size);
    if (config_.verify && !piece->markers.empty() && !proven_again(request, piece)) {
      stats_.verify_failures++;
      pool.withhold(piece);
      for (size_t i = 0; i < pieces.size(); i++) pool.rejoin(parts[i].address);
      return nullptr;  // and the window has no block
    }
    pieces.push_back(piece);
  }
  Block* block = pool.open(*window, window->address + plan.offset, request.size, pieces);
  for (Block* piece : pieces) piece->by_proof = true;
  block->stream = request.stream;
  block->tag = request.seen.view->proof_tag;
  stats_.stitched++;
  return block;
}

// All of it or, where the driver refuses, nothing that is used: what it does not take back then is tried again with what
// has no block any more.
Window* Device::map_window(Pool& pool, const std::vector<Address>& pages) {
  DriverGuard guard(driver_, context_, relaxed);
  int ordinal = 0;
  Address address = 0;
  size_t size = pages.size() * page;
  if (!guard.ok || driver_.device_get(&ordinal, index_) != result::success) return nullptr;
  std::vector<MemoryAccess> access{{{1, ordinal}, 3}};
  for (int peer : peers_) access.push_back({{1, peer}, 3});
  if (driver_.address_reserve(&address, size, 0, 0, 0) != result::success) return nullptr;
  Window* window = nullptr;
  try {
    window = &pool.windows().add(address, size);
  } catch (...) {
    driver_.address_free(address, size);
    throw;
  }
  for (Address at : pages) {
    Address next = address + window->pages.size() * page;
    if (driver_.memory_map(next, page, 0, pool.chunk_at(at)->handle, 0) != result::success) break;
    pool.windows().add_page(*window, at, *pool.chunk_at(at));
  }
  if (window->whole() && driver_.memory_access(address, size, access.data(), access.size()) == result::success) return window;
  unmap(pool, *window);
  return nullptr;
}

// From its end; where the driver refuses, the rest is still there.
bool Device::unmap(Pool& pool, Window& window) {
  while (!window.pages.empty()) {
    if (driver_.memory_unmap(window.address + (window.pages.size() - 1) * page, page) != result::success) return false;
    pool.windows().remove_page(window, pool.chunk_at(window.pages.back()));
  }
  if (driver_.address_free(window.address, window.size) != result::success) return false;
  pool.windows().drop(window);
  return true;
}

// Windows without a block, before the memory behind them goes back; where the device cannot be waited for they stay.
void Device::unmap_windows(Pool& pool, uint64_t not_used_since, bool& waited) {
  std::vector<Window*> idle;
  for (auto& [address, window] : pool.windows()) {
    bool old = std::all_of(window->pages.begin(), window->pages.end(), [&](Address at) {
      return std::prev(pool.segments().upper_bound(at))->second->last_use < not_used_since;
    });
    if (window->segment == nullptr && old) idle.push_back(window.get());
  }
  if (idle.empty() || !wait(waited)) return;
  for (Window* window : idle) unmap(pool, *window);
}

// Each piece is freed at home as the block would be.
void Device::end_of_window(Block* block) {
  Pool& pool = *block->segment->pool;
  Window& window = *block->segment->window;
  std::vector<Stream> users = std::move(block->users);
  Stream stream = block->stream;
  uint64_t capture = block->capture, born = block->born;
  history_.add(HistoryEntry::free_completed, block->address, block->size, stream);
  std::vector<Block*> pieces = pool.close(window);
  DriverGuard in(driver_, context_);
  for (Block* piece : pieces) {
    piece->users = users;
    piece->stream = stream;
    piece->capture = capture;
    piece->born = born;
    history_.add(HistoryEntry::allocate, piece->address, piece->size, stream);
    history_.add(HistoryEntry::free_requested, piece->address, piece->size, stream);
    lifetimes_.dispose(piece, watched());
  }
}

}  // namespace mg
