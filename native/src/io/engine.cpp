#include "tieroff/io/engine.hpp"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tieroff/errors.hpp"
#include "tieroff/io/thread_lane.hpp"

namespace tieroff {
namespace {

bool is_power_of_two(std::size_t value) { return value != 0 && (value & (value - 1)) == 0; }

constexpr std::size_t kChunkBytesMin = 4096;
constexpr std::size_t kChunkBytesMax = std::size_t{1} << 30;  // one call moves less than 2 GiB
// A copy of memory that takes less time than to wake the thread that would make it: some 10 us, measured on x86-64.
constexpr std::size_t kCopiedAtOnceBytes = std::size_t{32} << 10;
constexpr std::size_t kSubmittedMin = 64;

}  // namespace

struct Engine::State {
  FaultTable faults;
  std::shared_ptr<Signal> signal = std::make_shared<Signal>();
  std::unique_ptr<Lane> reads;
  std::unique_ptr<Lane> writes;
  std::mutex submitted_mutex;
  std::vector<std::weak_ptr<Transfer>> submitted;  // those that have ended may still be among them
  std::size_t kept_count = kSubmittedMin;          // from how many on they are looked for
  std::mutex close_mutex;                          // the second of two closers waits for the first
  std::atomic<bool> is_closed{false};

  Lane& lane(bool is_for_readers) { return is_for_readers ? *reads : *writes; }

  void note(const std::shared_ptr<Transfer>& transfer) {
    const std::lock_guard lock(submitted_mutex);
    if (submitted.size() >= kept_count) {
      std::erase_if(submitted, [](const std::weak_ptr<Transfer>& one) {
        const std::shared_ptr<Transfer> found = one.lock();
        return !found || found->is_done();
      });
      kept_count = std::max(2 * submitted.size(), kSubmittedMin);
    }
    submitted.push_back(transfer);
  }

  std::vector<std::weak_ptr<Transfer>> noted() {
    const std::lock_guard lock(submitted_mutex);
    return submitted;
  }
};

Engine::Engine(std::size_t chunk_bytes, const MakeLane& make_lane)
    : chunk_bytes_(chunk_bytes), pid_(getpid()), state_(std::make_unique<State>()) {
  if (!is_power_of_two(chunk_bytes) || chunk_bytes < kChunkBytesMin || chunk_bytes > kChunkBytesMax)
    throw std::invalid_argument("expected chunk_bytes to be a power of two from 4096 to 2^30, got " +
                                std::to_string(chunk_bytes));
  state_->reads = make_lane(true, state_->faults);
  state_->writes = make_lane(false, state_->faults);
}

Engine::~Engine() {
  close();
  if (getpid() != pid_) static_cast<void>(state_.release());  // [Note: one engine, one process]
}

std::shared_ptr<Transfer> Engine::submit(const Request& request, bool is_for_readers) {
  check_process();
  if (request.size_bytes == 0) throw std::invalid_argument("expected a size above 0");
  if (request.memory == nullptr && !(request.kind == Kind::kRead && request.with_crc))
    throw std::invalid_argument("expected an address, or a read with a checksum, got neither");
  if (request.kind != Kind::kCopy) {
    if (!is_power_of_two(request.block_bytes) || request.block_bytes > bounce_bytes(chunk_bytes_))
      throw std::invalid_argument("expected block_bytes to be a power of two, not above chunk_bytes and 1 MiB");
    if (!is_power_of_two(request.memory_alignment))
      throw std::invalid_argument("expected memory_alignment to be a power of two");
    if (request.offset % request.block_bytes != 0)
      throw std::invalid_argument("expected an offset that is a multiple of block_bytes");
  }
  const bool is_by_processor = request.kind == Kind::kCopy || is_bounced(request);
  auto transfer =
      std::make_shared<Transfer>(request, is_by_processor ? bounce_bytes(chunk_bytes_) : chunk_bytes_, state_->signal);
  Lane& lane = state_->lane(is_for_readers);
  if (request.kind == Kind::kCopy && request.size_bytes <= kCopiedAtOnceBytes && !state_->faults.is_armed()) {
    lane.check_open();
    run_copy({transfer, transfer->claim()}, state_->faults);
  } else {
    state_->note(transfer);
    lane.submit(transfer);
  }
  return transfer;
}

bool Engine::settle(std::int64_t timeout_ns) {
  check_process();
  const std::int64_t stop_ns = monotonic_ns() + timeout_ns;
  for (const std::weak_ptr<Transfer>& one : state_->noted())
    if (const std::shared_ptr<Transfer> transfer = one.lock())
      if (!transfer->wait(std::max<std::int64_t>(stop_ns - monotonic_ns(), 0))) return false;
  return true;
}

bool Engine::cancel(const std::shared_ptr<Transfer>& transfer) {
  check_process();
  for (Lane* lane : {state_->reads.get(), state_->writes.get()})
    if (const std::optional<bool> is_cancelled = lane->cancel(transfer)) return *is_cancelled;
  return false;
}

void Engine::close() {
  Lane* const lanes[] = {state_->reads.get(), state_->writes.get()};
  if (getpid() != pid_) {
    for (Lane* lane : lanes) lane->close_in_child();
    return;
  }
  const std::lock_guard lock(state_->close_mutex);
  state_->is_closed.store(true);
  for (Lane* lane : lanes) lane->close();
  state_->faults.release(true);
  for (Lane* lane : lanes) lane->join();
}

bool Engine::is_closed() const { return state_->is_closed.load(); }

std::size_t Engine::peak_call_count() const {
  return std::max(state_->reads->peak_call_count(), state_->writes->peak_call_count());
}

std::uint64_t Engine::bounced_bytes() const { return state_->reads->bounced_bytes() + state_->writes->bounced_bytes(); }

FaultTable& Engine::faults() {
  check_process();
  return state_->faults;
}

ThreadEngine::ThreadEngine(const ThreadOptions& options)
    : Engine(options.chunk_bytes,
             [&options](bool is_for_readers, FaultTable& faults) {
               const std::size_t count = is_for_readers ? options.read_thread_count : options.write_thread_count;
               if (count == 0) throw std::invalid_argument("expected at least one thread for each direction, got none");
               const char* name = is_for_readers ? "tieroff-read" : "tieroff-write";
               return std::make_unique<ThreadLane>(name, count, options.chunk_bytes, faults);
             }),
      options_(options) {}

RingEngine::RingEngine(const RingOptions& options)
    : Engine(options.chunk_bytes,
             [&options](bool is_for_readers, FaultTable& faults) {
               return make_ring_lane(is_for_readers ? "tieroff-ring-r" : "tieroff-ring-w", options, faults);
             }),
      options_(options) {}

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
