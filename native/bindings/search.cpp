// What the planner's search asks of C++: bytes per op, windows and the order of transfers. Arrays have one dimension.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <span>
#include <string>

#include "arrays.hpp"
#include "parts.hpp"
#include "tieroff/search/dispatch.hpp"
#include "tieroff/search/windows.hpp"
#include "tieroff/search/windows_held.hpp"
#include "tieroff/search/windows_sweep.hpp"

namespace py = pybind11;

namespace tieroff {

namespace {

using HeldSpans = std::vector<HeldSpan>;

Integers array(const std::vector<std::int64_t>& values) {
  return Integers(static_cast<py::ssize_t>(values.size()), values.data());
}

// The GIL is kept: each takes about a microsecond.
void bind_held(py::module_& module) {
  module.def(
      "most_bytes", [](const Integers& usage, const HeldSpans& spans) { return most_bytes(view(usage), spans); },
      py::arg("usage"), py::arg("spans"));
  module.def(
      "hold_bytes", [](Integers usage, const HeldSpans& spans) { return hold_bytes(changing(usage), spans); },
      py::arg("usage").noconvert(), py::arg("spans"));
  module.def(
      "drop_bytes", [](Integers usage, const HeldSpans& spans) { drop_bytes(changing(usage), spans); },
      py::arg("usage").noconvert(), py::arg("spans"));
}

}  // namespace

void bind_search(py::module_& module) {
  bind_held(module);
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
      "sweep_windows",
      [](Integers usage, const Integers& starts_ns, std::int64_t budget_bytes, std::int64_t lead_ns, const Integers& tensor,
         const Integers& tier, const Integers& start, const Integers& release_limit, const Integers& deadline,
         const Integers& copy_tick, const Integers& size_bytes, const Integers& out_ns, const Integers& back_ns,
         const Integers& is_boundary, const Integers& is_last, const Integers& late_limit) {
        const SweptSlots slots{view(tensor),   view(tier),        view(start),      view(release_limit),
                               view(deadline), view(copy_tick),   view(size_bytes), view(out_ns),
                               view(back_ns),  view(is_boundary), view(is_last),    view(late_limit)};
        Integers release_at(start.size());
        Integers load_at(start.size());
        const auto bytes = changing(usage);
        const auto releases = changing(release_at);
        const auto loads = changing(load_at);
        {
          const py::gil_scoped_release released;
          sweep_windows(bytes, view(starts_ns), budget_bytes, lead_ns, slots, releases, loads);
        }
        return py::make_tuple(release_at, load_at);
      },
      py::arg("usage").noconvert(), py::arg("starts_ns"), py::arg("budget_bytes"), py::arg("lead_ns"), py::arg("tensor"),
      py::arg("tier"), py::arg("start"), py::arg("release_limit"), py::arg("deadline"), py::arg("copy_tick"),
      py::arg("size_bytes"), py::arg("out_ns"), py::arg("back_ns"), py::arg("is_boundary"), py::arg("is_last"),
      py::arg("late_limit"));
  module.def(
      "serve_in_turn",
      [](const Reals& limits_ns, const Reals& takes_ns, bool is_backwards) {
        const auto ends_ns = serve_in_turn(view(limits_ns), view(takes_ns), is_backwards);
        return Reals(static_cast<py::ssize_t>(ends_ns.size()), ends_ns.data());
      },
      py::arg("limits_ns"), py::arg("takes_ns"), py::arg("is_backwards"));
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
