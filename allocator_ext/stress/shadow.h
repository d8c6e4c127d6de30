// A graph run in random orders, over memory that remembers who wrote it last.
//
// In: the graph's nodes, and which of them use which allocation. Out: the first allocation whose bytes were another's
// when it was used again. It says nothing that the oracle does not, by other means.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "sim/oracle.h"

namespace mg::stress {

class Shadow {
 public:
  Shadow(const sim::Simulator& simulator, const std::vector<sim::Allocation>& allocations);
  // One launch of each graph, each in an order of its own.
  std::string launch(std::mt19937_64& random);

 private:
  bool run(const sim::SimGraph* graph, std::mt19937_64& random);
  bool use(size_t allocation);

  struct Bytes {
    bool in_use = false;  // used in this launch (of the innermost body that it belongs to)
    bool lost = false;    // another wrote there since
  };
  const std::vector<sim::Allocation>& allocations_;
  std::vector<const sim::SimGraph*> graphs_;
  std::vector<std::vector<const sim::SimNode*>> nodes_;      // by graph
  std::vector<std::vector<size_t>> overlapping_;             // by allocation
  std::vector<std::vector<size_t>> users_;                   // by node: allocations
  std::vector<std::vector<const sim::SimNode*>> followers_;  // by node
  std::vector<Bytes> bytes_;
  std::string wrong_;
};

}  // namespace mg::stress
