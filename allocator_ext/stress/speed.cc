// What an allocation and its free cost outside of captures: nanoseconds of a pair, for some ways of asking.
//
//   speed [--expandable] [--rounds N] [--only NAME]
// Prints one line of JSON: for each way the least of seven rounds. "one": a block of 1 MiB, allocated and freed. "sizes":
// ten sizes in turn, each freed before the next. "nested": 64 blocks, freed in the opposite order. "random": 400 blocks of
// random sizes, of which a random one is replaced.
// But for growing once more in "random", the driver is not asked, so the times are the allocator's own.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "core/device.h"
#include "sim/simulator.h"

using namespace mg;

int main(int count, char** words) {
  Config config;
  config.reuse = Reuse::any_stream;
  uint64_t rounds = 200000;
  std::string only;
  for (int i = 1; i < count; i++) {
    std::string word = words[i];
    if (word == "--expandable") {
      config.expandable = true;
    } else if (word == "--rounds" && i + 1 < count) {
      rounds = strtoull(words[++i], nullptr, 10);
    } else if (word == "--only" && i + 1 < count) {
      only = words[++i];
    } else {
      fprintf(stderr, "speed: unknown argument %s\n", word.c_str());
      return 2;
    }
  }
  sim::Simulator sim;
  sim::Simulator::enter(&sim);
  std::string wrong;
  std::string text = "{";
  auto measure = [&](const char* name, const std::function<uint64_t(Device&, Stream)>& pairs) {
    if (!only.empty() && only != name) return;
    Device device(sim::Simulator::table(), 0, config);
    Stream stream = sim.stream();
    pairs(device, stream);
    double least = 1e30;
    for (int i = 0; i < 7; i++) {
      auto began = std::chrono::steady_clock::now();
      uint64_t made = pairs(device, stream);
      double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
      least = std::min(least, seconds * 1e9 / static_cast<double>(made));
    }
    if (wrong.empty()) wrong = device.verify();
    char shown[64];
    snprintf(shown, sizeof shown, "\"%s\": %.1f, ", name, least);
    text += shown;
  };
  auto allocate = [](Device& device, size_t bytes, Stream stream) {
    Address address = 0;
    if (device.allocate(bytes, stream, address).status != Status::ok) abort();
    return address;
  };
  measure("one", [&](Device& device, Stream stream) {
    for (uint64_t i = 0; i < rounds; i++) device.release(allocate(device, size_class::mib, stream));
    return rounds;
  });
  measure("sizes", [&](Device& device, Stream stream) {
    for (uint64_t i = 0; i < rounds; i++) device.release(allocate(device, (1 + i % 10) * 300 * size_class::kib, stream));
    return rounds;
  });
  measure("nested", [&](Device& device, Stream stream) {
    std::vector<Address> held;
    for (uint64_t i = 0; i < rounds / 64; i++) {
      for (size_t n = 0; n < 64; n++) held.push_back(allocate(device, (n + 1) * 64 * size_class::kib, stream));
      for (; !held.empty(); held.pop_back()) device.release(held.back());
    }
    return rounds / 64 * 64;
  });
  measure("random", [&](Device& device, Stream stream) {
    std::mt19937_64 random(1);
    std::vector<Address> held;
    auto bytes = [&] { return size_t{512} << random() % 14; };
    for (size_t n = 0; n < 400; n++) held.push_back(allocate(device, bytes(), stream));
    for (uint64_t i = 0; i < rounds; i++) {
      Address& place = held[random() % held.size()];
      device.release(place);
      place = allocate(device, bytes(), stream);
    }
    for (Address each : held) device.release(each);
    return rounds;
  });
  printf("%s\"wrong\": \"%s\"}\n", text.c_str(), wrong.c_str());
  return wrong.empty() ? 0 : 1;
}
