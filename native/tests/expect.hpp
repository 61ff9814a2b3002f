// What the tests under the compiler's sanitizers expect; they go on after a failure.
#pragma once

#include <atomic>
#include <cstdio>

inline std::atomic<int> failures{0};

inline void expect(bool is_true, const char* what, int line) {
  if (is_true) return;
  std::fprintf(stderr, "line %d: expected %s\n", line, what);
  failures.fetch_add(1);
}
#define EXPECT(condition) expect((condition), #condition, __LINE__)
