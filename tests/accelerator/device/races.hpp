// Which bytes were touched by whom, and whether anything ordered it: the race detector.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "order.hpp"

namespace sim {

// Bytes of a block: all of [low, high), or of those the elements that a strided view has.
struct Span {
  int64_t low = 0, high = 0;
  int64_t item = 1;
  std::vector<int64_t> sizes, strides;  // strides in bytes; empty where every byte of the range is touched

  bool is_dense() const { return sizes.empty(); }
};

// Where in the program something was submitted.
struct Place {
  const char* name = "";  // the operator, "copy to host", "free", ...; lives for ever
  int64_t number = 0;     // of all submissions of the process
  int stack = 0, label = 0;
};

struct Access {
  Actor actor = 0;
  uint64_t step = 0;
  bool is_write = false;
  Span span;
  Place place;
};

// What was touched in one block, without what a later access has made irrelevant.
class AccessLog {
 public:
  // Returns the access that `now` races with, or null; `before` is all that is ordered before it.
  std::shared_ptr<Access> note(const Access& now, const Clock& before);
  // True where no stream's access is still under way for all that `clock` knows.
  bool is_ordered_before(const Clock& clock) const;
  bool is_empty() const { return accesses_.empty(); }
  void forget_ordered(const Clock& clock);
  void clear() { accesses_.clear(); }

 private:
  std::vector<Access> accesses_;
};

Place here(const char* name);  // the caller's Python stack and label; takes Python's lock
int set_label(const std::string& label);
std::string label_of(int label);
void set_stack_depth(int depth);
const char* interned(const std::string& name);

// `block` says what memory it is. A race is kept until it is taken, and raised where races are.
void report_race(const Access& first, const Access& second, const std::string& block);
std::vector<std::string> races();
void forget_races();
void set_raising(bool is_on);
// Raises what was found by this thread since it last asked, where races are raised.
void raise_found();
int64_t dropped_accesses();

}  // namespace sim
