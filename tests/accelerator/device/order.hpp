// What happened before what: a vector clock for each stream and each thread of the host.
#pragma once
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace sim {

// A stream, a thread of the host, or an agent that acts for one (a drive that reads a block, say).
using Actor = uint32_t;

struct Clock {
  std::vector<uint64_t> steps;  // per actor: the last of its steps that happened before
  int64_t time_ns = 0;          // the device time by which all of that is over

  uint64_t of(Actor actor) const { return actor < steps.size() ? steps[actor] : 0; }
  void set(Actor actor, uint64_t step);
  void join(const Clock& other);
};

// Guards clocks, blocks, pins and what is noted of accesses. Whoever holds it waits for neither a stream nor Python's lock:
// tasks of streams take it too.
std::recursive_mutex& state_mutex();
using Locked = std::lock_guard<std::recursive_mutex>;

enum class Kind { kStream, kHost, kAgent };

Actor new_stream_actor(const std::string& name);
Kind kind_of(Actor actor);
Clock& clock_of(Actor actor);
const std::string& name_of(Actor actor);

// The calling thread. All of autograd's own threads, and a thread that waits in `backward`, are one actor: what they tell each
// other goes through locks in C++ that nobody sees from here.
Actor host_actor();
void enter_backward();
void leave_backward();

// What the caller did so far happens before whoever joins `into` (the caller's next steps do not).
void release_to(Clock& into);
void acquire_from(const Clock& from);
// The same for a thread that has ended, by its id in the kernel.
void acquire_from_thread(int64_t kernel_id);

// An agent starts with what the calling thread knows; ending it tells the calling thread.
Actor begin_agent(const std::string& name);
void end_agent(Actor agent);

void forget_order();

}  // namespace sim
