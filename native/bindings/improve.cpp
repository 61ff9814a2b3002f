// The local search on windows. Arrays are 64-bit integers, one dimension.
#include "tieroff/search/improve.hpp"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "arrays.hpp"
#include "parts.hpp"

namespace py = pybind11;

namespace tieroff {

void bind_improve(py::module_& module) {
  module.def(
      "improve",
      [](Integers usage, const Integers& duration_ns, const std::array<double, kLinkCount>& bytes_per_ns,
         const std::array<double, kLinkCount>& latency_ns, bool nvme_shares_host_link, double duplex_share,
         std::int64_t device_bytes, const std::array<std::int64_t, 2>& lower_bytes, std::int64_t granule_bytes,
         const Integers& piece, const Integers& start, const Integers& stop, const Integers& size_bytes,
         const Integers& is_last, const Integers& copy_from, const Integers& is_persistent, Integers away_start,
         Integers away_stop, Integers tier, std::uint64_t seed, std::int64_t work) {
        const SearchGround ground{view(duration_ns),
                                  {bytes_per_ns, latency_ns, nvme_shares_host_link, duplex_share},
                                  device_bytes,
                                  lower_bytes,
                                  granule_bytes};
        const SearchGaps gaps{view(piece),     view(start),         view(stop),           view(size_bytes),    view(is_last),
                              view(copy_from), view(is_persistent), changing(away_start), changing(away_stop), changing(tier)};
        const auto bytes = changing(usage);
        Improved result{};
        {
          const py::gil_scoped_release released;
          result = improve(bytes, ground, gaps, seed, work);
        }
        return py::make_tuple(result.before_ns, result.after_ns, result.nodes);
      },
      py::kw_only(), py::arg("usage").noconvert(), py::arg("duration_ns"), py::arg("bytes_per_ns"), py::arg("latency_ns"),
      py::arg("nvme_shares_host_link"), py::arg("duplex_share"), py::arg("device_bytes"), py::arg("lower_bytes"),
      py::arg("granule_bytes"), py::arg("piece"), py::arg("start"), py::arg("stop"), py::arg("size_bytes"), py::arg("is_last"),
      py::arg("copy_from"), py::arg("is_persistent"), py::arg("away_start").noconvert(), py::arg("away_stop").noconvert(),
      py::arg("tier").noconvert(), py::arg("seed"), py::arg("work"));
}

}  // namespace tieroff
