#include "tieroff/engine.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tieroff/chunk.hpp"

namespace tieroff {
namespace {

using TransferPtr = std::shared_ptr<Transfer>;

// Transfers of one direction, first in, first out; several threads work on the chunks of the first one.
struct Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<TransferPtr> waiting;  // those with chunks that nobody has claimed
  bool is_closing = false;
};

struct Claim {
  TransferPtr transfer;  // empty: the queue is closing
  std::size_t chunk = 0;
};

// Takes the next chunk to run, waiting for one. What is left of transfers that failed is dropped on the way.
Claim take(Queue& queue) {
  std::unique_lock lock(queue.mutex);
  for (;;) {
    queue.changed.wait(lock, [&] { return queue.is_closing || !queue.waiting.empty(); });
    if (queue.waiting.empty()) return {};
    TransferPtr transfer = queue.waiting.front();
    if (transfer->error() != 0) {
      queue.waiting.pop_front();
      transfer->end_chunks(transfer->drop_unclaimed());
      continue;
    }
    const std::size_t chunk = transfer->claim();
    if (transfer->claimed_count() == transfer->chunk_count()) queue.waiting.pop_front();
    return {std::move(transfer), chunk};
  }
}

void work(Queue& queue, FaultTable& faults, const BounceBuffer& bounce) {
  for (Claim claim = take(queue); claim.transfer; claim = take(queue)) {
    run_chunk(*claim.transfer, claim.chunk, bounce, faults);
    claim.transfer->end_chunks(1);
  }
}

void close_queue(Queue& queue) {
  std::deque<TransferPtr> dropped;
  {
    const std::lock_guard lock(queue.mutex);
    queue.is_closing = true;
    dropped.swap(queue.waiting);
    for (const TransferPtr& transfer : dropped) {
      transfer->fail(ECANCELED);
      transfer->end_chunks(transfer->drop_unclaimed());
    }
  }
  queue.changed.notify_all();
}

bool is_power_of_two(std::size_t value) { return value != 0 && (value & (value - 1)) == 0; }

// Signals are for the program's own threads; one that lands here would only interrupt a transfer.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

}  // namespace

struct Engine::State {
  Queue reads;
  Queue writes;
  FaultTable faults;
  std::shared_ptr<Signal> signal = std::make_shared<Signal>();
  std::vector<BounceBuffer> bounce_buffers;
  std::vector<std::thread> threads;
  std::mutex close_mutex;  // the second of two closers waits for the first
  std::atomic<bool> is_closed{false};

  void start(Queue& queue, const char* name, std::size_t index, const BounceBuffer& bounce) {
    threads.emplace_back([this, &queue, &bounce] { work(queue, faults, bounce); });
    pthread_setname_np(threads.back().native_handle(), (std::string(name) + std::to_string(index)).c_str());
  }
};

Engine::Engine(const EngineOptions& options) : options_(options), pid_(getpid()), state_(std::make_unique<State>()) {
  if (options.read_thread_count == 0 || options.write_thread_count == 0)
    throw std::invalid_argument("expected at least one thread for each direction");
  if (!is_power_of_two(options.chunk_bytes) || options.chunk_bytes < 4096)
    throw std::invalid_argument("expected chunk_bytes to be a power of two, 4096 or more");
  const std::size_t thread_count = options.read_thread_count + options.write_thread_count;
  for (std::size_t i = 0; i < thread_count; ++i) state_->bounce_buffers.emplace_back(options.chunk_bytes);
  const SignalsBlocked blocked;
  try {
    for (std::size_t i = 0; i < options.read_thread_count; ++i)
      state_->start(state_->reads, "tieroff-read", i, state_->bounce_buffers[i]);
    for (std::size_t i = 0; i < options.write_thread_count; ++i)
      state_->start(state_->writes, "tieroff-write", i, state_->bounce_buffers[options.read_thread_count + i]);
  } catch (...) {
    close();  // a thread that could not be started: join those that were
    throw;
  }
}

Engine::~Engine() {
  if (getpid() != pid_) {
    static_cast<void>(state_.release());  // [Note: one engine, one process]
    return;
  }
  close();
}

std::shared_ptr<Transfer> Engine::submit(const Request& request, bool is_for_readers) {
  check_process();
  if (request.size_bytes == 0) throw std::invalid_argument("expected a size above 0");
  if (request.memory == nullptr && !(request.kind == Kind::kRead && request.with_crc))
    throw std::invalid_argument("expected an address, or a read with a checksum, got neither");
  if (request.kind != Kind::kCopy) {
    if (!is_power_of_two(request.block_bytes) || request.block_bytes > options_.chunk_bytes)
      throw std::invalid_argument("expected block_bytes to be a power of two, not above chunk_bytes");
    if (!is_power_of_two(request.memory_alignment))
      throw std::invalid_argument("expected memory_alignment to be a power of two");
    if (request.offset % request.block_bytes != 0)
      throw std::invalid_argument("expected an offset that is a multiple of block_bytes");
  }
  auto transfer = std::make_shared<Transfer>(request, options_.chunk_bytes, state_->signal);
  Queue& queue = is_for_readers ? state_->reads : state_->writes;
  {
    const std::lock_guard lock(queue.mutex);
    if (queue.is_closing) throw StateError("expected an open engine, got one that is closed: make a new one");
    queue.waiting.push_back(transfer);
  }
  if (transfer->chunk_count() > 1)
    queue.changed.notify_all();
  else
    queue.changed.notify_one();
  return transfer;
}

bool Engine::cancel(const std::shared_ptr<Transfer>& transfer) {
  check_process();
  for (Queue* queue : {&state_->reads, &state_->writes}) {
    const std::lock_guard lock(queue->mutex);
    const auto found = std::find(queue->waiting.begin(), queue->waiting.end(), transfer);
    if (found == queue->waiting.end()) continue;
    if (transfer->claimed_count() != 0) return false;
    queue->waiting.erase(found);
    transfer->fail(ECANCELED);
    transfer->end_chunks(transfer->drop_unclaimed());
    return true;
  }
  return false;
}

void Engine::close() {
  if (getpid() != pid_) return;
  const std::lock_guard lock(state_->close_mutex);
  state_->is_closed.store(true);
  close_queue(state_->reads);
  close_queue(state_->writes);
  state_->faults.release(true);
  for (std::thread& thread : state_->threads)
    if (thread.joinable()) thread.join();
}

bool Engine::is_closed() const { return state_->is_closed.load(); }

FaultTable& Engine::faults() {
  check_process();
  return state_->faults;
}

void Engine::check_process() const {
  if (getpid() != pid_)
    throw StateError("expected a call in process " + std::to_string(pid_) + ", which made this engine, got one in " +
                     std::to_string(getpid()) + ": an engine does not survive a fork, make one in the child");
}

DirectAlignment direct_alignment(int fd) {
  // struct statx of the kernel's interface: 256 bytes, with stx_mask at 0, stx_dio_mem_align at 0x98 and
  // stx_dio_offset_align at 0x9c. By position, since C libraries older than the fields lack their names.
  constexpr unsigned kMaskDirectAlignment = 0x2000;
  std::array<unsigned char, 256> buffer{};
  DirectAlignment alignment;
  if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, kMaskDirectAlignment, buffer.data()) != 0) return alignment;
  std::uint32_t mask = 0;
  std::uint32_t memory = 0;
  std::uint32_t offset = 0;
  std::memcpy(&mask, buffer.data(), sizeof mask);
  std::memcpy(&memory, buffer.data() + 0x98, sizeof memory);
  std::memcpy(&offset, buffer.data() + 0x9c, sizeof offset);
  if ((mask & kMaskDirectAlignment) != 0) alignment = {memory, offset};
  return alignment;
}

}  // namespace tieroff
