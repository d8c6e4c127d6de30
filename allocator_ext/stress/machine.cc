#include "stress/machine.h"

#include <algorithm>

#include "core/threads.h"

namespace mg::stress {

namespace {
constexpr int lending = 3;
PoolId id_of(int pool) { return pool < 0 ? PoolId{} : PoolId{0, static_cast<uint64_t>(7 + pool)}; }
bool names_block(Op op) { return op == Op::use || op == Op::use_early || op == Op::mark || op == Op::release ||
                                   op == Op::release_elsewhere; }
bool names_pool(Op op) { return op == Op::pool_begin || op == Op::pool_end || op == Op::save || op == Op::restore ||
                                  op == Op::hand_over || op == Op::sleep || op == Op::wake; }
}

std::string printed(const Step& step) {
  const char* names[] = {"allocate", "use", "use_early", "record_stream", "free", "record", "wait",
                         "pool_begin", "pool_end", "replace", "begin", "begin_body", "end", "save", "restore", "free_elsewhere",
                         "hand_over", "begin_again", "launch", "destroy", "sleep", "wake"};
  return std::string(names[static_cast<int>(step.op)]) + "(" + std::to_string(step.a) + "," + std::to_string(step.b) +
         ")";
}

Machine::Machine(Config config, int count, size_t bytes, size_t capacity)
    : sim(capacity), oracle(sim), bytes_(bytes) {
  sim::Simulator::enter(&sim);
  device = std::make_unique<Device>(sim::Simulator::table(), 0, config);
  for (int i = 0; i < count; i++) streams.push_back(sim.stream());
}

Machine::~Machine() {
  sim::Simulator::enter(&sim);
  if (second_thread_) this_thread() -= 2000;
  device.reset();
  sim::Simulator::enter(nullptr);
}

bool Machine::fail(std::string text) {
  if (wrong.empty()) wrong = std::move(text);
  return false;
}

// Whether a use lies behind what one of `users` has at its end now, so that a free may name these streams alone.
bool Machine::known_over(const sim::Use& use, const std::vector<int>& users) {
  auto behind = [&](SimNode* node) {
    return std::any_of(users.begin(), users.end(), [&](int u) { return oracle.behind(node, at(u).terminals, u != use.stream); });
  };
  if (use.node->graph == nullptr) {
    return use.node->done || std::any_of(users.begin(), users.end(), [&](int u) {
      return u == use.stream || oracle.behind(use.node, at(u).capture != nullptr ? at(u).before_capture : at(u).terminals);
    });
  }
  // A body that is captured whole stands where its conditional node stands; a graph that is captured whole is over.
  for (SimNode* node = use.node; node != nullptr; node = node->graph->parent) {
    if (under_way(node->graph)) return behind(node);
  }
  return std::none_of(sim.streams.begin(), sim.streams.end(), [&](auto& s) {
    return s->capture != nullptr && sim::Oracle::top(s->capture->graph) == sim::Oracle::top(use.node->graph);
  });
}

bool Machine::under_way(const sim::SimGraph* graph) const {
  return std::any_of(sim.streams.begin(), sim.streams.end(),
                     [&](auto& s) { return s->capture != nullptr && s->capture->graph == graph; });
}

// Whether what is launched now finds the block allocated.
bool Machine::valid_use(const Step& step) {
  auto& stream = at(step.a);
  const Held& block = held[static_cast<size_t>(step.b)];
  const sim::SimGraph* home = allocations[static_cast<size_t>(step.b)].graph;
  const sim::SimGraph* here = stream.capture != nullptr ? stream.capture->graph : nullptr;
  auto last = std::find(stream.terminals.begin(), stream.terminals.end(), stream.last);
  bool early = step.op == Op::use_early;
  if (early && (here == nullptr || last == stream.terminals.end())) return false;
  // A graph that goes on has used what lay there before: launched, it would write over what another allocated since.
  bool came_back = block.life != static_cast<size_t>(step.b);
  if (here != nullptr && (came_back || home == nullptr || sim::Oracle::top(home) != sim::Oracle::top(here))) {
    for (size_t i = 0; again != 0 && i < static_cast<size_t>(step.b); i++) {
      if (!allocations[i].overlaps(allocations[static_cast<size_t>(step.b)])) continue;
      for (const sim::Use& use : allocations[i].uses) {
        if (use.node->graph != nullptr && sim::Oracle::top(use.node->graph) == sim::Oracle::top(here)) return false;
      }
    }
  }
  if (home == here) {
    // On the stream of its birth a kernel comes after what was launched there, early or not: it keeps its own order with
    // that. What was launched elsewhere and awaited there is over, also where dependencies have been replaced since.
    bool home_stream = step.a == allocations[static_cast<size_t>(step.b)].stream;
    std::vector<SimNode*> awaited = stream.terminals;
    if (early && !home_stream) awaited.erase(awaited.begin() + (last - stream.terminals.begin()));
    return std::all_of(block.birth.begin(), block.birth.end(), [&](SimNode* n) {
      bool own = home_stream && n->stream == step.a;
      return oracle.behind(n, awaited, !own) || (here == nullptr && n->done) ||
             (early && !own && oracle.completes_before(n, stream.last));
    });
  }
  if (home == nullptr) return true;  // what is older than a capture is there when its graph is launched
  if (here == nullptr) {
    for (const sim::SimGraph* g = home; g != nullptr; g = g->parent != nullptr ? g->parent->graph : nullptr) {
      if (under_way(g)) return false;  // nothing has run that could have written it
    }
    return true;
  }
  // A body may use what its conditional node comes after.
  for (const sim::SimGraph* g = here; g->parent != nullptr; g = g->parent->graph) {
    if (g->parent->graph != home) continue;
    return std::all_of(block.birth.begin(), block.birth.end(),
                       [&](SimNode* n) { return oracle.completes_before(n, g->parent); });
  }
  // What a body leaves behind is there once its conditional node has completed.
  for (const sim::SimGraph* g = home; g->parent != nullptr; g = g->parent->graph) {
    if (g->parent->graph == here) return oracle.behind(g->parent, stream.terminals, true);
  }
  return sim::Oracle::top(home) != sim::Oracle::top(here);  // of another graph, which is launched before
}

bool Machine::valid(const Step& step) {
  bool names_stream = !names_pool(step.op);
  auto& stream = at(names_stream ? step.a : 0);
  bool asks = step.op != Op::release && step.op != Op::release_elsewhere;
  if (names_stream && asks && stream.destroyed) return false;
  // Where a call has failed, a restore may have brought fewer blocks back than when the program was made.
  if (names_block(step.op) && static_cast<size_t>(step.b) >= held.size()) return false;
  bool uses = step.op == Op::use || step.op == Op::use_early;
  if (uses && lies_asleep(static_cast<size_t>(step.b))) return false;
  if (step.op == Op::launch && !asleep_.empty()) return false;
  switch (step.op) {
    case Op::allocate:
      return true;
    case Op::use:
    case Op::use_early:
      return held[static_cast<size_t>(step.b)].live && valid_use(step);
    case Op::mark: {
      const Held& block = held[static_cast<size_t>(step.b)];
      return block.live && allocations[static_cast<size_t>(step.b)].stream != step.a;
    }
    case Op::release:
    case Op::release_elsewhere: {
      const Held& block = held[static_cast<size_t>(step.b)];
      if (!block.live) return false;
      const auto& uses = allocations[static_cast<size_t>(step.b)].uses;
      return std::all_of(uses.begin(), uses.end(), [&](const sim::Use& use) { return known_over(use, block.users); });
    }
    case Op::record:
      return true;
    case Op::wait:
      return sim.can_wait(streams[static_cast<size_t>(step.a)], step.b);
    case Op::pool_begin:
      return std::find(scopes_.begin(), scopes_.end(), step.a) == scopes_.end();
    case Op::pool_end:
      // Nor does a scope end before a capture in it of which nothing is known but its bodies.
      return std::find(scopes_.begin(), scopes_.end(), step.a) != scopes_.end() &&
             std::none_of(sim.streams.begin(), sim.streams.end(), [&](auto& s) {
               return s->capture != nullptr && (again_.count(sim::Oracle::top(s->capture->graph)) != 0 || (seen_.count(s->capture->id) == 0 &&
                                                                                     with_bodies_.count(s->capture->id) != 0));
             });
    case Op::replace:
      // Of a capture that began without a scope the allocator may not know, so it cannot notice that either.
      return stream.capture != nullptr && !stream.terminals.empty() &&
             (seen_.count(stream.capture->id) != 0 || announced(stream.capture->id, false));
    case Op::begin_again: {
      size_t number = static_cast<size_t>(step.b / 2);
      bool scope = std::any_of(scopes_.begin(), scopes_.end(), [](int pool) { return pool == 0 || pool == lending; });
      return scope && stream.capture == nullptr && number < graphs.size() && over(graphs[number]);
    }
    case Op::launch: {
      size_t number = static_cast<size_t>(step.b), lent = 0;
      if (stream.capture != nullptr || number >= graphs.size() || !over(graphs[number])) return false;
      // While its pool has lent nothing, so the program asks.
      return device->pool_lent(id_of(lending), lent).status == Status::ok && lent == 0;
    }
    case Op::destroy:
      return stream.capture == nullptr;
    case Op::hand_over:
      return true;
    case Op::begin:
      return stream.capture == nullptr;
    case Op::begin_body:
      return stream.capture == nullptr && at(step.b).capture != nullptr &&
             (seen_.count(at(step.b).capture->id) != 0 || announced(at(step.b).capture->id, true));
    case Op::save:
    case Op::sleep:
    case Op::wake:
      return true;
    case Op::restore:
      return static_cast<size_t>(step.a) < saved.size() && saved[static_cast<size_t>(step.a)].state != 0 &&
             may_restore(saved[static_cast<size_t>(step.a)]);
    case Op::end:
      // A body that is first seen when the capture around it has ended looks like a capture of its own.
      return stream.capture != nullptr && std::all_of(sim.streams.begin(), sim.streams.end(), [&](auto& s) {
        return s->capture == nullptr || s->capture == stream.capture || seen_.count(s->capture->id) != 0 ||
               sim::Oracle::top(s->capture->graph) != sim::Oracle::top(stream.capture->graph);
      });
  }
  return false;
}

bool Machine::idle(const Step& step) {
  if (step.op == Op::wait) {
    auto& stream = at(step.a);
    auto& event = sim.events[static_cast<size_t>(step.b)];
    if (event.capture != stream.capture) return false;
    return std::all_of(event.nodes.begin(), event.nodes.end(),
                       [&](SimNode* n) { return oracle.behind(n, stream.terminals); });
  }
  if (step.op == Op::record) {
    auto& stream = at(step.a);
    return std::any_of(sim.events.begin(), sim.events.end(), [&](auto& e) {
      return e.capture == stream.capture && e.nodes == stream.terminals;
    });
  }
  if (step.op == Op::mark) {
    auto& users = held[static_cast<size_t>(step.b)].users;
    return std::find(users.begin(), users.end(), step.a) != users.end();
  }
  return false;
}

bool Machine::takes(int pool, Stream stream) const {
  bool odd = reinterpret_cast<sim::SimStream*>(stream)->number % 2 != 0, captures = sim.is_capturing(stream);
  return pool == 0 || pool == lending ? captures : pool == 1 ? captures && odd : !captures && odd;
}

int Machine::pool_of(int stream) const {
  for (size_t i = scopes_.size(); i-- > 0;) {
    if (takes(scopes_[i], streams[static_cast<size_t>(stream)])) return scopes_[i];
  }
  return -1;
}

// Whether memory of this size lies free that the rule "back to its own stream" gives to `stream` now.
bool Machine::could_reuse(int stream) {
  auto& now = at(stream);
  if (now.capture == nullptr || odd_) return false;
  for (size_t i = 0; i < held.size(); i++) {
    const Held& block = held[i];
    const sim::Allocation& old = allocations[i];
    if (block.live || old.stream != stream || !block.markers_known || block.capture != now.capture->id ||
        block.pool != pool_of(stream)) {
      continue;
    }
    bool taken = false;
    for (size_t j = i + 1; j < held.size(); j++) taken = taken || allocations[j].overlaps(old);
    if (taken) continue;
    if (std::all_of(block.markers.begin(), block.markers.end(),
                    [&](SimNode* n) { return oracle.behind(n, now.terminals, true); })) {
      return true;
    }
  }
  return false;
}

bool Machine::allocate(int stream, size_t bytes) {
  auto& on = at(stream);
  bool expected = check_completeness && pool_of(stream) >= 0 && could_reuse(stream);
  size_t before = sim.used;
  Address address = 0;
  pool_of_request_ = pool_of(stream);
  Outcome outcome = device->allocate(bytes, streams[static_cast<size_t>(stream)], address);
  if (is_asleep(pool_of(stream)) && outcome.status == Status::ok) return fail("a block was handed out while its pool sleeps");
  if (outcome.status == Status::invalid && !is_asleep(pool_of(stream))) return fail("a pool is taken to sleep that is awake");
  if (outcome.status != Status::ok) {
    out_of_memory++;
    held.push_back({});  // so that later steps name the same blocks
    allocations.push_back({});
    if (outcome.status == Status::invalid) return true;
    if (sim.failed == 0 && asleep_.empty() && memory_left(bytes)) return fail("memory is out, and some lies idle");
    return sim.failed != 0 || sim.capacity < (size_t{1} << 40) ? true : fail("no memory: " + outcome.message);
  }
  if (expected && sim.used != before) return fail("a block that is proven free was not used again");

  if (!sim.backed(address, bytes)) return fail("a block lies where no memory is");
  sim::Allocation made;
  made.number = static_cast<int>(allocations.size());
  made.address = address;
  made.size = bytes;
  made.memory = sim.memory_of(address, bytes);
  made.stream = stream;
  made.graph = on.capture != nullptr ? on.capture->graph : nullptr;
  Held block;
  block.live = true;
  block.birth = on.terminals;
  block.life = held.size();
  block.users = {stream};
  block.capture = on.capture != nullptr ? on.capture->id : 0;
  block.pool = pool_of(stream);
  block.replayed = made.graph != nullptr && block.pool >= 0;
  if (block.capture != 0 && announced(block.capture, false)) seen_.insert(block.capture);
  bool again = false, crossed = false;
  for (size_t i = 0; i < held.size(); i++) {
    if (!allocations[i].overlaps(made)) continue;
    if (held[i].live) return fail("two live blocks lie over each other");
    if (block.capture == 0 && held[i].capture != 0 && held[i].pool >= 0) {
      if (held[i].pool != lending) return fail("what a graph may be replayed in went to work outside of graphs");
      lent++;
      if (under_way(allocations[i].graph)) return fail("memory of a capture under way was lent");
      for (const Launch& each : launches_) {
        if (each.graph == sim::Oracle::top(allocations[i].graph) && !each.node->done &&
            !oracle.behind(each.node, on.terminals)) {
          return fail("what a graph uses was lent while it runs");
        }
      }
    }
    if (held[i].capture == block.capture && block.capture != 0) {
      again = true;
      crossed = crossed || held[i].users.size() > 1;
    }
    // Outside of captures the order is that of the streams and of what has run; a graph is launched after what its
    // streams had before.
    for (const sim::Use& use : allocations[i].uses) {
      if (use.node->graph != nullptr || use.node->done) continue;
      if (!oracle.behind(use.node, on.capture != nullptr ? on.before_capture : on.terminals)) {
        return fail("allocation " + std::to_string(made.number) + " has the memory of " + std::to_string(i) +
                    " before its last use has run");
      }
    }
  }
  reused += again;
  reused_crossed += crossed;
  allocations.push_back(std::move(made));
  held.push_back(std::move(block));
  return true;
}

void Machine::use(int stream, int block, bool early) {
  const sim::Allocation& of = allocations[static_cast<size_t>(block)];
  SimNode* node = sim.kernel(streams[static_cast<size_t>(stream)], block, early, {of.address, of.size});
  allocations[static_cast<size_t>(block)].uses.push_back({node, stream});
}

bool Machine::save(int pool) {
  Saved made;
  made.pool = pool;
  for (size_t i = 0; i < held.size(); i++) {
    if (held[i].live && allocations[i].address != 0 && in_pool(i, pool)) {
      made.blocks.push_back(i);
      made.held.push_back(held[i]);
    }
  }
  Outcome outcome = device->save_pool(id_of(pool), made.state);
  if (outcome.status != Status::ok) made.state = 0;
  bool same = outcome.status != Status::ok || device->live_blocks(id_of(pool)).size() == made.blocks.size();
  saved.push_back(std::move(made));
  return same || fail("a state has other blocks than the program");
}

// A restore ends lives, and a right program has no use of them under way: no capture that the allocator does not know of
// uses the pool, and outside of captures nothing does that has not run.
bool Machine::may_restore(const Saved& to) const {
  auto unknown = [&](const sim::SimGraph* graph) {
    return std::any_of(sim.streams.begin(), sim.streams.end(), [&](auto& s) {
      return s->capture != nullptr && s->capture->graph == graph && seen_.count(s->capture->id) == 0 &&
             !announced(s->capture->id, true);
    });
  };
  for (size_t i = 0; i < held.size(); i++) {
    if (!in_pool(i, to.pool)) continue;
    for (const sim::Use& use : allocations[i].uses) {
      if (use.node->graph != nullptr && unknown(use.node->graph)) return false;
      if (!held[i].live) continue;
      if (use.node->graph == nullptr && !use.node->done) return false;
      for (const sim::SimGraph* g = use.node->graph; g != nullptr; g = g->parent != nullptr ? g->parent->graph : nullptr) {
        if (under_way(g)) return false;
      }
    }
  }
  return true;
}

bool Machine::in_pool(size_t block, int pool) const {
  for (auto& run : device->segments(id_of(pool))) {
    if (run.address <= allocations[block].address && allocations[block].address < run.address + run.size) return true;
  }
  return false;
}

// Whether a capture under way has had memory of the pool.
bool Machine::in_use(int pool) const {
  for (const Held& block : held) {
    if (block.pool != pool || block.capture == 0) continue;
    for (auto& stream : sim.streams) {
      if (stream->capture != nullptr && stream->capture->id == block.capture) return true;
    }
  }
  return false;
}

bool Machine::restore(Saved& to) {
  uint64_t unused = 0;
  if (in_use(to.pool) && sim.failed == 0 && device->save_pool(id_of(to.pool), unused).status == Status::ok) {
    return fail("a state was taken of a pool in use");
  }
  std::vector<Address> before, after, expected;
  for (auto& block : device->live_blocks(id_of(to.pool))) before.push_back(block.address);
  std::vector<size_t> here;  // before the restore: a window that has no block after it is no run of the pool
  for (size_t i = 0; i < held.size(); i++) {
    if (held[i].live && in_pool(i, to.pool)) here.push_back(i);
  }
  Outcome outcome = device->restore_pool(to.state);
  for (auto& block : device->live_blocks(id_of(to.pool))) after.push_back(block.address);
  if (outcome.status != Status::ok) return before == after || fail("a refused restore has changed something");
  for (size_t i : to.blocks) expected.push_back(allocations[i].address);
  std::sort(expected.begin(), expected.end());
  if (after != expected) return fail("a restored pool has other blocks than its state");
  restored++;
  std::set<size_t> lives;
  for (size_t i : here) {
    held[i].live = false;
    bool kept = std::any_of(to.held.begin(), to.held.end(), [&](const Held& h) { return h.life == held[i].life; });
    if (kept && held[i].owned) lives.insert(held[i].life);
    // Whoever had what the restore has ended comes too late, and ends nothing.
    if (!kept && held[i].owned && device->release(allocations[i].address).status != Status::ok) return fail("free refused");
  }
  // A block that lives again is another allocation: what it holds is not what its uses since then have left.
  for (size_t n = 0; n < to.blocks.size(); n++) {
    size_t& i = to.blocks[n];
    sim::Allocation again = allocations[i];
    Held block = to.held[n];
    again.number = static_cast<int>(allocations.size());
    again.uses.clear();
    if (sim.memory_of(again.address, again.size) != again.memory) return fail("a block came back over other memory");
    block.live = true;
    block.owned = lives.count(block.life) != 0;
    i = allocations.size();
    allocations.push_back(std::move(again));
    held.push_back(std::move(block));
  }
  return true;
}

// While a pool is held its graphs may be launched, so what their kernels write at an address is what it was.
bool Machine::still_mapped(int pool) {
  if (is_asleep(pool)) return true;
  for (size_t i = 0; i < held.size(); i++) {
    if (!held[i].replayed || held[i].pool != pool) continue;
    const sim::Allocation& of = allocations[i];
    if (sim.memory_of(of.address, of.size) != of.memory) return fail("a graph may be launched over memory that has gone");
  }
  return true;
}

bool Machine::begin(int stream, sim::SimGraph* graph, const std::vector<SimNode*>& behind) {
  if (!sim.begin_capture(streams[static_cast<size_t>(stream)], graph, behind)) return false;
  began_under_[at(stream).capture->id] = scope_numbers_;
  announce();
  return true;
}

// Whether a scope that was open when it began still is; `for_captures`: one that takes captures.
bool Machine::announced(uint64_t capture, bool for_captures) const {
  auto under = began_under_.find(capture);
  if (under == began_under_.end()) return false;
  for (size_t i = 0; i < scopes_.size(); i++) {
    bool then = std::find(under->second.begin(), under->second.end(), scope_numbers_[i]) != under->second.end();
    if (then && (!for_captures || scopes_[i] != 2)) return true;
  }
  return false;
}

void Machine::announce() {
  for (auto& stream : sim.streams) {
    if (stream->capture != nullptr) stream->capture->announced = announced(stream->capture->id, true);
  }
}

// Nothing of it is being captured, nor of its bodies.
bool Machine::over(const sim::SimGraph* graph) const {
  return std::none_of(sim.streams.begin(), sim.streams.end(), [&](auto& s) {
    return s->capture != nullptr && sim::Oracle::top(s->capture->graph) == graph;
  });
}

std::vector<SimNode*> Machine::leaves(const sim::SimGraph* graph) const {
  std::set<SimNode*> found, before;
  for (auto& node : sim.nodes) {
    if (node->graph != graph) continue;
    found.insert(node.get());
    before.insert(node->dependencies.begin(), node->dependencies.end());
  }
  std::vector<SimNode*> last;
  for (auto& node : sim.nodes) {
    if (found.count(node.get()) != 0 && before.count(node.get()) == 0) last.push_back(node.get());
  }
  return last;
}

// Of a pool that has lent nothing: nobody outside of captures has memory of the graph, or had and is not over.
bool Machine::launched(int stream, const sim::SimGraph* graph) {
  for (size_t i = 0; i < held.size(); i++) {
    const sim::Allocation& of = allocations[i];
    if (of.graph == nullptr || sim::Oracle::top(of.graph) != graph || held[i].pool != lending || !held[i].replayed) continue;
    for (size_t j = 0; j < held.size(); j++) {
      if (allocations[j].graph != nullptr || !allocations[j].overlaps(of) || j < i) continue;
      bool in_use = held[j].live || std::any_of(allocations[j].uses.begin(), allocations[j].uses.end(), [](auto& use) {
        return use.node->graph == nullptr && !use.node->done;
      });
      if (in_use) return fail("a graph is launched while others have its memory");
    }
  }
  // That what it uses stays where it is, is looked at in `still_mapped`.
  launches_.push_back({sim.kernel(streams[static_cast<size_t>(stream)], -1, false, {1, 1}), graph});
  return true;
}

// Whether a request outside of captures could have been served: nobody captures, so all that is over may go back to the
// driver, but what pools that are held keep; and those that are open at out-of-memory serve it.
bool Machine::memory_left(size_t bytes) {
  bool captures = std::any_of(sim.streams.begin(), sim.streams.end(), [](auto& s) { return s->capture != nullptr; });
  // Of a capture that was never seen the allocator does not know that it is over before the scopes are.
  bool doubtful = !scopes_.empty() && std::any_of(began_under_.begin(), began_under_.end(), [&](auto& began) {
    return seen_.count(began.first) == 0;
  });
  if (captures || doubtful || destroyed_) return false;
  size_t rounded = size_class::rounded(bytes);
  auto idle = [&](Address address, size_t size) {
    return std::none_of(held.begin(), held.end(), [&](const Held& block) {
      const sim::Allocation& of = allocations[static_cast<size_t>(&block - held.data())];
      if (!block.live) return false;
      return std::any_of(of.memory.begin(), of.memory.end(), [&](const sim::Bytes& part) {
        auto here = sim.memory_of(address, size);
        return std::any_of(here.begin(), here.end(), [&](const sim::Bytes& b) {
          return part.place < b.place + b.size && b.place < part.place + part.size;
        });
      });
    });
  };
  // What graphs use is given back or lent once the device has been waited for, which a capture that may have begun would
  // not bear.
  bool waits = std::all_of(scopes_.begin(), scopes_.end(), [](int pool) { return pool == 2; });
  bool plain = device->stats().segments.current == static_cast<int64_t>(sim.memory.size());
  bool captured = std::any_of(allocations.begin(), allocations.end(), [](auto& each) { return each.graph != nullptr; });
  if (!waits && captured && !plain) return false;
  // Whole pages and segments of the default pool that nobody has would have gone back, and been enough.
  size_t left = sim.capacity - sim.used;
  for (auto& run : device->segments(PoolId{})) {
    if (sim.memory.count(run.address) != 0 && idle(run.address, run.size)) left += run.size;
    for (auto chunk = sim.mappings.lower_bound(run.address); chunk != sim.mappings.end() && chunk->first < run.address + run.size; ++chunk) {
      if (idle(chunk->first, chunk->second.size)) left += chunk->second.size;
    }
  }
  if (left >= 2 * size_class::segment(rounded)) return true;
  if (!waits) return false;
  for (auto& run : device->segments(id_of(lending))) {
    std::map<Address, Address> taken;  // addresses, and their ends
    for (size_t i = 0; i < held.size(); i++) {
      if (held[i].live) taken[allocations[i].address] = allocations[i].address + size_class::rounded(allocations[i].size);
    }
    Address at = run.address;
    bool fits = false;
    for (auto& [from, to] : taken) {
      if (to <= at || from >= run.address + run.size) continue;
      fits = fits || (from > at && from - at >= rounded + size_class::mib);
      at = std::max(at, to);
    }
    fits = fits || run.address + run.size >= at + rounded + size_class::mib;
    if (fits && pool_of_request_ != lending && device->stats().stitched == 0) return true;
  }
  return false;
}

bool Machine::run(const Step& step) {
  sim::Simulator::enter(&sim);
  bool names_stream = !names_pool(step.op);
  Stream stream = streams[static_cast<size_t>(names_stream ? step.a : 0)];
  switch (step.op) {
    case Op::allocate:
      return allocate(step.a, step.b != 0 ? static_cast<size_t>(step.b) : bytes_);
    case Op::use:
    case Op::use_early:
      odd_ = odd_ || step.op == Op::use_early;
      use(step.a, step.b, step.op == Op::use_early);
      return true;
    case Op::mark: {
      auto& users = held[static_cast<size_t>(step.b)].users;
      if (std::find(users.begin(), users.end(), step.a) == users.end()) users.push_back(step.a);
      allocations[static_cast<size_t>(step.b)].recorded = true;
      return device->record_stream(allocations[static_cast<size_t>(step.b)].address, stream).status == Status::ok ||
             fail("record_stream refused");
    }
    case Op::release:
    case Op::release_elsewhere: {
      Held& block = held[static_cast<size_t>(step.b)];
      freed_asleep += lies_asleep(static_cast<size_t>(step.b));
      block.live = false;
      bool elsewhere = step.op == Op::release_elsewhere;
      block.markers_known = !elsewhere || block.users.size() == 1;
      for (int user : block.users) {
        auto& on = at(user);
        if (on.capture == nullptr || on.capture->id != block.capture) block.markers_known = false;
        block.markers.insert(block.markers.end(), on.terminals.begin(), on.terminals.end());
      }
      if (elsewhere) this_thread() += 1000;
      sim.elsewhere = elsewhere;
      Outcome done = device->release(allocations[static_cast<size_t>(step.b)].address);
      sim.elsewhere = false;
      if (elsewhere) this_thread() -= 1000;
      return done.status == Status::ok || fail("free refused");
    }
    case Op::hand_over:
      this_thread() = second_thread_ ? this_thread() - 2000 : this_thread() + 2000;
      second_thread_ = !second_thread_;
      return true;
    case Op::begin_again: {
      sim::SimGraph* graph = graphs[static_cast<size_t>(step.b / 2)];
      again++;
      if (!begin(step.a, graph, step.b % 2 != 0 ? leaves(graph) : std::vector<SimNode*>{})) return fail("begin refused");
      again_.insert(graph);
      return true;
    }
    case Op::launch:
      return launched(step.a, graphs[static_cast<size_t>(step.b)]);
    case Op::destroy:
      destroyed_ = true;
      sim.destroy(stream);
      return true;
    case Op::record:
      sim.record(stream);
      return true;
    case Op::wait:
      return sim.wait(stream, step.b) || fail("invalid wait");
    case Op::pool_begin: {
      int pool = step.a;
      scopes_.push_back(pool);
      scope_numbers_.push_back(++last_scope_);
      device->begin_pool(id_of(pool), [this, pool](Stream s) { return takes(pool, s); });
      if (pool == 2 || pool == lending) device->set_use_on_oom(id_of(pool), true);
      return true;
    }
    case Op::pool_end:
      if (!still_mapped(step.a)) return false;
      if (step.a != lending) {  // whose graphs hold it
        // Nor are they launched where a state of before comes back.
        for (Held& block : held) block.replayed = block.replayed && block.pool != step.a;
        for (Saved& state : saved) {
          for (Held& block : state.held) block.replayed = block.replayed && block.pool != step.a;
        }
      }
      scope_numbers_.erase(scope_numbers_.begin() + (std::find(scopes_.begin(), scopes_.end(), step.a) - scopes_.begin()));
      scopes_.erase(std::find(scopes_.begin(), scopes_.end(), step.a));
      announce();
      if (device->end_pool(id_of(step.a)).status != Status::ok ||
          (step.a == lending ? lending_held_++, false : device->release_pool(id_of(step.a)).status != Status::ok)) {
        return fail("the end of a pool was refused");
      }
      return true;
    case Op::replace: {
      odd_ = true;
      SimNode* last = at(step.a).terminals.back();
      SimNode* node = last;
      if (step.b == 0) {
        while (!node->dependencies.empty()) node = node->dependencies.front();
      } else if (!node->dependencies.empty()) {
        node = node->dependencies.back();
      }
      return sim.set_terminals(stream, {node}) || fail("replace refused");
    }
    case Op::begin:
      if (!begin(step.a, nullptr, {})) return fail("begin refused");
      graphs.push_back(at(step.a).capture->graph);
      return true;
    case Op::begin_body:
      with_bodies_.insert(at(step.b).capture->id);
      return begin(step.a, sim.conditional(streams[static_cast<size_t>(step.b)]), {}) || fail("begin refused");
    case Op::end:
      return sim.end_capture(stream) || fail("end refused");
    case Op::save:
      return save(step.a);
    case Op::restore:
      return restore(saved[static_cast<size_t>(step.a)]);
    case Op::sleep:
      return sleep(step.a, step.b != 0);
    case Op::wake:
      return wake(step.a);
  }
  return false;
}

bool Machine::is_asleep(int pool) const { return asleep_.count(pool) != 0; }

bool Machine::lies_asleep(size_t block) const {
  return std::any_of(asleep_.begin(), asleep_.end(), [&](int pool) { return in_pool(block, pool); });
}

void Machine::look_who_sleeps() {
  asleep_.clear();
  for (int pool = -1; pool < pools; pool++) {
    bool asleep = false;
    size_t away = 0;
    device->pool_asleep(id_of(pool), asleep, away);
    if (asleep) asleep_.insert(pool);
  }
}

// Each live block has something of its own at both of its ends before. Refused, all of it is as it was; else it may only be
// looked at again after the wake.
bool Machine::sleep(int pool, bool keep) {
  size_t before = sim.failed;
  std::map<size_t, uint64_t> stamps;
  for (size_t i = 0; i < held.size(); i++) {
    const sim::Allocation& of = allocations[i];
    if (!held[i].live || of.address == 0 || lies_asleep(i)) continue;
    stamps[i] = last_stamp_ += 2;
    sim.write(of.address, last_stamp_ - 1);
    if (of.size > 1) sim.write(of.address + of.size - 1, last_stamp_);
  }
  for (size_t i = 0; i < allocations.size(); i++) {
    const sim::Allocation& of = allocations[i];
    if (of.address == 0 || of.memory.empty() || sim.memory_of(of.address, of.size) != of.memory) continue;
    int lies_in = held[i].pool;  // where it lay in a window, whose block is no more
    for (int each = -1; each < pools; each++) {
      if (in_pool(i, each)) lies_in = each;
    }
    mapped_[i] = lies_in;
  }
  look_who_sleeps();
  std::set<int> awake = asleep_;
  size_t bytes = 0, used = sim.used;
  Outcome done = pool == pools ? device->sleep_all(keep, bytes) : device->sleep_pool(id_of(pool), keep, bytes);
  look_who_sleeps();
  for (auto each = mapped_.begin(); each != mapped_.end();) each = is_asleep(each->second) ? std::next(each) : mapped_.erase(each);
  std::string books = device->verify();
  if (!books.empty()) return fail(books + ", after a sleep");
  if (done.status != Status::ok) {
    sleeps_refused++;
    bool more = !std::includes(awake.begin(), awake.end(), asleep_.begin(), asleep_.end());
    if (more) return fail("a pool sleeps though that was refused");
    for (auto& [i, stamp] : stamps) {
      if (!sim.backed(allocations[i].address, allocations[i].size)) return fail("a sleep that was refused has taken memory");
    }
    return true;
  }
  slept++;
  if (pool < pools && !is_asleep(pool)) return fail("a pool that was put to sleep is awake");
  if (sim.used + bytes > used) return fail("less went back than a sleep says");
  for (int each : asleep_) {
    if (awake.count(each) == 0 && in_use(each)) return fail("a pool sleeps that a capture under way uses");
    if (awake.count(each) != 0 || sim.failed != before) continue;
    for (auto& run : device->segments(id_of(each))) {
      if (sim.memory.count(run.address) != 0) continue;  // a plain segment
      auto first = sim.mappings.lower_bound(run.address);
      if (first != sim.mappings.end() && first->first < run.address + run.size) return fail("a pool sleeps and has memory");
    }
  }
  for (auto& [i, stamp] : stamps) {
    if (keep && lies_asleep(i)) stamps_[i] = stamp;
  }
  size_t unused = 0;
  Outcome twice = pool == pools ? device->sleep_all(keep, unused) : device->sleep_pool(id_of(pool), keep, unused);
  return twice.status != Status::ok || fail("a pool was put to sleep twice");
}

bool Machine::wake(int pool) {
  look_who_sleeps();  // pools that were let go of are no more
  bool expected = pool == pools || is_asleep(pool);
  size_t bytes = 0, failures = sim.failed;
  Outcome done = pool == pools ? device->wake_all(-1, bytes) : device->wake_pool(id_of(pool), -1, bytes);
  look_who_sleeps();
  std::string books = device->verify();
  if (!books.empty()) return fail(books + ", after a wake");
  if (!expected && done.status == Status::ok) return fail("a pool was woken that is awake");
  if (done.status != Status::ok) {
    wakes_refused++;
    if (pool < pools && expected && !is_asleep(pool)) return fail("a wake was refused, and the pool is awake");
    bool captures = std::any_of(sim.streams.begin(), sim.streams.end(), [](auto& s) { return s->capture != nullptr; });
    bool roomy = sim.capacity >= (size_t{1} << 40) && sim.failed == failures;
    if (pool < pools && expected && roomy && !captures && seen_.empty()) return fail("a wake was refused: " + done.message);
  } else {
    woken++;
  }
  if (!moved_alike()) return false;
  for (auto each = stamps_.begin(); each != stamps_.end();) {
    auto [i, stamp] = *each;
    const sim::Allocation& of = allocations[i];
    bool over = !held[i].live || !lies_asleep(i);
    if (held[i].live && over) {
      kept_through++;
      if (sim.read(of.address) != stamp - 1 || (of.size > 1 && sim.read(of.address + of.size - 1) != stamp)) {
        return fail("allocation " + std::to_string(i) + " has lost its contents while its pool slept");
      }
    }
    each = over ? stamps_.erase(each) : std::next(each);
  }
  return true;
}

// All that was mapped before a sleep lies over new memory, of which what was one byte is one, and what was two are two.
bool Machine::moved_alike() {
  struct Part {
    uint64_t from, to;
    size_t size;
  };
  std::vector<Part> parts;
  for (auto each = mapped_.begin(); each != mapped_.end();) {
    size_t i = each->first;
    sim::Allocation& of = allocations[i];
    bool needed = held[i].live || held[i].replayed;
    if (is_asleep(each->second)) {
      ++each;
      continue;
    }
    std::vector<sim::Bytes> now = sim.memory_of(of.address, of.size);
    if (now.empty() && needed) return fail("a wake has left a block without memory");
    size_t a = 0, b = 0, a_at = 0, b_at = 0;
    while (a < of.memory.size() && b < now.size()) {
      size_t size = std::min(of.memory[a].size - a_at, now[b].size - b_at);
      parts.push_back({of.memory[a].place + a_at, now[b].place + b_at, size});
      if ((a_at += size) == of.memory[a].size) a_at = 0, a++;
      if ((b_at += size) == now[b].size) b_at = 0, b++;
    }
    if (!now.empty()) of.memory = now;
    each = mapped_.erase(each);
  }
  for (size_t i = 0; i < parts.size(); i++) {
    for (size_t j = 0; j < i; j++) {
      const Part &one = parts[i], &two = parts[j];
      bool were = one.from < two.from + two.size && two.from < one.from + one.size;
      bool are = one.to < two.to + two.size && two.to < one.to + one.size;
      if (were != are || (were && one.to - one.from != two.to - two.from)) return fail("a wake has mapped memory elsewhere");
    }
  }
  return true;
}

bool Machine::finish() {
  sim::Simulator::enter(&sim);
  if (held.size() % 2 == 0) {  // else what sleeps is freed asleep
    for (int pool : std::set<int>(asleep_)) {
      if (!wake(pool)) return false;
    }
  }
  for (size_t i = 0; i < held.size(); i++) {
    if (!held[i].live) continue;
    Step last{Op::use, allocations[i].stream, static_cast<int>(i)};
    if (valid(last)) run(last);
  }
  // And once more by another stream, which waits for the first.
  for (size_t i = 0; i < held.size(); i++) {
    int own = allocations[i].stream, other = (own + 1) % static_cast<int>(streams.size());
    if (!held[i].live || at(own).capture == nullptr) continue;
    int event = sim.record(streams[static_cast<size_t>(own)]);
    if (valid({Op::wait, other, event})) run({Op::wait, other, event});
    if (valid({Op::use, other, static_cast<int>(i)})) run({Op::use, other, static_cast<int>(i)});
  }
  for (int pool : scopes_) {
    if (!still_mapped(pool)) return false;
  }
  std::string broken = oracle.check(allocations);
  if (!broken.empty()) return fail(broken);
  std::string books = device->verify();
  if (!books.empty()) return fail(books);
  if (device->stats().verify_failures != 0 && sim.failed == 0) return fail("the verifier refused a reuse");
  if (!give_all_back) return wrong.empty();

  sim.fail_at(0);
  for (size_t i = 0; i < held.size(); i++) {
    if (held[i].live) run({Op::release, 0, static_cast<int>(i)});
  }
  for (size_t i = 0; i < streams.size(); i++) {
    if (at(static_cast<int>(i)).capture != nullptr) sim.end_capture(streams[i]);
  }
  while (!scopes_.empty()) run({Op::pool_end, scopes_.back()});
  sim.run_all();
  device->set_use_on_oom(id_of(lending), false);
  for (; lending_held_ > 0; lending_held_--) device->release_pool(id_of(lending));
  device->empty_cache();
  for (int pool : std::set<int>(asleep_)) {
    size_t bytes = 0;
    if (device->wake_pool(id_of(pool), -1, bytes).status == Status::ok && bytes != 0) return fail("free memory was woken");
  }
  device->give_back_host();
  if (!sim.pinned.empty()) return fail("memory of the host was not given back in the end");
  books = device->verify();
  if (!books.empty()) return fail(books + ", in the end");
  if (!sim.memory.empty() || !sim.ranges.empty() || !sim.physical.empty() || sim.used != 0) return fail("memory was not given back in the end");
  if (sim.fault) return fail("the driver was called wrongly");
  if (sim.broke_a_capture) return fail("a capture was broken by a call of the driver");
  return wrong.empty();
}

}  // namespace mg::stress
