// Streams with a thread each, events, and what is submitted to them.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "clock.hpp"
#include "races.hpp"

namespace sim {

constexpr int kDevices = 2;
constexpr int kStreams = 33;  // per device: the default one, and the pool that new ones are dealt from, round and round

struct Stream {
  int device;
  int64_t id;
  Actor actor;
  std::string name;
  std::mutex mutex;
  std::condition_variable given, over;
  std::deque<std::function<void()>> tasks;
  int64_t issued = 0, done = 0;

  Stream(int device, int64_t id);
  int64_t push(std::function<void()> task);  // returns the ticket to wait for
  void wait(int64_t ticket);
  bool is_over(int64_t ticket);
  int64_t last_ticket();
};

Stream& stream_of(int device, int64_t id);
Stream& new_stream(int device);
std::vector<Stream*> streams_of(int device);
int current_device();
void set_current_device(int device);  // raises where there is no such device
Stream& current_stream(int device);
int64_t exchange_stream(int device, int64_t id);
bool is_stream_thread();
// In a child of the process that has the streams: their threads are not there, and may have held any lock.
bool is_in_forked_child();

struct Touch {
  const void* address;  // of device memory, or of memory of the host, which is checked where it is pinned
  Span span;            // from there
  bool is_write;
};

struct Submission {
  const char* name;
  Stream& stream;
  std::vector<Touch> touches;
  Engine engine = Engine::kNone;
  Cost cost = {};
};

// Queues a task behind all that its stream has, checks what it touches, and gives it its place in device time.
int64_t submit(const Submission& what, std::function<void()> task);
// The calling thread waits for all that the stream had when it was called, or the device.
void synchronize(Stream& stream);
void synchronize_device(int device);
// One stream waits for all that another one has by now; no thread of the host does.
void order_after(Stream& later, Stream& earlier);
bool is_idle(Stream& stream);

struct Event {
  std::mutex mutex;
  std::condition_variable over;
  uint64_t issued = 0, done = 0;
  int64_t real_ns = 0;
  Clock clock;  // as of its last record
  int device = 0;
};
using EventPtr = std::shared_ptr<Event>;

void record(const EventPtr& event, Stream& stream);
void wait_event(Stream& stream, const EventPtr& event);
bool is_over(const EventPtr& event);
void synchronize(const EventPtr& event);
double elapsed_ms(const EventPtr& start, const EventPtr& stop);
// The stream does nothing of what comes after this, until it is let go by setting the event's end.
EventPtr hold(Stream& stream);
void let_go(const EventPtr& held);

// A kernel failed after it was queued: everything else that is asked of its device raises this.
void fail_device(int device, const std::string& why);
void raise_failure(int device);
void forget_failures();

struct Counters {
  std::atomic<int64_t> kernels{0}, synchronous_kernels{0}, copies_to_device{0}, copies_to_host{0}, bytes_to_device{0},
      bytes_to_host{0}, blocking_copies{0}, unpinned_async_copies{0}, host_waits{0}, cross_device_waits{0},
      unregistered_in_flight{0}, unordered_frees{0}, refused_registrations{0};
};
Counters& counters();

}  // namespace sim
