#include "pinned.hpp"

#include <atomic>
#include <cstdlib>
#include <map>

namespace sim {

namespace {

struct Pin {
  size_t size = 0;
  AccessLog log;
  int flights = 0;
  bool is_freed = false;  // its owner let it go while copies were under way
  bool is_allocated = false;
};


std::map<char*, Pin>& pins() {
  static auto* all = new std::map<char*, Pin>;
  return *all;
}
std::atomic<size_t> pinned{0};
size_t limit = SIZE_MAX;
int last_error = kOk;

std::map<char*, Pin>::iterator pin_at(const void* address) {
  auto* at = const_cast<char*>(static_cast<const char*>(address));
  const auto next = pins().upper_bound(at);
  if (next == pins().begin()) return pins().end();
  const auto found = std::prev(next);
  return at < found->first + found->second.size ? found : pins().end();
}

int refuse(int code) {
  counters().refused_registrations++;
  last_error = code;
  return code;
}

int add(void* address, size_t size, bool is_allocated) {
  auto* at = static_cast<char*>(address);
  if (address == nullptr || size == 0) return refuse(kInvalidValue);
  const auto next = pins().lower_bound(at);
  const bool overlaps_next = next != pins().end() && next->first < at + size;
  if (overlaps_next || pin_at(at) != pins().end()) return refuse(kAlreadyRegistered);
  if (pinned + size > limit) return refuse(kNoMemory);
  Pin pin;
  pin.size = size;
  pin.is_allocated = is_allocated;
  pins().emplace(at, std::move(pin));
  pinned += size;
  return kOk;
}

void drop(std::map<char*, Pin>::iterator found) {
  pinned -= found->second.size;
  char* address = found->second.is_allocated ? found->first : nullptr;
  pins().erase(found);
  std::free(address);
}

}  // namespace

int host_register(void* address, size_t size) {
  Locked lock(state_mutex());
  return add(address, size, false);
}

int host_unregister(void* address) {
  Locked lock(state_mutex());
  const auto found = pins().find(static_cast<char*>(address));
  if (found == pins().end() || found->second.is_allocated) return refuse(kNotRegistered);
  // By the clocks, not by what happens to be over.
  if (!found->second.log.is_ordered_before(clock_of(host_actor()))) counters().unregistered_in_flight++;
  drop(found);
  return kOk;
}

void set_pin_limit(size_t bytes) {
  Locked lock(state_mutex());
  limit = bytes;
}

int take_last_error() {
  Locked lock(state_mutex());
  const int error = last_error;
  last_error = kOk;
  return error;
}

void raise_last_error() {
  const int error = take_last_error();
  if (error != kOk)
    throw std::runtime_error("sim error " + std::to_string(error) + ": an earlier call was refused, and nobody took its error");
}

void* allocate_pinned(size_t size) {
  if (size == 0) return nullptr;
  void* address = nullptr;
  if (posix_memalign(&address, kPage, (size + kPage - 1) / kPage * kPage) != 0) throw std::bad_alloc();
  Locked lock(state_mutex());
  if (add(address, size, true) != kOk) {
    take_last_error();
    std::free(address);
    throw OutOfMemory("sim out of memory: expected to pin " + std::to_string(size) + " bytes of host memory");
  }
  return address;
}

void free_pinned(void* address) {
  if (address == nullptr || is_in_forked_child()) return;
  Locked lock(state_mutex());
  const auto found = pins().find(static_cast<char*>(address));
  if (found == pins().end()) return;
  found->second.is_freed = true;
  if (found->second.flights == 0) drop(found);
}

bool is_pinned(const void* address, size_t size) {
  if (pinned == 0) return false;
  Locked lock(state_mutex());
  const auto found = pin_at(address);
  return found != pins().end() && static_cast<const char*>(address) + size <= found->first + found->second.size;
}

bool has_pinned() { return pinned > 0; }
size_t pinned_bytes() { return pinned; }

void begin_flight(const void* address) {
  Locked lock(state_mutex());
  const auto found = pin_at(address);
  if (found != pins().end()) found->second.flights++;
}

void end_flight(const void* address) {
  Locked lock(state_mutex());
  const auto found = pin_at(address);
  // Registered memory may have been unregistered meanwhile, and registered again.
  if (found == pins().end() || found->second.flights == 0) return;
  if (--found->second.flights == 0 && found->second.is_freed) drop(found);
}

Held pinned_at(const void* address) {
  const auto found = pin_at(address);
  if (found == pins().end()) return {};
  return {&found->second.log, found->first, found->second.size, false};
}

void note_host_access(const void* address, size_t size, bool is_write, const char* name, const Actor* agent) {
  if (pinned == 0 || size == 0) return;
  const auto* start = static_cast<const char*>(address);
  {
    Locked lock(state_mutex());
    const auto next = pins().upper_bound(const_cast<char*>(start) + size - 1);
    if (next == pins().begin() || std::prev(next)->first + std::prev(next)->second.size <= start) return;
  }
  const Place place = here(name);
  Locked lock(state_mutex());
  const Actor actor = agent != nullptr ? *agent : host_actor();
  const Clock& clock = clock_of(actor);
  // Several registered ranges may lie side by side.
  for (auto at = pins().begin(); at != pins().end(); ++at) {
    char* low = std::max(at->first, const_cast<char*>(start));
    char* high = std::min(at->first + at->second.size, const_cast<char*>(start) + size);
    if (low >= high) continue;
    Access access{actor, clock.of(actor), is_write, {}, place};
    access.span.low = low - at->first;
    access.span.high = high - at->first;
    if (const auto first = at->second.log.note(access, clock))
      report_race(*first, access, describe({&at->second.log, at->first, at->second.size, false}));
  }
}

void forget_pinned_accesses() {
  Locked lock(state_mutex());
  for (auto& [address, pin] : pins()) pin.log.clear();
}

}  // namespace sim
