// Threads that allocate, free, and save and restore a pool, while stacks are recorded and not, over the simulated driver.
// What numbers a stack takes a lock, as Python's is taken, that a thread may hold when it frees: if the library ever held
// one of its own then, this would not end. Prints how often it was asked; 0 is returned where the books are right.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <thread>
#include <vector>

#include "multigraph_allocator.h"
#include "sim/simulator.h"

std::recursive_mutex language;
std::atomic<uint64_t> asked{0};
std::atomic<bool> stop{false};

uint64_t number() {
  std::lock_guard lock(language);
  return ++asked % 50 + 1;
}

void allocate_and_free(size_t bytes, bool with_lock) {
  std::vector<void*> held;
  for (int i = 0; i < 20; i++) held.push_back(mg_torch_alloc(bytes, 0, nullptr));
  if (with_lock) {
    std::lock_guard lock(language);
    mg_torch_free(held.back(), 0, 0, nullptr);
    held.pop_back();
  }
  for (void* address : held) mg_torch_free(address, 0, 0, nullptr);
}

void save_and_restore(mg_device* device) {
  mg_torch_begin_pool_on_thread(0, 5, 0);
  void* block = mg_torch_alloc(5000, 0, nullptr);
  mg_end_pool(device, 5, 0);
  uint64_t address = reinterpret_cast<uint64_t>(block), with = 0, without = 0;
  mg_torch_adopt(device, address);
  mg_torch_free(block, 0, 0, nullptr);
  mg_torch_pool_save(device, 5, 0, &with);
  mg_torch_drop(device, address);
  mg_torch_pool_save(device, 5, 0, &without);
  mg_torch_pool_restore(device, with);
  mg_torch_pool_restore(device, without);
  mg_torch_pool_forget(device, with);
  mg_torch_pool_forget(device, without);
  mg_release_pool(device, 5, 0);
}

int main() {
  auto* sim = new mg::sim::Simulator(size_t{1} << 34);
  mg::sim::Simulator::enter(sim);
  mg_torch_free(mg_torch_alloc(100, 0, nullptr), 0, 0, nullptr);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; t++) {
    threads.emplace_back([sim, t] {
      mg::sim::Simulator::enter(sim);
      while (!stop) allocate_and_free(1000 * (t + 1), t == 0);
    });
  }
  threads.emplace_back([sim] {
    mg::sim::Simulator::enter(sim);
    while (!stop) save_and_restore(mg_torch_device(0));
  });
  std::vector<uint64_t> live(2 * 1000);
  std::vector<int64_t> log(7 * 500);
  for (int turn = 0; turn < 300; turn++) {
    mg_torch_record_stacks(turn % 3 != 0 ? number : nullptr, turn % 2, 500);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    size_t count = 0;
    mg_torch_stacks_live(live.data(), 1000, &count);
    mg_torch_stacks_log(log.data(), 500, &count);
  }
  stop = true;
  for (auto& thread : threads) thread.join();
  mg_torch_record_stacks(nullptr, 0, 0);
  uint64_t before = asked;
  mg_torch_free(mg_torch_alloc(100, 0, nullptr), 0, 0, nullptr);
  printf("%lu\n", static_cast<unsigned long>(before));
  return before == asked ? mg_verify(mg_torch_device(0)) : 3;
}
