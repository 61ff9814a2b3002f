#include <Python.h>

#include "stream.hpp"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "memory.hpp"
#include "pinned.hpp"

namespace sim {

namespace {

std::atomic<bool> is_forked{false};
thread_local bool on_stream = false;
thread_local int device_now = 0;
thread_local int64_t stream_now[kDevices] = {};

struct Streams {
  std::vector<std::unique_ptr<Stream>> all[kDevices];
  int64_t dealt[kDevices] = {};
};

Streams& streams() {
  static auto* made = [] {
    pthread_atfork(nullptr, nullptr, [] { is_forked = true; });
    return new Streams;
  }();
  return *made;
}

std::string failures[kDevices];

// A thread that waits lets Python's lock go: a kernel in Python, or a destructor, may need it before the wait can end.
class WithoutPython {
 public:
  WithoutPython() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutPython() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_;
};

int64_t real_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

// The stream goes on from what the calling thread knows, and from there on neither knows more of the other.
void follow_host(Stream& stream) { release_to(clock_of(stream.actor)); }

void check_touch(const Submission& what, const Touch& touch, const Clock& clock, const Place& place) {
  Held held = held_at(touch.address);
  if (held.log == nullptr) return;
  const int64_t offset = static_cast<const char*>(touch.address) - held.base;
  Access access{what.stream.actor, clock.of(what.stream.actor), touch.is_write, touch.span, place};
  access.span.low += offset;
  access.span.high += offset;
  if (const auto first = held.log->note(access, clock)) report_race(*first, access, describe(held));
}

}  // namespace

// -- streams ---------------------------------------------------------------------------------------------------------

Stream::Stream(int device, int64_t id)
    : device(device),
      id(id),
      actor(new_stream_actor("stream " + std::to_string(id) + " of sim:" + std::to_string(device))),
      name(std::to_string(id)) {
  std::thread([this] {
    on_stream = true;
    device_now = this->device;
    pthread_setname_np(pthread_self(), ("sim_" + std::to_string(this->device) + "_" + this->name).c_str());
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex);
        given.wait(lock, [&] { return !tasks.empty(); });
        task = std::move(tasks.front());
        tasks.pop_front();
      }
      task();
      task = nullptr;
      {
        std::lock_guard<std::mutex> lock(mutex);
        done++;
      }
      over.notify_all();
    }
  }).detach();
}

int64_t Stream::push(std::function<void()> task) {
  if (is_forked) return issued;  // as when a child ends, and its tensors die
  std::lock_guard<std::mutex> lock(mutex);
  tasks.push_back(std::move(task));
  given.notify_one();
  return ++issued;
}

void Stream::wait(int64_t ticket) {
  if (is_over(ticket)) return;
  const WithoutPython released;
  std::unique_lock<std::mutex> lock(mutex);
  over.wait(lock, [&] { return done >= ticket; });
}

bool Stream::is_over(int64_t ticket) {
  if (is_forked) return true;
  std::lock_guard<std::mutex> lock(mutex);
  return done >= ticket;
}

int64_t Stream::last_ticket() {
  std::lock_guard<std::mutex> lock(mutex);
  return issued;
}

bool is_in_forked_child() { return is_forked; }

Stream& stream_of(int device, int64_t id) {
  if (is_forked) throw std::runtime_error("sim: the device cannot be used in a forked process");
  Locked lock(state_mutex());
  auto& all = streams().all[device];
  while (static_cast<int64_t>(all.size()) <= id) all.push_back(std::make_unique<Stream>(device, all.size()));
  return *all[id];
}

Stream& new_stream(int device) {
  Locked lock(state_mutex());
  return stream_of(device, 1 + streams().dealt[device]++ % (kStreams - 1));
}

std::vector<Stream*> streams_of(int device) {
  Locked lock(state_mutex());
  std::vector<Stream*> all;
  for (auto& one : streams().all[device]) all.push_back(one.get());
  return all;
}

int current_device() { return device_now; }

void set_current_device(int device) {
  if (device < 0 || device >= kDevices)
    throw std::runtime_error("sim: expected a device from 0 to " + std::to_string(kDevices - 1) + ", got " + std::to_string(device));
  device_now = device;
}

Stream& current_stream(int device) { return stream_of(device, stream_now[device]); }

int64_t exchange_stream(int device, int64_t id) {
  const int64_t old = stream_now[device];
  stream_now[device] = id;
  return old;
}

bool is_stream_thread() { return on_stream; }

// -- submissions -----------------------------------------------------------------------------------------------------

int64_t submit(const Submission& what, std::function<void()> task) {
  raise_failure(what.stream.device);
  const Place place = here(what.name);
  Locked lock(state_mutex());
  follow_host(what.stream);
  Clock& clock = clock_of(what.stream.actor);
  clock.set(what.stream.actor, clock.of(what.stream.actor) + 1);
  for (const Touch& touch : what.touches) check_touch(what, touch, clock, place);
  clock.time_ns = reserve(what.stream.device, what.engine, what.cost, clock.time_ns, what.stream.name, what.name);
  return task ? what.stream.push(std::move(task)) : 0;
}

void synchronize(Stream& stream) {
  Clock clock;
  {
    Locked lock(state_mutex());
    clock = clock_of(stream.actor);
  }
  counters().host_waits++;
  stream.wait(stream.last_ticket());
  acquire_from(clock);
  raise_failure(stream.device);
}

void synchronize_device(int device) {
  for (Stream* one : streams_of(device)) synchronize(*one);
}

void order_after(Stream& later, Stream& earlier) {
  auto event = std::make_shared<Event>();
  record(event, earlier);
  wait_event(later, event);
}

bool is_idle(Stream& stream) {
  // Under the lock nothing is submitted: what the clock knows is what was done.
  Locked lock(state_mutex());
  if (!stream.is_over(stream.last_ticket())) return false;
  acquire_from(clock_of(stream.actor));
  return true;
}

// -- events ----------------------------------------------------------------------------------------------------------

void record(const EventPtr& event, Stream& stream) {
  Locked lock(state_mutex());
  follow_host(stream);
  event->clock = clock_of(stream.actor);
  event->device = stream.device;
  uint64_t value;
  {
    std::lock_guard<std::mutex> own(event->mutex);
    value = ++event->issued;
  }
  stream.push([event, value] {
    {
      std::lock_guard<std::mutex> own(event->mutex);
      event->done = value;
      event->real_ns = real_ns();
    }
    event->over.notify_all();
  });
}

void wait_event(Stream& stream, const EventPtr& event) {
  Locked lock(state_mutex());
  follow_host(stream);
  clock_of(stream.actor).join(event->clock);
  uint64_t value;
  {
    std::lock_guard<std::mutex> own(event->mutex);
    value = event->issued;
  }
  stream.push([event, value] {
    std::unique_lock<std::mutex> own(event->mutex);
    event->over.wait(own, [&] { return event->done >= value; });
  });
}

bool is_over(const EventPtr& event) {
  Locked lock(state_mutex());
  {
    std::lock_guard<std::mutex> own(event->mutex);
    if (event->done < event->issued) return false;
  }
  acquire_from(event->clock);
  return true;
}

void synchronize(const EventPtr& event) {
  Clock clock;
  uint64_t value;
  {
    Locked lock(state_mutex());
    clock = event->clock;
    std::lock_guard<std::mutex> own(event->mutex);
    value = event->issued;
    if (event->done < value) counters().host_waits++;
  }
  {
    const WithoutPython released;
    std::unique_lock<std::mutex> own(event->mutex);
    event->over.wait(own, [&] { return event->done >= value; });
  }
  acquire_from(clock);
  raise_failure(event->device);
}

double elapsed_ms(const EventPtr& start, const EventPtr& stop) {
  Locked lock(state_mutex());
  constexpr double kNsPerMs = 1e6;
  if (has_rates()) return static_cast<double>(stop->clock.time_ns - start->clock.time_ns) / kNsPerMs;
  return static_cast<double>(stop->real_ns - start->real_ns) / kNsPerMs;
}

EventPtr hold(Stream& stream) {
  auto held = std::make_shared<Event>();
  stream.push([held] {
    std::unique_lock<std::mutex> own(held->mutex);
    held->over.wait(own, [&] { return held->done > 0; });
  });
  return held;
}

void let_go(const EventPtr& held) {
  {
    std::lock_guard<std::mutex> own(held->mutex);
    held->done = 1;
  }
  held->over.notify_all();
}

// -- failures and counters -------------------------------------------------------------------------------------------

void fail_device(int device, const std::string& why) {
  Locked lock(state_mutex());
  if (failures[device].empty()) failures[device] = why;
}

void raise_failure(int device) {
  Locked lock(state_mutex());
  if (!failures[device].empty()) throw std::runtime_error("sim:" + std::to_string(device) + ": " + failures[device]);
}

void forget_failures() {
  Locked lock(state_mutex());
  for (auto& one : failures) one.clear();
}

Counters& counters() {
  static auto* all = new Counters;
  return *all;
}

}  // namespace sim
