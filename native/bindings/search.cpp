// What the planner's search asks of C++: windows and the order of transfers. Arrays are 64-bit integers, one dimension.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <span>
#include <string>

#include "arrays.hpp"
#include "parts.hpp"
#include "tieroff/dispatch.hpp"
#include "tieroff/windows.hpp"

namespace py = pybind11;

namespace tieroff {

namespace {

Integers array(const std::vector<std::int64_t>& values) {
  return Integers(static_cast<py::ssize_t>(values.size()), values.data());
}

}  // namespace

void bind_search(py::module_& module) {
  module.def(
      "fit_windows",
      [](Integers usage, const Integers& starts_ns, std::int64_t budget_bytes, const Integers& start, const Integers& stop,
         const Integers& size_bytes, Integers away_start, Integers away_stop, int repair, const Integers& load_order,
         const Integers& release_order, const Integers& load_from, const Integers& release_until, const std::string& passes) {
        if (repair < 0 || repair > 3) throw std::invalid_argument("expected a repair of 0 to 3");
        const Gaps gaps{view(start), view(stop), view(size_bytes), changing(away_start), changing(away_stop)};
        const Filling filling{view(load_order), view(release_order), view(load_from), view(release_until), passes};
        const auto bytes = changing(usage);
        const py::gil_scoped_release released;
        return fit_windows(bytes, view(starts_ns), budget_bytes, gaps, static_cast<Repair>(repair), filling);
      },
      py::arg("usage").noconvert(), py::arg("starts_ns"), py::arg("budget_bytes"), py::arg("start"), py::arg("stop"),
      py::arg("size_bytes"), py::arg("away_start").noconvert(), py::arg("away_stop").noconvert(), py::arg("repair"),
      py::arg("load_order"), py::arg("release_order"), py::arg("load_from"), py::arg("release_until"), py::arg("passes"));
  module.def(
      "dispatch",
      [](const Integers& duration_ns, const Integers& link, const Integers& issue_from, const Integers& ready_by,
         const Integers& size_bytes, const std::array<double, kLinkCount>& bytes_per_ns,
         const std::array<double, kLinkCount>& latency_ns, bool nvme_shares_host_link, double duplex_share,
         std::size_t step_count) {
        const DispatchJobs jobs{view(link), view(issue_from), view(ready_by), view(size_bytes)};
        const DispatchLinks links{bytes_per_ns, latency_ns, nvme_shares_host_link, duplex_share};
        Dispatched result;
        {
          const py::gil_scoped_release released;
          result = dispatch(view(duration_ns), jobs, links, step_count);
        }
        return py::make_tuple(result.step_ns, result.waits_ns, array(result.served), array(result.start_tick));
      },
      py::arg("duration_ns"), py::arg("link"), py::arg("issue_from"), py::arg("ready_by"), py::arg("size_bytes"),
      py::arg("bytes_per_ns"), py::arg("latency_ns"), py::arg("nvme_shares_host_link"), py::arg("duplex_share"),
      py::arg("step_count"));
}

}  // namespace tieroff
