// Threads that update parameters in host memory.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "parts.hpp"
#include "tieroff/errors.hpp"
#include "tieroff/update/pool.hpp"

namespace py = pybind11;

namespace {

using tieroff::Arithmetic;
using tieroff::Decay;
using tieroff::UpdateGate;
using tieroff::UpdateJob;
using tieroff::UpdatePart;
using tieroff::UpdatePool;
using tieroff::UpdateRule;
using tieroff::UpdateType;

template <class Value, std::size_t N>
Value parse(const std::array<std::pair<const char*, Value>, N>& names, const std::string& given) {
  for (const auto& [name, value] : names)
    if (given == name) return value;
  std::string expected;
  for (const auto& [name, value] : names) expected += (expected.empty() ? "" : ", ") + std::string(name);
  throw py::value_error("expected one of " + expected + ", got " + given);
}

constexpr std::array<std::pair<const char*, UpdateRule>, 4> kRules{{{"adam", UpdateRule::kAdam},
                                                                    {"sgd", UpdateRule::kSgd},
                                                                    {"adagrad", UpdateRule::kAdagrad},
                                                                    {"lion", UpdateRule::kLion}}};
constexpr std::array<std::pair<const char*, Arithmetic>, tieroff::kArithmetics> kArithmetics{{
    {"plain", Arithmetic::kPlain},
    {"contracted", Arithmetic::kContracted},
    {"device-ops", Arithmetic::kDeviceOps},
    {"device-ops-reciprocal", Arithmetic::kDeviceOpsReciprocal},
    {"contracted-ops", Arithmetic::kContractedOps},
    {"double-apart", Arithmetic::kDoubleApart},
    {"double-first", Arithmetic::kDoubleFirst},
    {"double-second", Arithmetic::kDoubleSecond},
}};
constexpr std::array<std::pair<const char*, UpdateType>, 2> kTypes{
    {{"float32", UpdateType::kFloat32}, {"bfloat16", UpdateType::kBfloat16}}};
constexpr std::array<std::pair<const char*, Decay>, 3> kDecays{
    {{"none", Decay::kNone}, {"gradient", Decay::kGradient}, {"parameter", Decay::kParameter}}};

// Names of what may be set beside the rule.
void set_flag(UpdatePart& part, const std::string& name) {
  if (name == "amsgrad")
    part.has_maximum = true;
  else if (name == "maximize")
    part.is_maximized = true;
  else if (name == "momentum")
    part.has_momentum = true;
  else if (name == "first")
    part.is_first = true;
  else if (name == "nesterov")
    part.is_nesterov = true;
  else
    throw py::value_error("expected amsgrad, maximize, momentum, first or nesterov, got " + name);
}

std::size_t tensor_count(const UpdatePart& part) {
  if (part.rule == UpdateRule::kAdam) return part.has_maximum ? 5 : 4;
  return part.rule == UpdateRule::kSgd && !part.has_momentum ? 2 : 3;
}

void set_scalar(UpdatePart& part, const std::string& name, double value) {
  auto& s = part.scalars;
  const std::array<std::pair<const char*, double*>, 11> names{{{"decay", &s.decay},
                                                               {"rate_decay", &s.rate_decay},
                                                               {"step", &s.step},
                                                               {"first", &s.first},
                                                               {"first_rest", &s.first_rest},
                                                               {"second", &s.second},
                                                               {"second_rest", &s.second_rest},
                                                               {"root_correction", &s.root_correction},
                                                               {"epsilon", &s.epsilon},
                                                               {"float_step", &s.float_step},
                                                               {"float_root_correction", &s.float_root_correction}}};
  *parse(names, name) = value;
}

UpdatePart make_part(const std::string& rule, const std::string& arithmetic, const std::string& type, const std::string& decay,
                     const std::vector<std::string>& flags, std::int64_t count, const std::vector<std::uintptr_t>& inputs,
                     const std::vector<std::uintptr_t>& outputs, const std::vector<std::pair<std::string, double>>& scalars,
                     std::vector<float> factors) {
  UpdatePart part;
  part.rule = parse(kRules, rule);
  part.arithmetic = parse(kArithmetics, arithmetic);
  part.type = parse(kTypes, type);
  part.decay = parse(kDecays, decay);
  for (const std::string& name : flags) set_flag(part, name);
  const bool is_double = part.arithmetic >= Arithmetic::kDoubleApart;
  if (is_double && (part.rule == UpdateRule::kAdagrad || part.rule == UpdateRule::kLion))
    throw py::value_error("expected another arithmetic: " + rule + " has none in fp64");
  if (count < 0) throw py::value_error("expected a count of elements >= 0");
  part.count = count;
  if (inputs.size() != tensor_count(part) || outputs.size() != inputs.size())
    throw py::value_error("expected addresses of " + std::to_string(tensor_count(part)) + " tensors, twice");
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if ((inputs[i] == 0 || outputs[i] == 0) && count > 0) throw py::value_error("expected addresses that are not 0");
    part.inputs[i] = reinterpret_cast<const void*>(inputs[i]);
    part.outputs[i] = reinterpret_cast<void*>(outputs[i]);
  }
  for (const auto& [name, value] : scalars) set_scalar(part, name, value);
  part.factors = std::move(factors);
  return part;
}

std::uint64_t submit(UpdatePool& pool, const std::vector<UpdatePart>& parts,
                     const std::vector<std::shared_ptr<UpdateGate>>& gates, const std::vector<std::uintptr_t>& counters) {
  UpdateJob job{parts, {}};
  for (const std::uintptr_t counter : counters) job.counters.push_back(reinterpret_cast<float*>(counter));
  return pool.submit(std::move(job), gates);
}

constexpr double kSignalCheckS = 0.05;  // so that Ctrl-C ends a wait

// Waits in slices; `wait_some(seconds)` waits for at most so long.
template <class WaitSome>
bool wait_in_slices(const WaitSome& wait_some, double timeout_s) {
  for (double left_s = timeout_s;; left_s -= kSignalCheckS) {
    bool is_done = false;
    {
      const py::gil_scoped_release released;
      is_done = wait_some(std::clamp(left_s, 0.0, kSignalCheckS));
    }
    if (is_done) return true;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (left_s <= kSignalCheckS) return false;
  }
}

}  // namespace

namespace tieroff {

void bind_update(py::module_& module) {
  py::class_<UpdateGate, std::shared_ptr<UpdateGate>>(module, "UpdateGate")
      .def(py::init<>())
      .def("open", &UpdateGate::open)
      .def("fail", &UpdateGate::fail)
      .def_property_readonly("is_open", [](const UpdateGate& gate) { return gate.state() == UpdateGate::State::kOpen; });
  py::class_<UpdatePart>(module, "UpdatePart")
      .def(py::init(&make_part), py::arg("rule"), py::arg("arithmetic"), py::arg("type"), py::arg("decay"), py::arg("flags"),
           py::arg("count"), py::arg("inputs"), py::arg("outputs"), py::arg("scalars"), py::arg("factors"))
      .def("run", [](const UpdatePart& part) { update_elements(part, 0, part.count); },
           py::call_guard<py::gil_scoped_release>())
      .def(
          "run_with",
          [](const UpdatePart& part, const std::string& instructions) {
            update_elements_with(instructions.c_str(), part, 0, part.count);
          },
          py::arg("instructions"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("moved_bytes",
                             [](const UpdatePart& part) { return part.count * moved_bytes_per_element(part); });
  py::class_<UpdatePool>(module, "UpdatePool")
      .def(py::init<std::size_t, std::vector<int>>(), py::arg("threads"), py::arg("cpus"))
      .def("submit", &submit, py::arg("parts"), py::arg("gates"), py::arg("counters"))
      .def("is_done", &UpdatePool::is_done, py::arg("ticket"))
      .def("has_failed", &UpdatePool::has_failed, py::arg("ticket"))
      .def(
          "wait",
          [](UpdatePool& pool, std::uint64_t ticket, double timeout_s) {
            return wait_in_slices([&](double slice_s) { return pool.wait(ticket, slice_s); }, timeout_s);
          },
          py::arg("ticket"), py::arg("timeout_s"))
      .def(
          "settle",
          [](UpdatePool& pool, double timeout_s) {
            return wait_in_slices([&](double slice_s) { return pool.settle(slice_s); }, timeout_s);
          },
          py::arg("timeout_s"))
      .def("delay", &UpdatePool::delay, py::arg("delay_ns"))
      .def("close", &UpdatePool::close, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("last_ticket", &UpdatePool::last_ticket)
      .def_property_readonly("threads", &UpdatePool::thread_count)
      .def_property_readonly("busy_ns", &UpdatePool::busy_ns)
      .def_property_readonly("moved_bytes", &UpdatePool::moved_bytes);
  module.def("update_instructions", &update_instructions);
}

}  // namespace tieroff
