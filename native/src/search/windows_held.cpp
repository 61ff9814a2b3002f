#include "tieroff/search/windows_held.hpp"

#include <algorithm>
#include <cstddef>
#include <stdexcept>

namespace tieroff {

namespace {

void check(std::span<const std::int64_t> usage, std::span<const HeldSpan> spans) {
  for (const auto& [start, stop, size_bytes] : spans) {
    if (start < 0 || start > stop || stop > static_cast<std::int64_t>(usage.size())) {
      throw std::invalid_argument("expected spans within the step");
    }
  }
}

void add(std::span<std::int64_t> usage, const HeldSpan& span, std::int64_t size_bytes) {
  const auto start = static_cast<std::size_t>(span[0]);
  for (std::int64_t& bytes : usage.subspan(start, static_cast<std::size_t>(span[1]) - start)) bytes += size_bytes;
}

}  // namespace

std::int64_t most_bytes(std::span<const std::int64_t> usage, std::span<const HeldSpan> spans) {
  check(usage, spans);
  std::int64_t most = 0;
  for (const HeldSpan& span : spans) {
    const auto start = static_cast<std::size_t>(span[0]);
    for (const std::int64_t bytes : usage.subspan(start, static_cast<std::size_t>(span[1]) - start)) {
      most = std::max(most, bytes);
    }
  }
  return most;
}

std::int64_t hold_bytes(std::span<std::int64_t> usage, std::span<const HeldSpan> spans) {
  check(usage, spans);
  for (const HeldSpan& span : spans) add(usage, span, span[2]);
  return most_bytes(usage, spans);
}

void drop_bytes(std::span<std::int64_t> usage, std::span<const HeldSpan> spans) {
  check(usage, spans);
  for (const HeldSpan& span : spans) add(usage, span, -span[2]);
}

}  // namespace tieroff
