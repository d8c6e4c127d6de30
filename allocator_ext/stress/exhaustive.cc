// Every small program, from several beginnings: the overlap property by brute force.
//
// Programs over three streams and the alphabet allocate, use, record_stream, free, event record, wait, pool begin and
// end; with --odd also programmatic launches and replaced dependencies; with --elsewhere also frees by another thread. Each ends with an allocation, for only there can
// the allocator go wrong; what lives then is used once more and the oracle looks at all pairs.
// Left out, because another program says the same:
//   - other names for streams that the beginning does not tell apart: the first to be named has the lowest number;
//   - steps that change nothing, and what is too late to matter: an event or a record_stream before the last operation;
//   - a last allocation when all memory is in use: it can only get memory that is new;
//   - other orders of steps of which neither can notice the other. Of all orders of one program the least by comparison
//     of steps is kept: a step is refused where it could have stood before a greater one.
// Both reductions keep the least of all programs that say the same, so together they lose none.
//
//   exhaustive [--operations N] [--reuse own|strict|graph|any] [--start NAME|all] [--odd] [--verify] [--empty-nodes]
//              [--expandable [--stitch]] [--every-order] [--elsewhere]
//              [--part I/N] [--from I] [--seconds N] [--stop-after BRANCHES] [--mutant N] [--print]
// The tree of programs is cut below its first `cut` operations into numbered branches. `--part 0/2` takes every second
// one; when `--seconds` are over, the branch that was begun is finished and the next one's number is told, for `--from`.
// Prints one line of JSON; exits with 1 when something was wrong.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "stress/machine.h"
#include "stress/mutant.h"

using namespace mg;
using namespace mg::stress;

namespace {

constexpr int streams = 3;
constexpr size_t block_bytes = 20 * size_class::mib;  // one segment each: sharing is a decision, not a fit
                                                      // (but where a beginning says otherwise, which is for what captures share)

struct Start {
  const char* name;
  std::vector<Step> steps;
  int told_apart;  // streams from this one on have the same part in it
  size_t bytes = block_bytes;
};

const std::vector<Step> all_forked = {{Op::pool_begin}, {Op::begin, 0}, {Op::allocate, 0}, {Op::use, 0, 0},
                                      {Op::record, 0},  {Op::wait, 1, 0}, {Op::wait, 2, 0}};

// Blocks of half a page, four of them in two pages: 0 and 1 of stream 0, 2 and 3 of stream 1. The first and the last are
// freed; an event behind stream 1's use of its own waits to be waited for. What is allocated then needs both of them.
constexpr size_t piece_bytes = size_class::page / 2;
constexpr size_t pieces_bytes = piece_bytes + piece_bytes / 2;
constexpr int half = static_cast<int>(piece_bytes);
const std::vector<Step> in_pieces = {{Op::pool_begin}, {Op::begin, 0}, {Op::record, 0}, {Op::wait, 1, 0}, {Op::wait, 2, 0},
                                     {Op::allocate, 0, half}, {Op::allocate, 0, half}, {Op::allocate, 1, half},
                                     {Op::allocate, 1, half}, {Op::use, 0, 0}, {Op::use, 1, 3}, {Op::record, 1},
                                     {Op::release, 0, 0}, {Op::release, 0, 3}};

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
    // block 0 came out of a capture that is over and its own stream has used it since; both streams are in another
    {"consumed", {{Op::pool_begin}, {Op::begin, 0}, {Op::allocate, 0}, {Op::use, 0, 0}, {Op::end, 0}, {Op::use, 0, 0},
                  {Op::begin, 0}, {Op::record, 0}, {Op::wait, 1, 0}}, 2},
    // the bodies of two conditional nodes that the graph does not order, captured one after the other on stream 1
    {"bodies", all_forked + std::vector<Step>{{Op::end, 0}, {Op::begin, 0}, {Op::allocate, 0}, {Op::use, 0, 1},
                                              {Op::record, 0}, {Op::wait, 2, 1}, {Op::begin_body, 1, 0},
                                              {Op::allocate, 1}, {Op::use, 1, 2}, {Op::release, 0, 2}, {Op::end, 1},
                                              {Op::begin_body, 1, 2}}, 2},
    // the same body, and the capture that surrounds it has ended before it; stream 0 is in the body now
    {"ended", {{Op::pool_begin}, {Op::begin, 0}, {Op::allocate, 0}, {Op::begin_body, 1, 0},
               {Op::allocate, 1}, {Op::use, 1, 1}, {Op::end, 0}, {Op::record, 1}, {Op::wait, 0, 0}}, 2},
    // block 1 was used on 0 and 1 and given back by proof as block 2; an early kernel has begun beside its last use since
    {"early", all_forked + std::vector<Step>{{Op::allocate, 0}, {Op::record, 0}, {Op::wait, 1, 1}, {Op::use, 0, 1},
                                             {Op::use, 1, 1}, {Op::mark, 1, 1}, {Op::record, 1}, {Op::wait, 0, 2},
                                             {Op::release, 0, 1}, {Op::allocate, 0}, {Op::use_early, 0, 0}}, 2},
    // two captures beside each other in one pool: stream 1 is in another than stream 0
    {"two", {{Op::pool_begin}, {Op::begin, 0}, {Op::begin, 1}, {Op::allocate, 0}, {Op::use, 0, 0}}, 2},
    // what the first capture into a graph has used is free, and another goes on in that graph, behind nothing of it
    {"again", {{Op::pool_begin}, {Op::begin, 0}, {Op::allocate, 0}, {Op::allocate, 0}, {Op::use, 0, 0}, {Op::use, 0, 1},
               {Op::release, 0, 0}, {Op::end, 0}, {Op::begin_again, 0, 0}}, 1},
    // the same, but behind all that is there; stream 1 joins it
    {"on", {{Op::pool_begin}, {Op::begin, 0}, {Op::allocate, 0}, {Op::use, 0, 0}, {Op::release, 0, 0}, {Op::end, 0},
            {Op::begin_again, 0, 1}, {Op::record, 0}, {Op::wait, 1, 0}}, 2},
    // block 0 is of an earlier capture; the body of a loop on stream 1 uses it, and nothing is known of what is around it
    {"unseen", {{Op::pool_begin}, {Op::begin, 1}, {Op::allocate, 1}, {Op::use, 1, 0}, {Op::end, 1}, {Op::begin, 0},
                {Op::begin_body, 1, 0}, {Op::use, 1, 0}}, 2},
    // pieces of two pages are free, one of each stream
    {"pieces", in_pieces, 2, pieces_bytes},
    // block 4 is made of them, and was used on both streams; an event behind stream 1's use waits to be waited for
    {"stitched", in_pieces + std::vector<Step>{{Op::wait, 0, 1}, {Op::allocate, 0}, {Op::use, 0, 4}, {Op::record, 0},
                                               {Op::wait, 1, 2}, {Op::use, 1, 4}, {Op::mark, 1, 4}, {Op::record, 1}},
     2, pieces_bytes},
};

constexpr int cut = 3;

// Of the broken rules (mutant.h) the one by which too little comes back; by the others too much does.
constexpr int frees_elsewhere_lost = 30;

struct Settings {
  int operations = 5;
  bool every_order = false;
  uint64_t part = 0, parts = 1, from = 0, stop_after = 0;
  double seconds = 0;
  Config config;
  std::string start = "all";
  bool odd = false;
  bool elsewhere = false;
  bool print = false;
} settings;

uint64_t programs = 0, reused = 0, reused_crossed = 0, stitched = 0;
uint64_t branches = 0, branches_run = 0, next_branch = 0;
bool out_of_time = false;
std::chrono::steady_clock::time_point began;
std::string wrong;

bool touches_stream(const Step& s) { return s.op != Op::release && s.op != Op::release_elsewhere && s.op != Op::pool_begin && s.op != Op::pool_end; }

// A step by names that do not change with its place among others: an event is called by its stream and its number there.
struct Named {
  Step step;
  int stream = -1, nth = -1;  // the event that it makes or waits for
  bool operator<(const Named& other) const {
    auto key = [](const Named& n) {
      return std::array<int, 5>{static_cast<int>(n.step.op), n.step.a, n.step.op == Op::wait ? 0 : n.step.b, n.stream, n.nth};
    };
    return key(*this) < key(other);
  }
};

// Neither notices whether the other came first. The allocator is told nothing of launches, events and waits, and looks at
// streams only when something is allocated or freed; record_stream adds to a list that is read at the free.
bool independent(const Named& x, const Named& y) {
  const Step &s = x.step, &t = y.step;
  if (s.op == Op::mark || t.op == Op::mark) {
    const Step &mark = s.op == Op::mark ? s : t, &other = s.op == Op::mark ? t : s;
    if (other.op == Op::allocate) return true;  // of another block: this one was there when the mark was chosen
    return (other.op != Op::release && other.op != Op::release_elsewhere) || other.b != mark.b;
  }
  auto pool = [](const Step& step) { return step.op == Op::pool_begin || step.op == Op::pool_end; };
  auto silent = [](const Step& step) {
    return step.op == Op::use || step.op == Op::wait || step.op == Op::record;
  };
  if (pool(s)) return silent(t);
  if (pool(t)) return silent(s);
  if (!silent(s) || !silent(t) || s.a == t.a) return false;
  bool hands_over = (s.op == Op::record && t.op == Op::wait) || (t.op == Op::record && s.op == Op::wait);
  return !hands_over || x.stream != y.stream || x.nth != y.nth;
}

// A machine takes no step back, so each program is run from its beginning.
bool replay(Machine& machine, const Start& start, const std::vector<Step>& program) {
  for (const Step& step : start.steps) {
    if (!machine.run(step)) return false;
  }
  machine.check_completeness = (mutant == 0 || mutant == frees_elsewhere_lost) && settings.config.reuse != Reuse::strict &&
                               settings.config.reuse != Reuse::graph_wide && !settings.config.empty_nodes && !settings.config.expandable;
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

// The last step is run on the machine that has run all before it.
void leaf(const Start& start, Machine& machine, const std::vector<Step>& program) {
  programs++;
  machine.give_all_back = programs % 16 == 0;  // that the books are right in the end needs no proof by every program
  if (!machine.run(program.back()) || !machine.finish()) report(start, program, machine.wrong);
  reused += machine.reused;
  reused_crossed += machine.reused_crossed;
  stitched += machine.device->stats().stitched;
  if (settings.print) {
    for (const Step& step : program) printf("%s ", printed(step).c_str());
    printf("\n");
  }
}

std::vector<Step> candidates(const Machine& machine, int left, int named) {
  std::vector<Step> steps;
  int last = std::min(streams - 1, named);  // the next name that is allowed
  Stats now = machine.device->stats();
  bool nothing_to_take = now.allocated_bytes.current == now.reserved_bytes.current;
  if (left == 1) {
    for (int s = 0; s <= last && !nothing_to_take; s++) steps.push_back({Op::allocate, s});
    return steps;
  }
  int blocks = static_cast<int>(machine.held.size()), events = static_cast<int>(machine.sim.events.size());
  for (int b = 0; b < blocks; b++) {
    steps.push_back({Op::release, 0, b});
    if (settings.elsewhere) steps.push_back({Op::release_elsewhere, 0, b});
  }
  if (left == 2 && nothing_to_take) return steps;
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
  steps.push_back({Op::pool_begin});
  steps.push_back({Op::pool_end});
  return steps;
}

Named named_in(const Start& start, const std::vector<Step>& program, const Step& step) {
  Named named{step};
  if (step.op != Op::record && step.op != Op::wait) return named;
  std::vector<int> events;  // by number: their streams
  auto look = [&](const Step& s) {
    if (s.op == Op::record) events.push_back(s.a);
  };
  for (const Step& s : start.steps) look(s);
  for (const Step& s : program) look(s);
  size_t event = step.op == Op::wait ? static_cast<size_t>(step.b) : events.size();
  named.stream = step.op == Op::wait ? events[event] : step.a;
  named.nth = static_cast<int>(std::count(events.begin(), events.begin() + static_cast<std::ptrdiff_t>(event), named.stream));
  return named;
}

// Whether `step` could have stood before a greater one.
bool another_order(const std::vector<Named>& program, const Named& step) {
  if (settings.every_order) return false;
  for (size_t i = program.size(); i-- > 0 && independent(program[i], step);) {
    if (step < program[i]) return true;
  }
  return false;
}

// Whether this branch is another process's, was run before, or has to wait for another time.
bool elsewhere() {
  uint64_t number = branches++;
  if (number % settings.parts != settings.part || number < settings.from || out_of_time) return true;
  double spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  if ((settings.seconds > 0 && spent > settings.seconds) ||
      (settings.stop_after > 0 && branches_run == settings.stop_after)) {
    out_of_time = true;
    next_branch = number;
    return true;
  }
  branches_run++;
  return false;
}

void explore(const Start& start, std::vector<Step>& program, std::vector<Named>& names, int named) {
  int left = settings.operations - static_cast<int>(program.size());
  std::vector<Step> next;
  auto machine = std::make_unique<Machine>(settings.config, streams, start.bytes);
  if (!replay(*machine, start, program)) {
    report(start, program, machine->wrong);
    return;
  }
  for (const Step& step : candidates(*machine, left, named)) {
    if (!machine->valid(step) || machine->idle(step)) continue;
    bool repeats = !settings.odd && !program.empty() && step == program.back() && step.op == Op::use;
    if (!repeats && !another_order(names, named_in(start, program, step))) next.push_back(step);
  }
  for (const Step& step : next) {
    if (static_cast<int>(program.size()) == cut - 1 && elsewhere()) continue;
    names.push_back(named_in(start, program, step));
    program.push_back(step);
    if (left == 1) {
      if (machine == nullptr) {
        machine = std::make_unique<Machine>(settings.config, streams, start.bytes);
        std::vector<Step> before(program.begin(), program.end() - 1);
        replay(*machine, start, before);
      }
      leaf(start, *machine, program);
    } else {
      explore(start, program, names, touches_stream(step) ? std::max(named, step.a + 1) : named);
    }
    machine.reset();
    program.pop_back();
    names.pop_back();
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
    else if (word == "--elsewhere") settings.elsewhere = true;
    else if (word == "--every-order") settings.every_order = true;
    else if (word == "--stop-after") settings.stop_after = static_cast<uint64_t>(number(value()));
    else if (word == "--seconds") settings.seconds = number(value());
    else if (word == "--from") settings.from = static_cast<uint64_t>(number(value()));
    else if (word == "--part") {
      std::string part = value();
      settings.part = static_cast<uint64_t>(number(part.c_str()));
      settings.parts = std::max<uint64_t>(1, static_cast<uint64_t>(number(part.c_str() + part.find('/') + 1)));
    }
    else if (word == "--print") settings.print = true;
    else if (word == "--expandable") settings.config.expandable = true;
    else if (word == "--stitch") settings.config.stitch = true;
    else if (word == "--verify") settings.config.verify = true;
    else if (word == "--empty-nodes") settings.config.empty_nodes = true;
    else if (has_mutants && word == "--mutant") mutant = number(value());
    else if (word == "--reuse") {
      std::string rule = value();
      settings.config.reuse = rule == "strict" ? Reuse::strict : rule == "graph" ? Reuse::graph_wide
                              : rule == "any"  ? Reuse::any_stream : Reuse::own_stream;
    } else {
      fprintf(stderr, "exhaustive: unknown argument %s\n", word.c_str());
      return 2;
    }
  }
  if (settings.operations < cut) {
    fprintf(stderr, "exhaustive: at least %d operations\n", cut);
    return 2;
  }
  began = std::chrono::steady_clock::now();
  for (const Start& start : starts) {
    if (settings.start != "all" && settings.start != start.name) continue;
    if (start.bytes != block_bytes && !(settings.config.expandable && settings.config.reuse == Reuse::any_stream)) continue;
    std::vector<Step> program;
    std::vector<Named> names;
    explore(start, program, names, start.told_apart);
    if (!wrong.empty()) break;
  }
  double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  auto n = [](uint64_t value) { return static_cast<unsigned long long>(value); };
  printf("{\"operations\": %d, \"programs\": %llu, \"reused\": %llu, \"reused_crossed\": %llu, \"stitched\": %llu, \"branches\": %llu, "
         "\"branches_run\": %llu, \"next_branch\": %llu, \"seconds\": %.2f, \"wrong\": \"%s\"}\n",
         settings.operations, n(programs), n(reused), n(reused_crossed), n(stitched), n(branches), n(branches_run),
         n(out_of_time ? next_branch : branches), seconds, wrong.c_str());
  return wrong.empty() ? 0 : 1;
}
