// What one update of one tensor is: a rule, an arithmetic, addresses and scalars.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tieroff {

enum class UpdateRule : int { kAdam, kSgd, kAdagrad, kLion };
enum class UpdateType : int { kFloat32, kBfloat16 };

// [Note: arithmetics]
// A rule says what is computed, an arithmetic how it is rounded. The same update in PyTorch rounds differently per device and
// per implementation, so each that is known has a value here, and which one an optimizer's results are is found by comparison.
//
// | arithmetic | products and sums | moments of Adam and SGD | rounding to bf16 |
// |---|---|---|---|
// | kPlain | apart | fp32 | at the end |
// | kContracted | (c g) g + v, a lerp and x + a y by one rounding each | fp32 | at the end |
// | kDeviceOps | c (g g) + v, p + s (m / d), a lerp and x + a y by one rounding each | fp32 | after each op |
// | kDeviceOpsReciprocal | the same; what is divided by a scalar is multiplied by its reciprocal | fp32 | after each op |
// | kContractedOps | as kContracted | fp32 | after each op |
// | kDoubleApart, kDoubleFirst, kDoubleSecond | scalars and moments in fp64; of a b + c d none, the first or the second product
//   joins the sum by one rounding | fp64 | at the end |
enum class Arithmetic : int {
  kPlain,
  kContracted,
  kDeviceOps,
  kDeviceOpsReciprocal,
  kContractedOps,
  kDoubleApart,
  kDoubleFirst,
  kDoubleSecond,
};
constexpr int kArithmetics = 8;

enum class Decay : int { kNone, kGradient, kParameter };  // added to the gradient, or taken off the parameter

// Scalars as the optimizer's own expressions give them; those that a rule does not name are not read.
struct UpdateScalars {
  double decay = 0;            // kGradient: the weight decay. kParameter: what the parameter is multiplied by
  double rate_decay = 0;       // kParameter, in fp64: learning rate times weight decay
  double step = 0;             // what the direction is multiplied by, negative: Adam -lr / correction, the others -lr
  double first = 0;            // Adam and Lion: beta1. SGD: momentum
  double first_rest = 0;       // 1 - beta1, 1 - dampening
  double second = 0;           // beta2
  double second_rest = 0;      // 1 - beta2
  double root_correction = 1;  // Adam: what the root of the second moment is divided by
  double epsilon = 0;
  double float_step = 0;             // Adam in fp64: lr / correction, from a correction in fp32; positive
  double float_root_correction = 1;  // Adam in fp64: the root of a correction in fp32
};

constexpr std::size_t kTensorsMax = 5;

// One tensor's update. Tensors in order: the parameter, the gradient (only read), then state: Adam the first and second
// moment and with amsgrad the largest second one; SGD the momentum buffer, if any; Adagrad the sum; Lion the moment. What is
// written goes to `outputs`, each the input's address or memory that overlaps no input.
struct UpdatePart {
  UpdateRule rule = UpdateRule::kAdam;
  Arithmetic arithmetic = Arithmetic::kPlain;
  UpdateType type = UpdateType::kFloat32;
  Decay decay = Decay::kNone;
  bool has_maximum = false;   // Adam: amsgrad
  bool is_maximized = false;  // the gradient counts with the other sign
  bool has_momentum = false;  // SGD
  bool is_first = false;      // SGD: the momentum buffer is the gradient; what it holds does not count
  bool is_nesterov = false;   // SGD
  std::int64_t count = 0;      // elements
  std::array<const void*, kTensorsMax> inputs{};
  std::array<void*, kTensorsMax> outputs{};
  UpdateScalars scalars{};
  std::vector<float> factors{};  // that the gradient is multiplied by first, each product rounded to its type
};

// Updates elements [first, first + count) of a part, with the widest vectors that this processor has.
void update_elements(const UpdatePart& part, std::int64_t first, std::int64_t count);

// As above with the vectors of one instruction set: "avx512", "avx2" or "portable"; the bits are the same.
// Throws std::invalid_argument where this processor or this build lacks it.
void update_elements_with(const char* instructions, const UpdatePart& part, std::int64_t first, std::int64_t count);

// Names of the instruction sets that this processor has, the widest first.
std::vector<const char*> update_instructions();

// Bytes that the update of one element reads and writes.
std::int64_t moved_bytes_per_element(const UpdatePart& part);

}  // namespace tieroff
