#include "tieroff/io/ring_lane.hpp"

#include <cerrno>
#include <system_error>

#ifdef TIEROFF_WITH_LIBURING

#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "tieroff/io/service_thread.hpp"

namespace tieroff {
namespace {

constexpr std::size_t kQueueDepthMax = 1024;
constexpr std::size_t kTailBytes = 4096;

// Whether the kernel makes all calls that a lane needs: an io_uring of before 5.6 does not.
bool makes_calls(io_uring& ring) noexcept {
  io_uring_probe* probe = io_uring_get_probe_ring(&ring);
  bool makes_all = probe != nullptr;
  for (const int operation : {IORING_OP_READ, IORING_OP_READV, IORING_OP_WRITE, IORING_OP_WRITEV, IORING_OP_SYNC_FILE_RANGE})
    makes_all = makes_all && io_uring_opcode_supported(probe, operation) != 0;
  io_uring_free_probe(probe);
  return makes_all;
}

// 0 or the errno; then there is no ring.
int open_ring(unsigned entry_count, io_uring& ring) noexcept {
  // Completions wait until this thread asks for them, instead of interrupting it. Kernels before 6.1 refuse the flags.
  constexpr unsigned kFlagSets[] = {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, 0};
  int result = 0;
  for (const unsigned flags : kFlagSets) {
    result = io_uring_queue_init(entry_count, &ring, flags);
    if (result != -EINVAL) break;
  }
  if (result < 0) return -result;
  // An inherited ring would let a forked child take completions that the parent waits for.
  result = makes_calls(ring) ? io_uring_ring_dontfork(&ring) : -ENOSYS;
  if (result < 0) io_uring_queue_exit(&ring);
  return -result;
}

// What io_uring_enter says when it may do better the next time.
bool is_passing(int error) { return error == EINTR || error == EAGAIN || error == EBUSY || error == ENOMEM; }

// Whether the ring's thread has work of its own with each chunk. It then looks at the ring after each, so that the drive has
// the next call meanwhile.
bool takes_processor(const Request& request) { return request.kind == Kind::kCopy || request.with_crc || is_bounced(request); }

// [Note: one submitting thread] The ring belongs to its thread from set-up to exit: the kernel takes back the requests of a
// thread that exits, so they must not be those of a caller. Everything but the queue, the descriptors and the counters is
// touched by that thread alone.
//
// Memory copies run on it too, a chunk at a time between two looks at the ring: they stay in order with the rest of their
// direction, the drive has its calls meanwhile, and no thread is there for copies alone.
class RingLane final : public Lane {
 public:
  RingLane(const std::string& name, const RingOptions& options, FaultTable& faults);
  ~RingLane() override;

  void join() override;
  void close_in_child() noexcept override;

 protected:
  void wake() override;

 private:
  // One call under way, with what the kernel refers to meanwhile.
  struct Slot {
    std::byte* tail = nullptr;    // room for the rest of a last block
    std::byte* bounce = nullptr;  // room for a chunk, while it holds one
    std::optional<ChunkRun> run = std::nullopt;
    Call call{};
    std::optional<Fault> fault = std::nullopt;
  };

  void work(std::promise<int>& opened);
  void serve();
  bool fill();
  bool start();
  void advance(Slot& slot);
  void prepare(Slot& slot);
  void prepare_wake();
  void reap();
  void end(Slot& slot);

  const RingOptions options_;
  io_uring ring_{};
  std::atomic<int> ring_fd_{-1};
  std::atomic<int> event_fd_{-1};  // written to when the queue has changed
  std::uint64_t event_count_ = 0;  // read from it
  int lost_error_ = 0;             // errno with which the kernel refused to go on
  BounceBuffer tails_;
  std::vector<BounceBuffer> bounce_buffers_;
  std::vector<std::byte*> free_bounces_;
  std::vector<Slot> slots_;
  std::vector<Slot*> free_slots_;
  Claim next_;  // claimed, and not started for want of a bounce buffer
  std::thread thread_;
};

RingLane::RingLane(const std::string& name, const RingOptions& options, FaultTable& faults)
    : Lane(faults), options_(options), tails_(options.queue_depth * kTailBytes), slots_(options.queue_depth) {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    slots_[i].tail = tails_.data() + i * kTailBytes;
    free_slots_.push_back(&slots_[i]);
  }
  for (std::size_t i = 0; i < options.bounce_count; ++i) {
    bounce_buffers_.emplace_back(bounce_bytes(options.chunk_bytes));
    free_bounces_.push_back(bounce_buffers_.back().data());
  }
  event_fd_ = eventfd(0, EFD_CLOEXEC);
  if (event_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  std::promise<int> opened;
  std::future<int> error = opened.get_future();
  try {
    thread_ = start_service_thread(name, [this, &opened] { work(opened); });
  } catch (...) {
    ::close(event_fd_);
    throw;
  }
  if (const int number = error.get(); number != 0) {
    thread_.join();
    ::close(event_fd_);
    throw std::system_error(number, std::generic_category(), "io_uring");
  }
}

RingLane::~RingLane() {
  close();
  join();
  ::close(event_fd_);
}

void RingLane::join() {
  if (!thread_.joinable()) return;
  thread_.join();
  // Of a ring that was lost the kernel has let go of all memory only now that its thread has ended.
  for (Slot& slot : slots_) {
    if (!slot.run) continue;
    slot.run->take(-lost_error_);
    end(slot);
  }
  if (!next_.transfer) return;
  next_.transfer->fail(lost_error_);
  next_.transfer->end_chunks(1);
  next_ = {};
}

void RingLane::close_in_child() noexcept {
  for (std::atomic<int>* fd : {&ring_fd_, &event_fd_})
    if (const int open_fd = fd->exchange(-1); open_fd >= 0) ::close(open_fd);
}

void RingLane::wake() {
  const std::uint64_t one = 1;
  // Fails only if the count would overflow, and then the thread has been woken already.
  static_cast<void>(!write(event_fd_, &one, sizeof one));
}

void RingLane::work(std::promise<int>& opened) {
  // An entry for each slot and one for the wake-up, so that there is always a free one.
  const int error = open_ring(static_cast<unsigned>(options_.queue_depth) + 1, ring_);
  if (error == 0) {
    ring_fd_ = ring_.ring_fd;
    // Spares the kernel a look-up per call; where it is refused the ring works all the same.
    static_cast<void>(io_uring_register_ring_fd(&ring_));
  }
  opened.set_value(error);
  if (error != 0) return;
  serve();
  ring_fd_ = -1;
  io_uring_queue_exit(&ring_);
}

void RingLane::serve() {
  prepare_wake();
  for (;;) {
    const bool has_more = fill();
    if (!has_more && free_slots_.size() == slots_.size() && queue_.is_closed()) return;
    const int result = has_more ? io_uring_submit_and_get_events(&ring_) : io_uring_submit_and_wait(&ring_, 1);
    if (result < 0 && !is_passing(-result)) {
      lost_error_ = -result;
      queue_.close(lost_error_);
      return;
    }
    if (result < 0) std::this_thread::sleep_for(std::chrono::milliseconds(result == -EINTR ? 0 : 1));
    reap();
  }
}

// Starts what there is room for, or one chunk that takes the processor: then there may be more, and it returns true.
bool RingLane::fill() {
  while (!free_slots_.empty()) {
    if (!next_.transfer) next_ = queue_.try_take();
    if (!next_.transfer) return false;
    const Request& request = next_.transfer->request();
    const bool has_worked = takes_processor(request);
    if (request.kind == Kind::kCopy) {
      io_uring_submit(&ring_);  // the drive works meanwhile
      run_copy(std::exchange(next_, {}), faults_);
      return true;
    }
    if (!start()) return false;
    if (has_worked) return true;
  }
  return false;
}

// Starts the claimed chunk; false while no bounce buffer is free.
bool RingLane::start() {
  Slot& slot = *free_slots_.back();
  const std::size_t bounced_bytes = ChunkRun::bounced_bytes(next_);
  if (bounced_bytes > kTailBytes) {
    if (free_bounces_.empty()) return false;
    slot.bounce = free_bounces_.back();
    free_bounces_.pop_back();
  }
  free_slots_.pop_back();
  count_bounced(bounced_bytes);
  count_calls(slots_.size() - free_slots_.size());
  slot.run.emplace(std::exchange(next_, {}), slot.bounce != nullptr ? slot.bounce : slot.tail);
  advance(slot);
  return true;
}

// Prepares the next call of a slot, or ends its chunk.
void RingLane::advance(Slot& slot) {
  while (slot.run->has_call()) {
    slot.call = slot.run->call();
    if (faults_.is_armed()) {
      io_uring_submit(&ring_);  // a call that hangs here must not keep those before it from the drive
      slot.fault = faults_.next(slot.call.kind);
    }
    const std::optional<ssize_t> answered = slot.fault ? answer(*slot.fault, slot.call) : std::nullopt;
    if (!answered) return prepare(slot);
    slot.fault.reset();
    slot.run->take(*answered);
  }
  end(slot);
}

void RingLane::prepare(Slot& slot) {
  io_uring_sqe* entry = io_uring_get_sqe(&ring_);
  const Call& call = slot.call;
  const iovec* parts = call.parts.data();
  const auto part_count = static_cast<unsigned>(call.part_count);
  const auto size = static_cast<unsigned>(parts[0].iov_len);
  if (call.kind == Kind::kFlush)
    io_uring_prep_sync_file_range(entry, call.fd, static_cast<unsigned>(call.size_bytes), call.offset,
                                  static_cast<int>(kFlushFlags));
  else if (call.kind == Kind::kRead && part_count == 1)
    io_uring_prep_read(entry, call.fd, parts[0].iov_base, size, call.offset);
  else if (call.kind == Kind::kRead)
    io_uring_prep_readv(entry, call.fd, parts, part_count, call.offset);
  else if (part_count == 1)
    io_uring_prep_write(entry, call.fd, parts[0].iov_base, size, call.offset);
  else
    io_uring_prep_writev(entry, call.fd, parts, part_count, call.offset);
  io_uring_sqe_set_data(entry, &slot);
}

void RingLane::prepare_wake() {
  io_uring_sqe* entry = io_uring_get_sqe(&ring_);
  io_uring_prep_read(entry, event_fd_, &event_count_, sizeof event_count_, 0);
  io_uring_sqe_set_data(entry, nullptr);
}

// Takes what has completed, or no more than one chunk that takes the processor: the others are still there the next time.
void RingLane::reap() {
  io_uring_cqe* completion = nullptr;
  while (io_uring_peek_cqe(&ring_, &completion) == 0) {
    auto* slot = static_cast<Slot*>(io_uring_cqe_get_data(completion));
    const ssize_t result = completion->res;
    io_uring_cqe_seen(&ring_, completion);
    if (slot == nullptr) {
      prepare_wake();
      continue;
    }
    const std::optional<Fault> fault = std::exchange(slot->fault, std::nullopt);
    const bool has_worked = takes_processor(slot->run->request());
    slot->run->take(fault ? distort(*fault, slot->call, result) : result);
    advance(*slot);
    if (has_worked) return;
  }
}

void RingLane::end(Slot& slot) {
  slot.run->finish();
  slot.run.reset();
  if (slot.bounce != nullptr) free_bounces_.push_back(std::exchange(slot.bounce, nullptr));
  free_slots_.push_back(&slot);
}

}  // namespace

int ring_refusal() noexcept {
  io_uring ring{};
  const int error = open_ring(1, ring);
  if (error == 0) io_uring_queue_exit(&ring);
  return error;
}

std::unique_ptr<Lane> make_ring_lane(const std::string& name, const RingOptions& options, FaultTable& faults) {
  if (options.queue_depth == 0 || options.queue_depth > kQueueDepthMax)
    throw std::invalid_argument("expected a queue_depth from 1 to " + std::to_string(kQueueDepthMax) + ", got " +
                                std::to_string(options.queue_depth));
  if (options.bounce_count == 0) throw std::invalid_argument("expected a bounce_count of at least 1, got 0");
  return std::make_unique<RingLane>(name, options, faults);
}

}  // namespace tieroff

#else

namespace tieroff {

int ring_refusal() noexcept { return ENOSYS; }

std::unique_ptr<Lane> make_ring_lane(const std::string&, const RingOptions&, FaultTable&) {
  throw std::system_error(ENOSYS, std::generic_category(), "io_uring: built without liburing");
}

}  // namespace tieroff

#endif
