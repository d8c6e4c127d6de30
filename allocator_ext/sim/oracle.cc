#include "sim/oracle.h"

#include <algorithm>

namespace mg::sim {

Oracle::Rows& Oracle::rows(const SimNode* node) {
  while (rows_.size() <= static_cast<size_t>(node->number)) {
    const SimNode& next = *simulator_.nodes[rows_.size()];
    size_t words = rows_.size() / 64 + 1;
    Rows made{Bits(words, 0), Bits(words, 0)};
    for (size_t i = 0; i < next.dependencies.size(); i++) {
      const SimNode* from = next.dependencies[i];
      const Rows& past = rows_[static_cast<size_t>(from->number)];
      for (size_t w = 0; w < past.begun.size(); w++) {
        made.begun[w] |= past.begun[w];
        made.completed[w] |= past.completed[w];
      }
      uint64_t self = uint64_t{1} << (from->number % 64);
      made.begun[static_cast<size_t>(from->number) / 64] |= self;
      if (next.edges[i].full()) made.completed[static_cast<size_t>(from->number) / 64] |= self;
    }
    rows_.push_back(std::move(made));
  }
  return rows_[static_cast<size_t>(node->number)];
}

bool Oracle::behind(const SimNode* u, const std::vector<SimNode*>& terminals, bool completed) {
  return std::any_of(terminals.begin(), terminals.end(), [&](SimNode* t) {
    return u == t || (completed ? completes_before(u, t) : begins_before(u, t));
  });
}

const SimGraph* Oracle::top(const SimGraph* graph) {
  while (graph->parent != nullptr) graph = graph->parent->graph;
  return graph;
}

bool Oracle::within(const SimGraph* graph, const SimGraph* outer) {
  while (graph != nullptr && graph != outer) graph = graph->parent != nullptr ? graph->parent->graph : nullptr;
  return graph == outer;
}

bool Oracle::precedes(const Allocation& a, const Use& use, const Allocation& b, const Use& later) {
  const SimNode *u = use.node, *v = later.node;
  // Up to the graph that both are in.
  while (!within(v->graph, u->graph)) u = u->graph->parent;
  while (v->graph != u->graph) v = v->graph->parent;
  if (u->graph->parent != nullptr && !(within(a.graph, u->graph) && within(b.graph, u->graph))) {
    return false;  // what lives longer than one run of a body has uses before and after all others in it
  }
  if (completes_before(u, v)) return true;
  // What is left begins in order, and a kernel between them was launched early. That is enough between kernels of one
  // stream, which then keep their own order, and for what one stream alone answers for: it is given back on that stream
  // as outside of graphs, where the stream's order is all that there is.
  bool one_stream = u == use.node && v == later.node && use.stream == later.stream;
  bool its_own = u == use.node && !a.recorded && a.stream == b.stream && use.stream == a.stream;
  return (one_stream || its_own) && begins_before(u, v);
}

bool Oracle::all_precede(const Allocation& a, const Allocation& b) {
  for (const Use& u : a.uses) {
    for (const Use& v : b.uses) {
      if (u.node->graph == nullptr || v.node->graph == nullptr) continue;
      if (top(u.node->graph) == top(v.node->graph) && !precedes(a, u, b, v)) return false;
    }
  }
  return true;
}

std::string Oracle::check(const std::vector<Allocation>& allocations) {
  for (size_t i = 0; i < allocations.size(); i++) {
    const Allocation& a = allocations[i];
    if (a.uses.empty()) continue;
    for (size_t j = i + 1; j < allocations.size(); j++) {
      const Allocation& b = allocations[j];
      if (b.uses.empty() || !a.overlaps(b) || all_precede(a, b) || all_precede(b, a)) continue;
      return "allocations " + std::to_string(a.number) + " and " + std::to_string(b.number) +
             " lie over each other and their uses are not ordered";
    }
  }
  return "";
}

}  // namespace mg::sim
