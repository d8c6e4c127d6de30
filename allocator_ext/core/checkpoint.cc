// A pool's state, to come back to: which blocks were live.
//
// In: a pool in which nothing waits and nothing is bound to a capture under way. Out: a state, and later a pool in which
// exactly the blocks of that state are live, at their addresses: what was allocated since is free, what was freed since
// is live again. Bytes are not touched.
//
// Owners are not told. Whoever held a block that a restore took away may still free it, and by then another block may have
// the address. Such a free is expected and ignored: `ghosts_` counts, for each address, how many are to come. An example:
// a tensor T has block X at address 100. A state without X is restored, so X is free and one ghost is expected at 100. A
// new allocation gets address 100. When T dies it frees 100: that is the ghost, and the new block stays. The next free of
// 100 is the new block's. Should the new block's owner free it first, that free is taken for the ghost, and T's is then
// the one that counts: the block is free after the second of the two, in whichever order they come.
// An owner whose block was adopted is a ghost from then on, too.
// Guarantee: a restore that is refused has changed nothing.

#include <algorithm>

#include "core/device.h"

namespace mg {

namespace {

Outcome unknown_state() { return {Status::invalid, "there is no such state"}; }

}  // namespace

// What keeps a pool from being saved or restored; empty: nothing.
std::string Device::in_the_way(Pool& pool) {
  if (pool.asleep) return "the pool sleeps";
  DriverGuard in(driver_, context_);
  tend(nullptr);
  std::string found = obstacle(pool);
  if (found.empty() || !quiet()) return found;
  bool back = lifetimes_.await();
  if (!recover() && !back) return found;
  return obstacle(pool);
}

std::string Device::obstacle(Pool& pool) const {
  for (auto& [address, segment] : pool.segments()) {
    for (const Block* block = segment->first; block != nullptr; block = block->next) {
      if (block->borrowed) return "memory of the pool is lent";
      if (block->state == BlockState::waiting) return "a block of the pool is freed and waits for another stream or a capture";
      if (block->state == BlockState::free && block->tag != settled) return "a capture that used the pool is under way";
      if (block->state == BlockState::live && lifetimes_.captures.under_way(block->capture)) {
        return "a block of the pool belongs to a capture under way";
      }
    }
  }
  return "";
}

Outcome Device::save_pool(PoolId id, uint64_t& state) {
  Lock lock(mutex_);
  Pool& pool = pool_of(id);
  std::string reason = in_the_way(pool);
  if (!reason.empty()) return {Status::invalid, reason};
  PoolState made{id, {}};
  for (auto& [address, segment] : pool.segments()) {
    for (const Block* block = segment->first; block != nullptr; block = block->next) {
      if (block->state != BlockState::live) continue;
      made.blocks.push_back({block->address, block->size, block->requested, block->stream, block->life, block->users,
                             block->capture, segment->window != nullptr ? segment->window->serial : 0});
    }
  }
  state = ++last_state_;
  states_.emplace(state, std::move(made));
  return {};
}

Outcome Device::restore_pool(uint64_t state) {
  Lock lock(mutex_);
  auto found = states_.find(state);
  if (found == states_.end()) return unknown_state();
  const PoolState& saved = found->second;
  Pool& pool = pool_of(saved.pool);
  std::string reason = in_the_way(pool);
  if (!reason.empty()) return {Status::invalid, reason};
  for (const SavedBlock& block : saved.blocks) {
    if (block.window != 0 ? pool.windows().find(block.window) == nullptr : !pool.maps(block.address, block.size)) {
      return {Status::invalid, "memory of this state has been given back to the driver"};
    }
  }

  auto in_state = [&](const Block& block) {
    auto place = std::lower_bound(saved.blocks.begin(), saved.blocks.end(), block.address,
                                  [](const SavedBlock& s, Address address) { return s.address < address; });
    return place != saved.blocks.end() && place->life == block.life;
  };
  std::vector<Block*> since;
  for (auto& [address, segment] : pool.segments()) {
    for (Block* block = segment->first; block != nullptr; block = block->next) {
      if (block->state == BlockState::live && !in_state(*block)) since.push_back(block);
    }
  }
  for (Block* block : since) {
    if (!block->adopted) ghosts_[block->address]++;
    live_.erase(block->address);
    count_live(*block, -1);
    stats_.active_bytes.add(-static_cast<int64_t>(block->size));
    history_.add(HistoryEntry::free_requested, block->address, block->size, block->stream);
    history_.add(HistoryEntry::free_completed, block->address, block->size, block->stream);
    // Outside of captures it may have been read on any stream that waited for its own.
    Stream home = block->segment->home_of(*block);
    if (Window* window = block->segment->window) {
      for (Block* piece : pool.close(*window)) pool.give(piece, home, settled, never_covered, {});
    } else {
      pool.give(block, home, settled, never_covered, {});
    }
  }
  for (const SavedBlock& old : saved.blocks) {
    if (live_.count(old.address) != 0) continue;
    Block* block = old.window != 0 ? take_window(pool, old) : pool.take_at(old.address, old.size);
    block->stream = old.stream;
    block->requested = old.requested;
    block->users = old.users;
    block->life = old.life;
    block->capture = old.capture;
    block->adopted = true;  // nobody has been told of this life
    live_.emplace(block->address, block);
    count_live(*block, 1);
    stats_.active_bytes.add(static_cast<int64_t>(block->size));
    history_.add(HistoryEntry::allocate, block->address, block->size, block->stream);
  }
  return {};
}

// All pieces are free: where they were, no other block of the state is, and what is not of the state has just been freed.
Block* Device::take_window(Pool& pool, const SavedBlock& saved) {
  Window& window = *pool.windows().find(saved.window);
  std::vector<Block*> pieces;
  for (const Piece& piece : pieces_of(window.pages, saved.address - window.address, saved.size)) {
    pieces.push_back(pool.take_at(piece.address, piece.size));
    pieces.back()->stream = saved.stream;
  }
  return pool.open(window, saved.address, saved.size, pieces);
}

Outcome Device::forget_state(uint64_t state) {
  Lock lock(mutex_);
  return states_.erase(state) != 0 ? Outcome{} : unknown_state();
}

Outcome Device::adopt(const Address* addresses, size_t count) {
  Lock lock(mutex_);
  for (size_t i = 0; i < count; i++) {
    if (live_.count(addresses[i]) == 0) return {Status::invalid, "an address to adopt was not handed out"};
  }
  for (size_t i = 0; i < count; i++) {
    live_[addresses[i]]->adopted = true;
    ghosts_[addresses[i]]++;
  }
  return {};
}

std::vector<SavedBlock> Device::live_blocks(PoolId id) {
  Lock lock(mutex_);
  std::vector<SavedBlock> blocks;
  Pool* pool = known(id);
  if (pool == nullptr) return blocks;
  for (auto& [address, segment] : pool->segments()) {
    for (const Block* block = segment->first; block != nullptr; block = block->next) {
      if (block->state != BlockState::live) continue;
      blocks.push_back({block->address, block->size, block->requested, block->stream, block->life, {}, 0});
    }
  }
  return blocks;
}

std::vector<SavedBlock> Device::segments(PoolId id) {
  Lock lock(mutex_);
  std::vector<SavedBlock> runs;
  Pool* pool = known(id);
  if (pool == nullptr) return runs;
  for (auto& [address, segment] : pool->segments()) {
    segment->each_run([&](const Block* first, const Block* end, size_t bytes) {
      (void)end;
      runs.push_back({first->address, bytes, bytes, segment->home == nobody ? nullptr : segment->home, 0, {}, 0});
    });
  }
  return runs;
}

Outcome Device::pool_users(PoolId id, int& users) {
  Lock lock(mutex_);
  Pool* pool = known(id);
  users = pool != nullptr ? pool->users : 0;
  return {};
}

}  // namespace mg
