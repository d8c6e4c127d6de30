#include "core/window.h"

#include <algorithm>

#include "core/pool.h"

namespace mg {

namespace {

using size_class::page;

// What may be left over where a block has a place already, and what a whole page is worth beside bytes that are left over.
constexpr size_t most_left = 64 * size_class::kib;
constexpr size_t worth_of_a_page = 250 * size_class::kib;

}  // namespace

void Ends::add(Address base, Address start, Address end) {
  Address first = base + size_class::up(start - base, page), last = base + (end - base) / page * page;
  if (first > last) return;  // within a page
  if (start < first) tails.push_back({first - page, first - start});
  for (Address at = first; at < last; at += page) whole.push_back(at);
  if (last < end) heads.push_back({last, end - last});
}

std::optional<Plan> choose(Ends& ends, size_t size, Stitch how) {
  struct Best {
    size_t fresh = SIZE_MAX, cost = SIZE_MAX, left = 0, pages = 0;
    const Ends::End *tail = nullptr, *head = nullptr;
  } best;
  auto consider = [&](size_t pages, size_t left, const Ends::End* tail, const Ends::End* head) {
    size_t fresh = pages > ends.whole.size() ? pages - ends.whole.size() : 0;
    size_t cost = left + pages * worth_of_a_page;
    if (tail == nullptr && head == nullptr) cost = left + (left != 0 ? page : 0);  // which cuts the last
    if (fresh > best.fresh || (fresh == best.fresh && cost >= best.cost)) return;
    best = {fresh, cost, left, pages, tail, head};
  };
  auto smaller = [](const Ends::End& a, const Ends::End& b) {
    return a.bytes != b.bytes ? a.bytes < b.bytes : a.page < b.page;
  };
  auto least = [](const std::vector<Ends::End>& ends_, size_t bytes) {
    return std::lower_bound(ends_.begin(), ends_.end(), bytes, [](const Ends::End& e, size_t b) { return e.bytes < b; });
  };
  std::sort(ends.tails.begin(), ends.tails.end(), smaller);
  std::sort(ends.heads.begin(), ends.heads.end(), smaller);
  size_t alone = size_class::up(size, page) / page;
  size_t most_pages = how == Stitch::replace ? 0 : alone - 1;
  if (how != Stitch::replace) consider(alone, alone * page - size, nullptr, nullptr);
  for (size_t pages = 0; pages <= most_pages; pages++) {
    size_t missing = size - pages * page;
    auto tail = least(ends.tails, missing);
    if (tail != ends.tails.end()) consider(pages, tail->bytes - missing, &*tail, nullptr);
    auto head = least(ends.heads, missing);
    if (head != ends.heads.end()) consider(pages, head->bytes - missing, nullptr, &*head);
    for (auto first = ends.tails.begin(); first != tail; ++first) {
      auto second = least(ends.heads, missing - first->bytes);
      if (second != head && second->page == first->page) ++second;
      if (second == head) continue;  // which would do alone, or is none
      size_t left = first->bytes + second->bytes - missing;
      if (left < first->bytes && left < second->bytes) consider(pages, left, &*first, &*second);
    }
  }
  bool alone_and_new = best.tail == nullptr && best.head == nullptr && best.fresh == best.pages;
  if (how == Stitch::grow ? alone_and_new : best.fresh != 0) return std::nullopt;
  if (how == Stitch::replace && best.left > most_left) return std::nullopt;

  Plan plan;
  size_t from_tail = best.tail != nullptr ? best.tail->bytes : 0;
  size_t from_head = best.head != nullptr ? best.head->bytes : 0;
  if (from_tail >= from_head && best.tail != nullptr) from_tail -= best.left;  // the rest stays at the far end
  if (best.tail != nullptr) plan.pages.push_back(best.tail->page);
  for (size_t i = 0; i < best.pages; i++) plan.pages.push_back(i < ends.whole.size() ? ends.whole[i] : 0);
  if (best.head != nullptr) plan.pages.push_back(best.head->page);
  plan.fresh = best.fresh;
  plan.offset = best.tail != nullptr ? page - from_tail : 0;
  return plan;
}

std::vector<Piece> pieces_of(const std::vector<Address>& pages, size_t offset, size_t size) {
  std::vector<Piece> pieces;
  for (Address at : pages) {
    if (size == 0) break;
    size_t bytes = std::min(size, page - offset);
    pieces.push_back({at + offset, bytes});
    size -= bytes;
    offset = 0;
  }
  return pieces;
}

Window& Pool::add_window(Address address, size_t size) {
  auto window = std::make_unique<Window>();
  window->address = address;
  window->size = size;
  window->serial = ++last_window_;
  window->pages.reserve(size / page);
  return *(windows_[address] = std::move(window));
}

Chunk* Pool::chunk_at(Address address) const {
  auto above = segments_.upper_bound(address);
  if (above == segments_.begin()) return nullptr;
  Segment& segment = *std::prev(above)->second;
  auto chunk = segment.chunks.find(address);
  return chunk == segment.chunks.end() ? nullptr : &chunk->second;
}

void Pool::add_page(Window& window, Address at) {
  window.pages.push_back(at);
  chunk_at(at)->windows++;
  window_pages++;
}

void Pool::remove_page(Window& window) {
  Chunk* chunk = chunk_at(window.pages.back());
  if (chunk != nullptr) chunk->windows--;
  window.pages.pop_back();
  window_pages--;
}

void Pool::drop(Window& window) { windows_.erase(window.address); }

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

Window* Pool::window(uint64_t serial) const {
  for (auto& [address, window] : windows_) {
    if (window->serial == serial) return window->whole() ? window.get() : nullptr;
  }
  return nullptr;
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
  if (pages != window_pages) return "pages of windows are miscounted";
  return "";
}

}  // namespace mg
