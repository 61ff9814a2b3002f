// Memory in whole pages that is given again when it was freed.
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "parts.hpp"
#include "tieroff/memory/process_pool.hpp"

namespace py = pybind11;

namespace {

using tieroff::PagePool;

// A stretch of a pool as Python holds it: a writable buffer, given back with its last reference.
class Pages {
 public:
  Pages(PagePool& pool, std::size_t size_bytes) : pool_(pool), memory_(pool.allocate(size_bytes)), size_bytes_(size_bytes) {
    if (memory_ == nullptr) throw std::bad_alloc();
  }
  ~Pages() { pool_.release(memory_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  [[nodiscard]] void* memory() const { return memory_; }
  [[nodiscard]] std::size_t size_bytes() const { return size_bytes_; }

 private:
  PagePool& pool_;
  void* memory_;
  std::size_t size_bytes_;
};

py::buffer_info view(const Pages& pages) {
  return {static_cast<std::uint8_t*>(pages.memory()), static_cast<py::ssize_t>(pages.size_bytes()), false};
}

}  // namespace

namespace tieroff {

void bind_memory(py::module_& module) {
  py::class_<Pages>(module, "Pages", py::buffer_protocol())
      .def_buffer(&view)
      .def_property_readonly("address", [](const Pages& pages) { return reinterpret_cast<std::uintptr_t>(pages.memory()); })
      .def_property_readonly("size_bytes", &Pages::size_bytes);
  py::class_<PagePool, std::unique_ptr<PagePool, py::nodelete>>(module, "PagePool")
      .def(py::init<std::size_t, bool>(), py::arg("reserved_bytes"), py::arg("has_huge_pages"))
      .def(
          "take", [](PagePool& pool, std::size_t size_bytes) { return std::make_unique<Pages>(pool, size_bytes); },
          py::arg("size_bytes"))
      .def(
          "owns", [](const PagePool& pool, std::uintptr_t address) { return pool.owns(reinterpret_cast<void*>(address)); },
          py::arg("address"))
      .def("set_limit", &PagePool::set_limit, py::arg("limit_bytes"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("in_use_bytes", [](PagePool& pool) { return pool.usage().in_use_bytes; })
      .def_property_readonly("kept_bytes", [](PagePool& pool) { return pool.usage().kept_bytes; });
  module.def("process_pool", &process_pool, py::arg("reserved_bytes"), py::arg("has_huge_pages"),
             py::return_value_policy::reference);
  module.def("serve_library", &serve_library, py::arg("library"));
  module.def("serve_from", [](std::size_t size_bytes) { serve_from(size_bytes); }, py::arg("size_bytes"));
}

}  // namespace tieroff
