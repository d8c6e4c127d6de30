// Which pool an allocation on a stream goes to: the list of active scopes of one device, the only truth about it.
//
// In: begin and end of a scope, as torch calls them, from any thread. Out: the pool of the innermost scope whose filter
// takes the stream. Filters are torch's own code, so they are asked without the device's lock, on a list that never
// changes: begin and end replace it whole.
// Guarantee: what `match` answers for a list is valid while `current()` is that list.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "core/types.h"

namespace mg {

using Filter = std::function<bool(Stream)>;

// What is known of a scope when it begins. `plain`: it takes streams that capture nothing. `one_capture`: it takes the streams
// of one capture and no others, as torch's own scopes do. `any`: neither is known.
enum class Takes : unsigned char { any, plain, one_capture };

class Scopes {
 public:
  struct Scope {
    PoolId pool;
    Filter filter;
    mutable std::atomic<bool> plain;  // it takes streams that capture nothing, so it is no capture's
    const bool one_capture;           // and no other
    const uint64_t number;            // in the order in which they begin, from 1

    Scope(PoolId pool_, Filter filter_, Takes takes, uint64_t number_)
        : pool(pool_), filter(std::move(filter_)), plain(takes == Takes::plain), one_capture(takes == Takes::one_capture),
          number(number_) {}
  };
  using List = std::vector<std::shared_ptr<const Scope>>;

  bool any() const { return any_.load(std::memory_order_acquire); }

  // The rest under the device's lock.
  std::shared_ptr<const List> current() const { return list_; }

  bool open(PoolId pool) const {
    return std::any_of(list_->begin(), list_->end(), [&](const auto& scope) { return scope->pool == pool; });
  }

  // Whether only one capture can be under way: each capture has a scope of its own, and there is one such scope.
  bool single() const {
    size_t captures = 0;
    for (const auto& scope : *list_) {
      if (scope->plain) continue;
      if (!scope->one_capture || ++captures > 1) return false;
    }
    return captures == 1;
  }

  uint64_t newest() const { return newest_; }
  uint64_t oldest_open() const { return list_->empty() ? UINT64_MAX : list_->front()->number; }

  // Whether a capture may have begun that nothing has been heard of: torch begins its scope first.
  bool for_captures() const {
    return std::any_of(list_->begin(), list_->end(), [](const auto& scope) { return !scope->plain; });
  }

  void begin(PoolId pool, Filter filter, Takes takes) {
    auto list = std::make_shared<List>(*list_);
    list->push_back(std::make_shared<const Scope>(pool, std::move(filter), takes, ++newest_));
    replace(std::move(list));
  }

  // Ends the innermost scope of `pool`; the list that was, to be dropped without the lock. Null: there is none.
  std::shared_ptr<const List> end(PoolId pool) {
    auto list = std::make_shared<List>(*list_);
    for (size_t i = list->size(); i-- > 0;) {
      if ((*list)[i]->pool != pool) continue;
      list->erase(list->begin() + static_cast<std::ptrdiff_t>(i));
      auto old = list_;
      replace(std::move(list));
      return old;
    }
    return nullptr;
  }

  static std::shared_ptr<const Scope> match(const List& list, Stream stream) {
    for (size_t i = list.size(); i-- > 0;) {
      if (list[i]->filter(stream)) return list[i];
    }
    return nullptr;
  }

 private:
  void replace(std::shared_ptr<const List> list) {
    list_ = std::move(list);
    any_.store(!list_->empty(), std::memory_order_release);
  }

  std::shared_ptr<const List> list_ = std::make_shared<const List>();
  std::atomic<bool> any_{false};
  uint64_t newest_ = 0;
};

}  // namespace mg
