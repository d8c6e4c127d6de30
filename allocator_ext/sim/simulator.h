// A driver without a device: memory that is only counted, streams, events, captures, and work that runs when told.
//
// In: the driver's functions (table()), and what a program does with streams: kernels, events, captures. Out: graphs with
// their edges, for the oracle to judge, and an order in which work ran. Everything launched is a node; a node outside of
// captures runs when `run_one` or a wait picks it, in any order that the streams and events allow.
// It is one object; the driver's functions find it as the driver finds its context: by a pointer of the calling thread.
// Invariant: nodes are numbered in the order of launching, so every edge leads to a higher number.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <vector>

#include "driver.h"

namespace mg::sim {

struct SimGraph;

// A piece of memory, wherever it is mapped.
struct Bytes {
  uint64_t place;
  size_t size;
  bool operator==(const Bytes& other) const { return place == other.place && size == other.size; }
};

struct SimNode {
  int number = 0;
  SimGraph* graph = nullptr;  // null: launched outside of captures
  std::vector<SimNode*> dependencies;
  std::vector<EdgeData> edges;
  bool done = false;
  int tag = -1;  // the caller's: which use this is
  int stream = -1;              // that it was launched on; -1: none
  Bytes uses{0, 0};             // the addresses that it uses; of no size: any may be
};

struct SimGraph {
  SimNode* parent = nullptr;  // the conditional node whose body this is
};

struct SimCapture {
  uint64_t id = 0;
  SimGraph* graph = nullptr;
  bool invalid = false;
  bool announced = true;  // a scope told of it: what breaks it is the allocator's fault
};

struct SimStream {
  int number = 0;
  SimCapture* capture = nullptr;
  std::vector<SimNode*> terminals;
  std::vector<EdgeData> edges;
  SimNode* last = nullptr;               // the kernel launched on it last: an early one is early relative to this
  std::vector<SimNode*> before_capture;  // terminals outside of it, while it captures
  bool destroyed = false;
};

struct SimEvent {
  SimCapture* capture = nullptr;
  std::vector<SimNode*> nodes;
};

class Simulator {
 public:
  explicit Simulator(size_t capacity = size_t{1} << 40);
  ~Simulator();
  Simulator(const Simulator&) = delete;
  Simulator& operator=(const Simulator&) = delete;

  static const Driver& table();
  // The simulator of the calling thread; null: none.
  static void enter(Simulator* simulator);

  // What a program does. False: the driver would refuse it, and nothing has changed.
  Stream stream();
  SimNode* kernel(Stream stream, int tag = -1, bool programmatic = false, Bytes uses = {0, 0});
  // Into `graph`: the body of a conditional node, or one that was captured before, behind `behind`; null: a new one.
  bool begin_capture(Stream stream, SimGraph* graph = nullptr, const std::vector<SimNode*>& behind = {});
  bool end_capture(Stream stream);
  void invalidate_capture(Stream stream);
  int record(Stream stream);             // a new event each time
  bool wait(Stream stream, int event);
  bool can_wait(Stream stream, int event) const;
  bool set_terminals(Stream stream, const std::vector<SimNode*>& nodes);
  SimGraph* conditional(Stream stream);  // a conditional node; the graph of its body
  bool is_capturing(Stream stream) const;
  // Its work goes on; every call on it is an error from now on, as a real driver may or may not tell.
  void destroy(Stream stream);

  // Runs one node outside of captures that may run now, picked by `random`; false: none is left.
  bool run_one(uint64_t random);
  void run_all();
  std::vector<int> ran;  // tags in the order in which they ran

  // The n-th call from now fails once (1: the next); 0: none. `calls` counts them.
  void fail_at(uint64_t n) { fail_in_ = n; }
  uint64_t calls = 0;
  uint64_t memory_calls = 0;  // of these, what asks for memory and addresses, maps them, or gives them back
  uint64_t failed = 0;

  std::vector<std::unique_ptr<SimNode>> nodes;
  std::vector<std::unique_ptr<SimStream>> streams;
  std::vector<SimEvent> events;
  std::map<Address, size_t> memory;
  struct Mapping {
    size_t size;
    Physical handle;
    std::set<int> devices = {};  // that may use it
    bool accessible() const { return !devices.empty(); }
  };
  struct Memory {
    size_t size;
    uint64_t place;          // among all memory that was ever created: no two have one byte in common
    bool held = true;        // created and not yet released
    size_t mappings = 0;     // one allocation may be mapped at several addresses
  };
  std::map<Address, size_t> ranges;       // of addresses, reserved
  std::map<Address, Mapping> mappings;    // in them
  std::map<Physical, Memory> physical;    // which is held or mapped
  // Whether a kernel could use all of this; of one device: through its mappings.
  bool backed(Address address, size_t size) const;
  bool mapped_for(int device, Address address, size_t size) const;
  // Handles of physical memory that were not released.
  size_t handles() const;
  // The memory that lies behind these addresses now, in their order; nothing where some have none.
  std::vector<Bytes> memory_of(Address address, size_t size) const;
  // What was last written to a byte of device memory, by whichever address; 0: nothing. What is mapped anew holds nothing.
  void write(Address address, uint64_t value);
  uint64_t read(Address address) const;
  std::map<char*, size_t> pinned;  // memory of the host
  // Devices below this number reach each other.
  static constexpr int peers = 4;
  size_t used = 0;
  size_t capacity;
  bool maps = true;             // whether the driver can map memory at all
  bool shares = true;           // whether that has handles for other processes and network cards
  size_t granularity = size_t{2} << 20;
  PhysicalMemory asked{};       // what memory was last created as
  bool fault = false;           // the allocator called the driver wrongly
  bool broke_a_capture = false; // it made a call that is not for captures of others
  bool elsewhere = false;       // the calling thread drives no capture, and may look at none

 private:
  friend struct Calls;
  bool refuse();
  void forget(std::map<Physical, Memory>::iterator memory);
  void run(SimNode* node);
  bool runnable(const SimNode* node) const;
  SimNode* append(SimStream& stream, int tag, bool programmatic);
  bool in_use(Address address, size_t size) const;  // by work outside of captures that has not run
  uint64_t place_of(Address address) const;         // of a byte, among all that there are

  // Copies between bytes of the device and of the host, by their places; done when their stream is waited for.
  struct Copy {
    uint64_t from, to;
    size_t size;
    Address device;  // the device's side
    int fill;        // -1: a copy
  };
  bool is_copied(Address address, size_t size) const;
  void carry_out(const Copy& copy);
  std::map<uint64_t, uint64_t> contents_;  // by places
  std::map<Stream, std::vector<Copy>> copies_;

  std::recursive_mutex mutex_;
  std::vector<std::unique_ptr<SimGraph>> graphs_;
  std::vector<std::unique_ptr<SimCapture>> captures_;
  std::vector<SimNode*> pending_;
  std::map<Event, std::unique_ptr<SimEvent>> driver_events_;
  uint64_t fail_in_ = 0;
  uint64_t last_capture_ = 0;
  Physical last_physical_ = 0;
  uint64_t next_place_ = uint64_t{1} << 62;  // plain memory is called by its address, of which there are less
  Address next_address_ = Address{1} << 32;
};

}  // namespace mg::sim
