// Which pool an allocation on a stream goes to: the list of active scopes of one device, the only truth about it.
//
// In: begin and end of a scope, as torch calls them, from any thread. Out: the pool of the innermost scope whose filter
// takes the stream. Filters are torch's own code, so they are asked without the device's lock, on a list that never
// changes: begin and end replace it whole.
// Invariant: what `match` answers for a list is valid while `current()` is that list.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "core/types.h"

namespace mg {

using Filter = std::function<bool(Stream)>;

class Scopes {
 public:
  struct Scope {
    PoolId pool;
    Filter filter;
  };
  using List = std::vector<std::shared_ptr<const Scope>>;

  bool any() const { return any_.load(std::memory_order_acquire); }

  // The rest under the device's lock.
  std::shared_ptr<const List> current() const { return list_; }

  void begin(PoolId pool, Filter filter) {
    auto list = std::make_shared<List>(*list_);
    list->push_back(std::make_shared<const Scope>(Scope{pool, std::move(filter)}));
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

  static std::optional<PoolId> match(const List& list, Stream stream) {
    for (size_t i = list.size(); i-- > 0;) {
      if (list[i]->filter(stream)) return list[i]->pool;
    }
    return std::nullopt;
  }

 private:
  void replace(std::shared_ptr<const List> list) {
    list_ = std::move(list);
    any_.store(!list_->empty(), std::memory_order_release);
  }

  std::shared_ptr<const List> list_ = std::make_shared<const List>();
  std::atomic<bool> any_{false};
};

}  // namespace mg
