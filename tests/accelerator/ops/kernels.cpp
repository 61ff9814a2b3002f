#include "kernels.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/contiguous.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include <cstring>
#include <exception>
#include <string_view>
#include <unordered_map>

#include "cost.hpp"
#include "random.hpp"
#include "../device/pinned.hpp"

namespace sim {

namespace {

using torch::jit::Stack;

struct Traits {
  const char* name = "";
  bool is_view = false;         // every result shares the bytes of an argument
  bool is_synchronous = false;  // the results' shapes, or a value for the host, depend on data
  bool is_seeded = false;
  int generator = -1;              // the argument that is one
  std::vector<bool> is_written;    // per argument
  std::vector<int> result_source;  // per result: the argument that it is, or -1
};

// Their schemas do not say that these arguments are written.
const std::unordered_map<std::string, std::vector<size_t>>& unannotated_writes() {
  static const auto* all = new std::unordered_map<std::string, std::vector<size_t>>{
      {"aten::native_batch_norm", {3, 4}}, {"aten::_batch_norm_impl_index", {3, 4}}, {"aten::rrelu_with_noise", {1}}};
  return *all;
}

int source_of(const c10::FunctionSchema& schema, const c10::Argument& result) {
  if (result.alias_info() == nullptr) return -1;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto* own = schema.arguments()[i].alias_info();
    if (own == nullptr) continue;
    for (const auto& name : result.alias_info()->beforeSets())
      if (own->beforeSets().count(name) > 0) return static_cast<int>(i);
  }
  return -1;
}

bool holds_tensors(const c10::TypePtr& type) {
  return type->isSubtypeOf(*c10::TensorType::get()) || type->isSubtypeOf(*c10::ListType::ofTensors());
}

Traits examine(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  Traits traits;
  traits.name = interned(schema.name());
  traits.is_synchronous = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  traits.is_seeded = op.hasTag(at::Tag::nondeterministic_seeded);
  traits.is_view = !schema.returns().empty();
  for (const auto& result : schema.returns()) {
    const auto* info = result.alias_info();
    traits.is_view = traits.is_view && info != nullptr && !info->isWrite();
    traits.is_synchronous = traits.is_synchronous || !holds_tensors(result.type());
    traits.result_source.push_back(source_of(schema, result));
  }
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto& argument = schema.arguments()[i];
    traits.is_written.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
    if (argument.type()->str().find("Generator") != std::string::npos) traits.generator = static_cast<int>(i);
  }
  const auto hidden = unannotated_writes().find(schema.name());
  if (hidden != unannotated_writes().end())
    for (const size_t i : hidden->second) traits.is_written[i] = true;
  return traits;
}

const Traits& traits_of(const c10::OperatorHandle& op) {
  static auto* mutex = new std::mutex;
  static auto* all = new std::unordered_map<c10::OperatorName, std::unique_ptr<Traits>>;
  const std::lock_guard<std::mutex> lock(*mutex);
  auto& one = (*all)[op.operator_name()];
  if (!one) one = std::make_unique<Traits>(examine(op));
  return *one;
}

void visit_tensors(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  with_tensors(value, [&](const at::Tensor& t) {
    visit(t);
    return t;
  });
}

[[noreturn]] void refuse_devices(const Traits& traits, const c10::Device& one, const c10::Device& other) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ", other,
              "! (when calling ", traits.name, ")");
}

// The device of the call. As on CUDA, a scalar of the host may stand beside its tensors and an index too, nothing else.
int device_of(const Traits& traits, const std::vector<c10::IValue>& given) {
  std::optional<c10::Device> device;
  for (const auto& value : given) {
    visit_tensors(value, [&](const at::Tensor& t) {
      if (!is_sim(t)) return;
      if (device && *device != t.device()) refuse_devices(traits, *device, t.device());
      device = t.device();
    });
    if (value.isDevice() && value.toDevice().type() == kSim && !device) device = device_or_current(value.toDevice());
  }
  if (!device) return current_device();
  for (size_t i = 0; i < given.size(); i++) {
    const bool is_index = given[i].isOptionalTensorList() || (given[i].isList() && !given[i].isTensorList());
    visit_tensors(given[i], [&](const at::Tensor& t) {
      if (is_sim(t) || is_index) return;
      if (!t.is_cpu() || t.dim() > 0 || traits.is_written[i]) refuse_devices(traits, *device, t.device());
    });
  }
  return device->index();
}

// -- the arguments, as kernels get them ------------------------------------------------------------------------------

struct Arguments {
  std::vector<c10::IValue> values;
  std::vector<Touch> touches;
  std::vector<at::Tensor> tensors;
};

void keep_scalar_flag(const at::Tensor& from, const at::Tensor& to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

at::Tensor kernel_argument(const at::Tensor& t, bool is_written, const char* name, Arguments* arguments) {
  if (is_sim(t)) {
    arguments->tensors.push_back(t);
    arguments->touches.push_back(touch_of(t, is_written));
    // An empty result is given its size by the kernel; the bytes go to the device afterwards.
    if (is_written && t.numel() == 0) return at::empty({0}, at::TensorOptions().dtype(t.scalar_type()));
    return as_host(t);
  }
  // Taken by value when the kernel is submitted, as a launch takes it.
  note_host_access(t.unsafeGetTensorImpl()->data(), t.nbytes(), false, name);
  at::Tensor copy = t.clone();
  keep_scalar_flag(t, copy);
  return copy;
}

c10::IValue kernel_generator(const Traits& traits, const c10::IValue& given, int device) {
  if (!traits.is_seeded) return given;
  if (given.isNone()) return draw_from(default_generator(device));
  const at::Generator generator = given.toGenerator();
  TORCH_CHECK(generator.device().type() == kSim, "Expected a '", c10::Device(kSim), "' device type for generator but found '",
              generator.device(), "'");
  return draw_from(generator);
}

Arguments kernel_arguments(const Traits& traits, const std::vector<c10::IValue>& given, int device) {
  Arguments arguments;
  for (size_t i = 0; i < given.size(); i++) {
    if (given[i].isDevice()) {
      arguments.values.emplace_back(c10::Device(c10::kCPU));
    } else if (static_cast<int>(i) == traits.generator) {
      arguments.values.push_back(kernel_generator(traits, given[i], device));
    } else {
      arguments.values.push_back(with_tensors(
          given[i], [&](const at::Tensor& t) { return kernel_argument(t, traits.is_written[i], traits.name, &arguments); }));
    }
  }
  return arguments;
}

at::Tensor meta_of(const at::Tensor& t) {
  if (!is_sim(t)) return t;
  at::Tensor meta = at::empty_strided(t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()).device(c10::kMeta));
  if (t.is_conj()) meta._set_conj(true);
  if (t.is_neg()) meta._set_neg(true);
  keep_scalar_flag(t, meta);
  return meta;
}

// -- the results ------------------------------------------------------------------------------------------------------

std::vector<c10::IValue> taken_results(const c10::OperatorHandle& op, Stack* stack) {
  const auto count = static_cast<std::ptrdiff_t>(op.schema().returns().size());
  return {stack->end() - count, stack->end()};
}

struct Shapes {
  std::vector<c10::IValue> results;
  std::vector<c10::IValue> arguments;
};

template <typename T>
void put(std::string* key, const T& value) {
  key->append(reinterpret_cast<const char*>(&value), sizeof value);
}

template <typename List>
void put_all(std::string* key, const List& values) {
  put(key, values.size());
  for (const auto value : values) put(key, value);
}

// Appends all that a meta kernel can know of a tensor; false where that is more than a few bytes.
bool describe_tensor(const at::Tensor& t, std::string* key) {
  put(key, t.defined());
  if (!t.defined()) return true;
  put(key, is_sim(t));
  put(key, t.scalar_type());
  put(key, t.unsafeGetTensorImpl()->is_wrapped_number());
  if (is_sim(t)) {
    put_all(key, t.sizes());
    put_all(key, t.strides());
    put(key, t.is_conj());
    put(key, t.is_neg());
    return true;
  }
  if (!t.is_cpu() || t.dim() > 0) return false;
  key->append(static_cast<const char*>(t.unsafeGetTensorImpl()->data()), t.itemsize());
  return true;
}

// Appends a value and what kind of value it is; false where a kind has no such description.
bool describe(const c10::IValue& value, std::string* key) {
  key->append(value.tagKind()).push_back(':');
  if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
    bool is_whole = true;
    if (value.isTensor()) return describe_tensor(value.toTensor(), key);
    put(key, value.toListRef().size());
    for (const auto& each : value.toListRef())
      is_whole = is_whole && describe_tensor(each.isNone() ? at::Tensor() : each.toTensor(), key);
    return is_whole;
  }
  if (value.isInt()) put(key, value.toInt());
  else if (value.isDouble()) put(key, value.toDouble());
  else if (value.isBool()) put(key, value.toBool());
  else if (value.isComplexDouble()) put(key, value.toComplexDouble());
  else if (value.isIntList()) put_all(key, value.toIntVector());
  else if (value.isDoubleList()) put_all(key, value.toDoubleVector());
  else if (value.isBoolList()) put_all(key, value.toBoolList().vec());
  else if (value.isString()) key->append(value.toStringRef()).push_back('\0');
  else return value.isNone() || value.isDevice() || value.isGenerator();  // of these a meta kernel is told nothing
  return true;
}

// What the meta kernel says of the results and of arguments that it resizes, or nothing where it cannot tell.
std::shared_ptr<const Shapes> told_by_meta(const c10::OperatorHandle& op, const std::vector<c10::IValue>& given) {
  auto shapes = std::make_shared<Shapes>();
  Stack stack;
  for (const auto& value : given) {
    if (value.isDevice()) stack.emplace_back(c10::Device(c10::kMeta));
    else if (value.isGenerator()) stack.emplace_back();
    else stack.push_back(with_tensors(value, meta_of));
  }
  shapes->arguments = stack;
  try {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  } catch (const std::exception&) {
    return nullptr;  // the kernel itself will say what is wrong, if anything is
  }
  shapes->results = taken_results(op, &stack);
  return shapes;
}

// Most meta kernels are Python and take longer than the kernel itself, so that each is asked once about the same arguments.
std::shared_ptr<const Shapes> shapes_of(const c10::OperatorHandle& op, const std::vector<c10::IValue>& given) {
  using Known = std::unordered_map<std::string, std::shared_ptr<const Shapes>>;
  static auto* mutex = new std::mutex;
  static auto* known = new Known;
  constexpr size_t kKnownMax = 1 << 14;
  std::string key = op.operator_name().name + "." + op.operator_name().overload_name + ":";
  put(&key, c10::get_default_dtype_as_scalartype());
  put(&key, at::globalContext().deterministicAlgorithms());
  for (const auto& value : given)
    if (!describe(value, &key)) return told_by_meta(op, given);
  {
    const std::lock_guard<std::mutex> lock(*mutex);
    const auto found = known->find(key);
    if (found != known->end()) return found->second;
  }
  const auto shapes = told_by_meta(op, given);
  if (shapes == nullptr) return shapes;
  Known forgotten;  // outlives the lock: the end of a tensor that Python knows waits for the GIL
  const std::lock_guard<std::mutex> lock(*mutex);
  if (known->size() >= kKnownMax) forgotten.swap(*known);
  known->emplace(std::move(key), shapes);
  return shapes;
}

at::Tensor like_meta(const at::Tensor& meta, int device) {
  if (meta.is_non_overlapping_and_dense()) return empty_strided_on(device, meta.sizes(), meta.strides(), meta.scalar_type());
  return empty_strided_on(device, meta.sizes(), c10::contiguous_strides(meta.sizes()), meta.scalar_type());
}

// Results for `out=` get the size that they will have.
void resize_written(const Traits& traits, const std::vector<c10::IValue>& given, const Shapes& shapes) {
  for (size_t i = 0; i < given.size(); i++) {
    if (!traits.is_written[i] || !given[i].isTensor() || !is_sim(given[i].toTensor())) continue;
    const at::Tensor now = given[i].toTensor(), later = shapes.arguments[i].toTensor();
    if (now.sizes() == later.sizes()) continue;
    resize_tensor(now, later.sizes(), std::nullopt);
    if (later.is_non_overlapping_and_dense())
      now.unsafeGetTensorImpl()->set_sizes_and_strides(later.sizes(), later.strides());
  }
}

std::vector<at::Tensor> tensors_in(const std::vector<c10::IValue>& values) {
  std::vector<at::Tensor> all;
  for (const auto& value : values)
    visit_tensors(value, [&](const at::Tensor& t) { all.push_back(t); });
  return all;
}

bool is_batch_norm(const Traits& traits) {
  return std::string_view(traits.name).find("native_batch_norm") != std::string_view::npos;
}

// Where a kernel's own results go. The kernel of the CPU makes tensors of its own: they are copied over.
void store(const Traits& traits, const std::vector<c10::IValue>& made, const std::vector<c10::IValue>& targets) {
  for (size_t r = 0; r < made.size(); r++) {
    if (traits.result_source[r] >= 0) continue;
    const auto from = tensors_in({made[r]}), to = tensors_in({targets[r]});
    for (size_t i = 0; i < to.size(); i++) {
      if (to[i].numel() == 0 && i < from.size() && from[i].numel() == 0) continue;
      // What nobody uses: statistics of a batch that were not taken, where the meta kernel has them empty or the other way.
      if (i < from.size() && (to[i].numel() == 0 || from[i].numel() == 0) && is_batch_norm(traits)) continue;
      TORCH_CHECK(i < from.size() && from[i].sizes() == to[i].sizes() && from[i].scalar_type() == to[i].scalar_type(),
                  "the kernel gave another shape or type than its meta kernel");
      to[i].copy_(from[i]);
    }
  }
}

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

// -- the two ways to run ----------------------------------------------------------------------------------------------

std::vector<c10::IValue> queue(const c10::OperatorHandle& op, const Traits& traits, const std::vector<c10::IValue>& given,
                               const Shapes& shapes, int device) {
  resize_written(traits, given, shapes);
  Arguments arguments = kernel_arguments(traits, given, device);
  std::vector<c10::IValue> results, targets;
  std::vector<at::Tensor> outputs;
  for (size_t r = 0; r < shapes.results.size(); r++) {
    if (traits.result_source[r] >= 0) {
      results.push_back(given[traits.result_source[r]]);
      visit_tensors(results.back(), [&](const at::Tensor& t) { outputs.push_back(t); });
      targets.emplace_back();
      continue;
    }
    results.push_back(with_tensors(shapes.results[r], [&](const at::Tensor& t) { return like_meta(t, device); }));
    visit_tensors(results.back(), [&](const at::Tensor& t) {
      outputs.push_back(t);
      arguments.touches.push_back(touch_of(t, true));
    });
    targets.push_back(with_tensors(results.back(), as_host));
  }
  counters().kernels++;
  const Cost cost = cost_of(traits.name, arguments.tensors, outputs);
  submit({traits.name, current_stream(device), arguments.touches, Engine::kCompute, cost},
         [op, &traits, device, values = std::move(arguments.values), targets = std::move(targets)] {
           try {
             Stack stack(values.begin(), values.end());
             run_on_host(op, &stack);
             const at::AutoDispatchBelowADInplaceOrView below;
             store(traits, taken_results(op, &stack), targets);
           } catch (const std::exception& error) {
             fail_device(device, std::string(traits.name) + " failed after it was queued: " + error.what());
           }
         });
  return results;
}

std::map<std::string, int64_t>& waited_for() {
  static auto* all = new std::map<std::string, int64_t>;
  return *all;
}

// A kernel that draws without being given a generator draws from the host's.
void run_seeded(const c10::OperatorHandle& op, Stack* stack, uint64_t seed) {
  at::Generator host = at::detail::getDefaultCPUGenerator();
  const at::Tensor state = host.get_state();
  host.set_current_seed(seed);
  try {
    run_on_host(op, stack);
  } catch (...) {
    host.set_state(state);
    throw;
  }
  host.set_state(state);
}

void copy_grown(const at::Tensor& target, const at::Tensor& given, Stream& stream, const char* name) {
  const at::Tensor host = given.is_non_overlapping_and_dense() ? given : given.contiguous();
  resize_tensor(target, host.sizes(), std::nullopt);
  if (host.numel() == 0) return;
  target.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
  char* to = kernel_view(target.unsafeGetTensorImpl()->data());
  submit({name, stream, {touch_of(target, true)}},
         [host, to] { std::memcpy(to, host.unsafeGetTensorImpl()->data(), host.nbytes()); });
}

std::vector<c10::IValue> run_now(const c10::OperatorHandle& op, const Traits& traits, const std::vector<c10::IValue>& given,
                                 int device) {
  {
    Locked lock(state_mutex());
    waited_for()[traits.name]++;
  }
  counters().kernels++;
  counters().synchronous_kernels++;
  Arguments arguments = kernel_arguments(traits, given, device);
  Stream& stream = current_stream(device);
  Stack stack(arguments.values.begin(), arguments.values.end());
  const bool draws = traits.is_seeded && traits.generator < 0;
  const uint64_t seed = draws ? draw_from(default_generator(device)).current_seed() : 0;
  std::exception_ptr error;
  submit({traits.name, stream, arguments.touches, Engine::kCompute, cost_of(traits.name, arguments.tensors, {})}, [&] {
    try {
      if (draws) run_seeded(op, &stack, seed);
      else run_on_host(op, &stack);
    } catch (...) {
      error = std::current_exception();
    }
  });
  synchronize(stream);
  if (error) std::rethrow_exception(error);
  for (size_t i = 0; i < given.size(); i++) {
    if (!traits.is_written[i]) continue;
    const auto targets = tensors_in({given[i]}), hosts = tensors_in({arguments.values[i]});
    for (size_t k = 0; k < targets.size(); k++)
      if (is_sim(targets[k]) && targets[k].numel() == 0) copy_grown(targets[k], hosts[k], stream, traits.name);
  }
  std::vector<c10::IValue> results;
  const auto made = taken_results(op, &stack);
  for (size_t r = 0; r < made.size(); r++) {
    if (traits.result_source[r] >= 0) results.push_back(given[traits.result_source[r]]);
    else results.push_back(with_tensors(made[r], [&](const at::Tensor& t) { return to_device(t, device, stream, traits.name); }));
  }
  return results;
}

// A view touches no bytes: its geometry is the host's.
std::vector<c10::IValue> views(const c10::OperatorHandle& op, const Traits& traits, const std::vector<c10::IValue>& given) {
  Stack stack;
  for (const auto& value : given) stack.push_back(with_tensors(value, [](const at::Tensor& t) { return is_sim(t) ? as_host(t) : t; }));
  run_on_host(op, &stack);
  std::vector<c10::IValue> results;
  const auto made = taken_results(op, &stack);
  for (size_t r = 0; r < made.size(); r++) {
    TORCH_CHECK(traits.result_source[r] >= 0, "sim: expected a view of an argument from ", traits.name);
    const at::Tensor base = given[traits.result_source[r]].toTensor();
    results.push_back(with_tensors(made[r], [&](const at::Tensor& t) { return as_view(base, t); }));
  }
  return results;
}

// -- operators that go by another name on the CPU ----------------------------------------------------------------------

void call_fallback(const c10::OperatorHandle& op, Stack* stack) { call_kernel(op, stack); }

void call_convolution(const c10::OperatorHandle&, Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  call_kernel(op, stack);
}

// The CPU's takes the sizes of the bias besides, before the stride.
void call_convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  constexpr std::ptrdiff_t kAfterWeight = 7;
  const at::Tensor weight = (stack->end() - kAfterWeight - 1)->toTensor();
  const bool is_transposed = (stack->end() - 4)->toBool();
  const int64_t groups = (stack->end() - 2)->toInt();
  const int64_t channels = is_transposed ? weight.size(1) * groups : weight.size(0);
  stack->insert(stack->end() - kAfterWeight, c10::IValue(std::vector<int64_t>{channels}));
  call_kernel(op, stack);
}

}  // namespace

c10::IValue with_tensors(const c10::IValue& value, const Replace& replace) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(replace(value.toTensor())) : value;
  if (value.isTensorList()) {
    auto list = value.toTensorVector();
    for (auto& t : list)
      if (t.defined()) t = replace(t);
    return c10::IValue(std::move(list));
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor> t : value.toOptionalTensorList())
      list.push_back(t && t->defined() ? std::optional<at::Tensor>(replace(*t)) : t);
    return c10::IValue(std::move(list));
  }
  return value;
}

void call_kernel(const c10::OperatorHandle& op, Stack* stack) {
  const Traits& traits = traits_of(op);
  const auto count = static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  const std::vector<c10::IValue> given(stack->end() - count, stack->end());
  stack->erase(stack->end() - count, stack->end());
  const int device = device_of(traits, given);
  const c10::DeviceGuard guard(c10::Device(kSim, static_cast<c10::DeviceIndex>(device)));
  std::vector<c10::IValue> results;
  if (traits.is_view) {
    results = views(op, traits, given);
  } else {
    raise_last_error();
    std::shared_ptr<const Shapes> shapes;
    const bool draws_unseen = traits.is_seeded && traits.generator < 0;
    if (!traits.is_synchronous && !draws_unseen) shapes = shapes_of(op, given);
    results = shapes ? queue(op, traits, given, *shapes, device) : run_now(op, traits, given, device);
    raise_found();
  }
  stack->insert(stack->end(), results.begin(), results.end());
}

void take_kernels_of_cpu() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema()) continue;
    const auto has = [&](c10::DispatchKey key) { return op->hasKernelForDispatchKey(key); };
    const bool is_composite = has(c10::DispatchKey::CompositeExplicitAutograd) ||
                              has(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
    if (!is_composite || !has(c10::DispatchKey::CPU) || has(c10::DispatchKey::PrivateUse1)) continue;
    const std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&call_fallback>());
  }
}

std::map<std::string, int64_t> synchronous_operators() {
  Locked lock(state_mutex());
  return waited_for();
}

}  // namespace sim

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::call_fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&sim::call_convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&sim::call_convolution_backward>());
}
