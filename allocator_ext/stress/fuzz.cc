// Long random programs: several captures, bodies, work outside of captures, little memory, a driver that fails.
//
// Each program is run with a random rule of reuse, judged by the oracle and launched in random orders over shadow memory.
// `--each-call` runs each program again and again, and in the n-th time the n-th call of the driver fails.
//
// `--sleep`: pools also sleep and wake.
//
//   fuzz [--seed N] [--operations N] [--length N] [--each-call] [--sleep] [--mutant N] [--print]
// Prints one line of JSON; exits with 1 when something was wrong.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "stress/machine.h"
#include "stress/mutant.h"
#include "stress/shadow.h"

using namespace mg;
using namespace mg::stress;

namespace {

constexpr int streams = 4;
constexpr size_t most_live = 24;
constexpr int launches = 3;

struct Totals {
  uint64_t operations = 0, programs = 0, reused = 0, reused_crossed = 0, restored = 0, stitched = 0, lent = 0, again = 0, failed_calls = 0, out_of_memory = 0;
  uint64_t slept = 0, woken = 0, sleeps_refused = 0, wakes_refused = 0, freed_asleep = 0, kept_through = 0;
  std::string wrong;
} totals;

struct Plan {
  Config config;
  size_t capacity;
  bool pieces;  // sizes that leave pieces of pages, and states with blocks that are made of such
};

Plan plan(std::mt19937_64& random) {
  Plan made;
  made.config.reuse = static_cast<Reuse>(random() % 4);
  made.config.verify = random() % 4 == 0;
  made.config.empty_nodes = random() % 8 == 0;
  made.config.expandable = random() % 3 == 0;
  made.pieces = random() % 4 != 0;
  if (made.pieces) {
    made.config.reuse = Reuse::any_stream;
    made.config.expandable = true;
  }
  made.config.stitch = random() % 4 != 0;
  made.capacity = random() % 4 == 0 ? 128 * size_class::mib : size_t{1} << 40;
  return made;
}

Step propose(Machine& machine, std::mt19937_64& random, bool pieces, bool& runs) {
  auto any = [&](size_t below) { return static_cast<int>(random() % below); };
  std::vector<int> live;
  for (size_t i = 0; i < machine.held.size(); i++) {
    if (machine.held[i].live) live.push_back(static_cast<int>(i));
  }
  int stream = any(streams);
  int block = live.empty() ? -1 : live[random() % live.size()];
  runs = false;
  int kind = any(100);
  if (kind < 22 && live.size() < most_live) {
    static const int sizes[] = {700, 4096, 70000, 600000, 1 << 20, 3 << 20, 5 << 20, 9 << 20, 13 << 20};
    static const int uneven[] = {70000, 600000, 1200000, 1500000, 1700000, 2500000, 2900000, 3500000, 5 << 20};
    size_t which = random() % 9;
    return {Op::allocate, stream, pieces ? uneven[which] : sizes[which]};
  }
  if (kind < 50 && block >= 0) return {kind < 48 ? Op::use : Op::use_early, stream, block};
  if (kind < 58 && block >= 0) return {Op::mark, stream, block};
  if (kind < 78 && block >= 0) return {any(8) != 0 ? Op::release : Op::release_elsewhere, 0, block};
  if (kind < 84) return {Op::record, stream};
  if (kind < 93 && !machine.sim.events.empty()) {
    size_t recent = std::min<size_t>(machine.sim.events.size(), 6);
    return {Op::wait, stream, static_cast<int>(machine.sim.events.size() - 1 - random() % recent)};
  }
  bool capturing = machine.sim.is_capturing(machine.streams[0]) || machine.sim.is_capturing(machine.streams[1]);
  if (pieces && !capturing && any(3) == 0) kind = 98;
  if (kind < 94) return {Op::begin, capturing && any(8) != 0 ? 0 : stream};
  if (kind < 95) return {Op::begin_body, stream, any(streams)};
  if (kind < 96 && any(2) == 0) return {Op::end, stream};
  if (kind < 97) return {any(3) != 0 ? Op::pool_begin : Op::pool_end, any(5) % pools};
  if (kind < 98 && any(4) == 0) return {Op::replace, stream, any(2)};
  if (kind < 99) {
    if (machine.saved.empty() || any(2) == 0) return {Op::save, any(8) != 0 ? 0 : any(pools)};
    return {Op::restore, any(2) != 0 ? any(machine.saved.size()) : static_cast<int>(machine.saved.size()) - 1};
  }
  if (any(2) == 0) {
    int graph = machine.graphs.empty() ? 0 : static_cast<int>(machine.graphs.size()) - 1 - any(std::min<size_t>(3, machine.graphs.size()));
    switch (any(12)) {
      case 0: case 1: case 2: case 3: return {Op::begin_again, stream, 2 * graph + any(2)};
      case 4: case 5: case 6: case 7: case 8: return {Op::launch, stream, graph};
      case 9: return {Op::hand_over};
      case 10: return {Op::destroy, streams - 1 - any(2)};
      default: break;
    }
  }
  runs = true;
  return {Op::record, stream};
}

// The capture ends after a block was made of pieces; a state keeps it, it is freed, another capture may have its memory,
// and the state comes back.
std::vector<Step> back_and_forth(const Machine& machine, std::mt19937_64& random) {
  std::vector<Step> steps;
  int block = static_cast<int>(machine.held.size()) - 1;
  for (int s = 0; s < streams; s++) steps.push_back({Op::end, s});
  steps.push_back({Op::save, 0});
  steps.push_back({Op::release, 0, block});
  if (random() % 2 == 0) {
    steps.push_back({Op::begin, 0});
    for (int i = 0; i < 3; i++) steps.push_back({Op::allocate, 0, 1500000});
    steps.push_back({Op::end, 0});
  }
  steps.push_back({Op::restore, static_cast<int>(machine.saved.size())});
  return steps;
}

bool judge(Machine& machine, std::mt19937_64& random, const std::string& what) {
  bool right = machine.wrong.empty() && machine.finish();
  if (right) {
    Shadow shadow(machine.sim, machine.allocations);
    for (int i = 0; i < launches && machine.wrong.empty(); i++) machine.wrong = shadow.launch(random);
    right = machine.wrong.empty();
  }
  totals.reused += machine.reused;
  totals.reused_crossed += machine.reused_crossed;
  totals.restored += machine.restored;
  totals.stitched += machine.device->stats().stitched;
  totals.lent += machine.lent;
  totals.again += machine.again;
  totals.slept += machine.slept;
  totals.woken += machine.woken;
  totals.sleeps_refused += machine.sleeps_refused;
  totals.wakes_refused += machine.wakes_refused;
  totals.freed_asleep += machine.freed_asleep;
  totals.kept_through += machine.kept_through;
  totals.failed_calls += machine.sim.failed;
  totals.out_of_memory += machine.out_of_memory;
  totals.programs++;
  if (!right) totals.wrong = what + ": " + machine.wrong;
  return right;
}

// For `--print`: a program as it runs.
void print(const Machine& machine, const Step& step, int block) {
  std::string where;
  for (Stream s : machine.streams) where += machine.sim.is_capturing(s) ? 'c' : '.';
  fprintf(stderr, "%s %s", where.c_str(), printed(step).c_str());
  if (step.op == Op::allocate) fprintf(stderr, " block %d", block);
  fprintf(stderr, "\n");
}

// Mostly when captures and scopes have ended, for else it is refused; soon what sleeps wakes, and all goes on.
std::vector<Step> sleep_or_wake(const Machine& machine, std::mt19937_64& random) {
  int pool = static_cast<int>(random() % (pools + 2)) - 1;  // the default one, one of `pools`, or all
  Step sleep{Op::sleep, pool, random() % 3 != 0 ? 1 : 0};
  std::vector<Step> steps;
  if (!machine.anything_asleep() || random() % 8 == 0) {
    if (random() % 8 == 0) return {sleep};
    for (int s = 0; s < streams; s++) steps.push_back({Op::end, s});
    for (int each = 0; each < pools; each++) steps.push_back({Op::pool_end, each});
    steps.push_back(sleep);
    if (random() % 2 == 0) steps.push_back({Op::pool_begin, 0});
    return steps;
  }
  for (int each = -1; each < pools; each++) {
    if (machine.is_asleep(each) && random() % 4 != 0) pool = each;
  }
  steps.push_back({Op::wake, pool});
  steps.push_back({Op::pool_begin, random() % 2 != 0 ? 3 : 0});
  return steps;
}

bool one(uint64_t seed, int length, bool each_call, bool sleeps, bool prints) {
  std::mt19937_64 random(seed);
  Plan planned = plan(random);
  if (prints) fprintf(stderr, "reuse %d, capacity %zu\n", static_cast<int>(planned.config.reuse), planned.capacity);
  bool failing = !each_call && random() % 3 == 0;
  std::vector<Step> steps;
  uint64_t calls = 0;
  std::string name = "seed " + std::to_string(seed);
  {
    Machine machine(planned.config, streams, size_class::mib, planned.capacity);
    machine.run({Op::pool_begin});
    while (static_cast<int>(steps.size()) < length) {
      bool runs = false;
      Step step = propose(machine, random, planned.pieces, runs);
      std::vector<Step> now;
      if (sleeps && random() % (machine.anything_asleep() ? 8 : 48) == 0) {
        now = sleep_or_wake(machine, random);
        runs = false;
        step = {Op::save, 0};  // which is always valid, and is not run
      }
      if (runs) machine.sim.run_one(random());
      if (runs || !machine.valid(step)) continue;
      if (failing && random() % 16 == 0) machine.sim.fail_at(1 + random() % 8);
      bool others = !now.empty();
      if (!others) now.push_back(step);
      if (step.op == Op::begin && random() % 4 != 0) {  // most captures are wide from the start
        now.push_back({Op::record, step.a});
        int event = static_cast<int>(machine.sim.events.size());
        for (int s = 0; s < streams; s++) now.push_back({Op::wait, s, event});
      }
      bool right = true;
      for (size_t i = 0; i < now.size() && right; i++) {
        const Step each = now[i];
        if ((i > 0 || others) && !machine.valid(each)) continue;
        steps.push_back(each);
        totals.operations++;
        if (prints) print(machine, each, static_cast<int>(machine.held.size()));
        uint64_t stitched = machine.device->stats().stitched;
        right = machine.run(each);
        if (i == 0 && machine.device->stats().stitched != stitched && random() % 4 == 0) {
          for (const Step& next : back_and_forth(machine, random)) now.push_back(next);
        }
      }
      if (!right) break;
    }
    calls = machine.sim.calls;
    if (!judge(machine, random, name)) return false;
  }
  if (!each_call) return true;
  for (uint64_t n = 1; n <= calls; n++) {
    Machine machine(planned.config, streams, size_class::mib, planned.capacity);
    machine.sim.fail_at(n);
    machine.run({Op::pool_begin});
    for (const Step& step : steps) {
      if (!machine.valid(step)) continue;
      totals.operations++;
      if (!machine.run(step)) break;
    }
    if (!judge(machine, random, name + ", call " + std::to_string(n) + " fails")) return false;
  }
  return true;
}

}  // namespace

int main(int count, char** words) {
  uint64_t seed = 9000, operations = 100000;  // from here on most broken rules show soon
  int length = 400;
  bool each_call = false, sleeps = false, prints = false;
  for (int i = 1; i < count; i++) {
    std::string word = words[i];
    auto value = [&] { return i + 1 < count ? strtoull(words[++i], nullptr, 10) : 0; };
    if (word == "--seed") seed = value();
    else if (word == "--operations") operations = value();
    else if (word == "--length") length = static_cast<int>(value());
    else if (word == "--each-call") each_call = true;
    else if (word == "--sleep") sleeps = true;
    else if (word == "--print") prints = true;
    else if (has_mutants && word == "--mutant") mutant = static_cast<int>(value());
    else {
      fprintf(stderr, "fuzz: unknown argument %s\n", word.c_str());
      return 2;
    }
  }
  auto began = std::chrono::steady_clock::now();
  while (totals.operations < operations && one(seed, length, each_call, sleeps, prints)) seed++;
  double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  auto n = [](uint64_t value) { return static_cast<unsigned long long>(value); };
  printf("{\"operations\": %llu, \"programs\": %llu, \"reused\": %llu, \"reused_crossed\": %llu, \"restored\": %llu, \"stitched\": %llu, \"lent\": %llu, \"again\": %llu, \"failed_calls\": %llu, "
         "\"slept\": %llu, \"woken\": %llu, \"sleeps_refused\": %llu, \"wakes_refused\": %llu, \"freed_asleep\": %llu, \"kept_through\": %llu, "
         "\"out_of_memory\": %llu, \"seconds\": %.2f, \"wrong\": \"%s\"}\n",
         n(totals.operations), n(totals.programs), n(totals.reused), n(totals.reused_crossed), n(totals.restored), n(totals.stitched), n(totals.lent), n(totals.again), n(totals.failed_calls),
         n(totals.slept), n(totals.woken), n(totals.sleeps_refused), n(totals.wakes_refused), n(totals.freed_asleep), n(totals.kept_through),
         n(totals.out_of_memory), seconds, totals.wrong.c_str());
  return totals.wrong.empty() ? 0 : 1;
}
