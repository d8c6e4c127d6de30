#include "stress/shadow.h"

#include <algorithm>

namespace mg::stress {

using sim::SimGraph;
using sim::SimNode;

namespace {
constexpr int runs_of_a_body = 2;
}

Shadow::Shadow(const sim::Simulator& simulator, const std::vector<sim::Allocation>& allocations)
    : allocations_(allocations) {
  users_.resize(simulator.nodes.size());
  followers_.resize(simulator.nodes.size());
  for (auto& node : simulator.nodes) {
    if (node->graph == nullptr) continue;
    auto place = std::find(graphs_.begin(), graphs_.end(), node->graph);
    auto index = static_cast<size_t>(place - graphs_.begin());
    if (place == graphs_.end()) {
      graphs_.push_back(node->graph);
      nodes_.emplace_back();
    }
    nodes_[index].push_back(node.get());
    for (SimNode* from : node->dependencies) followers_[static_cast<size_t>(from->number)].push_back(node.get());
  }
  overlapping_.resize(allocations.size());
  for (size_t i = 0; i < allocations.size(); i++) {
    for (const sim::Use& use : allocations[i].uses) users_[static_cast<size_t>(use.node->number)].push_back(i);
    for (size_t j = 0; j < allocations.size(); j++) {
      if (i != j && allocations[i].overlaps(allocations[j])) overlapping_[i].push_back(j);
    }
  }
}

std::string Shadow::launch(std::mt19937_64& random) {
  for (const SimGraph* graph : graphs_) {
    if (graph->parent != nullptr) continue;
    bytes_.assign(allocations_.size(), {});
    if (!run(graph, random)) break;
  }
  return wrong_;
}

bool Shadow::run(const SimGraph* graph, std::mt19937_64& random) {
  auto index = static_cast<size_t>(std::find(graphs_.begin(), graphs_.end(), graph) - graphs_.begin());
  if (index == graphs_.size()) return true;  // an empty body
  for (size_t i = 0; i < allocations_.size(); i++) {
    if (allocations_[i].graph == graph) bytes_[i] = {};
  }
  std::vector<size_t> missing(users_.size(), 0);
  std::vector<const SimNode*> ready;
  for (const SimNode* node : nodes_[index]) {
    missing[static_cast<size_t>(node->number)] = node->dependencies.size();
    if (node->dependencies.empty()) ready.push_back(node);
  }
  while (!ready.empty()) {
    size_t pick = random() % ready.size();
    const SimNode* node = ready[pick];
    ready[pick] = ready.back();
    ready.pop_back();
    for (size_t allocation : users_[static_cast<size_t>(node->number)]) {
      if (!use(allocation)) return false;
    }
    for (const SimGraph* body : graphs_) {
      if (body->parent != node) continue;
      for (int i = 0; i < runs_of_a_body; i++) {
        if (!run(body, random)) return false;
      }
    }
    for (const SimNode* next : followers_[static_cast<size_t>(node->number)]) {
      if (--missing[static_cast<size_t>(next->number)] == 0) ready.push_back(next);
    }
  }
  return true;
}

bool Shadow::use(size_t allocation) {
  Bytes& own = bytes_[allocation];
  if (own.in_use && own.lost) {
    wrong_ = "allocation " + std::to_string(allocation) + " found another's bytes when the graph ran";
    return false;
  }
  own.in_use = true;
  own.lost = false;
  for (size_t other : overlapping_[allocation]) bytes_[other].lost = true;
  return true;
}

}  // namespace mg::stress
