// Whether the books are right: what the headers guarantee, looked at block by block.
//
// In: a pool, or all pools of a device. Out: a sentence on the first thing that is wrong, or nothing. For tests and
// mg_verify: it looks at everything, and nothing here runs otherwise.

#include <map>

#include "core/device.h"

namespace mg {

std::string Pool::verify() const {
  size_t bytes = 0, gone = 0, free_blocks = 0, with_tag = 0, listed = 0, holes = 0;
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
          if (first && !holes_.begins(block)) return "a hole is not listed";
          bool last = block->next == nullptr || block->next->state != BlockState::free;
          if (last && (hole->hole_bytes != hole_bytes || hole->hole_other != block || block->hole_other != hole)) {
            return "a hole does not know its ends";
          }
          listed++;
        } else {
          if (!lists_.has(block)) return "a free block is not listed";
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
    for (auto& [start, chunk] : segment->chunks) {
      mapped -= chunk.size;
      if (chunk.away) gone += chunk.size;
    }
    if (segment->expandable && mapped != 0) return "chunks are not what is mapped";
  }
  if (lists_.keeps_an_empty_list()) return "an empty list is kept";
  listed += lists_.blocks();
  if (holes != holes_.count() || !holes_.alike()) return "a listed hole is not there";
  if (listed != free_blocks) return "a listed block is not free";
  if (with_tag != tagged) return "tagged blocks are miscounted";
  if (bytes != reserved) return "reserved bytes are miscounted";
  if (gone != away) return "bytes that are away are miscounted";
  return verify_windows();
}

std::string Pool::verify_windows() const {
  size_t lent = 0, pages = 0, blocks = 0, open = 0;
  std::map<Address, size_t> mapped;
  for (auto& [address, segment] : segments_) {
    if (segment->kind == Kind::window) {
      open++;
      if (segment->window == nullptr || segment->window->segment != segment.get()) return "a block is in no window";
    }
    for (const Block* block = segment->first; block != nullptr; block = block->next) {
      lent += block->state == BlockState::lent;
      if (block->state == BlockState::lent && segment->kind != Kind::shared) return "what nobody shares is lent";
    }
    for (auto& [start, chunk] : segment->chunks) {
      if (chunk.windows != 0) mapped[start] = chunk.windows;
    }
  }
  for (auto& [address, window] : windows_) {
    pages += window->pages.size();
    for (size_t i = 0; i < window->pages.size(); i++) {
      const Chunk* chunk = chunk_at(window->pages[i]);
      if (chunk != nullptr && chunk->away && window->mapped(i)) return "a window maps what is away";
      if (!asleep && !window->mapped(i)) return "a page of a window is away, and its pool is awake";
    }
    for (Address at : window->pages) {
      if (mapped[at]-- == 0) return "a window maps a page that does not know of it";
    }
    if (window->segment == nullptr) {
      if (!window->pieces.empty()) return "pieces of no block";
      continue;
    }
    open--;
    const Block& block = *window->segment->first;
    if (!window->whole() || block.state != BlockState::live || block.next != nullptr || block.segment != window->segment ||
        block.address < window->address || block.address + block.size > window->address + window->size) {
      return "a window's block is not in it";
    }
    std::vector<Piece> pieces = pieces_of(window->pages, block.address - window->address, block.size);
    if (pieces.size() != window->pieces.size()) return "a window's block has not all of its pieces";
    for (size_t i = 0; i < pieces.size(); i++) {
      const Block& piece = *window->pieces[i];
      if (piece.state != BlockState::lent || piece.address != pieces[i].address || piece.size != pieces[i].size) {
        return "a piece is not where its window has it";
      }
    }
    blocks += pieces.size();
  }
  for (auto& [start, count] : mapped) {
    if (count != 0) return "a page is in a window that does not map it";
  }
  if (open != 0) return "a window's block is counted twice";
  if (blocks != lent) return "lent memory is in no window, or in two";
  if (pages != windows_.pages()) return "pages of windows are miscounted";
  return "";
}

std::string Device::verify() {
  Lock lock(mutex_);
  size_t live = 0, waiting = 0, reserved = 0;
  for (Pool* pool : pool_list_) {
    std::string wrong = pool->verify();
    if (!wrong.empty()) return wrong;
    reserved += pool->reserved - pool->away;
    if (pool->away != 0 && !pool->asleep) return "memory of a pool that is awake is away";
    for (auto& [address, segment] : pool->segments()) {
      if (segment->pool != pool) return "a segment is in another's pool";
      for (Block* block = segment->first; block != nullptr; block = block->next) {
        if (block->state == BlockState::waiting) waiting++;
        if (block->state != BlockState::live) continue;
        live++;
        auto found = live_.find(block->address);
        if (found == live_.end() || found->second != block) return "a live block cannot be found";
      }
    }
  }
  if (live != live_.size()) return "an address is handed out without a live block";
  if (waiting != lifetimes_.waiting()) return "a waiting block is lost";
  if (static_cast<int64_t>(reserved) != stats_.reserved_bytes.current) return "reserved bytes are miscounted";
  return "";
}

}  // namespace mg
