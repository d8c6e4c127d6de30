#include "core/placement.h"

#include <algorithm>

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

}  // namespace mg
