// Watches operators of the host for tensors that lie in pinned memory.
#include <ATen/record_function.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <set>
#include <unordered_map>

#include "../ops/kernels.hpp"
#include "../device/pinned.hpp"

namespace sim {

namespace {

// Their arguments' bytes stay untouched, though the schema says that something is written.
bool only_describes(const std::string& name) {
  static const std::set<std::string> all{"aten::set_", "aten::resize_", "aten::is_set_to", "aten::is_pinned",
                                         "aten::is_same_size", "aten::_has_compatible_shallow_copy_type", "aten::record_stream"};
  return all.count(name) > 0;
}

struct Watched {
  bool is_watched = false;
  std::vector<bool> is_written;
  const char* name = "";
};

// What has a kernel for the CPU reads or writes; what is composed of other operators is seen in those.
Watched examine(const c10::OperatorName& op_name) {
  Watched watched;
  const auto op = c10::Dispatcher::singleton().findOp(op_name);
  if (!op) return watched;
  const auto& schema = op->schema();
  watched.name = interned(schema.name());
  const bool computes = op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || schema.name() == "aten::copy_";
  bool is_view = !schema.returns().empty();
  for (const auto& result : schema.returns())
    is_view = is_view && result.alias_info() != nullptr && !result.alias_info()->isWrite();
  watched.is_watched = computes && !is_view && !op->hasTag(at::Tag::inplace_view) && !only_describes(schema.name());
  for (const auto& argument : schema.arguments())
    watched.is_written.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
  return watched;
}

const Watched& watched(const c10::OperatorName& name) {
  static auto* mutex = new std::mutex;
  static auto* all = new std::unordered_map<c10::OperatorName, Watched>;
  const std::lock_guard<std::mutex> lock(*mutex);
  const auto found = all->find(name);
  return found != all->end() ? found->second : all->emplace(name, examine(name)).first->second;
}

void note(const at::Tensor& t, bool is_written, const char* name) {
  if (!t.defined() || !t.is_cpu() || t.layout() != c10::kStrided || t.numel() == 0 || !t.has_storage()) return;
  auto* storage = t.storage().unsafeGetStorageImpl();
  if (storage->_mutable_data_ptr_no_checks().get() == nullptr) return;
  const Touch touch = touch_of(t, is_written);
  note_host_access(static_cast<const char*>(touch.address) + touch.span.low,
                   static_cast<size_t>(touch.span.high - touch.span.low), is_written, name);
}

bool is_any_on_device(c10::ArrayRef<const c10::IValue> inputs) {
  bool found = false;
  for (const auto& value : inputs)
    with_tensors(value, [&](const at::Tensor& t) {
      found = found || is_sim(t);
      return t;
    });
  return found;
}

std::unique_ptr<at::ObserverContext> before(const at::RecordFunction& function) {
  // Copies and kernels of the device note for themselves what they touch, and threads of streams are not the host.
  if (!has_pinned() || is_stream_thread()) return nullptr;
  const auto name = function.operator_name();
  if (!name) return nullptr;
  const Watched& own = watched(*name);
  const auto inputs = function.inputs();
  if (!own.is_watched || is_any_on_device(inputs)) return nullptr;
  for (size_t i = 0; i < inputs.size() && i < own.is_written.size(); i++)
    with_tensors(inputs[i], [&](const at::Tensor& t) {
      note(t, own.is_written[i], own.name);
      return t;
    });
  return nullptr;
}

}  // namespace

void observe_host() {
  at::addGlobalCallback(at::RecordFunctionCallback(&before).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

}  // namespace sim
