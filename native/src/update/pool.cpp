#include "tieroff/update/pool.hpp"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "tieroff/errors.hpp"
#include "tieroff/io/service_thread.hpp"

namespace tieroff {

namespace {

using Clock = std::chrono::steady_clock;

// Of one tensor at a time: small enough for the second cache, and enough of them for every thread.
constexpr std::int64_t kSliceElements = std::int64_t{1} << 16;

}  // namespace

// A pool's lock and what it waits with, as gates need them too: a gate may outlive its pool, and the other way round.
struct Signal {
  std::mutex mutex;
  std::condition_variable changed;
};

struct UpdateGate::Shared {
  std::atomic<State> state{State::kShut};
  std::mutex mutex;  // of `listeners`; taken before none, so that pools may look at `state` under their own lock
  std::vector<std::shared_ptr<Signal>> listeners;

  void set(State value) {
    State shut = State::kShut;
    if (!state.compare_exchange_strong(shut, value)) return;
    std::vector<std::shared_ptr<Signal>> told;
    {
      const std::lock_guard lock(mutex);
      told.swap(listeners);
    }
    for (const auto& signal : told) {
      // Whoever looked before is waiting by the time that the lock is free, and hears it.
      const std::lock_guard lock(signal->mutex);
      signal->changed.notify_all();
    }
  }

  void listen(const std::shared_ptr<Signal>& signal) {
    const std::lock_guard lock(mutex);
    listeners.push_back(signal);
  }
};

UpdateGate::UpdateGate() : shared_(std::make_shared<Shared>()) {}
UpdateGate::~UpdateGate() = default;
void UpdateGate::open() { shared_->set(State::kOpen); }
void UpdateGate::fail() { shared_->set(State::kFailed); }
UpdateGate::State UpdateGate::state() const noexcept { return shared_->state.load(); }

struct UpdatePool::State {
  struct Queued {
    std::uint64_t ticket;
    UpdateJob job;
    std::vector<std::shared_ptr<UpdateGate::Shared>> gates;
    Clock::time_point not_before;
    std::size_t part = 0;          // of the next slice
    std::int64_t element = 0;      // of that part
    std::int64_t slices_under_way = 0;
    bool is_cut_up = false;        // the last slice was taken

    [[nodiscard]] bool is_open() const {
      return std::all_of(gates.begin(), gates.end(), [](const auto& gate) { return gate->state.load() == UpdateGate::State::kOpen; });
    }
    [[nodiscard]] bool has_failed() const {
      return std::any_of(gates.begin(), gates.end(), [](const auto& gate) { return gate->state.load() == UpdateGate::State::kFailed; });
    }
  };
  struct Slice {
    Queued* job = nullptr;
    const UpdatePart* part = nullptr;
    std::int64_t first = 0;
    std::int64_t count = 0;
  };

  const std::shared_ptr<Signal> signal = std::make_shared<Signal>();  // there is work, or a job ended; its lock guards all
  std::mutex& mutex = signal->mutex;
  std::condition_variable& changed = signal->changed;
  std::deque<std::unique_ptr<Queued>> jobs;  // in order of ticket; gone when done
  std::set<std::uint64_t> failed;
  std::uint64_t last_ticket = 0;
  std::int64_t delay_ns = 0;
  bool is_closing = false;
  std::atomic<std::int64_t> busy_ns{0};
  std::atomic<std::int64_t> moved_bytes{0};
  std::vector<std::thread> threads;

  // Removes a job that has nothing left to do.
  void finish(const Queued* job) {
    jobs.erase(std::find_if(jobs.begin(), jobs.end(), [job](const auto& other) { return other.get() == job; }));
    changed.notify_all();
  }

  // Jobs that a gate's failure, or the pool's end, keeps from running leave the queue.
  void drop_failed() {
    for (std::size_t i = jobs.size(); i-- > 0;) {
      Queued& job = *jobs[i];
      const bool was_begun = job.part > 0 || job.element > 0 || job.is_cut_up;
      if (was_begun || !(job.has_failed() || (is_closing && !job.is_open()))) continue;
      failed.insert(job.ticket);
      jobs.erase(jobs.begin() + static_cast<std::ptrdiff_t>(i));
      changed.notify_all();
    }
  }

  // Takes the next slice of the first job that may run. Without one, `next` is when to look again, if that is known.
  bool take(Slice& slice, Clock::time_point& next) {
    drop_failed();
    const auto now = Clock::now();
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      Queued& job = *jobs[i];
      if (job.is_cut_up || !job.is_open()) continue;
      if (job.not_before > now && !is_closing) {
        next = std::min(next, job.not_before);
        continue;
      }
      while (job.part < job.job.parts.size() && job.element >= job.job.parts[job.part].count) {
        ++job.part;
        job.element = 0;
      }
      if (job.part == job.job.parts.size()) {
        job.is_cut_up = true;
        if (job.slices_under_way == 0) {
          finish(&job);
          --i;
        }
        continue;
      }
      const UpdatePart& part = job.job.parts[job.part];
      slice = {&job, &part, job.element, std::min(kSliceElements, part.count - job.element)};
      job.element += slice.count;
      ++job.slices_under_way;
      return true;
    }
    return false;
  }

  void run() {
    std::unique_lock lock(mutex);
    while (true) {
      Slice slice;
      auto next = Clock::time_point::max();
      if (!take(slice, next)) {
        if (is_closing && jobs.empty()) return;
        if (next == Clock::time_point::max())
          changed.wait(lock);
        else
          changed.wait_until(lock, next);
        continue;
      }
      lock.unlock();
      const auto begin = Clock::now();
      update_elements(*slice.part, slice.first, slice.count);
      busy_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
      moved_bytes += slice.count * moved_bytes_per_element(*slice.part);
      lock.lock();
      --slice.job->slices_under_way;
      if (slice.job->is_cut_up && slice.job->slices_under_way == 0) finish(slice.job);
    }
  }

  [[nodiscard]] bool has(std::uint64_t ticket) const {
    return std::any_of(jobs.begin(), jobs.end(), [ticket](const auto& job) { return job->ticket == ticket; });
  }
};

UpdatePool::UpdatePool(std::size_t thread_count, std::vector<int> cpus) : pid_(getpid()), state_(std::make_unique<State>()) {
  if (thread_count == 0) throw std::invalid_argument("expected at least one thread");
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus)
    if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  try {
    for (std::size_t i = 0; i < thread_count; ++i) {
      state_->threads.push_back(
          start_service_thread("tieroff-upd-" + std::to_string(i), [state = state_.get()] { state->run(); }));
      // Where the system refuses (fewer processors are allowed), the threads run where they may: slower, not wrong.
      if (!cpus.empty()) static_cast<void>(pthread_setaffinity_np(state_->threads.back().native_handle(), sizeof(set), &set));
    }
  } catch (...) {
    close();  // a thread that could not be started: join those that were
    throw;
  }
}

UpdatePool::~UpdatePool() {
  if (getpid() != pid_) {
    static_cast<void>(state_.release());
    return;
  }
  close();
}

std::uint64_t UpdatePool::submit(UpdateJob job, const std::vector<std::shared_ptr<UpdateGate>>& gates) {
  if (getpid() != pid_) throw StateError("this process was forked from the one that the update pool runs in");
  auto queued = std::make_unique<State::Queued>();
  queued->job = std::move(job);
  for (const auto& gate : gates) queued->gates.push_back(gate->shared_);
  for (const auto& gate : queued->gates) gate->listen(state_->signal);
  const std::lock_guard lock(state_->mutex);
  if (state_->is_closing) throw StateError("the update pool is closed");
  queued->ticket = state_->last_ticket + 1;
  queued->not_before = Clock::now() + std::chrono::nanoseconds(state_->delay_ns);
  const State::Queued& kept = *state_->jobs.emplace_back(std::move(queued));  // the last that can throw
  for (float* counter : kept.job.counters) *counter += 1.0F;
  state_->changed.notify_all();
  return ++state_->last_ticket;
}

std::uint64_t UpdatePool::last_ticket() const {
  const std::lock_guard lock(state_->mutex);
  return state_->last_ticket;
}

bool UpdatePool::is_done(std::uint64_t ticket) const {
  const std::lock_guard lock(state_->mutex);
  return ticket <= state_->last_ticket && !state_->has(ticket);
}

bool UpdatePool::has_failed(std::uint64_t ticket) const {
  const std::lock_guard lock(state_->mutex);
  return state_->failed.contains(ticket);
}

bool UpdatePool::wait(std::uint64_t ticket, double timeout_s) {
  if (getpid() != pid_) throw StateError("this process was forked from the one that the update pool runs in");
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return !state_->has(ticket); });
}

bool UpdatePool::settle(double timeout_s) {
  if (getpid() != pid_) throw StateError("this process was forked from the one that the update pool runs in");
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return state_->jobs.empty(); });
}

void UpdatePool::delay(std::int64_t delay_ns) {
  const std::lock_guard lock(state_->mutex);
  state_->delay_ns = delay_ns;
}

void UpdatePool::close() {
  if (getpid() != pid_) return;
  {
    const std::lock_guard lock(state_->mutex);
    state_->is_closing = true;
    state_->changed.notify_all();
  }
  for (std::thread& thread : state_->threads)
    if (thread.joinable()) thread.join();
}

std::size_t UpdatePool::thread_count() const noexcept { return state_->threads.size(); }
std::int64_t UpdatePool::busy_ns() const noexcept { return state_->busy_ns.load(); }
std::int64_t UpdatePool::moved_bytes() const noexcept { return state_->moved_bytes.load(); }

}  // namespace tieroff
