// Every small program, from several beginnings: the overlap property by brute force.
//
// Programs over three streams and the alphabet allocate, use, record_stream, free, event record, wait, pool begin and
// end; with --odd also programmatic launches and replaced dependencies. Each ends with an allocation, for only there can
// the allocator go wrong; what lives then is used once more and the oracle looks at all pairs.
// Left out, because another program says the same: other names for streams that the beginning does not tell apart; steps
// that change nothing; events too late to be waited for; two steps in the other order where neither can notice the other.
//
//   exhaustive [--operations N] [--reuse own|strict|graph|any] [--start NAME|all] [--odd] [--verify] [--empty-nodes]
//              [--mutant N] [--print]
// Prints one line of JSON; exits with 1 when something was wrong.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "stress/machine.h"

using namespace mg;
using namespace mg::stress;

namespace {

constexpr int streams = 3;
constexpr size_t block_bytes = 20 * size_class::mib;  // one segment each: sharing is a decision, not a fit

struct Start {
  const char* name;
  std::vector<Step> steps;
  int told_apart;  // streams from this one on have the same part in it
};

const std::vector<Step> all_forked = {{Op::pool_begin}, {Op::begin, 0}, {Op::allocate, 0}, {Op::use, 0, 0},
                                      {Op::record, 0},  {Op::wait, 1, 0}, {Op::wait, 2, 0}};

std::vector<Step> operator+(std::vector<Step> a, const std::vector<Step>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

const std::vector<Start> starts = {
    // nothing but the capture's origin
    {"alone", {{Op::pool_begin}, {Op::begin, 0}}, 1},
    // all streams are in the capture; block 0 lives and was used on stream 0
    {"forked", all_forked, 1},
    // block 1 of stream 0 is used on both 0 and 1, which has gone on since
    {"shared", all_forked + std::vector<Step>{{Op::allocate, 0}, {Op::record, 0}, {Op::wait, 1, 1}, {Op::use, 1, 1},
                                              {Op::mark, 1, 1}}, 2},
    // the same, and already freed; an event behind stream 1's use waits to be waited for
    {"freed", all_forked + std::vector<Step>{{Op::allocate, 0}, {Op::record, 0}, {Op::wait, 1, 1}, {Op::use, 1, 1},
                                             {Op::mark, 1, 1}, {Op::record, 1}, {Op::release, 0, 1}}, 2},
    // block 0 is older than the capture and was used on two streams before it
    {"older", {{Op::allocate, 0}, {Op::use, 0, 0}, {Op::record, 0}, {Op::wait, 1, 0}, {Op::use, 1, 0}, {Op::mark, 1, 0},
               {Op::pool_begin}, {Op::begin, 0}, {Op::use, 0, 0}, {Op::record, 0}, {Op::wait, 1, 1}}, 2},
    // no capture at all
    {"eager", {{Op::allocate, 0}, {Op::use, 0, 0}, {Op::record, 0}, {Op::wait, 1, 0}, {Op::use, 1, 0}}, 2},
    // block 0 came out of a capture that is over and was used on stream 1 since; another capture begins
    {"output", {{Op::pool_begin}, {Op::begin, 0}, {Op::allocate, 0}, {Op::use, 0, 0}, {Op::end, 0}, {Op::record, 0},
                {Op::wait, 1, 0}, {Op::use, 1, 0}, {Op::mark, 1, 0}, {Op::begin, 0}}, 2},
    // the bodies of two conditional nodes that the graph does not order, captured one after the other on stream 1
    {"bodies", all_forked + std::vector<Step>{{Op::end, 0}, {Op::begin, 0}, {Op::allocate, 0}, {Op::use, 0, 1},
                                              {Op::record, 0}, {Op::wait, 2, 1}, {Op::begin_body, 1, 0},
                                              {Op::allocate, 1}, {Op::use, 1, 2}, {Op::release, 0, 2}, {Op::end, 1},
                                              {Op::begin_body, 1, 2}}, 2},
    // two captures beside each other in one pool: stream 1 is in another than stream 0
    {"two", {{Op::pool_begin}, {Op::begin, 0}, {Op::begin, 1}, {Op::allocate, 0}, {Op::use, 0, 0}}, 2},
};

struct Settings {
  int operations = 5;
  Config config;
  std::string start = "all";
  bool odd = false;
  bool print = false;
} settings;

uint64_t programs = 0, prefixes = 0, reused = 0, reused_crossed = 0;
std::string wrong;

bool touches_stream(const Step& s) { return s.op != Op::release && s.op != Op::pool_begin && s.op != Op::pool_end; }
bool touches_block(const Step& s) {
  return s.op == Op::use || s.op == Op::use_early || s.op == Op::mark || s.op == Op::release;
}

// Neither notices whether the other came first.
bool independent(const Step& s, const Step& t) {
  auto free_of_order = [](const Step& x) { return x.op == Op::use || x.op == Op::mark || x.op == Op::wait; };
  if (!free_of_order(s) || !free_of_order(t)) return false;
  if (s.op == Op::mark || t.op == Op::mark) {
    return s.op == t.op ? true : !(touches_block(s) && touches_block(t) && s.b == t.b);
  }
  return s.a != t.a;
}

// A machine takes no step back, so each program is run from its beginning.
bool replay(Machine& machine, const Start& start, const std::vector<Step>& program) {
  for (const Step& step : start.steps) {
    if (!machine.run(step)) return false;
  }
  machine.check_completeness = settings.config.mutant == Mutant::none && settings.config.reuse != Reuse::strict &&
                               settings.config.reuse != Reuse::graph_wide && !settings.config.empty_nodes;
  for (const Step& step : program) {
    if (!machine.run(step)) return false;
  }
  return true;
}

void report(const Start& start, const std::vector<Step>& program, const std::string& what) {
  wrong = std::string(start.name) + ":";
  for (const Step& step : program) wrong += " " + printed(step);
  wrong += ": " + what;
}

void leaf(const Start& start, const std::vector<Step>& program) {
  programs++;
  Machine machine(settings.config, streams, block_bytes);
  if (!replay(machine, start, program) || !machine.finish()) report(start, program, machine.wrong);
  reused += machine.reused;
  reused_crossed += machine.reused_crossed;
  if (settings.print) {
    for (const Step& step : program) printf("%s ", printed(step).c_str());
    printf("\n");
  }
}

std::vector<Step> candidates(const Machine& machine, int left, int named) {
  std::vector<Step> steps;
  int last = std::min(streams - 1, named);  // the next name that is allowed
  if (left == 1) {
    for (int s = 0; s <= last; s++) steps.push_back({Op::allocate, s});
    return steps;
  }
  int blocks = static_cast<int>(machine.held.size()), events = static_cast<int>(machine.sim.events.size());
  for (int s = 0; s <= last; s++) {
    steps.push_back({Op::allocate, s});
    for (int b = 0; b < blocks; b++) {
      steps.push_back({Op::use, s, b});
      if (settings.odd) steps.push_back({Op::use_early, s, b});
      if (left > 2) steps.push_back({Op::mark, s, b});
    }
    if (left > 2) steps.push_back({Op::record, s});
    for (int e = 0; e < events; e++) steps.push_back({Op::wait, s, e});
    if (settings.odd) {
      steps.push_back({Op::replace, s, 0});
      steps.push_back({Op::replace, s, 1});
    }
  }
  for (int b = 0; b < blocks; b++) steps.push_back({Op::release, 0, b});
  steps.push_back({Op::pool_begin});
  steps.push_back({Op::pool_end});
  return steps;
}

void explore(const Start& start, std::vector<Step>& program, int named) {
  int left = settings.operations - static_cast<int>(program.size());
  std::vector<Step> next;
  {
    Machine machine(settings.config, streams, block_bytes);
    prefixes++;
    if (!replay(machine, start, program)) {
      report(start, program, machine.wrong);
      return;
    }
    for (const Step& step : candidates(machine, left, named)) {
      if (!machine.valid(step) || machine.idle(step)) continue;
      if (!program.empty()) {
        const Step& before = program.back();
        if (independent(before, step) && step < before) continue;
        bool repeats = step == before && (step.op == Op::use || step.op == Op::replace);
        if (repeats) continue;
      }
      next.push_back(step);
    }
  }
  for (const Step& step : next) {
    program.push_back(step);
    if (left == 1) {
      leaf(start, program);
    } else {
      explore(start, program, touches_stream(step) ? std::max(named, step.a + 1) : named);
    }
    program.pop_back();
    if (!wrong.empty()) return;
  }
}

int number(const char* text) { return static_cast<int>(strtol(text, nullptr, 10)); }

}  // namespace

int main(int count, char** words) {
  for (int i = 1; i < count; i++) {
    std::string word = words[i];
    auto value = [&] { return i + 1 < count ? words[++i] : words[i]; };
    if (word == "--operations") settings.operations = number(value());
    else if (word == "--start") settings.start = value();
    else if (word == "--odd") settings.odd = true;
    else if (word == "--print") settings.print = true;
    else if (word == "--verify") settings.config.verify = true;
    else if (word == "--empty-nodes") settings.config.empty_nodes = true;
    else if (word == "--mutant") settings.config.mutant = static_cast<Mutant>(number(value()));
    else if (word == "--reuse") {
      std::string rule = value();
      settings.config.reuse = rule == "strict" ? Reuse::strict : rule == "graph" ? Reuse::graph_wide
                              : rule == "any"  ? Reuse::any_stream : Reuse::own_stream;
    } else {
      fprintf(stderr, "exhaustive: unknown argument %s\n", word.c_str());
      return 2;
    }
  }
  auto began = std::chrono::steady_clock::now();
  for (const Start& start : starts) {
    if (settings.start != "all" && settings.start != start.name) continue;
    std::vector<Step> program;
    explore(start, program, start.told_apart);
    if (!wrong.empty()) break;
  }
  double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  printf("{\"programs\": %llu, \"prefixes\": %llu, \"reused\": %llu, \"reused_crossed\": %llu, \"seconds\": %.2f, "
         "\"wrong\": \"%s\"}\n",
         static_cast<unsigned long long>(programs), static_cast<unsigned long long>(prefixes),
         static_cast<unsigned long long>(reused), static_cast<unsigned long long>(reused_crossed), seconds,
         wrong.c_str());
  return wrong.empty() ? 0 : 1;
}
