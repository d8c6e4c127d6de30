// Blocks made of pieces of several pages (windows.h has an example).
//
// In: a request of a capture for which no hole is right, though pieces of pages have enough. Out: a live block in a
// window, or the same memory at home where the chosen pages lie side by side already.
// What a stream may have of a shared segment is asked of each piece as of each neighbour of a run, so a window adds nothing
// to the proofs. Where kernels begin early there are no windows: what a kernel wrote by one address is there by another
// when that kernel is complete, and an early kernel may look before.

#include <algorithm>

#include "core/search.h"

namespace mg {

namespace {

using size_class::page;

// A pool's windows have at most so many pages for each page of the pool; then no more are made.
constexpr size_t most_windows = 10;

}  // namespace

// Of what is mapped; `fits`: there is a place, and only something better is wanted.
Block* Search::stitch_cached(const Request& request, const May& may, bool fits) {
  Ends found = request.pool->holes().ends(may);
  auto plan = choose(found, request.size, fits ? Stitch::replace : Stitch::fill);
  return plan ? stitch(request, *plan) : nullptr;
}

// With pages that are mapped now, of which `room` has the place; no more than would be missing without pieces.
Block* Search::stitch_fresh(const Request& request, const May& may, Pool::Room room) {
  Ends found = request.pool->holes().ends(may);
  auto plan = choose(found, request.size, Stitch::grow);
  if (!plan || plan->fresh == 0 || plan->fresh * page > room.bytes) return nullptr;
  std::string unused;
  room.bytes = plan->fresh * page;
  Address next = room.unmapped->address;
  if (supply_.pages(*request.pool, room, request.stream, unused) == nullptr) return nullptr;
  for (Address& at : plan->pages) {
    if (at != 0) continue;
    at = next;
    next += page;
  }
  return stitch(request, *plan);
}

Block* Search::stitch(const Request& request, const Plan& plan) {
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
  Window* window = supply_.window(pool, plan.pages);
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

}  // namespace mg
