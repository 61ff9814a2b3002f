// The reference of benchmarks/bench_io.py: one thread and one io_uring, by system calls alone, on an open file.
//
//   raw_io FD START_BYTES RANGE_BYTES
//
// For each line on standard input, "KIND BLOCK_BYTES DEPTH MEMORY_BYTES SLICE_NS", it keeps DEPTH transfers of BLOCK_BYTES
// under way for SLICE_NS, waits for the last ones, and prints "WRITTEN_BYTES READ_BYTES WALL_NS CPU_NS". KIND is write,
// read or both; both writes to the first half of the range and reads from the second, DEPTH each. Transfers take turns
// over MEMORY_BYTES of memory per way. What goes wrong is printed as "error: ...", with exit status 1.
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

namespace {

constexpr unsigned kEntries = 256;

[[noreturn]] void stop(const std::string& what, int error) {
  std::cout << "error: " << what << ": " << std::strerror(error) << std::endl;
  std::exit(1);
}

std::int64_t now_ns(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

char* map_memory(std::size_t size_bytes, int flags, int fd, off_t offset) {
  void* memory = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, flags, fd, offset);
  if (memory == MAP_FAILED) stop("mmap", errno);
  return static_cast<char*>(memory);
}

// The queues that are shared with the kernel. Indices run on; what the other side writes is read with acquire.
class Ring {
 public:
  Ring() {
    io_uring_params params{};
    fd_ = static_cast<int>(syscall(SYS_io_uring_setup, kEntries, &params));
    if (fd_ < 0) stop("io_uring_setup", errno);
    char* submit =
        map_memory(params.sq_off.array + params.sq_entries * sizeof(unsigned), MAP_SHARED | MAP_POPULATE, fd_, IORING_OFF_SQ_RING);
    char* complete = map_memory(params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe), MAP_SHARED | MAP_POPULATE, fd_,
                                IORING_OFF_CQ_RING);
    entries_ = reinterpret_cast<io_uring_sqe*>(
        map_memory(params.sq_entries * sizeof(io_uring_sqe), MAP_SHARED | MAP_POPULATE, fd_, IORING_OFF_SQES));
    submit_tail_ = reinterpret_cast<unsigned*>(submit + params.sq_off.tail);
    submit_mask_ = *reinterpret_cast<unsigned*>(submit + params.sq_off.ring_mask);
    submit_array_ = reinterpret_cast<unsigned*>(submit + params.sq_off.array);
    complete_head_ = reinterpret_cast<unsigned*>(complete + params.cq_off.head);
    complete_tail_ = reinterpret_cast<unsigned*>(complete + params.cq_off.tail);
    complete_mask_ = *reinterpret_cast<unsigned*>(complete + params.cq_off.ring_mask);
    completions_ = reinterpret_cast<io_uring_cqe*>(complete + params.cq_off.cqes);
  }

  void add(bool is_write, int fd, std::uint64_t offset, char* memory, std::uint32_t size_bytes, std::uint64_t tag) {
    const unsigned tail = *submit_tail_;
    io_uring_sqe& entry = entries_[tail & submit_mask_];
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = is_write ? IORING_OP_WRITE : IORING_OP_READ;
    entry.fd = fd;
    entry.off = offset;
    entry.addr = reinterpret_cast<std::uint64_t>(memory);
    entry.len = size_bytes;
    entry.user_data = tag;
    submit_array_[tail & submit_mask_] = tail & submit_mask_;
    std::atomic_ref(*submit_tail_).store(tail + 1, std::memory_order_release);
    ++unsubmitted_;
  }

  // Submits what was added and waits until at least one transfer has ended.
  void enter() {
    const long taken = syscall(SYS_io_uring_enter, fd_, unsubmitted_, 1U, IORING_ENTER_GETEVENTS, nullptr, 0);
    if (taken >= 0)
      unsubmitted_ -= static_cast<unsigned>(taken);
    else if (errno != EINTR)
      stop("io_uring_enter", errno);
  }

  bool take(io_uring_cqe& completion) {
    const unsigned head = *complete_head_;
    if (head == std::atomic_ref(*complete_tail_).load(std::memory_order_acquire)) return false;
    completion = completions_[head & complete_mask_];
    std::atomic_ref(*complete_head_).store(head + 1, std::memory_order_release);
    return true;
  }

 private:
  int fd_;
  io_uring_sqe* entries_;
  io_uring_cqe* completions_;
  unsigned *submit_tail_, *submit_array_, *complete_head_, *complete_tail_;
  unsigned submit_mask_, complete_mask_, unsubmitted_ = 0;
};

// One way: which bytes of the file it goes through, and which memory. Lane l of `depth` uses memory slots l, l + depth,
// and so on, so that no two transfers under way share one.
struct Way {
  bool is_write;
  std::uint64_t start, block_count;
  char* memory;
  std::uint64_t slot_count;
  std::uint64_t issued = 0, done_bytes = 0;
  std::vector<std::uint64_t> turns;  // per lane
};

struct Order {
  std::string kind;
  std::uint64_t block_bytes = 0, depth = 0, memory_bytes = 0;
  std::int64_t slice_ns = 0;
};

void run(Ring& ring, int fd, std::vector<Way>& ways, const Order& order) {
  std::uint64_t under_way = 0;
  auto issue = [&](std::size_t index, std::uint64_t lane) {
    Way& way = ways[index];
    const std::uint64_t slot = (lane + order.depth * way.turns[lane]++) % way.slot_count;
    const std::uint64_t offset = way.start + way.issued++ % way.block_count * order.block_bytes;
    ring.add(way.is_write, fd, offset, way.memory + slot * order.block_bytes,
             static_cast<std::uint32_t>(order.block_bytes), index << 32 | lane);
    ++under_way;
  };
  const std::int64_t begin = now_ns(CLOCK_MONOTONIC);
  for (std::size_t index = 0; index < ways.size(); ++index)
    for (std::uint64_t lane = 0; lane < order.depth; ++lane) issue(index, lane);
  while (under_way > 0) {
    ring.enter();
    const bool is_over = now_ns(CLOCK_MONOTONIC) - begin >= order.slice_ns;
    for (io_uring_cqe completion{}; ring.take(completion);) {
      const std::size_t index = completion.user_data >> 32;
      if (completion.res < 0) stop(ways[index].is_write ? "write" : "read", -completion.res);
      if (static_cast<std::uint64_t>(completion.res) != order.block_bytes) stop("a short transfer", EIO);
      ways[index].done_bytes += order.block_bytes;
      --under_way;
      if (!is_over) issue(index, completion.user_data & 0xffffffff);
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) stop("expected FD START_BYTES RANGE_BYTES", EINVAL);
  const int fd = std::atoi(arguments[1]);
  const std::uint64_t start = std::stoull(arguments[2]), range = std::stoull(arguments[3]);
  Ring ring;
  char* memory = nullptr;
  std::uint64_t mapped_bytes = 0;
  for (Order order; std::cin >> order.kind >> order.block_bytes >> order.depth >> order.memory_bytes >> order.slice_ns;) {
    const bool is_both = order.kind == "both";
    const std::uint64_t part = is_both ? range / 2 : range;
    const std::uint64_t slots = order.memory_bytes / order.block_bytes / order.depth * order.depth;
    if (order.block_bytes == 0 || order.depth == 0 || slots == 0 || part / order.block_bytes < order.depth ||
        order.depth * (is_both ? 2 : 1) > kEntries)
      stop("an order that cannot be met", EINVAL);
    if (2 * order.memory_bytes > mapped_bytes) {
      if (memory != nullptr) munmap(memory, mapped_bytes);
      mapped_bytes = 2 * order.memory_bytes;
      memory = map_memory(mapped_bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      madvise(memory, mapped_bytes, MADV_HUGEPAGE);
      for (std::uint64_t i = 0; i < mapped_bytes; ++i) memory[i] = static_cast<char>((i * 2654435761U) >> 13);
    }
    std::vector<Way> ways;
    const std::vector<std::uint64_t> turns(order.depth, 0);
    const std::uint64_t blocks = part / order.block_bytes;
    if (order.kind != "read") ways.push_back({true, start, blocks, memory, slots, 0, 0, turns});
    if (order.kind != "write")
      ways.push_back({false, is_both ? start + range / 2 : start, blocks, memory + order.memory_bytes, slots, 0, 0, turns});
    const std::int64_t wall = now_ns(CLOCK_MONOTONIC), cpu = now_ns(CLOCK_PROCESS_CPUTIME_ID);
    run(ring, fd, ways, order);
    std::uint64_t moved[2] = {0, 0};
    for (const Way& way : ways) moved[way.is_write ? 0 : 1] = way.done_bytes;
    std::cout << moved[0] << ' ' << moved[1] << ' ' << now_ns(CLOCK_MONOTONIC) - wall << ' '
              << now_ns(CLOCK_PROCESS_CPUTIME_ID) - cpu << std::endl;
  }
}
