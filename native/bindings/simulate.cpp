// The simulator's arrays: rows of 64-bit integers, in and out.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "parts.hpp"
#include "tieroff/simulate/simulate.hpp"

namespace py = pybind11;

namespace tieroff {
namespace {

using Rows = py::array_t<std::int64_t, py::array::c_style>;

std::span<const std::int64_t> line(const Rows& array, const char* name) {
  if (array.ndim() != 1) throw std::invalid_argument(std::string("expected ") + name + " with 1 dimension");
  return {array.data(), static_cast<std::size_t>(array.size())};
}

std::int32_t narrow(std::int64_t value) {
  if (value < std::numeric_limits<std::int32_t>::min() || value > std::numeric_limits<std::int32_t>::max()) {
    throw std::invalid_argument("expected an index, a tick or a rank of 32 bits, got " + std::to_string(value));
  }
  return static_cast<std::int32_t>(value);
}

SimulatedTier tier(std::int64_t value) {
  if (value < 0 || value > 2) throw std::invalid_argument("expected a tier 0 to 2, got " + std::to_string(value));
  return static_cast<SimulatedTier>(value);
}

// One element per row, made from a pointer to the row.
template <class Item, class Make>
std::vector<Item> rows(const Rows& array, py::ssize_t columns, const char* name, Make make) {
  if (array.ndim() != 2 || array.shape(1) != columns) {
    throw std::invalid_argument(std::string("expected ") + name + " with " + std::to_string(columns) + " columns");
  }
  std::vector<Item> items;
  items.reserve(static_cast<std::size_t>(array.shape(0)));
  for (py::ssize_t i = 0; i < array.shape(0); ++i) items.push_back(make(array.data(i, 0)));
  return items;
}

std::vector<SimulatedRepeat> repeat_rows(const Rows& array) {
  return rows<SimulatedRepeat>(
      array, 2, "repeats", [](const std::int64_t* row) { return SimulatedRepeat{.op = narrow(row[0]), .at = narrow(row[1])}; });
}

template <class Item, class Fill>
Rows to_rows(const std::vector<Item>& items, Fill fill) {
  Rows array({static_cast<py::ssize_t>(items.size()), py::ssize_t{3}});
  std::int64_t* row = array.mutable_data();
  for (const Item& item : items) {
    fill(item, row);
    row += 3;
  }
  return array;
}

Rows span_rows(const std::vector<SimulatedSpan>& spans) {
  return to_rows(spans, [](const SimulatedSpan& span, std::int64_t* row) {
    row[0] = span.index;
    row[1] = span.start_ns;
    row[2] = span.stop_ns;
  });
}

SimulationResult simulate_rows(const Rows& op_ns, const Rows& transfers, const Rows& updates, const Rows& repeats,
                               const Rows& links, std::int32_t duplex_share_millionths, bool nvme_shares_host_link,
                               const Rows& memory, bool has_exclusive_link, std::int32_t step_count_max, bool with_spans,
                               const Rows& queues) {
  const auto transfer_items = rows<SimulatedTransfer>(transfers, 6, "transfers", [](const std::int64_t* row) {
    return SimulatedTransfer{.source = tier(row[0]),
                             .target = tier(row[1]),
                             .issue_at = narrow(row[2]),
                             .ready_by = narrow(row[3]),
                             .rank = narrow(row[4]),
                             .size_bytes = row[5]};
  });
  const auto update_items = rows<SimulatedUpdate>(updates, 3, "updates", [](const std::int64_t* row) {
    return SimulatedUpdate{.issue_at = narrow(row[0]), .ready_by = narrow(row[1]), .duration_ns = row[2]};
  });
  const auto link_items = rows<SimulatedLink>(
      links, 2, "links", [](const std::int64_t* row) { return SimulatedLink{.bytes_per_s = row[0], .latency_ns = row[1]}; });
  const auto queue_items = rows<SimulatedQueue>(queues, 2, "queues", [](const std::int64_t* row) {
    return SimulatedQueue{.is_communication = row[0] != 0, .awaits = narrow(row[1])};
  });
  if (link_items.size() != kLinkCount) throw std::invalid_argument("expected links with 4 rows");
  const auto limits = line(memory, "memory");
  if (limits.size() != 4) throw std::invalid_argument("expected memory with 4 numbers");
  const auto repeat_items = repeat_rows(repeats);
  const SimulationInput input{.op_ns = line(op_ns, "op_ns"),
                              .transfers = transfer_items,
                              .updates = update_items,
                              .repeats = repeat_items,
                              .links = {link_items[0], link_items[1], link_items[2], link_items[3]},
                              .duplex_share_millionths = duplex_share_millionths,
                              .nvme_shares_host_link = nvme_shares_host_link,
                              .memory = {.bytes_per_s = limits[0],
                                         .update_bytes_per_s = limits[1],
                                         .host_passes = narrow(limits[2]),
                                         .nvme_passes = narrow(limits[3])},
                              .has_exclusive_link = has_exclusive_link,
                              .step_count_max = step_count_max,
                              .queues = queue_items,
                              .with_spans = with_spans};
  const py::gil_scoped_release released;
  return simulate(input);
}

py::tuple memory_rows(const Rows& transient_bytes, const Rows& residencies, const Rows& repeats, const Rows& addresses) {
  const auto items = rows<SimulatedResidency>(residencies, 4, "residencies", [](const std::int64_t* row) {
    return SimulatedResidency{.tier = tier(row[0]), .start = narrow(row[1]), .stop = narrow(row[2]), .size_bytes = row[3]};
  });
  const auto repeat_items = repeat_rows(repeats);
  const MemoryInput input{.transient_bytes = line(transient_bytes, "transient_bytes"),
                          .residencies = items,
                          .repeats = repeat_items,
                          .addresses = line(addresses, "addresses")};
  const auto memory = memory_per_op(input);
  const auto array = [](const std::vector<std::int64_t>& values) {
    return Rows(static_cast<py::ssize_t>(values.size()), values.data());
  };
  return py::make_tuple(array(memory[0]), array(memory[1]), array(memory[2]));
}

}  // namespace

void bind_simulate(py::module_& module) {
  py::class_<SimulationResult>(module, "SimulationResult")
      .def_readonly("step_ns", &SimulationResult::step_ns)
      .def_readonly("first_step_ns", &SimulationResult::first_step_ns)
      .def_readonly("cycle", &SimulationResult::cycle)
      .def_readonly("recompute_ns", &SimulationResult::recompute_ns)
      .def_property_readonly("stalls",
                             [](const SimulationResult& self) {
                               return to_rows(self.stalls, [](const SimulatedStall& stall, std::int64_t* row) {
                                 row[0] = stall.op;
                                 row[1] = stall.duration_ns;
                                 row[2] = stall.cause;
                               });
                             })
      .def_property_readonly("ops", [](const SimulationResult& self) { return span_rows(self.ops); })
      .def_property_readonly("repeats", [](const SimulationResult& self) { return span_rows(self.repeats); })
      .def_property_readonly("transfers", [](const SimulationResult& self) { return span_rows(self.transfers); })
      .def_property_readonly("updates", [](const SimulationResult& self) { return span_rows(self.updates); });
  module.def("simulate", &simulate_rows, py::arg("op_ns"), py::arg("transfers"), py::arg("updates"), py::arg("repeats"),
             py::arg("links"), py::arg("duplex_share_millionths"), py::arg("nvme_shares_host_link"),
             py::arg("memory"), py::arg("has_exclusive_link"), py::arg("step_count_max"), py::arg("with_spans"),
             py::arg_v("queues", Rows(std::vector<py::ssize_t>{0, 2}), "none"));
  module.def("memory_per_op", &memory_rows, py::arg("transient_bytes"), py::arg("residencies"), py::arg("repeats"),
             py::arg("addresses"));
}

}  // namespace tieroff
