#include "core/holes.h"

namespace mg {

Holes::Hole Holes::before(const Block* block) {
  Block* last = block->previous;
  if (last == nullptr || last->state != BlockState::free) return {0, nullptr};
  return {last->hole_other->hole_bytes, last->hole_other};
}

Holes::Hole Holes::behind(const Block* block) {
  Block* first = block->next;
  if (first == nullptr || first->state != BlockState::free) return {0, nullptr};
  return {first->hole_bytes, first};
}

void Holes::insert(Block* first, Block* last, size_t bytes) {
  first->hole_bytes = bytes;
  first->hole_other = last;
  last->hole_other = first;
  by_size_.insert({bytes, first});
  by_address_.emplace(first->address, first);
}

void Holes::erase(const Hole& hole) {
  by_size_.erase(hole);
  by_address_.erase(hole.first->address);
}

void Holes::add(Block* block) {
  Hole left = before(block), right = behind(block);
  if (left.bytes != 0) erase(left);
  if (right.bytes != 0) erase(right);
  Block* first = left.bytes != 0 ? left.first : block;
  Block* last = right.bytes != 0 ? right.first->hole_other : block;
  insert(first, last, left.bytes + block->size + right.bytes);
}

// The first block of the hole has to be looked for only where the block lies in the middle of it.
void Holes::remove(Block* block) {
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
  erase({first->hole_bytes, first});
  if (left != 0) insert(first, block->previous, left);
  if (right != 0) insert(block->next, last, right);
}

Block* Holes::at(Address address) const {
  Block* block = std::prev(by_address_.upper_bound(address))->second;
  while (block->address + block->size <= address) block = block->next;
  return block;
}

bool Holes::begins(const Block* block) const {
  return by_size_.count({block->hole_bytes, const_cast<Block*>(block)}) != 0;
}

}  // namespace mg
