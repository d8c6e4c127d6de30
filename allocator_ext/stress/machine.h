// One program, run on the allocator over the simulated driver, with everything checked that can be.
//
// In: operations, only those that a right program makes (`valid`). Out: the first thing that was wrong, or nothing. What
// a program must keep to, for any allocator to be right: a stream that uses a block is ordered behind its allocation, and
// at the free each use is behind the present end of a stream that the block belongs to or was recorded on. DESIGN.md says
// what each rule leaves out.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/device.h"
#include "sim/oracle.h"

namespace mg::stress {

using sim::SimNode;

enum class Op : unsigned char {
  allocate,   // a: stream, b: bytes, 0: the machine's
  use,        // a: stream, b: block
  use_early,  // the same, launched by a programmatic edge
  mark,       // record_stream: a: stream, b: block
  release,    // b: block
  record,     // a: stream
  wait,       // a: stream, b: event
  pool_begin, // a: which of `pools`
  pool_end,   // the same
  replace,    // a: stream, b: 0 the capture's first node, 1 the node before the stream's last
  begin,      // a: stream
  begin_body, // a: stream, which captures the body of a conditional node launched on b
  end,        // a: stream
  save,       // a: which of `pools`
  restore,    // a: the number of a save; refused while the pool is in use
  release_elsewhere,  // b: block; by a thread that drives no capture
  hand_over,          // another thread drives from now on
  begin_again,        // a: stream, b: twice the number of a graph, one more where it goes on behind all that is there
  launch,             // a: stream, b: the number of a graph
  destroy,            // a: stream
  sleep,              // a: which of `pools`, -1: the default pool, `pools`: all that are awake; b: 1: contents are kept
  wake,               // the same
};

struct Step {
  Op op;
  int a = 0;
  int b = 0;
  bool operator<(const Step& other) const {
    return op != other.op ? op < other.op : a != other.a ? a < other.a : b < other.b;
  }
  bool operator==(const Step& other) const { return op == other.op && a == other.a && b == other.b; }
};

std::string printed(const Step& step);

// What a scope's filter takes: all streams that capture, every other one of them, every other one that does not, and again
// all that capture. The memory of the last two is open to all at out-of-memory.
constexpr int pools = 4;

struct Held {  // an allocation of the program
  bool live = false;
  std::vector<sim::SimNode*> birth;  // the stream's terminals at its allocation
  std::vector<sim::SimNode*> markers;
  std::vector<int> users;
  bool markers_known = false;        // all users were in the capture that it was allocated in
  uint64_t capture = 0;
  size_t life = 0;                   // the allocation that began it: a restore may bring it back under another number
  bool owned = true;                 // somebody will free it, even after a restore has ended it
  bool replayed = false;             // by graphs of the pool, which is held since
  int pool = -1;                     // whose memory it is: an index of `pools`, -1: nobody's
};

struct Saved {
  int pool = 0;
  uint64_t state = 0;          // 0: it was refused
  std::vector<size_t> blocks;  // live then
  std::vector<Held> held;      // what they were then
};

class Machine {
 public:
  Machine(Config config, int streams, size_t bytes, size_t capacity = size_t{1} << 40);
  ~Machine();

  bool valid(const Step& step);
  // Whether `step` leaves everything as it is.
  bool idle(const Step& step);
  bool run(const Step& step);
  // Uses what lives, frees everything, ends captures, gives memory back: all of it must come back.
  bool finish();

  std::string wrong;
  std::vector<sim::Allocation> allocations;
  std::vector<Held> held;
  std::vector<Saved> saved;
  sim::Simulator sim;
  sim::Oracle oracle;
  std::unique_ptr<Device> device;
  std::vector<Stream> streams;
  std::vector<sim::SimGraph*> graphs;  // that were begun by themselves
  bool check_completeness = false;
  bool give_all_back = true;
  size_t reused = 0;        // allocations over memory that another had in the same capture
  size_t reused_crossed = 0;
  size_t out_of_memory = 0;
  size_t restored = 0;
  size_t lent = 0;          // allocations outside of captures over memory that graphs use
  size_t again = 0;         // captures into the graph of an earlier one
  size_t slept = 0, woken = 0, sleeps_refused = 0, wakes_refused = 0, freed_asleep = 0, kept_through = 0;
  bool is_asleep(int pool) const;
  bool anything_asleep() const { return !asleep_.empty(); }

 private:
  sim::SimStream& at(int stream) { return *sim.streams[static_cast<size_t>(stream)]; }
  bool allocate(int stream, size_t bytes);
  bool fail(std::string text);
  bool save(int pool);
  bool restore(Saved& to);
  bool may_restore(const Saved& to) const;
  bool in_pool(size_t block, int pool) const;
  bool in_use(int pool) const;
  bool could_reuse(int stream);
  bool still_mapped(int pool);
  void use(int stream, int block, bool early);
  bool under_way(const sim::SimGraph* graph) const;
  bool valid_use(const Step& step);
  bool known_over(const sim::Use& use, const std::vector<int>& users);

  size_t bytes_;
  int pool_of_request_ = -1;
  int pool_of(int stream) const;
  bool takes(int pool, Stream stream) const;
  bool begin(int stream, sim::SimGraph* graph, const std::vector<SimNode*>& behind);
  bool announced(uint64_t capture, bool for_captures) const;
  void announce();
  bool over(const sim::SimGraph* graph) const;
  std::vector<SimNode*> leaves(const sim::SimGraph* graph) const;
  bool launched(int stream, const sim::SimGraph* graph);
  bool memory_left(size_t bytes);
  bool lies_asleep(size_t block) const;
  bool sleep(int pool, bool keep);
  bool wake(int pool);
  bool moved_alike();
  void look_who_sleeps();

  std::vector<int> scopes_;            // pools, the innermost last
  std::vector<uint64_t> scope_numbers_;                   // of these, in the order in which they began
  uint64_t last_scope_ = 0;
  std::map<uint64_t, std::vector<uint64_t>> began_under_;  // by capture: numbers of the scopes that were open then
  std::set<uint64_t> with_bodies_;                         // captures
  std::set<const sim::SimGraph*> again_;                   // graphs
  struct Launch {
    SimNode* node;
    const sim::SimGraph* graph;
  };
  std::vector<Launch> launches_;
  int lending_held_ = 0;
  std::set<int> asleep_;               // pools, -1: the default one
  std::map<size_t, uint64_t> stamps_;  // by block: what was written to it before its pool slept, where that is kept
  std::map<size_t, int> mapped_;       // allocations that lay where memory was, then, and the pools that this was of
  uint64_t last_stamp_ = 0;
  bool destroyed_ = false, second_thread_ = false;
  std::set<uint64_t> seen_;            // of these, the ones in which memory was allocated
  bool odd_ = false;  // replaced dependencies or programmatic edges occurred
};

}  // namespace mg::stress
