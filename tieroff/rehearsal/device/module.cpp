// What Python sees of all this.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "kernels.hpp"
#include "tensors.hpp"

namespace rehearsal {
void take_hooks();
void choose_attention_as_cuda();
}  // namespace rehearsal

namespace {

namespace py = pybind11;
using namespace rehearsal;

std::map<std::string, int64_t> count() {
  const Counters all = counters();
  const Figures memory = figures();
  return {{"now_ns", now_ns()},
          {"device_ns", all.device_ns},
          {"kernels", all.kernels},
          {"busy_ns", all.busy_ns},
          {"copying_ns", all.copying_ns},
          {"starved_ns", all.starved_ns},
          {"waited_ns", all.waited_ns},
          {"values", all.values},
          {"h2d", all.bytes[kToDevice]},
          {"d2h", all.bytes[kToHost]},
          {"nvme_read", all.bytes[kNvmeRead]},
          {"nvme_write", all.bytes[kNvmeWrite]},
          {"allocated_bytes", memory.allocated},
          {"peak_bytes", memory.peak},
          {"step_peak_bytes", memory.step_peak}};
}

// Per link (h2d, d2h, nvme_read, nvme_write) bytes per second and latency.
void set_machine(size_t device_size, const std::vector<std::pair<double, double>>& links, double duplex_share) {
  Rates rates;
  for (size_t i = 0; i < kLinks; i++) rates.links[i] = {links.at(i).first, links.at(i).second};
  rates.duplex_share = duplex_share;
  set_rates(rates);
  set_device_bytes(device_size);
}

}  // namespace

PYBIND11_MODULE(_rehearsal, m) {
  const py::call_guard<py::gil_scoped_release> free;
  m.def("register", [](const py::object& clock) {
    set_python_clock(clock);
    take_hooks();
    choose_attention_as_cuda();
    take_kernels_of_cuda();
  });
  m.def("set_machine", &set_machine);
  m.def("counters", &count, free);
  m.def("restart_step_peak", &restart_step_peak, free);
  m.def("default_generator", [] { return default_generator(); });
  m.def("map_host", [](size_t size, bool is_drive) { return reinterpret_cast<uintptr_t>(map_host(size, is_drive)); }, free);
  m.def("unmap_host", [](uintptr_t address) { unmap_host(reinterpret_cast<void*>(address)); }, free);
  m.def("forbid_access", [](uintptr_t storage, const std::string& message) {
    reinterpret_cast<c10::StorageImpl*>(storage)->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  });
}
