// What is right, found by looking at everything: shares nothing with the core.
//
// In: the simulator's nodes and edges, and which node used which allocation. Out: the order between any two nodes, and
// the pairs of allocations that lie over each other, by whichever addresses, while the graph does not order their uses.
//
// Two orders: u *begins before* v along edges of any kind; u *completes before* v begins, if the last edge that leaves u
// is a full one (what a node waited for is over once it has begun). Nodes of a conditional body stand, seen from outside,
// where their conditional node stands; the body may run any number of times.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sim/simulator.h"

namespace mg::sim {

struct Use {
  SimNode* node;
  int stream;
};

struct Allocation {
  int number = 0;
  Address address = 0;
  size_t size = 0;
  int stream = 0;
  SimGraph* graph = nullptr;  // in whose capture it was allocated; null: in none
  bool recorded = false;      // record_stream named another stream
  std::vector<Use> uses;

  std::vector<Bytes> memory;  // that lay behind its addresses when it was made

  // In addresses or, where memory is mapped at several, in memory.
  bool overlaps(const Allocation& other) const {
    if (address < other.address + other.size && other.address < address + size) return true;
    for (const Bytes& a : memory) {
      for (const Bytes& b : other.memory) {
        if (a.place < b.place + b.size && b.place < a.place + a.size) return true;
      }
    }
    return false;
  }
};

class Oracle {
 public:
  explicit Oracle(const Simulator& simulator) : simulator_(simulator) {}

  bool begins_before(const SimNode* u, const SimNode* v) { return u != v && bit(rows(v).begun, u); }
  bool completes_before(const SimNode* u, const SimNode* v) { return u != v && bit(rows(v).completed, u); }

  // The graph that a body belongs to in the end.
  static const SimGraph* top(const SimGraph* graph);

  // Whether u is behind one of `terminals`, or one of them.
  bool behind(const SimNode* u, const std::vector<SimNode*>& terminals, bool completed = false);

  // The property that everything rests on, for all pairs; the first that breaks it, or nothing.
  std::string check(const std::vector<Allocation>& allocations);

 private:
  using Bits = std::vector<uint64_t>;
  struct Rows {
    Bits begun, completed;
  };
  static bool bit(const Bits& bits, const SimNode* node) {
    size_t word = static_cast<size_t>(node->number) / 64;
    return word < bits.size() && (bits[word] >> (node->number % 64) & 1) != 0;
  }
  Rows& rows(const SimNode* node);
  bool precedes(const Allocation& a, const Use& u, const Allocation& b, const Use& v);
  bool all_precede(const Allocation& a, const Allocation& b);
  static bool within(const SimGraph* graph, const SimGraph* outer);

  const Simulator& simulator_;
  std::vector<Rows> rows_;
};

}  // namespace mg::sim
