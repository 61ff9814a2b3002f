// Arrays of 64-bit integers or doubles, one dimension, as Python holds them and as C++ sees them.
#pragma once

#include <pybind11/numpy.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace tieroff {

using Integers = pybind11::array_t<std::int64_t, pybind11::array::c_style>;
using Reals = pybind11::array_t<double, pybind11::array::c_style>;

inline std::span<const std::int64_t> view(const Integers& values) {
  return {values.data(), static_cast<std::size_t>(values.size())};
}

inline std::span<const double> view(const Reals& values) { return {values.data(), static_cast<std::size_t>(values.size())}; }

inline std::span<std::int64_t> changing(Integers& values) {
  return {values.mutable_data(), static_cast<std::size_t>(values.size())};
}

}  // namespace tieroff
