// Updates without instructions of a certain processor; fused multiply-adds by the library where the processor has none.
#include "tieroff/update/kernels.hpp"
#include "tieroff/update/rules.hpp"

namespace tieroff {

void update_portable(const UpdatePart& part, std::int64_t first, std::int64_t count) {
  update_with<OneLane>(part, first, count);
}

}  // namespace tieroff
