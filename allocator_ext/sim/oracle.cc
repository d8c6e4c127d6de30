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
  // Kernels that follow each other on one stream by a programmatic edge keep their own order, and what waits for the
  // stream waits for all of them; what that stream alone answers for was behind its end at the free.
  bool one_stream = !a.recorded && a.stream == b.stream && u == use.node;
  return one_stream ? begins_before(u, v) : completes_before(u, v);
}

bool Oracle::all_precede(const Allocation& a, const Allocation& b) {
  for (const Use& u : a.uses) {
    for (const Use& v : b.uses) {
      if (u.node->graph == nullptr || v.node->graph == nullptr) continue;
      const SimGraph *top_u = u.node->graph, *top_v = v.node->graph;
      while (top_u->parent != nullptr) top_u = top_u->parent->graph;
      while (top_v->parent != nullptr) top_v = top_v->parent->graph;
      if (top_u == top_v && !precedes(a, u, b, v)) return false;
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
