#include "core/search.h"

#include <algorithm>

namespace mg {

namespace {

// Whether the beginning of a run, taken, would end within a page that lies in it as a whole.
bool cuts_a_page(const Run& run, size_t size) {
  Address base = run.first->segment->address, start = run.first->address;
  auto whole = [base](Address from, Address to) {
    size_t first = size_class::up(from - base, size_class::page) / size_class::page, last = (to - base) / size_class::page;
    return last > first ? last - first : 0;
  };
  Address at = start + size, end = start + run.bytes;
  return whole(start, end) > whole(start, at) + whole(at, end);
}

}  // namespace

Block* Search::find(Request& request) {
  // The driver did not tell: it may be a capture that goes on in a graph, for which nothing that was used is over.
  if (request.seen.status == Observation::unknown) return nullptr;
  for (;;) {
    Block* block = nullptr;
    StreamView* view = request.seen.view;
    auto kind = size_class::kind(request.size);
    if (view == nullptr) {
      block = request.pool->lists().best(request.size, kind, request.stream, &settled, 1);
    } else {
      if (shared(request)) block = find_shared(request);
      Tag tags[] = {view->order_tag, view->proof_tag, settled};
      // What this stream has outside of captures too.
      if (block == nullptr) block = request.pool->lists().best(request.size, kind, request.stream, tags, view->apart ? 2 : 3);
      if (block == nullptr && config_.reuse == Reuse::any_stream) block = find_covered(request, kind);
    }
    if (block == nullptr || verified(request, block)) return block;
  }
}

// Other streams of the same capture, and what of theirs was freed before this one last waited for them.
std::vector<Owner> Search::owners(const Request& request) {
  std::vector<Owner> found;
  StreamView& view = *request.seen.view;
  for (StreamView* other : view.capture->in_order) {
    if (other == &view || other->partial_at != 0 || !other->known) continue;
    found.push_back({other->stream, other->order_tag, other->proof_tag, lifetimes_.captures.cover(view, *other)});
  }
  return found;
}

Block* Search::find_covered(const Request& request, size_class::Kind kind) {
  for (const Owner& owner : owners(request)) {
    for (Tag tag : {owner.order_tag, owner.proof_tag}) {
      if (Block* block = request.pool->lists().best_covered(request.size, kind, owner.stream, tag, owner.cover)) return block;
    }
  }
  return nullptr;
}

// What captures share: neighbours of which this stream may have each.
Block* Search::find_shared(Request& request) {
  const Pool& pool = *request.pool;
  Run run;
  if (request.seen.view->partial_at == 0) {
    May may(*this, request, May::any);
    if (request.size <= size_class::low_limit) run.first = pool.holes().lowest(request.size, may);
    if (run.first == nullptr) run = pool.holes().best(request.size, may);
    if (may_stitch(request) && (run.first == nullptr || cuts_a_page(run, request.size))) {
      if (Block* block = stitch_cached(request, may, run.first != nullptr)) return block;
    }
  } else {
    run = pool.holes().best(request.size, May(*this, request, May::begun));
    if (run.first == nullptr) run = pool.holes().best(request.size, May(*this, request, May::over));
  }
  return run.first != nullptr ? out_of(request, run.first) : nullptr;
}

// One free block of the neighbours from `first` on, of which the stream may have each.
Block* Search::out_of(const Request& request, Block* first) {
  return first->size >= request.size ? first : gather(request, first, request.size);
}

May::May(Search& search, const Request& request, Which which) : request_(request) {
  StreamView* view = request.seen.view;
  settled_too_ = request.seen.status != Observation::unknown;
  if (view == nullptr) return;
  settled_too_ = !view->apart;
  if (which != over) order_tag_ = view->order_tag;
  if (which != begun) proof_tag_ = view->proof_tag;
  if (which != begun) owners_ = search.owners(request);
}

bool May::operator()(const Block& block) const {
  if (block.state != BlockState::free) return false;
  if (block.tag == settled) {
    return settled_too_ && (block.stream == request_.stream || (block.stream == nobody && request_.seen.view != nullptr));
  }
  if (block.stream == request_.stream) return block.tag == order_tag_ || block.tag == proof_tag_;
  return std::any_of(owners_.begin(), owners_.end(), [&](const Owner& owner) {
    return owner.stream == block.stream && (block.tag == owner.order_tag || block.tag == owner.proof_tag) &&
           block.point <= owner.cover;
  });
}

// The neighbours from `first` on as one block of `size` that is this stream's.
Block* Search::gather(const Request& request, Block* first, size_t size) {
  bool moved = false, by_proof = false;
  Tag tag = settled;
  size_t bytes = 0;
  for (const Block* part = first; bytes < size; part = part->next) {
    bytes += part->size;
    moved = moved || (part->stream != request.stream && part->stream != nobody);
    by_proof = by_proof || moved || part->tag % 2 == 1;
    if (part->tag != settled) tag = request.seen.view->order_tag;
  }
  if (moved) stats_.moved++;
  if (by_proof) tag = request.seen.view->proof_tag;
  return request.pool->gather(first, size, request.stream, tag);
}

// When verifying: what is not proven again nobody gets before the captures end.
bool Search::verified(const Request& request, Block* block) {
  if (!config_.verify || block->markers.empty() || proven_again(request, block)) return true;
  stats_.verify_failures++;
  request.pool->withhold(block);
  return false;
}

bool Search::proven_again(const Request& request, const Block* block) {
  stats_.verified++;
  bool full = block->tag % 2 == 1 || block->stream != request.stream;
  return std::all_of(block->markers.begin(), block->markers.end(),
                     [&](Node marker) { return lifetimes_.captures.proves(request.stream, marker, full); });
}

}  // namespace mg
