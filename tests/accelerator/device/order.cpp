#include "order.hpp"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <map>

namespace sim {

namespace {

struct Known {
  std::string name;
  Clock clock;
  Kind kind = Kind::kStream;
  bool is_free = false;
};

std::deque<Known>& known() {
  static auto* all = new std::deque<Known>;
  return *all;
}

std::map<int64_t, Actor>& threads() {
  static auto* all = new std::map<int64_t, Actor>;
  return *all;
}

uint64_t generation = 1;  // raised by `forget_order`: actors of before are gone
Actor autograd_actor = 0;
bool has_autograd_actor = false;

Actor add(const std::string& name, Kind kind) {
  known().push_back({name, {}, kind, false});
  const auto actor = static_cast<Actor>(known().size() - 1);
  known()[actor].clock.set(actor, 1);
  return actor;
}

// A clock's length is the number of actors that ever were. One that has ended is given again, but only to somebody who
// knows all that it did: then its older accesses are ordered before the new ones, as the shared number says.
Actor reuse_or_add(const std::string& name, const Clock& start, Kind kind) {
  for (Actor actor = 0; actor < known().size(); actor++) {
    auto& old = known()[actor];
    const uint64_t last = old.clock.of(actor);
    if (!old.is_free || start.of(actor) < last) continue;
    old = {name, start, kind, false};
    old.clock.set(actor, last + 1);
    return actor;
  }
  const Actor actor = add(name, kind);
  known()[actor].clock.join(start);
  return actor;
}

// Whoever started a thread did so after something; what all threads of the host know is the most that it can have been.
Clock of_all_hosts() {
  Clock all;
  for (const auto& one : known())
    if (one.kind == Kind::kHost) all.join(one.clock);
  return all;
}

std::string thread_name() {
  char name[32] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return name;
}

struct Thread {
  Actor actor = 0;
  uint64_t generation = 0;
  int backward_depth = 0;
  int64_t kernel_id = 0;

  ~Thread() {
    if (kernel_id == 0) return;
    Locked lock(state_mutex());
    if (generation == sim::generation && !(has_autograd_actor && actor == autograd_actor)) known()[actor].is_free = true;
  }
};
thread_local Thread self;

Actor autograd() {
  if (!has_autograd_actor) {
    autograd_actor = add("autograd", Kind::kHost);
    has_autograd_actor = true;
  }
  return autograd_actor;
}

Actor thread_actor() {
  if (self.generation == generation) return self.actor;
  self.kernel_id = syscall(SYS_gettid);
  const std::string name = thread_name();
  const bool is_autograd = name.rfind("pt_autograd", 0) == 0;
  const bool is_main = self.kernel_id == getpid();
  self.actor = is_autograd ? autograd()
                           : reuse_or_add(is_main ? "host" : "host:" + std::to_string(self.kernel_id), of_all_hosts(), Kind::kHost);
  self.generation = generation;
  threads()[self.kernel_id] = self.actor;
  return self.actor;
}

}  // namespace

void Clock::set(Actor actor, uint64_t step) {
  if (actor >= steps.size()) steps.resize(actor + 1);
  steps[actor] = step;
}

void Clock::join(const Clock& other) {
  if (other.steps.size() > steps.size()) steps.resize(other.steps.size());
  for (size_t i = 0; i < other.steps.size(); i++) steps[i] = std::max(steps[i], other.steps[i]);
  time_ns = std::max(time_ns, other.time_ns);
}

std::recursive_mutex& state_mutex() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}

Actor new_stream_actor(const std::string& name) {
  Locked lock(state_mutex());
  return add(name, Kind::kStream);
}

Kind kind_of(Actor actor) { return known()[actor].kind; }

Clock& clock_of(Actor actor) { return known()[actor].clock; }

const std::string& name_of(Actor actor) { return known()[actor].name; }

Actor host_actor() {
  Locked lock(state_mutex());
  const Actor own = thread_actor();
  return self.backward_depth > 0 ? autograd() : own;
}

void enter_backward() {
  Locked lock(state_mutex());
  const Actor own = host_actor();
  self.backward_depth++;
  clock_of(autograd()).join(clock_of(own));
  clock_of(own).set(own, clock_of(own).of(own) + 1);
}

void leave_backward() {
  Locked lock(state_mutex());
  self.backward_depth--;
  const Actor own = host_actor();
  clock_of(own).join(clock_of(autograd()));
  clock_of(autograd()).set(autograd(), clock_of(autograd()).of(autograd()) + 1);
}

void release_to(Clock& into) {
  Locked lock(state_mutex());
  const Actor own = host_actor();
  into.join(clock_of(own));
  clock_of(own).set(own, clock_of(own).of(own) + 1);
}

void acquire_from(const Clock& from) {
  Locked lock(state_mutex());
  clock_of(host_actor()).join(from);
}

void acquire_from_thread(int64_t kernel_id) {
  Locked lock(state_mutex());
  const auto found = threads().find(kernel_id);
  if (found == threads().end()) return;
  acquire_from(clock_of(found->second));
}

Actor begin_agent(const std::string& name) {
  Locked lock(state_mutex());
  Clock start;
  release_to(start);
  return reuse_or_add(name, start, Kind::kAgent);
}

void end_agent(Actor agent) {
  Locked lock(state_mutex());
  acquire_from(clock_of(agent));
  known()[agent].is_free = true;
}

void forget_order() {
  Locked lock(state_mutex());
  // Streams keep their actors, whose clocks start again; the rest is found anew.
  generation++;
  for (Actor actor = 0; actor < known().size(); actor++) {
    auto& one = known()[actor];
    const uint64_t last = one.clock.of(actor);
    one.clock = {};
    one.clock.set(actor, last + 1);
    if (one.kind != Kind::kStream) one.is_free = true;
  }
  threads().clear();
  has_autograd_actor = false;
}

}  // namespace sim
