// The simulated driver for tests in Python: a simulator, its streams, and an allocator over it.
//
// Everything here is for one thread at a time; `sim_enter` says which simulator the thread's calls mean.

#include "abi.h"
#include "core/device.h"
#include "cuda/libcuda.h"
#include "sim/oracle.h"
#include "torch/relief.h"

using mg::sim::Simulator;

// torch's side of the library is here as it is delivered, but for the driver.
const mg::Driver* mg::cuda::driver(std::string& reason) {
  reason.clear();
  return &Simulator::table();
}

MG_EXPORT Simulator* sim_new(size_t capacity) noexcept { return new Simulator(capacity); }
MG_EXPORT void sim_delete(Simulator* sim) noexcept { delete sim; }
MG_EXPORT void sim_enter(Simulator* sim) noexcept { Simulator::enter(sim); }
MG_EXPORT void* sim_stream(Simulator* sim) noexcept { return sim->stream(); }
MG_EXPORT int sim_kernel(Simulator* sim, void* stream) noexcept {
  return sim->kernel(static_cast<mg::Stream>(stream))->number;
}
// Launched by a programmatic edge.
MG_EXPORT int sim_early_kernel(Simulator* sim, void* stream) noexcept {
  return sim->kernel(static_cast<mg::Stream>(stream), -1, true)->number;
}
// What the stream appends next depends on this node alone.
MG_EXPORT int sim_set_terminal(Simulator* sim, void* stream, int node) noexcept {
  return sim->set_terminals(static_cast<mg::Stream>(stream), {sim->nodes[static_cast<size_t>(node)].get()}) ? 0 : 1;
}
// `stream` captures the body of a conditional node that `on` launches.
MG_EXPORT int sim_begin_body(Simulator* sim, void* stream, void* on) noexcept {
  mg::sim::SimGraph* body = sim->conditional(static_cast<mg::Stream>(on));
  return body != nullptr && sim->begin_capture(static_cast<mg::Stream>(stream), body) ? 0 : 1;
}
MG_EXPORT int sim_begin_capture(Simulator* sim, void* stream) noexcept {
  return sim->begin_capture(static_cast<mg::Stream>(stream)) ? 0 : 1;
}
// The same once more into the graph of an earlier capture, behind nothing.
MG_EXPORT void* sim_graph(Simulator* sim, void* stream) noexcept {
  auto* from = static_cast<mg::sim::SimStream*>(stream);
  (void)sim;
  return from->capture != nullptr ? from->capture->graph : nullptr;
}
MG_EXPORT int sim_begin_capture_to(Simulator* sim, void* stream, void* graph) noexcept {
  return sim->begin_capture(static_cast<mg::Stream>(stream), static_cast<mg::sim::SimGraph*>(graph)) ? 0 : 1;
}
MG_EXPORT void sim_destroy_stream(Simulator* sim, void* stream) noexcept { sim->destroy(static_cast<mg::Stream>(stream)); }
// Whether the allocator has called the driver wrongly, or broken a capture.
MG_EXPORT int sim_faults(Simulator* sim) noexcept { return sim->fault || sim->broke_a_capture ? 1 : 0; }
MG_EXPORT int sim_end_capture(Simulator* sim, void* stream) noexcept {
  return sim->end_capture(static_cast<mg::Stream>(stream)) ? 0 : 1;
}
MG_EXPORT void sim_invalidate_capture(Simulator* sim, void* stream) noexcept {
  sim->invalidate_capture(static_cast<mg::Stream>(stream));
}
MG_EXPORT int sim_is_capturing(Simulator* sim, void* stream) noexcept {
  return sim->is_capturing(static_cast<mg::Stream>(stream)) ? 1 : 0;
}
MG_EXPORT int sim_record(Simulator* sim, void* stream) noexcept { return sim->record(static_cast<mg::Stream>(stream)); }
MG_EXPORT int sim_wait(Simulator* sim, void* stream, int event) noexcept {
  return sim->wait(static_cast<mg::Stream>(stream), event) ? 0 : 1;
}
MG_EXPORT void sim_run_all(Simulator* sim) noexcept { sim->run_all(); }
MG_EXPORT void sim_fail_at(Simulator* sim, uint64_t call) noexcept { sim->fail_at(call); }
MG_EXPORT uint64_t sim_calls(Simulator* sim) noexcept { return sim->calls; }
// The value that was last written to a byte, 0: none; through the memory that lies behind its address now.
MG_EXPORT void sim_write(Simulator* sim, uint64_t address, uint64_t value) noexcept { sim->write(address, value); }
MG_EXPORT uint64_t sim_read(Simulator* sim, uint64_t address) noexcept { return sim->read(address); }
MG_EXPORT int sim_backed(Simulator* sim, uint64_t address, size_t size) noexcept { return sim->backed(address, size) ? 1 : 0; }
MG_EXPORT size_t sim_pinned(Simulator* sim) noexcept {
  size_t bytes = 0;
  for (auto& [address, size] : sim->pinned) bytes += size;
  return bytes;
}
// Whether a kernel of this device may use an address that lies in a mapping.
MG_EXPORT int sim_mapped_for(Simulator* sim, int device, uint64_t address) noexcept {
  return sim->mapped_for(device, address, 1) ? 1 : 0;
}
// What mapped memory is asked for as: a type of handle, and whether network cards reach it.
MG_EXPORT int sim_handle_types(Simulator* sim) noexcept { return sim->asked.handle_types; }
MG_EXPORT int sim_remote_access(Simulator* sim) noexcept { return sim->asked.direct_rdma; }
MG_EXPORT void sim_cannot_share(Simulator* sim) noexcept { sim->shares = false; }
MG_EXPORT void sim_granularity(Simulator* sim, size_t bytes) noexcept { sim->granularity = bytes; }
MG_EXPORT void sim_cannot_map(Simulator* sim) noexcept { sim->maps = false; }
MG_EXPORT size_t sim_used(Simulator* sim) noexcept { return sim->used; }

// With the options that were set last.
MG_EXPORT mg_device* sim_device(int index) noexcept {
  return new mg::Device(Simulator::table(), index, mg::configured());
}
// As torch's own devices are made.
MG_EXPORT void sim_relieve(mg_device* device) noexcept {
  device->set_relief([](size_t bytes) { return mg::torch_side::relief(0, bytes); });
}
MG_EXPORT void sim_device_delete(mg_device* device) noexcept { delete device; }
