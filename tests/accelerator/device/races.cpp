#include <Python.h>

#include "races.hpp"

#include <algorithm>
#include <atomic>
#include <map>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <tuple>
#include <unordered_set>

namespace sim {

namespace {

#if PY_VERSION_HEX >= 0x030d0000
bool python_runs() { return Py_IsInitialized() && !Py_IsFinalizing(); }
#else
bool python_runs() { return Py_IsInitialized() && !_Py_IsFinalizing(); }
#endif

// More accesses of one block than this, none of which makes another irrelevant: the oldest is dropped, and counted.
constexpr size_t kAccessesMax = 1024;
std::atomic<int64_t> dropped{0};

bool overlap(const Span& a, const Span& b) { return a.low < b.high && b.low < a.high; }

template <typename Visit>
void each_element(const Span& span, const Visit& visit) {
  std::vector<int64_t> index(span.sizes.size(), 0);
  for (;;) {
    int64_t at = span.low;
    for (size_t d = 0; d < index.size(); d++) at += index[d] * span.strides[d];
    if (visit(at)) return;
    size_t d = index.size();
    while (d > 0 && ++index[d - 1] == span.sizes[d - 1]) index[--d] = 0;
    if (d == 0) return;
  }
}

// Only asked of pairs that are not ordered, so that it may take its time.
bool share_bytes(const Span& a, const Span& b) {
  if (!overlap(a, b)) return false;
  if (a.is_dense() && b.is_dense()) return true;
  const int64_t low = std::max(a.low, b.low), high = std::min(a.high, b.high);
  std::vector<bool> touched(high - low, a.is_dense());
  if (!a.is_dense())
    each_element(a, [&](int64_t at) {
      for (int64_t i = at; i < at + a.item; i++)
        if (i >= low && i < high) touched[i - low] = true;
      return false;
    });
  if (b.is_dense()) return std::find(touched.begin(), touched.end(), true) != touched.end();
  bool found = false;
  each_element(b, [&](int64_t at) {
    for (int64_t i = at; i < at + b.item; i++) found = found || (i >= low && i < high && touched[i - low]);
    return found;
  });
  return found;
}

bool covers(const Span& a, const Span& b) {
  if (a.is_dense()) return a.low <= b.low && b.high <= a.high;
  return a.low == b.low && a.high == b.high && a.sizes == b.sizes && a.strides == b.strides;
}

// -- places ----------------------------------------------------------------------------------------------------------

struct Frame {
  PyCodeObject* code;  // one reference is kept for ever
  int line;
  bool operator<(const Frame& other) const { return std::tie(code, line) < std::tie(other.code, other.line); }
};
using Stack = std::vector<Frame>;

std::atomic<int> stack_depth{0};
std::atomic<int64_t> submissions{0};
thread_local int label = 0;

std::mutex& places_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}
std::vector<Stack>& stacks() {
  static auto* all = new std::vector<Stack>(1);
  return *all;
}
std::map<Stack, int>& stack_numbers() {
  static auto* all = new std::map<Stack, int>;
  return *all;
}
std::vector<std::string>& labels() {
  static auto* all = new std::vector<std::string>(1);
  return *all;
}

int current_stack() {
  const int depth = stack_depth;
  if (depth == 0 || !python_runs()) return 0;
  const PyGILState_STATE state = PyGILState_Ensure();
  Stack stack;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame != nullptr && static_cast<int>(stack.size()) < depth) {
    stack.push_back({PyFrame_GetCode(frame), PyFrame_GetLineNumber(frame)});
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  int number = 0;
  bool is_new = false;
  if (!stack.empty()) {
    std::lock_guard<std::mutex> lock(places_mutex());
    const auto [found, added] = stack_numbers().emplace(stack, static_cast<int>(stacks().size()));
    is_new = added;
    if (added) stacks().push_back(stack);
    number = found->second;
  }
  if (!is_new)
    for (const Frame& one : stack) Py_DECREF(one.code);
  PyGILState_Release(state);
  return number;
}

// Takes Python's lock.
std::string text_of_stack(int number) {
  if (number == 0 || !python_runs()) return "";
  Stack stack;
  {
    std::lock_guard<std::mutex> lock(places_mutex());
    stack = stacks()[number];
  }
  std::ostringstream text;
  const PyGILState_STATE state = PyGILState_Ensure();
  for (const Frame& one : stack)
    text << "\n      " << PyUnicode_AsUTF8(one.code->co_filename) << ":" << one.line << " in "
         << PyUnicode_AsUTF8(one.code->co_name);
  PyGILState_Release(state);
  return text.str();
}

struct Found {
  Access first, second;
  std::string first_actor, second_actor, block;
};

std::vector<Found>& found_races() {
  static auto* all = new std::vector<Found>;
  return *all;
}
std::atomic<bool> is_raising{false};
thread_local int64_t found_here = 0;

std::string text_of(const Access& access, const std::string& actor) {
  std::ostringstream text;
  text << (access.is_write ? "write" : "read") << " by " << access.place.name << " (submission " << access.place.number
       << ") on " << actor << ", bytes " << access.span.low << " to " << access.span.high;
  const std::string named = label_of(access.place.label);
  if (!named.empty()) text << ", in " << named;
  text << text_of_stack(access.place.stack);
  return text.str();
}

std::string text_of(const Found& race) {
  return "race in " + race.block + ":\n  first  " + text_of(race.first, race.first_actor) + "\n  second " +
         text_of(race.second, race.second_actor) + "\n  and nothing orders the two";
}

}  // namespace

// -- accesses --------------------------------------------------------------------------------------------------------

std::shared_ptr<Access> AccessLog::note(const Access& now, const Clock& before) {
  std::shared_ptr<Access> race;
  size_t kept = 0;
  for (size_t i = 0; i < accesses_.size(); i++) {
    Access& old = accesses_[i];
    // What threads of the host do to each other is not looked at: their locks are not all known.
    const bool is_of_hosts = kind_of(old.actor) == Kind::kHost && kind_of(now.actor) == Kind::kHost;
    const bool is_ordered = old.actor == now.actor || old.step <= before.of(old.actor);
    if (!race && !is_ordered && !is_of_hosts && (old.is_write || now.is_write) && share_bytes(old.span, now.span)) {
      race = std::make_shared<Access>(old);
      continue;  // said once
    }
    // Whatever comes later and races with `old` races with `now` too: it need not be kept. A read makes only reads of its
    // own actor irrelevant, a write everything.
    const bool is_over = covers(now.span, old.span) && is_ordered && (now.is_write || (!old.is_write && old.actor == now.actor));
    if (!is_over) {
      if (kept != i) accesses_[kept] = std::move(old);
      kept++;
    }
  }
  accesses_.resize(kept);
  if (accesses_.size() >= kAccessesMax) {
    accesses_.erase(accesses_.begin());
    dropped++;
  }
  accesses_.push_back(now);
  return race;
}

bool AccessLog::is_ordered_before(const Clock& clock) const {
  return std::all_of(accesses_.begin(), accesses_.end(),
                     [&](const Access& one) {
                       return kind_of(one.actor) != Kind::kStream || one.step <= clock.of(one.actor);
                     });
}

void AccessLog::forget_ordered(const Clock& clock) {
  accesses_.erase(std::remove_if(accesses_.begin(), accesses_.end(),
                                 [&](const Access& one) { return one.step <= clock.of(one.actor); }),
                  accesses_.end());
}

int64_t dropped_accesses() { return dropped; }

// -- places ----------------------------------------------------------------------------------------------------------

Place here(const char* name) { return {name, ++submissions, current_stack(), label}; }

int set_label(const std::string& text) {
  std::lock_guard<std::mutex> lock(places_mutex());
  const int old = label;
  const auto found = std::find(labels().begin(), labels().end(), text);
  label = static_cast<int>(found - labels().begin());
  if (found == labels().end()) labels().push_back(text);
  return old;
}

std::string label_of(int number) {
  std::lock_guard<std::mutex> lock(places_mutex());
  return labels()[number];
}

void set_stack_depth(int depth) { stack_depth = depth; }

const char* interned(const std::string& name) {
  std::lock_guard<std::mutex> lock(places_mutex());
  static auto* names = new std::unordered_set<std::string>;
  return names->insert(name).first->c_str();
}

// -- races -----------------------------------------------------------------------------------------------------------

void report_race(const Access& first, const Access& second, const std::string& block) {
  Locked lock(state_mutex());
  found_here++;
  found_races().push_back({first, second, name_of(first.actor), name_of(second.actor), block});
}

std::vector<std::string> races() {
  std::vector<Found> all;
  {
    Locked lock(state_mutex());
    all = found_races();
  }
  std::vector<std::string> texts;
  for (const Found& race : all) texts.push_back(text_of(race));
  return texts;
}

void forget_races() {
  Locked lock(state_mutex());
  found_races().clear();
  found_here = 0;
  dropped = 0;
}

void set_raising(bool is_on) { is_raising = is_on; }

void raise_found() {
  if (found_here == 0 || !is_raising) return;
  std::optional<Found> last;
  {
    Locked lock(state_mutex());
    found_here = 0;
    if (!found_races().empty()) last = found_races().back();
  }
  if (last) throw std::runtime_error(text_of(*last));
}

}  // namespace sim
