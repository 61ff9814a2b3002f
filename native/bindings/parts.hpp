// The parts of the Python module, a file each.
#pragma once

#include <pybind11/pybind11.h>

namespace tieroff {

void bind_storage(pybind11::module_& module);  // this one and the next two on Linux
void bind_memory(pybind11::module_& module);
void bind_update(pybind11::module_& module);
void bind_layout(pybind11::module_& module);
void bind_simulate(pybind11::module_& module);
void bind_search(pybind11::module_& module);
void bind_improve(pybind11::module_& module);
void bind_sharding(pybind11::module_& module);

}  // namespace tieroff
