// What Python sees of all this.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <array>

#include "../device/pinned.hpp"
#include "../ops/kernels.hpp"
#include "../ops/random.hpp"

namespace sim {
void register_hooks();
void observe_host();
}  // namespace sim

namespace {

namespace py = pybind11;
using namespace sim;

// What one thread of the host did before another one goes on. Called with Python's lock, which is let go only to wait for that of
// the detector: a daemon that wants it back while Python ends is ended there, and must not be inside of C++ by then.
struct Order {
  Clock clock;

  void release() {
    locked([this] { release_to(clock); });
  }
  void acquire() {
    locked([this] { acquire_from(clock); });
  }

 private:
  template <typename Act>
  static void locked(const Act& act) {
    if (const std::unique_lock lock(state_mutex(), std::try_to_lock); lock) {
      act();
      return;
    }
    const py::gil_scoped_release released;
    const Locked lock(state_mutex());
    act();
  }
};

std::map<std::string, int64_t> count() {
  const Counters& all = counters();
  return {{"kernels", all.kernels},
          {"synchronous_kernels", all.synchronous_kernels},
          {"copies_to_device", all.copies_to_device},
          {"copies_to_host", all.copies_to_host},
          {"bytes_to_device", all.bytes_to_device},
          {"bytes_to_host", all.bytes_to_host},
          {"blocking_copies", all.blocking_copies},
          {"unpinned_async_copies", all.unpinned_async_copies},
          {"host_waits", all.host_waits},
          {"cross_device_waits", all.cross_device_waits},
          {"unregistered_in_flight", all.unregistered_in_flight},
          {"unordered_frees", all.unordered_frees},
          {"refused_registrations", all.refused_registrations},
          {"dropped_accesses", dropped_accesses()},
          {"pinned_bytes", static_cast<int64_t>(pinned_bytes())}};
}

void restart_counts() {
  Counters& all = counters();
  for (auto* one : {&all.kernels, &all.synchronous_kernels, &all.copies_to_device, &all.copies_to_host, &all.bytes_to_device,
                    &all.bytes_to_host, &all.blocking_copies, &all.unpinned_async_copies, &all.host_waits,
                    &all.cross_device_waits, &all.unregistered_in_flight, &all.unordered_frees, &all.refused_registrations})
    *one = 0;
}

void note_from_python(uintptr_t address, size_t size, bool is_write, const std::string& name, std::optional<Actor> agent) {
  note_host_access(reinterpret_cast<void*>(address), size, is_write, interned(name), agent ? &*agent : nullptr);
  raise_found();
}

int64_t host_time_ns() {
  Locked lock(state_mutex());
  return clock_of(host_actor()).time_ns;
}

void advance_host(int64_t ns) {
  Locked lock(state_mutex());
  clock_of(host_actor()).time_ns += ns;
}

int64_t stream_time_ns(int device, int64_t stream) {
  Locked lock(state_mutex());
  return clock_of(stream_of(device, stream).actor).time_ns;
}

std::vector<py::tuple> entries() {
  constexpr std::array<const char*, 4> kNames{"compute", "h2d", "d2h", "none"};
  std::vector<Entry> all;
  {
    Locked lock(state_mutex());
    all = timeline();
  }
  std::vector<py::tuple> made;
  for (const Entry& one : all)
    made.push_back(py::make_tuple(one.device, kNames[static_cast<size_t>(one.engine)], std::stoi(one.stream), one.name,
                                  one.start_ns, one.stop_ns));
  return made;
}

void reset() {
  for (int device = 0; device < kDevices; device++)
    for (Stream* one : streams_of(device)) one->wait(one->last_ticket());
  Locked lock(state_mutex());
  forget_failures();
  take_last_error();
  forget_accesses();
  forget_order();
  forget_races();
  restart_counts();
  restart_time();
  forget_rates();
  keep_timeline(false);
}

void set_machine(double fp32, double half, double memory, double h2d, double d2h, double h2d_latency, double d2h_latency,
                 double share, double kernel_s) {
  Locked lock(state_mutex());
  set_rates({fp32, half, memory, h2d, d2h, h2d_latency, d2h_latency, share, kernel_s});
}

}  // namespace

PYBIND11_MODULE(_simulated, m) {
  // Whatever takes the state's lock lets Python's go first: who holds the state may be waiting for Python.
  const py::call_guard<py::gil_scoped_release> free;
  m.def("register", [] {
    register_hooks();
    take_kernels_of_cpu();
    observe_host();
  });
  m.def("reset", &reset, free);
  m.def("counters", &count, free);
  m.def("synchronous_operators", &synchronous_operators, free);

  m.def("device_count", [] { return kDevices; });
  m.def("current_device", &current_device);
  m.def("set_device", &set_current_device);
  m.def("seed_all", &seed_all);

  m.def("default_generator", [](int device) { return default_generator(device); });

  m.def("races", &races, free);
  m.def("forget_races", &forget_races, free);
  m.def("set_raising", &set_raising);
  m.def("raise_found", &raise_found, free);
  m.def("set_stack_depth", &set_stack_depth);
  m.def("set_label", [](const std::string& label) { return label_of(set_label(label)); });

  m.def("host_register", [](uintptr_t at, size_t size) { return host_register(reinterpret_cast<void*>(at), size); }, free);
  m.def("host_unregister", [](uintptr_t at) { return host_unregister(reinterpret_cast<void*>(at)); }, free);
  m.def("set_pin_limit", &set_pin_limit, free);
  m.def("take_last_error", &take_last_error, free);
  m.def("is_pinned", [](uintptr_t at, size_t size) { return is_pinned(reinterpret_cast<void*>(at), size); }, free);
  m.def("note_host_access", &note_from_python, free);
  m.def("begin_agent", &begin_agent, free);
  m.def("end_agent", &end_agent, free);
  m.def("forbid_access", [](uintptr_t storage, const std::string& message) {
    reinterpret_cast<c10::StorageImpl*>(storage)->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  });
  m.def("set_late_links", &set_late_links);
  m.def("set_total", &set_total);

  m.def("set_machine", &set_machine, free);
  m.def("forget_machine", [] { Locked lock(state_mutex()); forget_rates(); }, free);
  m.def("host_time_ns", &host_time_ns, free);
  m.def("advance_host", &advance_host, free);
  m.def("stream_time_ns", &stream_time_ns, free);
  py::class_<Event, EventPtr>(m, "Held");
  m.def("hold", [](int device, int64_t stream) { return hold(stream_of(device, stream)); }, free);
  m.def("let_go", &let_go, free);
  m.def("keep_timeline", [](bool is_on) { Locked lock(state_mutex()); keep_timeline(is_on); }, free);
  m.def("timeline", &entries);

  m.def("enter_backward", &enter_backward, free);
  m.def("leave_backward", &leave_backward, free);
  m.def("acquire_from_thread", &acquire_from_thread, free);
  py::class_<Order>(m, "Order").def(py::init<>()).def("release", &Order::release).def("acquire", &Order::acquire);
}
