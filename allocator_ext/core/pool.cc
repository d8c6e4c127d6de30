#include "core/pool.h"

#include <algorithm>

namespace mg {

namespace {
constexpr int looks = 16;  // of best_covered
}

Block* Pool::best(size_t size, Stream stream, const Tag* tags, size_t count) const {
  const Free& free = size_class::is_small(size) ? small_ : large_;
  Block key;
  key.size = size;
  Block* best = nullptr;
  for (size_t i = 0; i < count; i++) {
    auto list = free.find({stream, tags[i]});
    if (list == free.end()) continue;
    auto place = list->second.lower_bound(&key);
    if (place == list->second.end()) continue;
    if (best == nullptr || BySize()(*place, best)) best = *place;
  }
  return best;
}

Block* Pool::best_covered(size_t size, Stream owner, Tag tag, uint64_t cover) const {
  const Free& free = size_class::is_small(size) ? small_ : large_;
  auto list = free.find({owner, tag});
  if (list == free.end()) return nullptr;
  Block key;
  key.size = size;
  auto place = list->second.lower_bound(&key);
  for (int i = 0; i < looks && place != list->second.end(); i++, ++place) {
    if ((*place)->point <= cover) return *place;
  }
  return nullptr;
}

Block* Pool::best_settled(size_t size) const {
  const Free& free = size_class::is_small(size) ? small_ : large_;
  Block* best = nullptr;
  for (auto& [condition, list] : free) {
    if (condition.tag != settled) continue;
    Block* found = this->best(size, condition.stream, &condition.tag, 1);
    if (found != nullptr && (best == nullptr || BySize()(found, best))) best = found;
  }
  return best;
}

Block* Pool::add_segment(Address address, size_t size, Stream stream, bool small) {
  auto segment = std::make_unique<Segment>();
  auto block = std::make_unique<Block>();
  segment->address = block->address = address;
  segment->size = segment->mapped = block->size = size;
  segment->home = block->stream = stream;
  segment->pool = this;
  segment->small = small;
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
  lists(block)[{block->stream, block->tag}].insert(block);
  if (block->tag != settled) tagged++;
}

void Pool::unlist(Block* block) {
  auto& free = lists(block);
  auto place = free.find({block->stream, block->tag});
  place->second.erase(block);
  if (place->second.empty()) free.erase(place);
  if (block->tag != settled) tagged--;
}

Block* Pool::take(Block* block, size_t size) {
  size_t rest = block->size - size;
  std::unique_ptr<Block> cut;
  if (size_class::worth_splitting(rest, block->segment->small)) cut = std::make_unique<Block>(*block);
  unlist(block);
  if (cut != nullptr) {
    Block* right = cut.release();
    right->address += size;
    right->size = rest;
    right->previous = block;
    if (right->next != nullptr) right->next->previous = right;
    block->next = right;
    block->size = size;
    list(right);
  }
  block->state = BlockState::live;
  block->tag = settled;
  block->used_outside = block->point == never_covered;
  block->point = 0;
  block->markers.clear();
  return block;
}

// Two free blocks out of one, under its condition; the right one.
Block* Pool::split(Block* block, Address at) {
  auto made = std::make_unique<Block>(*block);
  unlist(block);
  Block* right = made.release();
  right->address = at;
  right->size = block->address + block->size - at;
  right->previous = block;
  if (right->next != nullptr) right->next->previous = right;
  block->size = at - block->address;
  block->next = right;
  list(block);
  list(right);
  return right;
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
    if (part != block) {
      block->size += part->size;
      block->next = next;
      if (next != nullptr) next->previous = block;
      delete part;
    }
    if (block->size == size) break;
    part = next;
  }
  block->state = BlockState::live;
  block->used_outside = outside;
  block->by_proof = false;
  block->point = 0;
  block->markers.clear();
  return block;
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

Block* Pool::give(Block* block, Stream stream, Tag tag, uint64_t point, const std::vector<Node>& markers) {
  block->stream = stream;
  block->tag = tag;
  block->point = point;
  block->markers = markers;
  block->users.clear();
  block->adopted = false;
  block->capture = block->born = 0;
  list(block);
  return join(block);
}

void Pool::withhold(Block* block) {
  unlist(block);
  block->tag = withheld;
  list(block);
  join(block);
}

Block* Pool::join(Block* block) {
  if (block->next != nullptr) merge(block, block->next);
  Block* previous = block->previous;
  return previous != nullptr && merge(previous, block) ? previous : block;
}

// Makes `left` both of them, and deletes `right`, where both are free and one condition holds the other.
bool Pool::merge(Block* left, Block* right) {
  if (left->state != BlockState::free || right->state != BlockState::free) return false;
  if (left->stream != right->stream) return false;
  if (!one_period(left->tag, right->tag) && left->tag != settled && right->tag != settled) return false;
  unlist(left);
  unlist(right);
  left->tag = std::max(left->tag, right->tag);
  left->point = std::max(left->point, right->point);
  left->markers.insert(left->markers.end(), right->markers.begin(), right->markers.end());
  left->size += right->size;
  left->next = right->next;
  if (left->next != nullptr) left->next->previous = left;
  delete right;
  list(left);
  return true;
}

void Pool::settle() {
  if (tagged == 0) return;
  for (auto& [address, segment] : segments_) {
    for (Block* block = segment->first; block != nullptr; block = block->next) {
      if (block->state != BlockState::free || block->tag == settled) continue;
      unlist(block);
      block->tag = settled;
      if (block->point != never_covered) {
        block->point = 0;
        block->stream = segment->home;
      }
      block->markers.clear();
      list(block);
    }
    for (Block* block = segment->first; block != nullptr;) {
      if (block->next == nullptr || !merge(block, block->next)) block = block->next;
    }
  }
}

std::vector<std::unique_ptr<Segment>> Pool::cut_cached(uint64_t not_used_since) {
  std::vector<std::unique_ptr<Segment>> cut;
  for (auto place = segments_.begin(); place != segments_.end();) {
    Segment& segment = *place->second;
    if (segment.granule != 0 || !segment.cached() || segment.last_use >= not_used_since) {
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

std::string Pool::verify() const {
  size_t bytes = 0, free_blocks = 0, with_tag = 0, listed = 0;
  for (auto& [address, segment] : segments_) {
    bytes += segment->mapped;
    size_t mapped = 0;
    Address at = segment->address;
    const Block* previous = nullptr;
    for (const Block* block = segment->first; block != nullptr; block = block->next) {
      if (block->address != at) return "blocks leave a hole or overlap";
      if (block->previous != previous) return "a block does not know its neighbour";
      if (block->segment != segment.get()) return "a block is in another's segment";
      if (block->size == 0) return "an empty block";
      if (block->state != BlockState::unmapped) {
        mapped += block->size;
      } else if (segment->granule == 0 || block->size % segment->granule != 0 ||
                 (previous != nullptr && previous->state == BlockState::unmapped)) {
        return "unmapped memory is not in whole granules, or in two blocks";
      }
      if (block->state == BlockState::free) {
        free_blocks++;
        with_tag += block->tag != settled;
        const Free& free = segment->small ? small_ : large_;
        auto list = free.find({block->stream, block->tag});
        if (list == free.end() || list->second.count(const_cast<Block*>(block)) == 0) return "a free block is not listed";
        if (previous != nullptr && previous->state == BlockState::free && previous->stream == block->stream &&
            previous->tag == block->tag) {
          return "free neighbours are not one";
        }
      }
      at += block->size;
      previous = block;
    }
    if (at != segment->address + segment->size) return "blocks do not fill their segment";
    if (mapped != segment->mapped) return "mapped bytes are miscounted";
  }
  for (const Free* free : {&small_, &large_}) {
    for (auto& [condition, list] : *free) {
      if (list.empty()) return "an empty list is kept";
      listed += list.size();
    }
  }
  if (listed != free_blocks) return "a listed block is not free";
  if (with_tag != tagged) return "tagged blocks are miscounted";
  if (bytes != reserved) return "reserved bytes are miscounted";
  return "";
}

}  // namespace mg
