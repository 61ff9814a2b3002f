// Copies between the device and the host, and between devices.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "kernels.hpp"
#include "../device/pinned.hpp"

namespace sim {

namespace {

std::atomic<int64_t> late_ns{0};

// Up to so long; from a seed, so that a test sees the same again.
int64_t lateness_ns() {
  const int64_t most = late_ns;
  if (most == 0) return 0;
  static std::atomic<uint32_t> seed{1};
  return static_cast<int64_t>(std::minstd_rand(seed++ * 7919U)() % static_cast<uint64_t>(most));
}

struct Bytes {
  char *to, *from;
  size_t size;

  // A target holds nothing of use from the moment on that its copy begins.
  void move(int64_t late) const {
    std::memset(to, kPoison, size);
    if (late > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(late));
    std::memcpy(to, from, size);
  }
};

bool is_plain(const at::Tensor& to, const at::Tensor& from) {
  return to.scalar_type() == from.scalar_type() && to.strides() == from.strides() && to.is_conj() == from.is_conj() &&
         to.is_neg() == from.is_neg() && to.is_non_overlapping_and_dense();
}

void count_copy(bool is_out, size_t size, bool is_blocking) {
  (is_out ? counters().copies_to_host : counters().copies_to_device)++;
  (is_out ? counters().bytes_to_host : counters().bytes_to_device) += static_cast<int64_t>(size);
  if (is_blocking) counters().blocking_copies++;
}

// Pinned memory is read and written by the stream when it gets there; what is not pinned goes through the driver's own
// buffers, and the host waits: for the bytes to be taken, or to have come.
void cross_link(const at::Tensor& to, const at::Tensor& from, bool asks_async) {
  const bool is_out = is_sim(from);
  const at::Tensor &host = is_out ? to : from, &device = is_out ? from : to;
  char* host_bytes = static_cast<char*>(host.unsafeGetTensorImpl()->mutable_data());
  char* device_bytes = kernel_view(device.unsafeGetTensorImpl()->data());
  const size_t size = host.nbytes();
  const bool is_pinned_copy = is_pinned(host_bytes, size);
  if (asks_async && !is_pinned_copy) counters().unpinned_async_copies++;
  count_copy(is_out, size, !asks_async || !is_pinned_copy);

  Stream& stream = current_stream(device.device().index());
  const Engine engine = is_out ? Engine::kToHost : Engine::kToDevice;
  const char* name = is_out ? "copy to host" : "copy to device";
  Span span;
  span.high = static_cast<int64_t>(size);
  const Submission what{name,
                        stream,
                        {touch_of(device, !is_out), {host_bytes, span, is_out}},
                        engine,
                        {0, static_cast<double>(size), false}};
  const Bytes bytes{is_out ? host_bytes : device_bytes, is_out ? device_bytes : host_bytes, size};
  if (asks_async && is_pinned_copy) {
    begin_flight(host_bytes);
    submit(what, [bytes, host_bytes, late = lateness_ns()] {
      bytes.move(late);
      end_flight(host_bytes);
    });
    return;
  }
  if (asks_async && !is_out) {
    const auto staged = std::make_shared<std::vector<char>>(host_bytes, host_bytes + size);
    submit(what, [bytes, staged] { std::memcpy(bytes.to, staged->data(), bytes.size); });
    return;
  }
  submit(what, [bytes] { bytes.move(0); });
  synchronize(stream);
}

void copy_on_device(const at::Tensor& to, const at::Tensor& from, Stream& stream) {
  const Cost cost{0, static_cast<double>(to.nbytes() + from.nbytes()), to.element_size() == 2};
  counters().kernels++;
  submit({"aten::copy_", stream, {touch_of(to, true), touch_of(from, false)}, Engine::kCompute, cost},
         [to = as_host(to), from = as_host(from)] {
           const at::AutoDispatchBelowADInplaceOrView below;
           to.copy_(from);
         });
}

// On the source's stream, and both streams are ordered round it.
void copy_between(const at::Tensor& to, const at::Tensor& from) {
  Stream &source = current_stream(from.device().index()), &target = current_stream(to.device().index());
  if (&source != &target) order_after(source, target);
  copy_on_device(to, from, source);
  if (&source != &target) order_after(target, source);
}

// Not `empty_like`, which would first resolve a conjugate or negative bit, by a copy.
at::Tensor contiguous_like(const at::Tensor& t, c10::ScalarType type) { return at::empty(t.sizes(), t.options().dtype(type)); }

void set_bits(const at::Tensor& of, const at::Tensor& like) {
  of._set_conj(like.is_conj());
  of._set_neg(like.is_neg());
}

// Another type or layout: the bytes cross dense, and are converted on the device where the copy is asynchronous, else on the
// host.
void copy_by_way_of(const at::Tensor& to, const at::Tensor& from, bool asks_async) {
  const bool converts_at_source = is_sim(from) == asks_async || to.scalar_type() == from.scalar_type();
  const auto type = converts_at_source ? to.scalar_type() : from.scalar_type();
  at::Tensor source = from.expand_as(to);
  at::Tensor dense = source;
  if (!source.is_contiguous() || source.scalar_type() != type) {
    dense = contiguous_like(source, type);
    set_bits(dense, source);
    dense.copy_(source);
  }
  at::Tensor target = to;
  if (!to.is_contiguous() || to.scalar_type() != type || to.is_conj() != dense.is_conj() || to.is_neg() != dense.is_neg()) {
    target = contiguous_like(to, type);
    set_bits(target, dense);
  }
  // The host reads what it converts next: that copy has to have come.
  const bool is_read_by_host = !is_sim(to) && !target.is_same(to);
  cross_link(target, dense, asks_async && !is_read_by_host);
  if (!target.is_same(to)) to.copy_(target);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool asks_async) {
  if (target.numel() == 0) return target;
  const at::Tensor source = self.sizes() == target.sizes() ? self : self.expand_as(target);
  raise_last_error();
  TORCH_CHECK((is_sim(source) || source.is_cpu()) && (is_sim(target) || target.is_cpu()), "sim: expected a copy to or from the host, got ",
              source.device(), " to ", target.device());
  const c10::DeviceGuard guard(is_sim(target) ? target.device() : source.device());
  if (is_sim(source) && is_sim(target)) {
    if (source.device() == target.device()) copy_on_device(target, source, current_stream(target.device().index()));
    else copy_between(target, source);
  } else if (is_plain(target, source)) {
    cross_link(target, source, asks_async);
  } else {
    copy_by_way_of(target, source, asks_async);
  }
  raise_found();
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

// A number for the host: a copy of a few bytes that it waits for.
at::Scalar local_scalar(const at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  at::Tensor host = at::empty({}, at::TensorOptions().dtype(self.scalar_type()));
  set_bits(host, self);
  cross_link(host, self.reshape({}), false);
  raise_found();
  return host.item();
}

}  // namespace

void set_late_links(double seconds) { late_ns = static_cast<int64_t>(seconds * 1e9); }

}  // namespace sim

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", sim::copy_from);
  m.impl("_copy_from_and_resize", sim::copy_from_and_resize);
  m.impl("_local_scalar_dense", sim::local_scalar);
}

// Else their fallbacks would resolve the bits by a copy, which comes back here.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
