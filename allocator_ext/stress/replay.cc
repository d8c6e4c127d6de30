// A recorded log of allocations, played to the allocator over the simulated driver: what it would have reserved.
//
// A log is lines of words; `scripts/allocator-log` makes one from a snapshot with history. Streams, blocks and pools are
// numbers of the log's own, streams from 0.
//
//   allocate BLOCK BYTES STREAM      free BLOCK            record BLOCK STREAM     (record_stream)
//   kernel STREAM                    join STREAM AWAITED   (waits for what the other has now)
//   begin POOL STREAM                end POOL              (a scope that takes that stream alone)
//   release POOL                     capture STREAM        captured STREAM         (a capture's begin and end)
//   run                              (everything launched outside of captures has run)
//   # anything
//
//   replay LOG [--reuse own|strict|graph|any] [--expandable] [--stitch] [--capacity MIB]
// Prints one line of JSON; exits with 1 when something was wrong. `bound` is computed without the allocator: the most bytes
// that were live at once, each block rounded to 512. `fragmentation` is the part of what is reserved at its peak that is
// above it. `driver_calls` are those about memory and addresses, `handles` those of the driver that are kept at the end.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "core/device.h"
#include "sim/simulator.h"

using namespace mg;

namespace {

struct Live {
  Address address;
  size_t bytes;
};

class Replay {
 public:
  Replay(const Config& config, size_t capacity) : sim_(capacity) {
    sim::Simulator::enter(&sim_);
    device = std::make_unique<Device>(sim::Simulator::table(), 0, config);
  }
  ~Replay() {
    device.reset();
    sim::Simulator::enter(nullptr);
  }

  std::unique_ptr<Device> device;
  uint64_t operations = 0, out_of_memory = 0;
  size_t bound = 0;
  std::string wrong;
  const sim::Simulator& driver() const { return sim_; }

  bool line(const std::string& text) {
    std::istringstream in(text);
    std::string word;
    if (!(in >> word) || word[0] == '#') return true;
    std::vector<uint64_t> numbers{std::istream_iterator<uint64_t>(in), {}};
    static const std::map<std::string, size_t> words = {
        {"allocate", 3}, {"free", 1}, {"record", 2}, {"kernel", 1}, {"join", 2}, {"begin", 2},
        {"end", 1}, {"release", 1}, {"capture", 1}, {"captured", 1}, {"run", 0}};
    auto known = words.find(word);
    if (known == words.end() || known->second != numbers.size() || !in.eof()) return fail("not understood");
    operations++;
    return apply(word, numbers);
  }

 private:
  bool fail(const std::string& what) {
    wrong = what;
    return false;
  }
  bool ok(const Outcome& outcome) { return outcome.status == Status::ok || fail(outcome.message); }

  Stream stream(uint64_t number) {
    while (streams_.size() <= number) streams_.push_back(sim_.stream());
    return streams_[number];
  }

  bool apply(const std::string& word, const std::vector<uint64_t>& n) {
    if (word == "allocate") return allocate(n[0], n[1], stream(n[2]));
    if (word == "free" || word == "record") {
      auto found = live_.find(n[0]);
      if (found == live_.end()) return refused_.count(n[0]) != 0 || fail("no such block");
      if (word == "record") return ok(device->record_stream(found->second.address, stream(n[1])));
      Live block = found->second;
      live_.erase(found);
      by_address_.erase(block.address);
      bytes_ -= size_class::rounded(block.bytes);
      return ok(device->release(block.address));
    }
    if (word == "kernel") return sim_.kernel(stream(n[0])) != nullptr;
    if (word == "join") return sim_.wait(stream(n[0]), sim_.record(stream(n[1]))) || fail("this stream cannot wait for that");
    if (word == "begin") {
      Stream taken = stream(n[1]);
      device->begin_pool({0, n[0]}, [taken](Stream asked) { return asked == taken; });
      return true;
    }
    if (word == "end") return ok(device->end_pool({0, n[0]}));
    if (word == "release") return ok(device->release_pool({0, n[0]}));
    if (word == "capture") return sim_.begin_capture(stream(n[0])) || fail("the stream captures already");
    if (word == "captured") return sim_.end_capture(stream(n[0])) || fail("the stream does not capture");
    sim_.run_all();
    return true;
  }

  bool allocate(uint64_t number, size_t bytes, Stream on) {
    if (live_.count(number) != 0) return fail("the block is live");
    Address address = 0;
    Outcome outcome = device->allocate(bytes, on, address);
    if (outcome.status == Status::out_of_memory) {
      out_of_memory++;
      refused_.insert({number, true});
      return true;
    }
    if (!ok(outcome)) return false;
    if (bytes != 0) {
      auto above = by_address_.lower_bound(address);
      bool lies_over = above != by_address_.end() && above->first < address + bytes;
      if (above != by_address_.begin()) lies_over = lies_over || std::prev(above)->first + std::prev(above)->second > address;
      if (lies_over || !sim_.backed(address, bytes)) return fail("the block lies over another, or where no memory is");
      by_address_[address] = bytes;
      bytes_ += size_class::rounded(bytes);
      bound = std::max(bound, bytes_);
    }
    live_[number] = {address, bytes};
    return true;
  }

  sim::Simulator sim_;
  std::vector<Stream> streams_;
  std::map<uint64_t, Live> live_;
  std::map<uint64_t, bool> refused_;
  std::map<Address, size_t> by_address_;
  size_t bytes_ = 0;
};

}  // namespace

int main(int count, char** words) {
  Config config;
  std::string path;
  size_t capacity = size_t{1} << 40;
  for (int i = 1; i < count; i++) {
    std::string word = words[i];
    if (word == "--expandable") {
      config.expandable = true;
    } else if (word == "--stitch") {
      config.stitch = true;
    } else if (word == "--capacity" && i + 1 < count) {
      capacity = strtoull(words[++i], nullptr, 10) * size_class::mib;
    } else if (word == "--reuse" && i + 1 < count) {
      std::string rule = words[++i];
      config.reuse = rule == "strict" ? Reuse::strict : rule == "graph" ? Reuse::graph_wide
                     : rule == "any"  ? Reuse::any_stream : Reuse::own_stream;
    } else if (word[0] != '-' && path.empty()) {
      path = word;
    } else {
      fprintf(stderr, "replay: unknown argument %s\n", word.c_str());
      return 2;
    }
  }
  std::ifstream log(path);
  if (!log) {
    fprintf(stderr, "replay: cannot read %s\n", path.c_str());
    return 2;
  }
  Replay replay(config, capacity);
  auto began = std::chrono::steady_clock::now();
  std::string text, wrong;
  for (uint64_t number = 1; std::getline(log, text); number++) {
    if (replay.line(text)) continue;
    wrong = "line " + std::to_string(number) + ": " + replay.wrong;
    break;
  }
  double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  if (wrong.empty()) wrong = replay.device->verify();
  Stats stats = replay.device->stats();
  auto n = [](auto value) { return static_cast<unsigned long long>(value); };
  double reserved = static_cast<double>(stats.reserved_bytes.peak), bound = static_cast<double>(replay.bound);
  printf("{\"operations\": %llu, \"bound\": %llu, \"peak_live\": %llu, \"peak_active\": %llu, \"peak_reserved\": %llu, "
         "\"fragmentation\": %.4f, \"segments\": %llu, \"proven\": %llu, \"stitched\": %llu, \"driver_calls\": %llu, "
         "\"handles\": %llu, \"out_of_memory\": %llu, \"seconds\": %.4f, \"wrong\": \"%s\"}\n",
         n(replay.operations), n(replay.bound), n(stats.allocated_bytes.peak), n(stats.active_bytes.peak),
         n(stats.reserved_bytes.peak), reserved > 0 ? 1 - bound / reserved : 0.0, n(stats.segments.peak), n(stats.proven),
         n(stats.stitched), n(replay.driver().memory_calls), n(replay.driver().handles()), n(replay.out_of_memory), seconds,
         wrong.c_str());
  return wrong.empty() ? 0 : 1;
}
