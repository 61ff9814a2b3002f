// Bytes held at each op of a step, and what changes them: the small questions that the planner asks most often.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace tieroff {

// Ops [start, stop) of the step and the bytes that are held there.
using HeldSpan = std::array<std::int64_t, 3>;

// All throw std::invalid_argument, with nothing changed, for a span that is not within the step.

// Returns the most bytes at an op of the spans, 0 where they have none.
std::int64_t most_bytes(std::span<const std::int64_t> usage, std::span<const HeldSpan> spans);

// Adds the spans and returns the most bytes that are then at an op of them, 0 where they have none.
std::int64_t hold_bytes(std::span<std::int64_t> usage, std::span<const HeldSpan> spans);

// Takes the spans off again.
void drop_bytes(std::span<std::int64_t> usage, std::span<const HeldSpan> spans);

}  // namespace tieroff
