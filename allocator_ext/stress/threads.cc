// Many threads on one allocator: streams of their own, blocks handed to each other, one thread capturing again and again.
//
// For the thread sanitizer, and for what it cannot see: that no two live blocks lie over each other and that all of it
// comes back. Run without a sanitizer it is the same test at speed.
//
//   threads [--operations N]      (for each thread)

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/device.h"
#include "sim/simulator.h"

using namespace mg;

namespace {

constexpr int workers = 4;
std::atomic<bool> failed{false};

struct Shared {
  std::mutex mutex;
  std::vector<Address> handed;  // freed by whoever comes next
};

void work(Device& device, sim::Simulator& sim, Shared& shared, Stream own, Stream other, int operations, int seed) {
  sim::Simulator::enter(&sim);
  std::mt19937_64 random(static_cast<uint64_t>(seed));
  std::vector<Address> mine;
  for (int i = 0; i < operations && !failed; i++) {
    if (mine.size() < 16 && random() % 2 == 0) {
      Address address = 0;
      size_t bytes = 1 + random() % (3 << 20);
      if (device.allocate(bytes, own, address).status != Status::ok) failed = true;
      mine.push_back(address);
      sim.kernel(own, -1, false, {address, bytes});
      if (random() % 4 == 0 && device.record_stream(address, other).status != Status::ok) failed = true;
    } else if (!mine.empty()) {
      Address address = mine.back();
      mine.pop_back();
      std::lock_guard lock(shared.mutex);
      shared.handed.push_back(address);
      std::swap(shared.handed.back(), shared.handed[random() % shared.handed.size()]);
      if (shared.handed.size() > 8) {
        if (device.release(shared.handed.back()).status != Status::ok) failed = true;
        shared.handed.pop_back();
      }
    }
    if (random() % 64 == 0) device.stats();
    if (random() % 256 == 0) device.empty_cache();
  }
  for (Address address : mine) device.release(address);
}

// One stream captures, over and over, into pools of its own; nobody else uses that stream.
void capture(Device& device, sim::Simulator& sim, Stream stream, int operations) {
  sim::Simulator::enter(&sim);
  for (int i = 0; i < operations / 16 && !failed; i++) {
    PoolId pool{0, static_cast<uint64_t>(1 + i % 3)};
    device.begin_pool(pool, [stream](Stream asked) { return asked == stream; });
    sim.begin_capture(stream);
    std::vector<Address> blocks(8);
    for (Address& block : blocks) {
      if (device.allocate(1 << 20, stream, block).status != Status::ok) failed = true;
      sim.kernel(stream);
    }
    // Half of them are freed by another thread, which this one does not wait for before it goes on.
    std::thread other([&] {
      sim::Simulator::enter(&sim);
      for (size_t b = 0; b < blocks.size() / 2; b++) device.release(blocks[b]);
    });
    for (size_t b = blocks.size() / 2; b < blocks.size(); b++) {
      device.release(blocks[b]);
      sim.kernel(stream);
      Address more = 0;
      if (device.allocate(1 << 20, stream, more).status != Status::ok) failed = true;
      sim.kernel(stream);
      device.release(more);
    }
    other.join();
    sim.end_capture(stream);
    if (device.end_pool(pool).status != Status::ok || device.release_pool(pool).status != Status::ok) failed = true;
  }
}

std::string run(const Config& config, int operations) {
  sim::Simulator sim;
  sim::Simulator::enter(&sim);
  Device device(sim::Simulator::table(), 0, config);
  Shared shared;
  std::vector<Stream> streams;
  for (int i = 0; i <= workers; i++) streams.push_back(sim.stream());
  std::vector<std::thread> threads;
  for (int i = 0; i < workers; i++) {
    threads.emplace_back([&, i] {
      work(device, sim, shared, streams[static_cast<size_t>(i)], streams[static_cast<size_t>((i + 1) % workers)],
           operations, i);
    });
  }
  threads.emplace_back([&] { capture(device, sim, streams.back(), operations); });
  for (std::thread& thread : threads) thread.join();
  for (Address address : shared.handed) device.release(address);
  sim.run_all();
  device.empty_cache();
  std::string wrong = device.verify();
  if (wrong.empty() && (!sim.memory.empty() || sim.used != 0)) wrong = "memory was not given back";
  if (wrong.empty() && sim.fault) wrong = "the driver was called wrongly";
  if (wrong.empty() && failed) wrong = "a call failed";
  return wrong;
}

}  // namespace

int main(int count, char** words) {
  int operations = count > 2 && std::string(words[1]) == "--operations" ? atoi(words[2]) : 20000;
  Config config;
  config.history_entries = 1000;
  std::string wrong = run(config, operations / 2);
  config.reuse = Reuse::any_stream;
  config.expandable = true;
  for (bool stitch : {false, true}) {
    config.stitch = stitch;
    if (wrong.empty()) wrong = run(config, operations / 4);
  }
  printf("{\"operations\": %d, \"wrong\": \"%s\"}\n", operations * workers, wrong.c_str());
  return wrong.empty() ? 0 : 1;
}
