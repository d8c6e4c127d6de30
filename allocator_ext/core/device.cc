#include "core/device.h"

#include <algorithm>
#include <cstdio>

#include "core/account.h"

namespace mg {

namespace {

Outcome unknown_address() { return {Status::invalid, "this address was not handed out, or has been freed"}; }
bool written(const std::string& path, const std::string& text) {
  FILE* file = fopen(path.c_str(), "w");
  if (file == nullptr) return false;
  bool all = fwrite(text.data(), 1, text.size(), file) == text.size();
  return fclose(file) == 0 && all;
}

Outcome unknown_pool() { return {Status::invalid, "there is no such pool"}; }

}  // namespace

Device::Device(const Driver& driver, int index, Config config, Context context)
    : driver_(driver), index_(index), config_(config), context_(context), history_(config.history_entries),
      lifetimes_(driver_, config_, stats_, history_),
      supply_(driver_, index_, context_, config_, stats_, history_), search_(config_, supply_, lifetimes_, stats_) {
  default_pool_ = &pool_of(PoolId{});
  default_pool_->users = 1;
}

Device::~Device() {
  DriverGuard guard(driver_, context_, relaxed);
  for (Pool* pool : pool_list_) supply_.take_down(*pool);
  supply_.give_back_host();
}

Pool& Device::pool_of(PoolId id) {
  auto& pool = pools_[id];
  if (pool == nullptr) {
    pool = std::make_unique<Pool>(id);
    pool_list_.push_back(pool.get());
  }
  return *pool;
}

Pool* Device::known(PoolId id) {
  auto found = pools_.find(id);
  return found == pools_.end() ? nullptr : found->second.get();
}

// Pools that nobody holds and that hold nothing: programs that record and drop graphs make ever new ones.
void Device::forget_empty_pools() {
  for (size_t i = pool_list_.size(); i-- > 0;) {
    Pool* pool = pool_list_[i];
    if (pool == default_pool_ || pool->users > 0 || pool->use_on_oom || pool->limit != 0) continue;
    if (!pool->segments().empty() || !pool->windows().empty()) continue;
    supply_.forget_kept(*pool);
    pool_list_.erase(pool_list_.begin() + static_cast<std::ptrdiff_t>(i));
    PoolId id = pool->id;
    pools_.erase(id);
  }
}

// The lock, and the scope that is right while it is held; null: none.
Device::Lock Device::route(Stream stream, std::shared_ptr<const Scopes::Scope>& scope) {
  Lock lock(mutex_);
  while (scopes_.any()) {
    auto list = scopes_.current();
    lock.unlock();
    auto matched = Scopes::match(*list, stream);
    lock.lock();
    if (scopes_.current() != list) continue;
    scope = std::move(matched);
    break;
  }
  return lock;
}

Outcome Device::allocate(size_t asked, Stream stream, Address& out) {
  out = 0;
  if (asked == 0) return {};
  if (asked > size_class::largest) {
    return {Status::out_of_memory, "tried to allocate " + std::to_string(asked) + " bytes, more than there can be"};
  }
  std::shared_ptr<const Scopes::Scope> scope;
  Lock lock = route(stream, scope);
  requests_++;
  Pool& pool = scope == nullptr ? *default_pool_ : pool_of(scope->pool);
  if (pool.asleep) return {Status::invalid, asleep_text};
  Request request{asked, size_class::rounded(asked), stream, &pool, {}};
  if (watched() || !lifetimes_.idle()) {
    DriverGuard in(driver_, context_);
    request.seen = tend(stream);
  }
  if (scope != nullptr && !scope->plain && request.seen.status == Observation::outside) scope->plain = true;
  std::string reason;
  Block* block = climb(request, lock, reason);
  if (block == nullptr) {
    stats_.ooms++;
    DriverGuard in(driver_, context_);
    size_t free = 0, total = 0;
    if (driver_.memory_info(&free, &total) != result::success) free = total = 0;
    std::string text = account(index_, pool_list_, stats_, asked, reason, free, total);
    history_.add(HistoryEntry::oom, free, asked, stream);
    if (!snapshot_path_.empty()) {
      std::string path = snapshot_path_, snapshot = snapshot_text(index_, pool_list_, history_);
      lock.unlock();  // a disk may be slow
      text += written(path, snapshot) ? " A snapshot is in " + path + "." : " No snapshot could be written to " + path + ".";
    }
    return {Status::out_of_memory, text};
  }
  hand_out(block, request, out);
  return {};
}

// `block` is free and listed, or a window's; it fits.
void Device::hand_out(Block* block, const Request& request, Address& out) {
  Pool& pool = *block->segment->pool;
  bool moved = block->stream != request.stream && block->stream != nobody;
  bool by_proof = moved || block->tag % 2 == 1;
  Window* window = block->segment->window;
  ByAddress::iterator place = live_.end();
  try {
    if (block->live.empty()) {
      place = live_.emplace(block->address, block).first;
    } else {
      block->live.key() = block->address;
      block->live.mapped() = block;
      place = live_.insert(std::move(block->live)).position;
    }
    if (window == nullptr) pool.take(block, request.size);
  } catch (...) {
    if (place != live_.end()) live_.erase(place);
    if (window != nullptr) {
      const StreamView& view = *request.seen.view;
      for (Block* piece : pool.close(*window)) pool.give(piece, piece->stream, view.proof_tag, never_covered, {});
    }
    throw;
  }
  block->stream = request.stream;
  block->by_proof = by_proof;
  block->requested = request.asked;
  block->life = ++lives_;
  block->segment->last_use = requests_;
  if (window != nullptr) {
    for (Block* piece : window->pieces) piece->segment->last_use = requests_;
  }
  if (&pool != request.pool) {
    block->borrowed = true;
    pool.lent += block->size;
  }
  if (request.seen.status != Observation::outside) {  // where the driver does not tell it may be one
    pool.captured = true;
    block->segment->captured = true;
  }
  if (request.seen.view != nullptr) {
    block->capture = request.seen.view->capture->serial;
    block->born = request.seen.view->capture->clock;
    if (moved) stats_.moved++;
  }
  count_live(*block, 1);
  stats_.active_bytes.add(static_cast<int64_t>(block->size));
  history_.add(HistoryEntry::allocate, block->address, block->size, request.stream);
  out = block->address;
}

Outcome Device::release(Address address) {
  if (address == 0) return {};
  Lock lock(mutex_);
  if (!ghosts_.empty()) {
    auto ghost = ghosts_.find(address);
    if (ghost != ghosts_.end()) {
      if (--ghost->second == 0) ghosts_.erase(ghost);
      return {};
    }
  }
  auto found = live_.find(address);
  return found == live_.end() ? unknown_address() : end(found);
}

Outcome Device::drop(Address address) {
  Lock lock(mutex_);
  auto found = live_.find(address);
  if (found == live_.end()) return unknown_address();
  if (!found->second->adopted) ghosts_[address]++;
  return end(found);
}

void Device::count_live(const Block& block, int sign) {
  stats_.allocated_bytes.add(sign * static_cast<int64_t>(block.size));
  stats_.requested_bytes.add(sign * static_cast<int64_t>(block.requested));
  stats_.allocations.add(sign);
}

Outcome Device::end(ByAddress::iterator place) {
  Block* block = place->second;
  block->live = live_.extract(place);
  count_live(*block, -1);
  history_.add(HistoryEntry::free_requested, block->address, block->size, block->stream);
  tell_of_scopes();
  if (block->segment->window != nullptr) {
    end_of_window(block);
  } else if (watched() || !block->users.empty() || block->stream != block->segment->home) {
    DriverGuard in(driver_, context_);
    lifetimes_.dispose(block, watched());
  } else {
    lifetimes_.dispose(block, false);
  }
  return {};
}

// Each piece is freed at home as the block would be.
void Device::end_of_window(Block* block) {
  Pool& pool = *block->segment->pool;
  Window& window = *block->segment->window;
  std::vector<Stream> users = std::move(block->users);
  Stream stream = block->stream;
  uint64_t capture = block->capture, born = block->born;
  history_.add(HistoryEntry::free_completed, block->address, block->size, stream);
  std::vector<Block*> pieces = pool.close(window);
  DriverGuard in(driver_, context_);
  for (Block* piece : pieces) {
    piece->users = users;
    piece->stream = stream;
    piece->capture = capture;
    piece->born = born;
    history_.add(HistoryEntry::allocate, piece->address, piece->size, stream);
    history_.add(HistoryEntry::free_requested, piece->address, piece->size, stream);
    lifetimes_.dispose(piece, watched());
  }
}

Outcome Device::record_stream(Address address, Stream stream) {
  if (address == 0) return {};
  Lock lock(mutex_);
  auto found = live_.find(address);
  if (found == live_.end()) return unknown_address();
  auto& users = found->second->users;
  if (stream != found->second->stream && std::find(users.begin(), users.end(), stream) == users.end()) {
    users.push_back(stream);
  }
  return {};
}

Outcome Device::base(Address address, Address& start, size_t& size) {
  Lock lock(mutex_);
  for (Pool* pool : pool_list_) {
    auto above = pool->segments().upper_bound(address);
    if (above == pool->segments().begin()) continue;
    const Segment& segment = *std::prev(above)->second;
    if (address >= segment.address + segment.size) continue;
    size = 0;
    segment.each_run([&](const Block* first, const Block*, size_t bytes) {
      if (address < first->address || address >= first->address + bytes) return;
      start = first->address;
      size = bytes;
    });
    if (size != 0) return {};
  }
  return unknown_address();
}

void Device::begin_pool(PoolId id, Filter filter, Takes takes) {
  Lock lock(mutex_);
  pool_of(id).users++;
  scopes_.begin(id, std::move(filter), takes);
}

Outcome Device::end_pool(PoolId id) {
  std::shared_ptr<const Scopes::List> old;  // dropped without the lock: a filter's end is other people's code
  Lock lock(mutex_);
  old = scopes_.end(id);
  if (lifetimes_.captures.any()) {  // often the last call before another capture
    DriverGuard in(driver_, context_);
    tend(nullptr);
  }
  lock.unlock();
  return old != nullptr ? Outcome{} : unknown_pool();
}

Outcome Device::release_pool(PoolId id) {
  Lock lock(mutex_);
  Pool* pool = known(id);
  if (pool == nullptr || pool == default_pool_ || pool->users == 0) return unknown_pool();
  if (--pool->users == 0) pool->captured = false;
  forget_empty_pools();
  return {};
}

Outcome Device::open_to(int other) {
  Lock lock(mutex_);
  return supply_.open_to(other, pool_list_);
}

Outcome Device::set_use_on_oom(PoolId id, bool on) {
  Lock lock(mutex_);
  pool_of(id).use_on_oom = on;
  return {};
}

Outcome Device::pool_lent(PoolId id, size_t& bytes) {
  Lock lock(mutex_);
  Pool* pool = known(id);
  if (pool != nullptr && pool->lent != 0) {  // what was freed may be over by now
    DriverGuard in(driver_, context_);
    tend(nullptr);
  }
  bytes = pool != nullptr ? pool->lent : 0;
  return {};
}

Outcome Device::set_pool_limit(PoolId id, size_t bytes) {
  Lock lock(mutex_);
  pool_of(id).limit = bytes;
  return {};
}

Outcome Device::set_limit(size_t bytes) {
  Lock lock(mutex_);
  supply_.limit = bytes;
  return {};
}

Outcome Device::set_fraction(double fraction) {
  if (!(fraction >= 0 && fraction <= 1)) return {Status::invalid, "a memory fraction lies between 0 and 1"};
  Lock lock(mutex_);
  DriverGuard in(driver_, context_);
  size_t free = 0, total = 0;
  if (driver_.memory_info(&free, &total) != result::success) {
    return {Status::driver_failed, "the driver does not tell how much memory the device has"};
  }
  supply_.limit = fraction == 1 ? 0 : std::max<size_t>(1, static_cast<size_t>(fraction * static_cast<double>(total)));
  return {};
}

Outcome Device::set_reuse(Reuse reuse) {
  Lock lock(mutex_);
  tend(nullptr);
  if (!lifetimes_.quiet()) return {Status::invalid, "the rule of reuse does not change while a capture is under way"};
  config_.reuse = reuse;
  return {};
}

void Device::set_oom_callback(std::function<bool(size_t)> callback) {
  Lock lock(mutex_);
  oom_callback_.swap(callback);
  lock.unlock();
}

void Device::set_relief(std::function<bool(size_t)> relief) {
  Lock lock(mutex_);
  relief_.swap(relief);
  lock.unlock();
}

size_t Device::empty_cache() {
  Lock lock(mutex_);
  DriverGuard in(driver_, context_);
  tend(nullptr);
  if (!quiet()) return 0;
  lifetimes_.await();
  recover();
  size_t bytes = give_back_all();
  forget_empty_pools();
  return bytes;
}

Outcome Device::empty_pool(PoolId id, size_t& bytes) {
  bytes = 0;
  Lock lock(mutex_);
  Pool* pool = known(id);
  if (pool == nullptr) return unknown_pool();
  DriverGuard in(driver_, context_);
  tend(nullptr);
  // A scope of it that is open may be that of a capture which is about to use it.
  if (!quiet() || scopes_.open(id) || (pool->captured && pool != default_pool_)) return {};
  lifetimes_.await();
  recover();
  bytes = give_back(*pool);
  forget_empty_pools();
  return {};
}

Stats Device::stats() {
  Lock lock(mutex_);
  return stats_;
}

void Device::reset_peaks() {
  Lock lock(mutex_);
  for (Level* level : {&stats_.allocated_bytes, &stats_.requested_bytes, &stats_.reserved_bytes, &stats_.active_bytes,
                       &stats_.allocations, &stats_.segments}) {
    level->peak = level->current;
  }
}

void Device::record_history(size_t entries) {
  Lock lock(mutex_);
  history_.keep(entries);
}

std::string Device::snapshot() {
  Lock lock(mutex_);
  return snapshot_text(index_, pool_list_, history_);
}

void Device::snapshot_at_oom(std::string path) {
  Lock lock(mutex_);
  snapshot_path_ = std::move(path);
}

}  // namespace mg
