// What kernels are given by Python.
#pragma once
#include <torch/csrc/utils/pybind.h>

namespace rehearsal {

// An object with `duration_ns(name, overload, arguments, results)` and `decomposed(name, overload, arguments)`, called with meta
// tensors once for each kind of call.
void set_python_clock(const pybind11::object& clock);

}  // namespace rehearsal
