// Every operator that no file here has a kernel for: what its results look like and what it takes is found out once for each
// kind of call (operator, shapes, types), from its meta kernel and from Python's clock, and then known.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/strides.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/library.h>

#include <cstring>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include "kernels.hpp"
#include "tensors.hpp"

namespace rehearsal {

namespace {

namespace py = pybind11;
using c10::IValue;
using torch::jit::Stack;

struct Traits {
  std::string name, overload;
  bool is_view = false;         // every result shares the bytes of an argument
  bool is_synchronous = false;  // the results' shapes, or a value for the host, depend on data
  bool is_in_lists = false;     // writes lists of tensors in place, and returns nothing else
  bool is_sized_by_numbers = false;
  bool is_all = false;  // whether all of something is true
  bool is_mixed = false;           // tensors of the host may be among its arguments
  std::vector<bool> is_written;    // per argument
  std::vector<bool> is_number;     // per argument: of type Scalar or float, whose value says nothing about shapes
  std::vector<int> result_source;  // per result: the argument that it is, or -1
};

enum class Kind { kArgument, kFresh, kView, kNothing, kValue, kList };

struct Result {
  Kind kind = Kind::kNothing;
  int argument = -1;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  c10::ScalarType type = c10::ScalarType::Float;
  bool is_conj = false, is_neg = false;
  IValue value;
  std::vector<Result> parts;
};

struct Grown {  // an `out=` that gets another size
  size_t argument;
  std::vector<int64_t> sizes, strides;
};

struct Call {
  std::vector<int64_t> key;
  std::vector<Result> results;
  std::vector<Grown> grown;
  int64_t cost_ns = 0;
  bool is_synchronous = false;
};

struct Known {
  Traits traits;
  std::unordered_multimap<uint64_t, std::shared_ptr<const Call>> calls;
};

std::mutex known_mutex;
// By the address of the operator's name, which its entry in the dispatcher keeps.
std::unordered_map<const void*, std::unique_ptr<Known>> known;
PyObject* python_clock = nullptr;

// -- what an operator is ------------------------------------------------------------------------------------------------

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

bool is_number(const c10::TypePtr& type) {
  if (const auto optional = type->cast<c10::OptionalType>()) return is_number(optional->getElementType());
  if (const auto list = type->cast<c10::ListType>()) return is_number(list->getElementType());
  return type->kind() == c10::TypeKind::NumberType || type->kind() == c10::TypeKind::FloatType;
}

bool begins(const std::string& name, std::string_view with) { return name.rfind(with, 0) == 0; }

Traits examine(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  Traits traits;
  traits.name = schema.name();
  traits.overload = schema.overload_name();
  // Of an index only masks depend on data: `find_out` sees to them.
  const bool is_index = schema.name() == "aten::index";
  traits.is_synchronous = !is_index && (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output));
  traits.is_all = schema.name() == "aten::all";
  traits.is_view = !schema.returns().empty();
  for (const auto& result : schema.returns()) {
    const auto* info = result.alias_info();
    traits.is_view = traits.is_view && info != nullptr && !info->isWrite();
    traits.is_synchronous = traits.is_synchronous || !holds_tensors(result.type());
    traits.result_source.push_back(source_of(schema, result));
  }
  for (const auto& argument : schema.arguments()) {
    traits.is_written.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
    traits.is_number.push_back(is_number(argument.type()));
  }
  const auto& name = traits.name;
  const bool is_of_lists = begins(name, "aten::_foreach_") || begins(name, "aten::_fused_") || begins(name, "aten::_amp_");
  traits.is_in_lists = is_of_lists && schema.returns().empty();
  traits.is_sized_by_numbers = begins(name, "aten::arange") || begins(name, "aten::range");
  traits.is_mixed = is_of_lists || begins(name, "aten::copy_") || begins(name, "aten::index") || begins(name, "aten::_index");
  return traits;
}

Known& known_of(const c10::OperatorHandle& op) {
  auto& one = known[&op.operator_name()];
  if (!one) {
    one = std::make_unique<Known>();
    one->traits = examine(op);
  }
  return *one;
}

// -- what a call is -----------------------------------------------------------------------------------------------------

template <typename Visit>
void visit_tensors(const IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector())
      if (t.defined()) visit(t);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor> t : value.toOptionalTensorList())
      if (t && t->defined()) visit(*t);
  }
}

void add_tensor(std::vector<int64_t>& key, const Traits& traits, const at::Tensor& t, bool is_written) {
  const bool is_ours = is_here(t);
  if (!is_ours && !traits.is_mixed && (t.dim() > 0 || is_written) && t.is_cpu())
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", the_device(), " and ",
                t.device(), "! (when calling ", traits.name, ")");
  // Raises what the storage says when its memory must not be used.
  if (is_ours && !traits.is_view) static_cast<void>(t.storage().data_ptr());
  const auto* impl = t.unsafeGetTensorImpl();
  const int64_t flags = (is_ours ? 1 : 0) | (impl->is_wrapped_number() ? 2 : 0) | (t.is_conj() ? 4 : 0) | (t.is_neg() ? 8 : 0);
  key.push_back(static_cast<int64_t>(t.scalar_type()) | t.dim() << 8 | flags << 16);
  key.insert(key.end(), t.sizes().begin(), t.sizes().end());
  key.insert(key.end(), t.strides().begin(), t.strides().end());
  if (traits.is_view) {
    key.push_back(t.storage_offset());
    key.push_back(static_cast<int64_t>(t.storage().nbytes()));
  }
}

constexpr int64_t kNone = -1, kOther = -2, kTensors = -3, kNumbers = -4, kText = -5;

void add_value(std::vector<int64_t>& key, const Traits& traits, const IValue& value, size_t argument) {
  if (value.isTensor() && value.toTensor().defined()) {
    add_tensor(key, traits, value.toTensor(), traits.is_written[argument]);
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    key.push_back(kTensors);
    key.push_back(static_cast<int64_t>(value.toListRef().size()));
    for (const IValue& one : value.toListRef()) {
      if (one.isTensor() && one.toTensor().defined()) add_tensor(key, traits, one.toTensor(), traits.is_written[argument]);
      else key.push_back(kNone);
    }
  } else if (value.isNone() || value.isTensor()) {
    key.push_back(kNone);
  } else if (traits.is_number[argument] && !traits.is_sized_by_numbers) {
    key.push_back(value.isDouble() ? kNumbers : value.isInt() ? kNumbers - 1 : kNumbers - 2);
  } else if (value.isInt()) {
    key.push_back(value.toInt());
  } else if (value.isBool()) {
    key.push_back(value.toBool() ? 1 : 0);
  } else if (value.isDouble()) {
    const double number = value.toDouble();
    int64_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    key.push_back(bits);
  } else if (value.isIntList()) {
    const auto list = value.toIntVector();
    key.push_back(static_cast<int64_t>(list.size()));
    key.insert(key.end(), list.begin(), list.end());
  } else if (value.isBoolList()) {
    for (const IValue& one : value.toListRef()) key.push_back(one.toBool() ? 1 : 0);
  } else if (value.isString()) {
    key.push_back(kText);
    key.push_back(static_cast<int64_t>(std::hash<std::string>()(value.toStringRef())));
  } else {
    key.push_back(kOther);
  }
}

uint64_t hash_of(const std::vector<int64_t>& key) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (const int64_t part : key) {
    hash = (hash ^ static_cast<uint64_t>(part)) * 0x9e3779b97f4a7c15ULL;
    hash ^= hash >> 29;
  }
  return hash;
}

// -- finding out --------------------------------------------------------------------------------------------------------

// A number of the host stays one: kernels take it by value.
at::Tensor meta_of(const at::Tensor& t, bool with_storage) {
  if (!is_here(t) && t.dim() == 0) return t;
  const auto options = at::TensorOptions().dtype(t.dtype()).device(c10::kMeta);
  at::Tensor meta;
  if (with_storage) {
    const auto count = static_cast<int64_t>(t.storage().nbytes() / t.element_size());
    meta = at::empty({count}, options).as_strided(t.sizes(), t.strides(), t.storage_offset());
  } else {
    meta = at::empty_strided(t.sizes(), t.strides(), options);
  }
  if (t.is_conj()) meta._set_conj(true);
  if (t.is_neg()) meta._set_neg(true);
  return meta;
}

IValue with_metas(const IValue& value, bool with_storage) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(meta_of(value.toTensor(), with_storage)) : value;
  if (value.isTensorList()) {
    auto list = value.toTensorVector();
    for (auto& t : list)
      if (t.defined()) t = meta_of(t, with_storage);
    return IValue(std::move(list));
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor> t : value.toOptionalTensorList())
      list.push_back(t && t->defined() ? std::optional<at::Tensor>(meta_of(*t, with_storage)) : t);
    return IValue(std::move(list));
  }
  if (value.isDevice()) return IValue(c10::Device(c10::kMeta));
  if (value.isGenerator()) return IValue();
  return value;
}

std::vector<int64_t> contiguous(c10::IntArrayRef sizes) {
  const auto strides = c10::contiguous_strides(sizes);
  return {strides.begin(), strides.end()};
}

Result result_of(const IValue& made, int source, bool is_view) {
  Result result;
  result.argument = source;
  if (source >= 0 && !is_view) {
    result.kind = Kind::kArgument;
  } else if (made.isTensor() && made.toTensor().defined()) {
    const at::Tensor& t = made.toTensor();
    result.kind = is_view ? Kind::kView : Kind::kFresh;
    result.type = t.scalar_type();
    result.sizes = t.sizes().vec();
    result.strides = is_view || t.is_non_overlapping_and_dense() ? t.strides().vec() : contiguous(t.sizes());
    result.offset = t.storage_offset();
    result.is_conj = t.is_conj();
    result.is_neg = t.is_neg();
  } else if (made.isTensorList()) {
    result.kind = Kind::kList;
    for (const at::Tensor& t : made.toTensorVector()) result.parts.push_back(result_of(IValue(t), source, is_view));
  } else if (!made.isNone() && !made.isTensor()) {
    result.kind = Kind::kValue;
    result.value = made;
  }
  return result;
}

// What depends on values, with all values zero; false for other operators.
bool of_zeros(const Traits& traits, const std::vector<IValue>& metas, Stack* made) {
  const auto longs = at::TensorOptions().dtype(at::kLong).device(c10::kMeta);
  if (traits.name == "aten::nonzero" && traits.overload.empty()) {
    made->push_back(at::empty({0, metas[0].toTensor().dim()}, longs));
  } else if (traits.name == "aten::masked_select" && traits.overload.empty()) {
    made->push_back(at::empty({0}, metas[0].toTensor().options()));
  } else if (traits.name == "aten::equal") {
    made->emplace_back(metas[0].toTensor().sizes() == metas[1].toTensor().sizes());
  } else {
    return false;
  }
  return true;
}

py::list as_list(c10::ArrayRef<IValue> values) {
  py::list list;
  for (const IValue& one : values) list.append(torch::jit::toPyObject(one));
  return list;
}

void run_meta(const c10::OperatorHandle& op, const Traits& traits, const std::vector<IValue>& metas, Stack* stack) {
  if (traits.is_in_lists || of_zeros(traits, metas, stack)) return;
  TORCH_CHECK(!op.hasTag(at::Tag::dynamic_output_shape) || traits.name == "aten::index", "tieroff rehearse: the shape of what ", traits.name,
              " returns depends on values, and a rehearsal has none: keep it off the device, or leave it out");
  *stack = metas;
  const at::AutoDispatchBelowADInplaceOrView below;
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), stack);
  } catch (const c10::NotImplementedError&) {
    const py::gil_scoped_acquire gil;
    const py::object out = py::handle(python_clock).attr("decomposed")(traits.name, traits.overload, as_list(metas));
    const auto& returns = op.schema().returns();
    stack->clear();
    for (size_t r = 0; r < returns.size(); r++)
      stack->push_back(torch::jit::toIValue(returns.size() == 1 ? out : py::object(out[py::int_(r)]), returns[r].type()));
  }
}

int64_t price(const Traits& traits, const std::vector<IValue>& metas, const Stack& made) {
  const py::gil_scoped_acquire gil;
  return py::handle(python_clock).attr("duration_ns")(traits.name, traits.overload, as_list(metas), as_list(made)).cast<int64_t>();
}

// Indices in place of masks, which are false everywhere: none along each of a mask's dimensions. Returns whether there was one.
bool replace_masks(IValue& indices) {
  bool has_masks = false;
  c10::List<std::optional<at::Tensor>> list;
  for (const std::optional<at::Tensor> t : indices.toOptionalTensorList()) {
    const bool is_mask = t && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte);
    if (!is_mask) list.push_back(t);
    for (int64_t d = 0; is_mask && d < t->dim(); d++) list.push_back(at::empty({0}, at::TensorOptions().dtype(at::kLong).device(c10::kMeta)));
    has_masks = has_masks || is_mask;
  }
  indices = IValue(std::move(list));
  return has_masks;
}

std::shared_ptr<const Call> find_out(const c10::OperatorHandle& op, const Traits& traits, c10::ArrayRef<IValue> given,
                                     std::vector<int64_t> key) {
  auto call = std::make_shared<Call>();
  call->key = std::move(key);
  std::vector<IValue> metas;
  for (const IValue& one : given) metas.push_back(with_metas(one, traits.is_view));
  call->is_synchronous = traits.is_synchronous && !traits.is_in_lists && !traits.is_view;
  if (traits.name == "aten::index" && replace_masks(metas[1])) call->is_synchronous = true;
  Stack made;
  run_meta(op, traits, metas, &made);
  for (size_t r = 0; r < made.size(); r++) call->results.push_back(result_of(made[r], traits.result_source[r], traits.is_view));
  for (size_t i = 0; i < given.size(); i++) {
    if (!traits.is_written[i] || !given[i].isTensor() || !is_here(given[i].toTensor())) continue;
    const at::Tensor now = given[i].toTensor(), later = metas[i].toTensor();
    if (now.sizes() != later.sizes()) call->grown.push_back({i, later.sizes().vec(), later.strides().vec()});
  }
  if (!traits.is_view) call->cost_ns = price(traits, metas, made);
  return call;
}

// -- calling ------------------------------------------------------------------------------------------------------------

at::Tensor view_of(const at::Tensor& base, const Result& result) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                   base.key_set(), c10::scalarTypeToTypeMeta(result.type));
  impl->set_storage_offset(result.offset);
  impl->set_sizes_and_strides(result.sizes, result.strides);
  at::Tensor made(std::move(impl));
  made._set_conj(result.is_conj);
  made._set_neg(result.is_neg);
  return made;
}

IValue made_of(const Result& result, c10::ArrayRef<IValue> given) {
  switch (result.kind) {
    case Kind::kArgument: return given[result.argument];
    case Kind::kFresh: return fresh(result.sizes, result.strides, result.type);
    case Kind::kView: return view_of(given[result.argument].toTensor(), result);
    case Kind::kValue: return result.value;
    case Kind::kList: {
      std::vector<at::Tensor> list;
      for (const Result& part : result.parts) {
        const IValue one = made_of(part, given);
        list.push_back(one.isTensor() ? one.toTensor() : at::Tensor());
      }
      return IValue(std::move(list));
    }
    case Kind::kNothing: break;
  }
  return IValue(at::Tensor());
}

void grow(const at::Tensor& target, const Grown& to) {
  resize_tensor(target, to.sizes, std::nullopt);
  target.unsafeGetTensorImpl()->set_sizes_and_strides(to.sizes, to.strides);
}

}  // namespace

void set_python_clock(const py::object& clock) { python_clock = clock.inc_ref().ptr(); }

void call_kernel(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const c10::ArrayRef<IValue> given(stack->data() + (stack->size() - count), count);
  thread_local std::vector<int64_t> key;
  Known* one;
  {
    const std::lock_guard<std::mutex> lock(known_mutex);
    one = &known_of(op);
  }
  const Traits& traits = one->traits;
  key.clear();
  for (size_t i = 0; i < count; i++) add_value(key, traits, given[i], i);
  const uint64_t hash = hash_of(key);
  std::shared_ptr<const Call> call;
  {
    const std::lock_guard<std::mutex> lock(known_mutex);
    const auto [begin, end] = one->calls.equal_range(hash);
    for (auto at = begin; at != end && !call; ++at)
      if (at->second->key == key) call = at->second;
  }
  if (!call) {
    call = find_out(op, traits, given, key);
    const std::lock_guard<std::mutex> lock(known_mutex);
    one->calls.emplace(hash, call);
  }
  for (const Grown& to : call->grown) grow(given[to.argument].toTensor(), to);
  std::vector<IValue> results;
  results.reserve(call->results.size());
  for (const Result& result : call->results) results.push_back(made_of(result, given));
  if (call->cost_ns > 0) launch(current_stream(), call->cost_ns);
  if (call->is_synchronous) {
    count_value();
    synchronize(current_stream());
  }
  if (traits.is_all && results[0].isTensor()) mark_true(results[0].toTensor().storage().data_ptr().get());
  torch::jit::drop(*stack, count);
  for (IValue& result : results) stack->push_back(std::move(result));
}

void take_kernels_of_cuda() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema()) continue;
    const auto has = [&](c10::DispatchKey key) { return op->hasKernelForDispatchKey(key); };
    const bool is_composite = has(c10::DispatchKey::CompositeExplicitAutograd) ||
                              has(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
    const bool is_of_cuda = has(c10::DispatchKey::CPU) || name.name.rfind("aten::_foreach_", 0) == 0;
    if (!is_composite || !is_of_cuda || has(c10::DispatchKey::CUDA)) continue;
    const std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&call_kernel>());
  }
}

}  // namespace rehearsal

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&rehearsal::call_kernel>()); }

// One kernel each, as cuDNN's; else they would be built from others.
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&rehearsal::call_kernel>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&rehearsal::call_kernel>());
}
