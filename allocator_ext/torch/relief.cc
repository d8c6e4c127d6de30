#include "torch/relief.h"

#include <dlfcn.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "multigraph_allocator.h"
#include "torch/devices.h"

namespace mg::torch_side {

namespace {

std::mutex mutex;
std::condition_variable asked, answered;
double seconds = 0;      // that an allocation waits; 0: nobody is asked
pid_t process = 0;       // in which there is a thread to ask
bool present = false;    // that thread waits, or is at work
uint64_t question = 0, taken = 0, answer = 0;  // numbers of the last that was asked, taken up, and answered
int device = 0;          // of the last question
size_t lacking = 0;
bool gave = false;       // the last answer
thread_local bool relieves = false;

// Also where there is no telling: then the thread that would be asked may be unable to run.
bool has_python_lock() {
  static const auto check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  return check == nullptr || check() != 0;
}

}  // namespace

bool relief(int index, size_t bytes) noexcept {
  if (relieves || forked() || has_python_lock()) return false;
  try {
    std::unique_lock lock(mutex);
    if (seconds <= 0 || !present || process != getpid()) return false;
    if (answer == question) {  // else the answer to another allocation is on its way, and serves this one
      question++;
      device = index;
      lacking = bytes;
      asked.notify_one();
    }
    uint64_t mine = question;
    bool done = answered.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return answer >= mine || seconds <= 0; });
    return done && answer >= mine && gave;
  } catch (...) {
    return false;
  }
}

}  // namespace mg::torch_side

using namespace mg::torch_side;

int mg_torch_relief(double wait) noexcept {
  std::lock_guard lock(mutex);
  seconds = wait;
  asked.notify_all();
  answered.notify_all();
  return 0;
}

int mg_torch_relief_wait(int* index, size_t* bytes) noexcept {
  relieves = true;
  std::unique_lock lock(mutex);
  process = getpid();
  present = true;
  asked.wait(lock, [] { return seconds <= 0 || taken != question; });
  if (seconds <= 0) {
    present = false;
    answer = taken = question;
    gave = false;
    *index = -1;
    *bytes = 0;
    return 0;
  }
  taken = question;
  *index = device;
  *bytes = lacking;
  return 0;
}

int mg_torch_relief_done(int something) noexcept {
  std::lock_guard lock(mutex);
  gave = something != 0;
  answer = taken;
  answered.notify_all();
  return 0;
}
