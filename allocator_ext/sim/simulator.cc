#include "sim/simulator.h"

#include <algorithm>

namespace mg::sim {

namespace {

thread_local Simulator* current = nullptr;

constexpr Result invalid = 1;
constexpr EdgeData programmatic_edge{1, 0, 1, {}};

SimStream* as_stream(Stream handle) { return reinterpret_cast<SimStream*>(handle); }
SimNode* as_node(Node handle) { return reinterpret_cast<SimNode*>(handle); }
Node handle(SimNode* node) { return reinterpret_cast<Node>(node); }

template <class T>
bool contains(const std::vector<T>& list, const T& item) {
  return std::find(list.begin(), list.end(), item) != list.end();
}

}  // namespace

Simulator::Simulator(size_t capacity_) : capacity(capacity_) {}
Simulator::~Simulator() = default;

void Simulator::enter(Simulator* simulator) { current = simulator; }

Stream Simulator::stream() {
  streams.push_back(std::make_unique<SimStream>());
  streams.back()->number = static_cast<int>(streams.size()) - 1;
  return reinterpret_cast<Stream>(streams.back().get());
}

SimNode* Simulator::append(SimStream& stream, int tag, bool programmatic) {
  nodes.push_back(std::make_unique<SimNode>());
  SimNode* node = nodes.back().get();
  node->number = static_cast<int>(nodes.size()) - 1;
  node->graph = stream.capture != nullptr ? stream.capture->graph : nullptr;
  node->dependencies = stream.terminals;
  node->edges = stream.edges;
  node->tag = tag;
  node->stream = stream.number;
  for (size_t i = 0; programmatic && i < node->edges.size(); i++) {
    if (node->dependencies[i] == stream.last) node->edges[i] = programmatic_edge;
  }
  stream.last = node;
  stream.terminals.assign(1, node);
  stream.edges.assign(1, EdgeData{});
  if (node->graph == nullptr) pending_.push_back(node);
  return node;
}

SimNode* Simulator::kernel(Stream stream, int tag, bool programmatic, Bytes uses) {
  std::lock_guard lock(mutex_);
  SimNode* node = append(*as_stream(stream), tag, programmatic);
  node->uses = uses;
  return node;
}

bool Simulator::in_use(Address address, size_t size) const {
  return std::any_of(pending_.begin(), pending_.end(), [&](const SimNode* node) {
    const Bytes& used = node->uses;
    return used.size == 0 || (used.place < address + size && address < used.place + used.size);
  });
}

bool Simulator::begin_capture(Stream handle_, SimGraph* body, const std::vector<SimNode*>& behind) {
  std::lock_guard lock(mutex_);
  SimStream& stream = *as_stream(handle_);
  if (stream.capture != nullptr || stream.destroyed) return false;
  if (body == nullptr) {
    graphs_.push_back(std::make_unique<SimGraph>());
    body = graphs_.back().get();
  }
  captures_.push_back(std::make_unique<SimCapture>());
  stream.capture = captures_.back().get();
  stream.capture->id = ++last_capture_;
  stream.capture->graph = body;
  stream.before_capture = std::move(stream.terminals);
  stream.terminals = behind;
  stream.edges.assign(behind.size(), EdgeData{});
  stream.last = nullptr;
  return true;
}

void Simulator::destroy(Stream stream) {
  std::lock_guard lock(mutex_);
  as_stream(stream)->destroyed = true;
}

bool Simulator::end_capture(Stream handle_) {
  std::lock_guard lock(mutex_);
  SimCapture* capture = as_stream(handle_)->capture;
  if (capture == nullptr) return false;
  for (auto& stream : streams) {
    if (stream->capture != capture) continue;
    stream->capture = nullptr;
    stream->terminals = std::move(stream->before_capture);
    stream->edges.assign(stream->terminals.size(), EdgeData{});
  }
  return true;
}

void Simulator::invalidate_capture(Stream handle_) {
  std::lock_guard lock(mutex_);
  if (as_stream(handle_)->capture != nullptr) as_stream(handle_)->capture->invalid = true;
}

int Simulator::record(Stream handle_) {
  std::lock_guard lock(mutex_);
  SimStream& stream = *as_stream(handle_);
  events.push_back({stream.capture, stream.terminals});
  return static_cast<int>(events.size()) - 1;
}

bool Simulator::can_wait(Stream handle_, int number) const {
  const SimStream& stream = *as_stream(handle_);
  const SimEvent& event = events[static_cast<size_t>(number)];
  if (event.capture == nullptr) return stream.capture == nullptr;
  if (stream.capture != nullptr) return stream.capture == event.capture;
  return std::any_of(streams.begin(), streams.end(), [&](const auto& s) { return s->capture == event.capture; });
}

bool Simulator::wait(Stream handle_, int number) {
  std::lock_guard lock(mutex_);
  if (!can_wait(handle_, number)) return false;
  SimStream& stream = *as_stream(handle_);
  const SimEvent& event = events[static_cast<size_t>(number)];
  if (stream.capture == nullptr && event.capture != nullptr) {
    stream.capture = event.capture;
    stream.before_capture = std::move(stream.terminals);
    stream.terminals.clear();
    stream.edges.clear();
  }
  for (SimNode* node : event.nodes) {
    if (contains(stream.terminals, node)) continue;
    stream.terminals.push_back(node);
    stream.edges.push_back(EdgeData{});
  }
  return true;
}

bool Simulator::set_terminals(Stream handle_, const std::vector<SimNode*>& nodes_) {
  std::lock_guard lock(mutex_);
  SimStream& stream = *as_stream(handle_);
  if (stream.capture == nullptr) return false;
  stream.terminals = nodes_;
  stream.edges.assign(nodes_.size(), EdgeData{});
  return true;
}

SimGraph* Simulator::conditional(Stream stream) {
  std::lock_guard lock(mutex_);
  if (as_stream(stream)->capture == nullptr) return nullptr;
  graphs_.push_back(std::make_unique<SimGraph>());
  graphs_.back()->parent = append(*as_stream(stream), -1, false);
  as_stream(stream)->last = nullptr;
  return graphs_.back().get();
}

bool Simulator::is_capturing(Stream stream) const { return as_stream(stream)->capture != nullptr; }

bool Simulator::backed(Address address, size_t size) const {
  auto plain = memory.upper_bound(address);
  if (plain != memory.begin() && address + size <= std::prev(plain)->first + std::prev(plain)->second) return true;
  return mapped_for(-1, address, size);
}

bool Simulator::mapped_for(int device, Address address, size_t size) const {
  for (Address at = address; at < address + size;) {
    auto mapping = mappings.upper_bound(at);
    if (mapping == mappings.begin() || !(--mapping)->second.accessible()) return false;
    if (at >= mapping->first + mapping->second.size) return false;
    if (device >= 0 && mapping->second.devices.count(device) == 0) return false;
    at = mapping->first + mapping->second.size;
  }
  return true;
}

std::vector<Bytes> Simulator::memory_of(Address address, size_t size) const {
  auto plain = memory.upper_bound(address);
  if (plain != memory.begin() && address + size <= std::prev(plain)->first + std::prev(plain)->second) return {{address, size}};
  std::vector<Bytes> found;
  for (Address at = address; at < address + size;) {
    auto mapping = mappings.upper_bound(at);
    if (mapping == mappings.begin()) return {};
    --mapping;
    Address end = std::min<Address>(mapping->first + mapping->second.size, address + size);
    if (at >= end) return {};
    found.push_back({physical.at(mapping->second.handle).place + (at - mapping->first), end - at});
    at = end;
  }
  return found;
}

uint64_t Simulator::place_of(Address address) const {
  auto found = memory_of(address, 1);
  return found.empty() ? 0 : found.front().place;
}

void Simulator::write(Address address, uint64_t value) {
  std::lock_guard lock(mutex_);
  contents_[place_of(address)] = value;
}

uint64_t Simulator::read(Address address) const {
  auto found = contents_.find(place_of(address));
  return found == contents_.end() ? 0 : found->second;
}

// Whether copies that are not done are at work there.
bool Simulator::is_copied(Address address, size_t size) const {
  return std::any_of(copies_.begin(), copies_.end(), [&](auto& of_stream) {
    return std::any_of(of_stream.second.begin(), of_stream.second.end(), [&](const Copy& copy) {
      return copy.device < address + size && address < copy.device + copy.size;
    });
  });
}

void Simulator::carry_out(const Copy& copy) {
  auto begin = contents_.lower_bound(copy.to), end = contents_.lower_bound(copy.to + copy.size);
  contents_.erase(begin, end);
  if (copy.fill >= 0) {
    contents_[copy.to] = contents_[copy.to + copy.size - 1] = static_cast<uint64_t>(copy.fill) | (uint64_t{1} << 63);
    return;
  }
  std::vector<std::pair<uint64_t, uint64_t>> found(contents_.lower_bound(copy.from), contents_.lower_bound(copy.from + copy.size));
  for (auto& [place, value] : found) contents_[copy.to + (place - copy.from)] = value;
}

// Memory that is neither held nor mapped is the driver's again.
void Simulator::forget(std::map<Physical, Memory>::iterator memory_) {
  if (memory_->second.held || memory_->second.mappings != 0) return;
  uint64_t place = memory_->second.place;
  contents_.erase(contents_.lower_bound(place), contents_.lower_bound(place + memory_->second.size));
  used -= memory_->second.size;
  physical.erase(memory_);
}

bool Simulator::runnable(const SimNode* node) const {
  return std::all_of(node->dependencies.begin(), node->dependencies.end(), [](const SimNode* d) { return d->done; });
}

void Simulator::run(SimNode* node) {
  for (SimNode* dependency : node->dependencies) {
    if (!dependency->done) run(dependency);
  }
  node->done = true;
  ran.push_back(node->tag);
  pending_.erase(std::find(pending_.begin(), pending_.end(), node));
}

bool Simulator::run_one(uint64_t random) {
  std::lock_guard lock(mutex_);
  std::vector<SimNode*> ready;
  for (SimNode* node : pending_) {
    if (runnable(node)) ready.push_back(node);
  }
  if (ready.empty()) return false;
  run(ready[random % ready.size()]);
  return true;
}

void Simulator::run_all() {
  std::lock_guard lock(mutex_);
  while (!pending_.empty()) run(pending_.front());
}

size_t Simulator::handles() const {
  return static_cast<size_t>(std::count_if(physical.begin(), physical.end(), [](auto& each) { return each.second.held; }));
}

bool Simulator::refuse() {
  calls++;
  if (fail_in_ == 0 || --fail_in_ != 0) return false;
  failed++;
  return true;
}

// The driver's functions.
struct Calls {
  // The simulator of this thread, locked; null when this call is to fail.
  struct In {
    Simulator* sim = current;
    std::unique_lock<std::recursive_mutex> lock{sim->mutex_};
    bool refused = sim->refuse();

    static CaptureMode& mode() {
      thread_local CaptureMode mode = capture_mode_global;
      return mode;
    }

    // A call that breaks captures of others, unless this thread has said otherwise.
    void unsafe() {
      for (auto& stream : sim->streams) {
        if (stream->capture != nullptr && mode() != capture_mode_relaxed) sim->broke_a_capture = true;
      }
    }
  };

  static Result device_count(int* out) {
    *out = Simulator::peers;
    return result::success;
  }

  // Never read or written here: what it holds is in `contents_`.
  static Result host_alloc(void** out, size_t size, unsigned) {
    In in;
    if (in.refused || size == 0) return result::out_of_memory;
    Address address = in.sim->next_address_;
    in.sim->next_address_ += (size + (1 << 21)) >> 21 << 21;
    *out = reinterpret_cast<void*>(address);
    in.sim->pinned[reinterpret_cast<char*>(address)] = size;
    return result::success;
  }

  static Result host_free(void* address) {
    In in;
    if (in.sim->pinned.erase(static_cast<char*>(address)) == 0) in.sim->fault = true;
    return in.refused ? invalid : result::success;
  }

  static bool is_pinned(Simulator& sim, const void* address, size_t size) {
    auto* first = const_cast<char*>(static_cast<const char*>(address));
    auto found = sim.pinned.upper_bound(first);
    return found != sim.pinned.begin() && first + size <= std::prev(found)->first + std::prev(found)->second;
  }

  // One copy for each piece of memory behind the addresses.
  static Result copied(Address address, const void* host, size_t size, int fill, bool to_host, Stream stream) {
    In in;
    if (in.refused) return invalid;
    auto queue = in.sim->copies_.find(stream);
    bool known = queue != in.sim->copies_.end() && (fill >= 0 || is_pinned(*in.sim, host, size));
    if (!known || !in.sim->backed(address, size) || in.sim->in_use(address, size)) {
      in.sim->fault = true;
      return invalid;
    }
    uint64_t there = reinterpret_cast<uint64_t>(host);
    for (const Bytes& part : in.sim->memory_of(address, size)) {
      queue->second.push_back({to_host ? part.place : there, to_host ? there : part.place, part.size, address, fill});
      address += part.size;
      there += part.size;
    }
    return result::success;
  }
  static Result copy_to_host(void* host, Address address, size_t size, Stream stream) {
    return copied(address, host, size, -1, true, stream);
  }
  static Result copy_from_host(Address address, const void* host, size_t size, Stream stream) {
    return copied(address, host, size, -1, false, stream);
  }
  static Result fill(Address address, unsigned char byte, size_t size, Stream stream) {
    return copied(address, nullptr, size, byte, false, stream);
  }

  // For copies alone.
  static Result stream_create(Stream* out, unsigned flags) {
    In in;
    if (in.refused || flags != stream_beside_all) return invalid;
    *out = reinterpret_cast<Stream>(in.sim->next_address_);
    in.sim->next_address_ += 1 << 21;
    in.sim->copies_[*out];
    return result::success;
  }
  static Result stream_synchronize(Stream stream) {
    In in;
    in.unsafe();
    auto queue = in.sim->copies_.find(stream);
    if (queue == in.sim->copies_.end()) {
      in.sim->fault = true;
      return invalid;
    }
    if (!in.refused) {
      for (const Simulator::Copy& copy : queue->second) in.sim->carry_out(copy);
    }
    queue->second.clear();  // what failed is not done later either
    return in.refused ? invalid : result::success;
  }
  static Result stream_destroy(Stream stream) {
    In in;
    auto queue = in.sim->copies_.find(stream);
    if (queue == in.sim->copies_.end() || !queue->second.empty()) in.sim->fault = true;
    if (queue != in.sim->copies_.end()) in.sim->copies_.erase(queue);
    return in.refused ? invalid : result::success;
  }

  static Result context_current(Context* out) {
    *out = nullptr;
    return result::success;
  }
  static Result context_set(Context) { return result::success; }
  static Result device_get(int* out, int ordinal) {
    *out = ordinal;
    return result::success;
  }
  static Result device_attribute(int* out, int attribute, int) {
    In in;
    if (in.refused) return invalid;
    if (attribute != maps_memory && attribute != shares_by_descriptor && attribute != remote_access_to_mapped) return invalid;
    *out = (attribute == maps_memory ? in.sim->maps : in.sim->shares) ? 1 : 0;
    return result::success;
  }
  static Result can_access_peer(int* out, int device, int other) {
    In in;
    if (in.refused) return invalid;
    *out = device != other && device < Simulator::peers && other < Simulator::peers ? 1 : 0;
    return result::success;
  }
  static Result primary_context(Context* out, int) {
    *out = nullptr;
    return result::success;
  }

  static Result memory_info(size_t* free, size_t* total) {
    In in;
    if (in.refused) return invalid;
    *free = in.sim->capacity - in.sim->used;
    *total = in.sim->capacity;
    return result::success;
  }

  static Result memory_alloc(Address* out, size_t size) {
    In in;
    in.sim->memory_calls++;
    in.unsafe();
    if (in.refused || size == 0 || in.sim->used + size > in.sim->capacity) return result::out_of_memory;
    *out = in.sim->next_address_;
    in.sim->next_address_ += (size + (1 << 21)) >> 21 << 21;  // never two that touch, never the same again
    in.sim->memory[*out] = size;
    in.sim->used += size;
    return result::success;
  }

  static Result memory_free(Address address) {
    In in;
    in.sim->memory_calls++;
    if (in.refused) return invalid;
    auto found = in.sim->memory.find(address);
    if (found == in.sim->memory.end()) {
      in.sim->fault = true;
      return invalid;
    }
    in.unsafe();
    in.sim->run_all();
    in.sim->used -= found->second;
    auto& contents = in.sim->contents_;
    contents.erase(contents.lower_bound(address), contents.lower_bound(address + found->second));
    in.sim->memory.erase(found);
    return result::success;
  }

  // Whatever the thread's mode is, this is an error while anything captures, and ends the captures.
  static Result context_synchronize() {
    In in;
    if (in.refused) return invalid;
    bool captures = false;
    for (auto& stream : in.sim->streams) {
      captures = captures || stream->capture != nullptr;
      if (stream->capture != nullptr && stream->capture->announced) in.sim->broke_a_capture = true;
    }
    if (captures) return result::capture_unsupported;
    in.sim->run_all();
    return result::success;
  }

  static Result address_reserve(Address* out, size_t size, size_t, Address, unsigned long long) {
    In in;
    in.sim->memory_calls++;
    if (in.refused || size == 0) return result::out_of_memory;
    if (!in.sim->maps) in.sim->fault = true;
    *out = in.sim->next_address_;
    in.sim->next_address_ += (size + (1 << 21)) >> 21 << 21;
    in.sim->ranges[*out] = size;
    return result::success;
  }

  static Result address_free(Address address, size_t size) {
    In in;
    in.sim->memory_calls++;
    if (in.refused) return invalid;
    auto found = in.sim->ranges.find(address);
    auto inside = in.sim->mappings.lower_bound(address);
    bool mapped = inside != in.sim->mappings.end() && inside->first < address + size;
    if (found == in.sim->ranges.end() || found->second != size || mapped) {
      in.sim->fault = true;
      return invalid;
    }
    in.sim->ranges.erase(found);
    return result::success;
  }

  static Result granularity(size_t* out, const PhysicalMemory* memory, int) {
    In in;
    if (in.refused || memory->type != 1 || memory->location.type != 1) return invalid;
    *out = in.sim->granularity;
    return result::success;
  }

  static Result physical_create(Physical* out, size_t size, const PhysicalMemory* memory, unsigned long long) {
    In in;
    in.sim->memory_calls++;
    in.unsafe();
    if (memory->type != 1 || memory->location.type != 1 || size % in.sim->granularity != 0) in.sim->fault = true;
    if (!in.sim->shares && (memory->handle_types != 0 || memory->direct_rdma != 0)) return invalid;  // it has no such
    in.sim->asked = *memory;
    if (in.refused || in.sim->used + size > in.sim->capacity) return result::out_of_memory;
    in.sim->used += size;
    in.sim->physical[*out = ++in.sim->last_physical_] = {size, in.sim->next_place_};
    in.sim->next_place_ += size;
    return result::success;
  }

  // The mapping keeps the memory. A call that fails here has released it all the same: the core asks once.
  static Result physical_release(Physical handle) {
    In in;
    in.sim->memory_calls++;
    auto found = in.sim->physical.find(handle);
    if (found == in.sim->physical.end() || !found->second.held) {
      in.sim->fault = true;
      return invalid;
    }
    found->second.held = false;
    in.sim->forget(found);
    return in.refused ? invalid : result::success;
  }

  static Result memory_map(Address address, size_t size, size_t offset, Physical handle, unsigned long long) {
    In in;
    in.sim->memory_calls++;
    if (in.refused) return invalid;
    auto range = in.sim->ranges.upper_bound(address);
    bool inside = range != in.sim->ranges.begin() && address + size <= std::prev(range)->first + std::prev(range)->second;
    auto found = in.sim->physical.find(handle);
    auto next = in.sim->mappings.lower_bound(address);
    bool taken = next != in.sim->mappings.end() && next->first < address + size;
    if (!inside || taken || offset != 0 || found == in.sim->physical.end() || !found->second.held ||
        found->second.size != size) {
      in.sim->fault = true;
      return invalid;
    }
    in.sim->mappings[address] = {size, handle};
    found->second.mappings++;
    return result::success;
  }

  static Result memory_unmap(Address address, size_t size) {
    In in;
    in.sim->memory_calls++;
    in.unsafe();
    if (in.refused) return invalid;
    auto found = in.sim->mappings.find(address);
    // What has no access yet was never used; else the device must have been waited for. Another thread may have launched
    // something since, which is over other memory.
    if (found == in.sim->mappings.end() || found->second.size != size ||
        (found->second.accessible() && in.sim->in_use(address, size)) || in.sim->is_copied(address, size)) {
      in.sim->fault = true;
      return invalid;
    }
    auto memory = in.sim->physical.find(found->second.handle);
    memory->second.mappings--;
    in.sim->forget(memory);
    in.sim->mappings.erase(found);
    return result::success;
  }

  static Result memory_access(Address address, size_t size, const MemoryAccess* access, size_t count) {
    In in;
    in.sim->memory_calls++;
    if (in.refused) return invalid;
    for (size_t i = 0; i < count; i++) {
      if (access[i].flags != 3 || access[i].location.type != 1) return invalid;
    }
    for (Address at = address; at < address + size;) {
      auto found = in.sim->mappings.find(at);
      if (found == in.sim->mappings.end()) {
        in.sim->fault = true;
        return invalid;
      }
      for (size_t i = 0; i < count; i++) found->second.devices.insert(access[i].location.id);
      at += found->second.size;
    }
    return result::success;
  }

  static Result event_create(Event* out, unsigned) {
    In in;
    if (in.refused) return invalid;
    auto event = std::make_unique<SimEvent>();
    *out = reinterpret_cast<Event>(event.get());
    in.sim->driver_events_[*out] = std::move(event);
    return result::success;
  }

  static Result event_destroy(Event event) {
    In in;
    if (in.sim->driver_events_.erase(event) == 0) in.sim->fault = true;
    return in.refused ? invalid : result::success;
  }

  static Result event_record(Event event, Stream stream) {
    In in;
    SimStream& from = *as_stream(stream);
    if (in.refused || from.destroyed) return invalid;
    if (from.capture != nullptr) in.sim->fault = true;  // it would become part of the graph
    *reinterpret_cast<SimEvent*>(event) = {from.capture, from.terminals};
    return result::success;
  }

  static Result event_query(Event event) {
    In in;
    in.unsafe();
    if (in.refused) return invalid;
    for (SimNode* node : reinterpret_cast<SimEvent*>(event)->nodes) {
      if (!node->done) return result::not_ready;
    }
    return result::success;
  }

  static Result event_synchronize(Event event) {
    In in;
    in.unsafe();
    if (in.refused) return invalid;
    for (SimNode* node : reinterpret_cast<SimEvent*>(event)->nodes) {
      if (!node->done) in.sim->run(node);
    }
    return result::success;
  }

  static Result capture_info(Stream handle_, CaptureStatus* status, uint64_t* id, Graph* graph, const Node** nodes,
                             const EdgeData** edges, size_t* count) {
    In in;
    if (in.refused) return invalid;
    *status = not_capturing;
    if (handle_ == nullptr) return result::success;
    SimStream& stream = *as_stream(handle_);
    if (stream.destroyed) return invalid;
    if (stream.capture == nullptr) return result::success;
    if (nodes != nullptr && in.sim->elsewhere) in.sim->fault = true;  // that is the other thread's
    *status = stream.capture->invalid ? capture_invalidated : capturing;
    *id = stream.capture->id;
    *graph = reinterpret_cast<Graph>(stream.capture->graph);
    if (nodes == nullptr) return result::success;
    *nodes = reinterpret_cast<Node*>(stream.terminals.data());
    *edges = stream.edges.data();
    *count = stream.terminals.size();
    return result::success;
  }

  static Result capture_dependencies(Stream handle_, Node* nodes, const EdgeData* edges, size_t count, unsigned) {
    In in;
    SimStream& stream = *as_stream(handle_);
    if (in.refused || stream.capture == nullptr) return invalid;
    stream.terminals.clear();
    stream.edges.clear();
    for (size_t i = 0; i < count; i++) {
      stream.terminals.push_back(as_node(nodes[i]));
      stream.edges.push_back(edges != nullptr ? edges[i] : EdgeData{});
    }
    return result::success;
  }

  static Result exchange_capture_mode(CaptureMode* mode) {
    In in;
    if (in.refused) return invalid;
    std::swap(*mode, in.mode());
    return result::success;
  }

  static Result node_dependencies(Node handle_, Node* nodes, EdgeData* edges, size_t* count) {
    In in;
    if (in.refused) return invalid;
    SimNode& node = *as_node(handle_);
    size_t given = std::min(*count, node.dependencies.size());
    for (size_t i = 0; i < given; i++) {
      nodes[i] = handle(node.dependencies[i]);
      edges[i] = node.edges[i];
    }
    *count = given;
    return result::success;
  }

  static Result graph_nodes(Graph graph, Node* nodes, size_t* count) {
    In in;
    if (in.refused) return invalid;
    if (in.sim->elsewhere) in.sim->fault = true;
    size_t all = 0, room = nodes != nullptr ? *count : 0;
    for (auto& node : in.sim->nodes) {
      if (node->graph != reinterpret_cast<SimGraph*>(graph)) continue;
      if (all < room) nodes[all] = handle(node.get());
      all++;
    }
    *count = nodes != nullptr ? std::min(all, room) : all;
    return result::success;
  }

  static Result add_empty_node(Node* out, Graph graph, const Node* dependencies, size_t count) {
    In in;
    if (in.refused) return invalid;
    SimStream ghost;
    SimCapture capture;
    capture.graph = reinterpret_cast<SimGraph*>(graph);
    ghost.capture = &capture;
    ghost.number = -1;
    for (size_t i = 0; i < count; i++) {
      ghost.terminals.push_back(as_node(dependencies[i]));
      ghost.edges.push_back(EdgeData{});
    }
    *out = handle(in.sim->append(ghost, -1, false));
    return result::success;
  }
};

const Driver& Simulator::table() {
  static const Driver driver = [] {
    Driver made;
#define MG_FILL(name, symbol, parameters) made.name = Calls::name;
    MG_DRIVER_FUNCTIONS(MG_FILL)
#undef MG_FILL
    return made;
  }();
  return driver;
}

}  // namespace mg::sim
