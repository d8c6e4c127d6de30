#include "core/pool.h"

#include <algorithm>

namespace mg {

namespace {
constexpr size_t most_spare = 1024;
}

Pool::~Pool() {
  for (Block* block : spare_) delete block;
}

Block* Pool::add_segment(Address address, size_t size, Stream stream, Kind kind) {
  auto segment = std::make_unique<Segment>();
  auto block = std::make_unique<Block>();
  segment->address = block->address = address;
  segment->size = segment->mapped = block->size = size;
  segment->home = block->stream = stream;
  segment->pool = this;
  segment->kind = kind;
  block->segment = segment.get();
  Block* first = segment->first = block.release();
  auto [place, fresh] = segments_.emplace(address, std::move(segment));
  (void)fresh;
  try {
    list(first);
  } catch (...) {
    segments_.erase(place);
    throw;
  }
  reserved += size;
  return first;
}

void Pool::list(Block* block) {
  block->state = BlockState::free;
  if (block->segment->kind == Kind::shared) {
    holes_.add(block);
  } else {
    lists_.add(block);
  }
  if (block->tag != settled) tagged++;
}

void Pool::unlist(Block* block) {
  if (block->segment->kind == Kind::shared) {
    holes_.remove(block);
  } else {
    lists_.remove(block);
  }
  block->state = BlockState::waiting;  // no part of a hole
  if (block->tag != settled) tagged--;
}

Block* Pool::take(Block* block, size_t size) {
  Block* right = nullptr;
  prepare();
  unlist(block);
  if (size_class::worth_splitting(block->size - size, block->segment->kind)) right = behind_of(block, block->address + size);
  if (right != nullptr) list(right);
  block->state = BlockState::live;
  block->tag = settled;
  block->used_outside = block->point == never_covered;
  block->point = 0;
  block->markers.clear();
  return block;
}

// Two free blocks out of one, under its condition; the right one.
Block* Pool::split(Block* block, Address at) {
  prepare();
  unlist(block);
  Block* right = behind_of(block, at);
  list(block);
  list(right);
  return right;
}

// What may fail comes before anything is changed.
void Pool::prepare() {
  if (!spare_.empty()) return;
  spare_.reserve(most_spare);
  spare_.push_back(new Block);
}

Block* Pool::behind_of(Block* left, Address at) {
  Block* right = spare_.back();
  right->markers = left->markers;
  spare_.pop_back();
  right->address = at;
  right->size = left->address + left->size - at;
  right->segment = left->segment;
  right->state = left->state;
  right->stream = left->stream;
  right->tag = left->tag;
  right->point = left->point;
  right->previous = left;
  right->next = left->next;
  if (right->next != nullptr) right->next->previous = right;
  left->size = at - left->address;
  left->next = right;
  return right;
}

void Pool::retire(Block* block) {
  if (spare_.size() == most_spare) {
    delete block;
    return;
  }
  block->markers.clear();
  block->users.clear();
  spare_.push_back(block);
}

Block* Pool::take_at(Address address, size_t size) {
  Segment& segment = *std::prev(segments_.upper_bound(address))->second;
  Block* block = segment.first;
  while (block->address + block->size <= address) block = block->next;
  if (block->address < address) block = split(block, address);
  bool outside = false;
  for (Block* part = block;;) {
    if (part->address + part->size > address + size) split(part, address + size);
    outside = outside || part->point == never_covered;
    Block* next = part->next;
    unlist(part);
    if (part != block) absorb(block);
    if (block->size == size) break;
    part = next;
  }
  block->state = BlockState::live;
  block->tag = settled;
  block->used_outside = outside;
  block->by_proof = false;
  block->point = 0;
  block->markers.clear();
  return block;
}

// Both have been taken out of the lists.
void Pool::absorb(Block* left) {
  Block* right = left->next;
  left->size += right->size;
  left->next = right->next;
  if (left->next != nullptr) left->next->previous = left;
  retire(right);
}

Block* Pool::gather(Block* first, size_t size, Stream stream, Tag tag) {
  Block* last = first;
  for (size_t bytes = first->size; bytes < size; bytes += last->size) last = last->next;
  Address end = first->address + size;
  if (last->address + last->size > end) split(last, end);
  size_t markers = 0;
  for (Block* part = first; part != last->next; part = part->next) markers += part->markers.size();
  first->markers.reserve(markers);
  unlist(first);
  while (first->size < size) {
    Block* part = first->next;
    unlist(part);
    first->point = std::max(first->point, part->point);
    first->markers.insert(first->markers.end(), part->markers.begin(), part->markers.end());
    absorb(first);
  }
  first->stream = stream;
  first->tag = tag;
  list(first);
  return first;
}

bool Pool::maps(Address address, size_t size) const {
  auto above = segments_.upper_bound(address);
  if (above == segments_.begin()) return false;
  const Segment& segment = *std::prev(above)->second;
  if (address + size > segment.address + segment.size) return false;
  for (const Block* block = segment.first; block != nullptr; block = block->next) {
    bool within = block->address < address + size && address < block->address + block->size;
    if (within && block->state == BlockState::unmapped) return false;
  }
  return true;
}

void Pool::rejoin(Address address) {
  Block* block = free_from(address);
  unlist(block);
  join(block);
}

Block* Pool::give(Block* block, Stream stream, Tag tag, uint64_t point, const std::vector<Node>& markers) {
  block->stream = stream;
  block->tag = tag;
  block->point = point;
  block->markers = markers;
  block->users.clear();
  block->adopted = false;
  block->capture = block->born = 0;
  return join(block);
}

Block* Pool::bind(Block* block, Tag tag) {
  unlist(block);
  block->tag = tag;
  return join(block);
}

void Pool::withhold(Block* block) { bind(block, withheld); }

// Lists a block that is in no list, as one with its free neighbours where they agree.
Block* Pool::join(Block* block, bool settled_only) {
  auto joins = [&](const Block* neighbour) {
    return neighbour != nullptr && neighbour->state == BlockState::free && agree(block, neighbour) &&
           (!settled_only || neighbour->tag == settled);
  };
  Block* next = block->next;
  if (joins(next)) {
    unlist(next);
    fuse(block);
  }
  Block* previous = block->previous;
  if (joins(previous)) {
    unlist(previous);
    fuse(previous);
    block = previous;
  }
  list(block);
  return block;
}

// Whether one's condition holds the other's.
bool Pool::agree(const Block* left, const Block* right) {
  if (left->stream != right->stream) return false;
  // The later point of the two would keep other streams from the earlier one's memory.
  if (left->segment->kind == Kind::shared && left->point != right->point) return false;
  return one_period(left->tag, right->tag) || left->tag == settled || right->tag == settled;
}

// Makes `left` both it and the block behind it, which agree and are in no list.
void Pool::fuse(Block* left) {
  const Block* right = left->next;
  left->tag = std::max(left->tag, right->tag);
  left->point = std::max(left->point, right->point);
  left->markers.insert(left->markers.end(), right->markers.begin(), right->markers.end());
  absorb(left);
}

void Pool::settle() {
  if (tagged == 0) return;
  for (auto& [address, segment] : segments_) {
    for (Block* block = segment->first; block != nullptr; block = block->next) {
      if (block->state != BlockState::free || block->tag == settled) continue;
      bool in_a_hole = segment->kind == Kind::shared;  // which is no matter of conditions
      if (in_a_hole) tagged--;
      if (!in_a_hole) unlist(block);
      block->tag = settled;
      if (block->point != never_covered) {
        block->point = 0;
        block->stream = segment->home;
      }
      block->markers.clear();
      if (!in_a_hole) list(block);
    }
    for (Block* block = segment->first; block != nullptr;) {
      Block* next = block->next;
      if (next == nullptr || block->state != BlockState::free || next->state != BlockState::free || !agree(block, next)) {
        block = next;
        continue;
      }
      unlist(block);
      unlist(next);
      fuse(block);
      list(block);
    }
  }
}

std::vector<std::unique_ptr<Segment>> Pool::cut_cached(uint64_t not_used_since) {
  std::vector<std::unique_ptr<Segment>> cut;
  for (auto place = segments_.begin(); place != segments_.end();) {
    Segment& segment = *place->second;
    if (segment.expandable || !segment.cached() || segment.last_use >= not_used_since) {
      ++place;
      continue;
    }
    cut.emplace_back();
    for (Block* block = segment.first; block != nullptr; block = block->next) unlist(block);
    reserved -= segment.size;
    cut.back() = std::move(place->second);
    place = segments_.erase(place);
  }
  return cut;
}

void Pool::put_back(std::unique_ptr<Segment> segment) {
  Segment& kept = *segment;
  segments_.emplace(kept.address, std::move(segment));
  reserved += kept.size;
  for (Block* block = kept.first; block != nullptr; block = block->next) list(block);
}

Segment* Pool::add_range(Address address, size_t size, Stream stream, Kind kind) {
  auto segment = std::make_unique<Segment>();
  auto block = std::make_unique<Block>();
  segment->address = block->address = address;
  segment->size = block->size = size;
  segment->expandable = true;
  segment->home = block->stream = stream;
  segment->pool = this;
  segment->kind = kind;
  segment->captured = kind == Kind::shared;
  block->segment = segment.get();
  block->state = BlockState::unmapped;
  segment->open.emplace(address, block.get());
  segment->first = block.release();
  Segment* made = segment.get();
  segments_.emplace(address, std::move(segment));
  return made;
}

Block* Pool::mapped(Block* block, size_t bytes) {
  Segment& segment = *block->segment;
  prepare();
  auto place = segment.open.extract(block->address);
  if (bytes < block->size) {
    Block* rest = behind_of(block, block->address + bytes);
    place.key() = rest->address;
    place.mapped() = rest;
    segment.open.insert(std::move(place));
  }
  block->stream = segment.home;
  block->tag = settled;
  block->point = 0;
  block->state = BlockState::waiting;
  segment.mapped += bytes;
  reserved += bytes;
  // Not with what is free under a condition: then this would be under it too.
  return join(block, true);
}

Address Pool::free_chunk(const Segment& segment, Address from) {
  Address start = 0, end = 0;  // of a run of free blocks
  for (const Block* block = segment.first; block != nullptr; block = block->next) {
    if (block->state != BlockState::free || block->tag != settled) continue;
    if (block->address != end) start = block->address;
    end = block->address + block->size;
    auto chunk = segment.chunks.lower_bound(std::max(start, from));
    if (chunk != segment.chunks.end() && chunk->first + chunk->second.size <= end) return chunk->first;
  }
  return 0;
}

void Pool::unmapped(Block* block) {
  Segment& segment = *block->segment;
  block->state = BlockState::unmapped;
  block->markers.clear();
  segment.mapped -= block->size;
  segment.chunks.erase(block->address);
  reserved -= block->size;
  auto open = [](const Block* b) { return b != nullptr && b->state == BlockState::unmapped; };
  if (open(block->next)) {
    segment.open.erase(block->next->address);
    absorb(block);
  }
  if (open(block->previous)) {
    absorb(block->previous);
  } else {
    segment.open.emplace(block->address, block);
  }
}

Chunk* Pool::chunk_at(Address address) const {
  auto above = segments_.upper_bound(address);
  if (above == segments_.begin()) return nullptr;
  Segment& segment = *std::prev(above)->second;
  auto chunk = segment.chunks.find(address);
  return chunk == segment.chunks.end() ? nullptr : &chunk->second;
}

Block* Pool::open(Window& window, Address address, size_t size, const std::vector<Block*>& pieces) {
  auto segment = std::make_unique<Segment>();
  auto made = std::make_unique<Block>();
  prepare();
  window.pieces = pieces;
  segment->address = made->address = address;
  segment->size = made->size = size;
  segment->expandable = true;
  segment->kind = Kind::window;
  segment->home = nobody;
  segment->pool = this;
  segment->window = &window;
  made->segment = segment.get();
  made->state = BlockState::live;
  Block* block = segment->first = made.release();
  window.segment = segment.get();
  segments_.emplace(address, std::move(segment));
  for (Block* piece : pieces) {
    if (piece->state == BlockState::free) take(piece, piece->size);
    piece->state = BlockState::lent;
  }
  return block;
}

std::vector<Block*> Pool::close(Window& window) {
  segments_.erase(window.segment->address);
  window.segment = nullptr;
  std::vector<Block*> pieces;
  pieces.swap(window.pieces);
  for (Block* piece : pieces) piece->state = BlockState::waiting;
  return pieces;
}

}  // namespace mg
