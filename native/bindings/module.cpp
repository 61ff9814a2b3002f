// The Python module. Each part has a file beside this one; only these files know Python.
#include <pybind11/pybind11.h>

#include "parts.hpp"

PYBIND11_MODULE(_native, module) {
  module.doc() = "Engines that move bytes between memory and files, updates of parameters in host memory (both on Linux), and the "
      "planner's simulator and search.";
  tieroff::bind_layout(module);
  tieroff::bind_simulate(module);
  tieroff::bind_search(module);
  tieroff::bind_improve(module);
  tieroff::bind_sharding(module);
#ifdef TIEROFF_WITH_STORAGE
  tieroff::bind_storage(module);
  tieroff::bind_memory(module);
  tieroff::bind_update(module);
#endif
}
