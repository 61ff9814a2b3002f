// Engines that move bytes between memory and files. Everything that can block releases the interpreter's lock.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "parts.hpp"
#include "tieroff/errors.hpp"
#include "tieroff/io/crc32c.hpp"
#include "tieroff/io/engine.hpp"
#include "tieroff/memory/page_returner.hpp"

namespace py = pybind11;

namespace {

using tieroff::Engine;
using tieroff::Kind;

// A transfer as Python holds it: it keeps its engine, whose threads still work on it.
struct Handle {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<tieroff::Transfer> transfer;

  const tieroff::Transfer& checked() const {
    engine->check_process();
    return *transfer;
  }
};

constexpr std::int64_t kSignalCheckNs = 50'000'000;  // so that Ctrl-C ends a wait

// Waits in slices, so that Ctrl-C ends it; `wait_some(nanoseconds)` waits for at most so long, without the interpreter's lock.
template <typename WaitSome>
bool wait_in_slices(const WaitSome& wait_some, std::optional<double> timeout_s) {
  const std::int64_t begin_ns = tieroff::monotonic_ns();
  for (;;) {
    std::int64_t slice_ns = kSignalCheckNs;
    if (timeout_s) {
      const double left_ns = std::max(0.0, *timeout_s) * 1e9 - static_cast<double>(tieroff::monotonic_ns() - begin_ns);
      slice_ns = static_cast<std::int64_t>(std::clamp(left_ns, 0.0, static_cast<double>(kSignalCheckNs)));
    }
    bool is_done = false;
    {
      const py::gil_scoped_release released;
      is_done = wait_some(slice_ns);
    }
    if (is_done) return true;
    if (timeout_s && slice_ns == 0) return false;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

bool wait(const Handle& handle, std::optional<double> timeout_s) {
  const tieroff::Transfer& transfer = handle.checked();
  return wait_in_slices([&transfer](std::int64_t slice_ns) { return transfer.wait(slice_ns); }, timeout_s);
}

bool settle(const std::shared_ptr<Engine>& engine, double timeout_s) {
  return wait_in_slices([&engine](std::int64_t slice_ns) { return engine->settle(slice_ns); }, timeout_s);
}

std::byte* pointer(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

Handle submit_file(const std::shared_ptr<Engine>& engine, Kind kind, int fd, std::uint64_t offset, std::uintptr_t address,
                   std::size_t size_bytes, std::size_t block_bytes, std::size_t memory_alignment, bool with_crc,
                   bool is_flushed_first) {
  const tieroff::Request request{.kind = kind,
                                 .fd = fd,
                                 .offset = offset,
                                 .memory = pointer(address),
                                 .size_bytes = size_bytes,
                                 .block_bytes = block_bytes,
                                 .memory_alignment = memory_alignment,
                                 .with_crc = with_crc,
                                 .is_flushed_first = is_flushed_first};
  return {engine, engine->submit(request, kind == Kind::kRead)};
}

Handle submit_copy(const std::shared_ptr<Engine>& engine, std::uintptr_t target, std::uintptr_t source, std::size_t size_bytes,
                   bool is_for_readers, bool with_crc) {
  if (with_crc) throw std::invalid_argument("expected with_crc=False: a memory copy has no checksum");
  const tieroff::Request request{
      .kind = Kind::kCopy, .memory = pointer(target), .source = pointer(source), .size_bytes = size_bytes};
  return {engine, engine->submit(request, is_for_readers)};
}

Kind parse_kind(const std::string& name) {
  if (name == "read") return Kind::kRead;
  if (name == "write") return Kind::kWrite;
  if (name == "copy") return Kind::kCopy;
  if (name == "flush") return Kind::kFlush;
  throw std::invalid_argument("expected kind to be read, write, copy or flush, got " + name);
}

void raise_from_project(const char* type, const char* message) {
  const py::object error = py::module_::import("tieroff.errors").attr(type);
  PyErr_SetString(error.ptr(), message);
}

void translate(std::exception_ptr pending) {
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const tieroff::StateError& error) {
    raise_from_project("StateError", error.what());
  } catch (const std::system_error& error) {
    const py::object arguments = py::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

void bind_transfer(py::module_& module) {
  py::class_<Handle>(module, "Transfer")
      .def("done", [](const Handle& self) { return self.checked().is_done(); })
      .def("wait", &wait, py::arg("timeout_s") = py::none())
      .def("cancel", [](const Handle& self) { return self.engine->cancel(self.transfer); })
      .def_property_readonly("size_bytes", [](const Handle& self) { return self.transfer->request().size_bytes; })
      .def_property_readonly("done_bytes", [](const Handle& self) { return self.checked().done_bytes(); })
      .def_property_readonly("errno", [](const Handle& self) { return self.checked().error(); })
      .def_property_readonly("start_ns", [](const Handle& self) { return self.checked().start_ns(); })
      .def_property_readonly("stop_ns", [](const Handle& self) { return self.checked().stop_ns(); })
      .def_property_readonly("checksum", [](const Handle& self) { return self.checked().crc(); });
}

void bind_engine(py::module_& module) {
  py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine")
      .def(
          "read",
          [](const std::shared_ptr<Engine>& self, int fd, std::uint64_t offset, std::uintptr_t address, std::size_t size_bytes,
             std::size_t block_bytes, std::size_t memory_alignment, bool with_crc, bool is_flushed_first) {
            return submit_file(self, Kind::kRead, fd, offset, address, size_bytes, block_bytes, memory_alignment, with_crc,
                               is_flushed_first);
          },
          py::arg("fd"), py::arg("offset"), py::arg("address"), py::arg("size_bytes"), py::arg("block_bytes"),
          py::arg("memory_alignment"), py::arg("with_crc") = false, py::arg("is_flushed_first") = false)
      .def(
          "write",
          [](const std::shared_ptr<Engine>& self, int fd, std::uint64_t offset, std::uintptr_t address, std::size_t size_bytes,
             std::size_t block_bytes, std::size_t memory_alignment, bool with_crc) {
            return submit_file(self, Kind::kWrite, fd, offset, address, size_bytes, block_bytes, memory_alignment, with_crc,
                               false);
          },
          py::arg("fd"), py::arg("offset"), py::arg("address"), py::arg("size_bytes"), py::arg("block_bytes"),
          py::arg("memory_alignment"), py::arg("with_crc") = false)
      .def(
          "copy",
          [](const std::shared_ptr<Engine>& self, std::uintptr_t target, std::uintptr_t source, std::size_t size_bytes,
             bool is_for_readers) { return submit_copy(self, target, source, size_bytes, is_for_readers, false); },
          py::arg("target"), py::arg("source"), py::arg("size_bytes"), py::arg("is_for_readers"))
      .def("settle", &settle, py::arg("timeout_s"))
      .def("close", &Engine::close, py::call_guard<py::gil_scoped_release>())
      .def(
          "inject",
          [](Engine& self, const std::string& kind, int error, std::uint64_t after, std::uint64_t count,
             std::optional<std::size_t> short_bytes, bool hang,
             bool flip) { self.faults().inject({parse_kind(kind), after, count, error, short_bytes, hang, flip}); },
          py::arg("kind"), py::arg("errno") = 0, py::arg("after") = 0, py::arg("count") = 1,
          py::arg("short_bytes") = py::none(), py::arg("hang") = false, py::arg("flip") = false)
      .def("clear_faults", [](Engine& self) { self.faults().clear(); })
      .def("release", [](Engine& self) { self.faults().release(); })
      .def(
          "wait_hanging",
          [](Engine& self, std::size_t count, double timeout_s) { return self.faults().wait_hanging(count, timeout_s); },
          py::arg("count"), py::arg("timeout_s"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("is_closed", &Engine::is_closed)
      .def_property_readonly("peak_call_count", &Engine::peak_call_count)
      .def_property_readonly("bounced_bytes", &Engine::bounced_bytes)
      .def_property_readonly("chunk_bytes", &Engine::chunk_bytes);
}

void bind_thread_engine(py::module_& module) {
  using tieroff::ThreadEngine;
  const tieroff::ThreadOptions defaults;
  py::class_<ThreadEngine, Engine, std::shared_ptr<ThreadEngine>>(module, "ThreadEngine")
      .def(py::init([](std::size_t read_threads, std::size_t write_threads, std::size_t chunk_bytes) {
             return std::make_shared<ThreadEngine>(tieroff::ThreadOptions{read_threads, write_threads, chunk_bytes});
           }),
           py::arg("read_threads") = defaults.read_thread_count, py::arg("write_threads") = defaults.write_thread_count,
           py::arg("chunk_bytes") = defaults.chunk_bytes)
      .def_property_readonly("read_threads", [](const ThreadEngine& self) { return self.options().read_thread_count; })
      .def_property_readonly("write_threads", [](const ThreadEngine& self) { return self.options().write_thread_count; });
}

void bind_ring_engine(py::module_& module) {
  using tieroff::RingEngine;
  const tieroff::RingOptions defaults;
  py::class_<RingEngine, Engine, std::shared_ptr<RingEngine>>(module, "RingEngine")
      .def(py::init([](std::size_t queue_depth, std::size_t bounce_count, std::size_t chunk_bytes) {
             return std::make_shared<RingEngine>(tieroff::RingOptions{queue_depth, bounce_count, chunk_bytes});
           }),
           py::arg("queue_depth") = defaults.queue_depth, py::arg("bounce_count") = defaults.bounce_count,
           py::arg("chunk_bytes") = defaults.chunk_bytes)
      .def_property_readonly("queue_depth", [](const RingEngine& self) { return self.options().queue_depth; })
      .def_property_readonly("bounce_count", [](const RingEngine& self) { return self.options().bounce_count; });
  module.def("ring_refusal", &tieroff::ring_refusal);
}

void bind_page_returner(py::module_& module) {
  using tieroff::PageReturner;
  py::class_<PageReturner>(module, "PageReturner")
      .def(py::init<std::uintptr_t, std::size_t, std::int64_t>(), py::arg("address"), py::arg("size_bytes"),
           py::arg("interval_ns"))
      .def("set_interval", &PageReturner::set_interval, py::arg("interval_ns"))
      .def("wait_rounds", &PageReturner::wait_rounds, py::arg("count"), py::arg("timeout_s"),
           py::call_guard<py::gil_scoped_release>())
      .def("close", &PageReturner::close, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("round_count", &PageReturner::round_count)
      .def_property_readonly("errno", &PageReturner::error);
}

}  // namespace

namespace tieroff {

void bind_storage(py::module_& module) {
  py::register_local_exception_translator(&translate);
  bind_transfer(module);
  bind_engine(module);
  bind_thread_engine(module);
  bind_ring_engine(module);
  bind_page_returner(module);
  module.def(
      "crc32c",
      [](const py::buffer& data, std::uint32_t crc) {
        const py::buffer_info view = data.request();
        return tieroff::crc32c(view.ptr, static_cast<std::size_t>(view.size * view.itemsize), crc);
      },
      py::arg("data"), py::arg("crc") = 0);
  module.def(
      "crc32c_table",
      [](const py::buffer& data, std::uint32_t crc) {
        const py::buffer_info view = data.request();
        return tieroff::crc32c_table(view.ptr, static_cast<std::size_t>(view.size * view.itemsize), crc);
      },
      py::arg("data"), py::arg("crc") = 0);
  module.def("crc32c_combine", &tieroff::crc32c_combine, py::arg("first"), py::arg("second"), py::arg("second_size_bytes"));
  module.def("crc32c_is_hardware", &tieroff::crc32c_is_hardware);
  module.def(
      "direct_alignment",
      [](int fd) {
        const auto alignment = tieroff::direct_alignment(fd);
        return py::make_tuple(alignment.memory_bytes, alignment.offset_bytes);
      },
      py::arg("fd"));
}

}  // namespace tieroff
