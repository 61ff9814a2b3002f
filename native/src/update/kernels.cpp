// Which instruction set runs an update.
#include "tieroff/update/kernels.hpp"

#include <cfenv>
#include <stdexcept>
#include <string_view>

namespace tieroff {

namespace {

using Kernel = void (*)(const UpdatePart&, std::int64_t, std::int64_t);

struct Choice {
  const char* name;
  Kernel kernel;
};

std::vector<Choice> choices() {
  std::vector<Choice> found;
#ifdef TIEROFF_UPDATES_ON_X86
  __builtin_cpu_init();
  const bool has_fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    found.push_back({"avx512", &update_avx512});
  if (has_fma) found.push_back({"avx2", &update_avx2});
#endif
  found.push_back({"portable", &update_portable});
  return found;
}

// Within its life this thread computes as IEEE 754 says. A program may have denormals flushed to zero, which is an option of
// each thread and passed on to those that it starts; the device whose updates these stand for knows nothing of it.
class PlainNumbers {
 public:
  PlainNumbers() noexcept {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~PlainNumbers() { std::fesetenv(&before_); }
  PlainNumbers(const PlainNumbers&) = delete;
  PlainNumbers& operator=(const PlainNumbers&) = delete;

 private:
  std::fenv_t before_{};
};

}  // namespace

void update_elements(const UpdatePart& part, std::int64_t first, std::int64_t count) {
  static const Kernel widest = choices().front().kernel;
  const PlainNumbers plain;
  widest(part, first, count);
}

void update_elements_with(const char* instructions, const UpdatePart& part, std::int64_t first, std::int64_t count) {
  const PlainNumbers plain;
  for (const auto& [name, kernel] : choices())
    if (std::string_view(name) == instructions) return kernel(part, first, count);
  throw std::invalid_argument("expected the name of an instruction set that this processor has");
}

std::vector<const char*> update_instructions() {
  std::vector<const char*> names;
  for (const auto& choice : choices()) names.push_back(choice.name);
  return names;
}

std::int64_t moved_bytes_per_element(const UpdatePart& part) {
  const std::int64_t state = part.rule == UpdateRule::kAdam  ? (part.has_maximum ? 3 : 2)
                             : part.rule == UpdateRule::kSgd ? (part.has_momentum ? 1 : 0)
                                                             : 1;
  const std::int64_t size_bytes = part.type == UpdateType::kFloat32 ? 4 : 2;
  return size_bytes * (3 + 2 * state);  // the gradient is read, the rest read and written
}

}  // namespace tieroff
