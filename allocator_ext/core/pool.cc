#include "core/pool.h"

#include <algorithm>

namespace mg {

namespace {
constexpr int looks = 16;  // of best_covered
constexpr size_t most_spare = 1024;
}

Pool::~Pool() {
  for (Block* block : spare_) delete block;
}

FreeList& Pool::list_of(Kind kind, Stream stream, Tag tag) {
  if (tag != settled) return lists(kind)[{stream, tag}];
  Last& last = last_[static_cast<size_t>(kind)];
  if (last.list == nullptr || last.stream != stream) last = {stream, &lists(kind)[{stream, tag}]};
  return *last.list;
}

const FreeList* Pool::known_list(Kind kind, Stream stream, Tag tag) const {
  const Last& last = last_[static_cast<size_t>(kind)];
  if (tag == settled && last.stream == stream && last.list != nullptr) return last.list;
  auto list = lists(kind).find({stream, tag});
  return list == lists(kind).end() ? nullptr : &list->second;
}

Block* Pool::best(size_t size, Kind kind, Stream stream, const Tag* tags, size_t count) const {
  Block* best = nullptr;
  for (size_t i = 0; i < count; i++) {
    const FreeList* list = known_list(kind, stream, tags[i]);
    if (list == nullptr) continue;
    auto place = list->lower_bound(size);
    if (place == list->end()) continue;
    if (best == nullptr || BySize()(*place, best)) best = *place;
  }
  return best;
}

Block* Pool::best_covered(size_t size, Kind kind, Stream owner, Tag tag, uint64_t cover) const {
  const FreeList* list = known_list(kind, owner, tag);
  if (list == nullptr) return nullptr;
  auto place = list->lower_bound(size);
  for (int i = 0; i < looks && place != list->end(); i++, ++place) {
    if ((*place)->point <= cover) return *place;
  }
  return nullptr;
}

Block* Pool::best_settled(size_t size) const {
  Block* best = nullptr;
  for (Kind kind : {Kind::small, Kind::large}) {
    for (auto& [condition, list] : lists(kind)) {
      if (condition.tag != settled) continue;
      Block* found = this->best(size, kind, condition.stream, &condition.tag, 1);
      if (found != nullptr && (best == nullptr || BySize()(found, best))) best = found;
    }
  }
  return best;
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

// The holes that end and begin beside a block.
Pool::Hole Pool::before(const Block* block) {
  Block* last = block->previous;
  if (last == nullptr || last->state != BlockState::free) return {0, nullptr};
  return {last->hole_other->hole_bytes, last->hole_other};
}

Pool::Hole Pool::behind(const Block* block) {
  Block* first = block->next;
  if (first == nullptr || first->state != BlockState::free) return {0, nullptr};
  return {first->hole_bytes, first};
}

void Pool::list_hole(Block* first, Block* last, size_t bytes) {
  first->hole_bytes = bytes;
  first->hole_other = last;
  last->hole_other = first;
  holes_.insert({bytes, first});
  holes_at_.emplace(first->address, first);
}

void Pool::forget_hole(const Hole& hole) {
  holes_.erase(hole);
  holes_at_.erase(hole.first->address);
}

// What is left of the hole are two, one or none. Only from within a hole its beginning has to be looked for.
void Pool::unlist_hole(Block* block) {
  auto free = [](const Block* b) { return b != nullptr && b->state == BlockState::free; };
  Block* first = block;
  size_t left = 0;
  if (free(block->previous) && !free(block->next)) {
    first = block->hole_other;
    left = first->hole_bytes - block->size;
  } else {
    for (; free(first->previous); left += first->size) first = first->previous;
  }
  Block* last = first->hole_other;
  size_t right = first->hole_bytes - left - block->size;
  forget_hole({first->hole_bytes, first});
  if (left != 0) list_hole(first, block->previous, left);
  if (right != 0) list_hole(block->next, last, right);
}

void Pool::list(Block* block) {
  block->state = BlockState::free;
  if (block->segment->kind == Kind::shared) {
    Hole left = before(block), right = behind(block);
    if (left.bytes != 0) forget_hole(left);
    if (right.bytes != 0) forget_hole(right);
    Block* first = left.bytes != 0 ? left.first : block;
    Block* last = right.bytes != 0 ? right.first->hole_other : block;
    list_hole(first, last, left.bytes + block->size + right.bytes);
  } else {
    FreeList& list = list_of(block->segment->kind, block->stream, block->tag);
    if (block->node.empty()) {
      block->place = list.insert(block).first;
    } else {
      block->node.value() = block;
      block->place = list.insert(std::move(block->node)).position;
    }
    block->in = &list;
  }
  if (block->tag != settled) tagged++;
}

void Pool::unlist(Block* block) {
  if (block->segment->kind == Kind::shared) {
    unlist_hole(block);
  } else {
    block->node = block->in->extract(block->place);
    if (block->tag != settled && block->in->empty()) lists(block->segment->kind).erase({block->stream, block->tag});
    block->in = nullptr;
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

Block* Pool::free_from(Address address) {
  Block* block = std::prev(holes_at_.upper_bound(address))->second;
  while (block->address + block->size <= address) block = block->next;
  return block->address < address ? split(block, address) : block;
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

std::string Pool::verify() const {
  size_t bytes = 0, free_blocks = 0, with_tag = 0, listed = 0, holes = 0;
  for (auto& [address, segment] : segments_) {
    bytes += segment->mapped;
    size_t mapped = 0;
    Address at = segment->address;
    const Block *previous = nullptr, *hole = nullptr;
    size_t hole_bytes = 0, open = 0;
    if (segment->kind == Kind::window) continue;  // verify_windows
    for (const Block* block = segment->first; block != nullptr; block = block->next) {
      if (block->address != at) return "blocks leave a hole or overlap";
      if (block->previous != previous) return "a block does not know its neighbour";
      if (block->segment != segment.get()) return "a block is in another's segment";
      if (block->size == 0) return "an empty block";
      if (block->state != BlockState::unmapped) {
        mapped += block->size;
      } else if (!segment->expandable || block->size % size_class::page != 0 ||
                 (previous != nullptr && previous->state == BlockState::unmapped)) {
        return "unmapped memory is not in whole pages, or in two blocks";
      } else {
        auto place = segment->open.find(block->address);
        if (place == segment->open.end() || place->second != block) return "an unmapped block is not listed";
        open++;
      }
      if (block->state == BlockState::free) {
        free_blocks++;
        with_tag += block->tag != settled;
        if (segment->kind == Kind::shared) {
          bool first = previous == nullptr || previous->state != BlockState::free;
          hole_bytes = first ? block->size : hole_bytes + block->size;
          if (first) hole = block;
          holes += first;
          if (first && holes_.count({block->hole_bytes, const_cast<Block*>(block)}) == 0) return "a hole is not listed";
          bool last = block->next == nullptr || block->next->state != BlockState::free;
          if (last && (hole->hole_bytes != hole_bytes || hole->hole_other != block || block->hole_other != hole)) {
            return "a hole does not know its ends";
          }
          listed++;
        } else {
          const Free& free = lists(segment->kind);
          auto list = free.find({block->stream, block->tag});
          if (list == free.end() || list->second.count(const_cast<Block*>(block)) == 0) return "a free block is not listed";
        }
        if (previous != nullptr && previous->state == BlockState::free && previous->stream == block->stream &&
            previous->tag == block->tag && (segment->kind != Kind::shared || previous->point == block->point)) {
          return "free neighbours are not one";
        }
      }
      at += block->size;
      previous = block;
    }
    if (at != segment->address + segment->size) return "blocks do not fill their segment";
    if (open != segment->open.size()) return "a listed unmapped block is not there";
    if (mapped != segment->mapped) return "mapped bytes are miscounted";
    for (auto& [start, chunk] : segment->chunks) mapped -= chunk.size;
    if (segment->expandable && mapped != 0) return "chunks are not what is mapped";
  }
  for (const Free& free : lists_) {
    for (auto& [condition, list] : free) {
      if (list.empty() && condition.tag != settled) return "an empty list is kept";
      listed += list.size();
    }
  }
  if (holes != holes_.size() || holes != holes_at_.size()) return "a listed hole is not there";
  if (listed != free_blocks) return "a listed block is not free";
  if (with_tag != tagged) return "tagged blocks are miscounted";
  if (bytes != reserved) return "reserved bytes are miscounted";
  return verify_windows();
}

}  // namespace mg
