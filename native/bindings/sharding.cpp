// The choice of strategies under a limit of memory, as Python sees it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "arrays.hpp"
#include "parts.hpp"
#include "tieroff/sharding/solve.hpp"

namespace py = pybind11;

namespace tieroff {

void bind_sharding(py::module_& module) {
  const sharding::Options defaults;
  module.def(
      "shard",
      [](const Integers& first_strategy, const Integers& cost, const Integers& usage, const Integers& start,
         const Integers& stop, const Integers& source, const Integers& target, const Integers& first_entry,
         const Integers& entry, std::int64_t limit, double time_limit_s, std::uint64_t seed) {
        if (first_strategy.size() != start.size() + 1 || start.size() != stop.size() || cost.size() != usage.size())
          throw std::invalid_argument("expected intervals and strategies of every node");
        if (source.size() != target.size() || first_entry.size() != source.size() + 1)
          throw std::invalid_argument("expected two ends and a cost matrix of every edge");
        const sharding::Problem problem{view(first_strategy), view(cost),   view(usage),       view(start), view(stop),
                                        view(source),         view(target), view(first_entry), view(entry), limit};
        sharding::Result result;
        {
          const py::gil_scoped_release released;
          result = sharding::solve(problem, {time_limit_s, seed});
        }
        return py::make_tuple(result.is_feasible, result.bound, result.strategies, result.start_count);
      },
      py::kw_only(), py::arg("first_strategy"), py::arg("cost"), py::arg("usage"), py::arg("start"), py::arg("stop"),
      py::arg("source"), py::arg("target"), py::arg("first_entry"), py::arg("entry"), py::arg("limit"),
      py::arg("time_limit_s") = defaults.time_limit_s, py::arg("seed") = defaults.seed);
}

}  // namespace tieroff
