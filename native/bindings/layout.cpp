// The search for layouts, as Python sees it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "parts.hpp"
#include "tieroff/layout/layout.hpp"

namespace py = pybind11;

namespace tieroff {

namespace {

py::tuple pack(std::vector<std::int64_t> lower, std::vector<std::int64_t> upper, std::vector<std::int64_t> size,
               std::vector<std::int64_t> above, std::int64_t ring, std::int64_t alignment, const layout::Options& options) {
  if (upper.size() != lower.size() || size.size() != lower.size() || above.size() != lower.size())
    throw std::invalid_argument("expected lower, upper, size and above of one length");
  const layout::Problem problem{std::move(lower), std::move(upper), std::move(size), std::move(above), ring, alignment};
  layout::Result result;
  {
    const py::gil_scoped_release released;
    result = layout::search(problem, options);
  }
  return py::make_tuple(result.offsets, result.footprint, result.bound, result.node_count, result.step_count);
}

}  // namespace

void bind_layout(py::module_& module) {
  const layout::Options defaults;
  module.def(
      "pack",
      [](std::vector<std::int64_t> lower, std::vector<std::int64_t> upper, std::vector<std::int64_t> size,
         std::vector<std::int64_t> above, std::int64_t ring, std::int64_t alignment, std::int64_t capacity,
         std::int64_t node_budget, std::int64_t fit_budget, std::uint64_t seed, std::int64_t time_limit_ns, bool splits,
         bool stacks, bool dominates, bool bounds, bool remembers, bool orders_twins) {
        const layout::Options options{capacity, node_budget, fit_budget, seed,      time_limit_ns, splits,
                                      stacks,   dominates,   bounds,     remembers, orders_twins};
        return pack(std::move(lower), std::move(upper), std::move(size), std::move(above), ring, alignment, options);
      },
      py::arg("lower"), py::arg("upper"), py::arg("size"), py::arg("above"), py::arg("ring") = 0, py::arg("alignment") = 1,
      py::arg("capacity") = defaults.capacity, py::arg("node_budget") = defaults.node_budget,
      py::arg("fit_budget") = defaults.fit_budget, py::arg("seed") = defaults.seed,
      py::arg("time_limit_ns") = defaults.time_limit_ns, py::arg("splits") = defaults.splits,
      py::arg("stacks") = defaults.stacks, py::arg("dominates") = defaults.dominates, py::arg("bounds") = defaults.bounds,
      py::arg("remembers") = defaults.remembers, py::arg("orders_twins") = defaults.orders_twins);
}

}  // namespace tieroff
