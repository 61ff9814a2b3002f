// An engine under many threads, faults and closes, for the sanitizers. Prints what failed and exits 1, else exits 0.
//
//   engine_test threads|uring [without-fork]
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string_view>
#include <thread>
#include <vector>

#include "expect.hpp"
#include "tieroff/errors.hpp"
#include "tieroff/io/crc32c.hpp"
#include "tieroff/io/engine.hpp"
#include "tieroff/memory/page_returner.hpp"

namespace {

using tieroff::Engine;
using tieroff::Kind;
using tieroff::Request;

constexpr std::size_t kChunk = 65536;
constexpr std::int64_t kWaitNs = 60'000'000'000;

bool is_ring = false;

// An engine that makes this many calls at once in each direction.
std::unique_ptr<Engine> make_engine(std::size_t call_count) {
  if (is_ring)
    return std::make_unique<tieroff::RingEngine>(
        tieroff::RingOptions{.queue_depth = call_count, .bounce_count = (call_count + 1) / 2, .chunk_bytes = kChunk});
  return std::make_unique<tieroff::ThreadEngine>(
      tieroff::ThreadOptions{.read_thread_count = call_count, .write_thread_count = call_count, .chunk_bytes = kChunk});
}

class File {
 public:
  explicit File(std::size_t size_bytes) : fd_(open("/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600)) {
    if (fd_ < 0 || ftruncate(fd_, static_cast<off_t>(size_bytes)) != 0) std::abort();
  }
  ~File() { close(fd_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  [[nodiscard]] int fd() const { return fd_; }

 private:
  int fd_;
};

std::vector<std::byte> noise(std::size_t size_bytes, unsigned seed) {
  std::mt19937 generator(seed);
  std::vector<std::byte> bytes(size_bytes);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(generator());
  return bytes;
}

Request request(Kind kind, int fd, std::uint64_t offset, std::vector<std::byte>& memory, std::size_t alignment = 1) {
  return {.kind = kind,
          .fd = fd,
          .offset = offset,
          .memory = memory.data(),
          .size_bytes = memory.size(),
          .block_bytes = 4096,
          .memory_alignment = alignment,
          .with_crc = true,
          .is_flushed_first = kind == Kind::kRead};
}

// Several threads write and read their own ranges at once; every byte and every checksum is as it should be.
void test_many_threads() {
  constexpr std::size_t kRange = std::size_t{1} << 20;
  File file(8 * kRange);
  const auto engine = make_engine(3);
  std::vector<std::thread> threads;
  for (unsigned index = 0; index < 4; ++index) {
    threads.emplace_back([&, index] {
      for (unsigned round = 0; round < 10; ++round) {
        auto source = noise(kRange - 13 * index - round, 100 * index + round);
        std::vector<std::byte> target(source.size());
        const std::size_t alignment = round % 2 == 0 ? 1 : 4096;  // straight, and through the bounce buffers
        auto write = engine->submit(request(Kind::kWrite, file.fd(), index * kRange, source, alignment), false);
        EXPECT(write->wait(kWaitNs));
        auto read = engine->submit(request(Kind::kRead, file.fd(), index * kRange, target, alignment), true);
        EXPECT(read->wait(kWaitNs));
        EXPECT(source == target);
        EXPECT(write->crc() == tieroff::crc32c(source.data(), source.size()));
        EXPECT(read->crc() == write->crc());
        EXPECT(read->done_bytes() == source.size());
        EXPECT(write->start_ns() <= write->stop_ns() && write->stop_ns() <= read->stop_ns());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void test_copies() {
  const auto engine = make_engine(2);
  auto source = noise(777'777, 1);
  std::vector<std::byte> target(source.size());
  auto copy = engine->submit(
      {.kind = Kind::kCopy, .memory = target.data(), .source = source.data(), .size_bytes = source.size()}, true);
  EXPECT(copy->wait(kWaitNs));
  EXPECT(source == target);
}

// The first error is kept, the rest of the transfer is not run, and the next transfer is not touched.
void test_errors_under_load() {
  File file(1 << 20);
  const auto engine = make_engine(3);
  auto source = noise(1 << 20, 2);
  for (unsigned round = 0; round < 20; ++round) {
    engine->faults().inject({.kind = Kind::kWrite, .after = round % 5, .count = 1, .error = EIO});
    auto broken = engine->submit(request(Kind::kWrite, file.fd(), 0, source), false);
    EXPECT(broken->wait(kWaitNs));
    EXPECT(broken->error() == EIO && broken->done_bytes() < source.size());
    engine->faults().clear();
    auto whole = engine->submit(request(Kind::kWrite, file.fd(), 0, source), false);
    EXPECT(whole->wait(kWaitNs));
    EXPECT(whole->error() == 0 && whole->done_bytes() == source.size());
  }
}

// Cancelling and closing race with the threads: every transfer ends, as cancelled or as done, never as both.
void test_cancel_and_close() {
  File file(1 << 20);
  for (unsigned round = 0; round < 20; ++round) {
    auto engine = make_engine(2);
    auto source = noise(5 * kChunk / 2, round);
    std::vector<std::shared_ptr<tieroff::Transfer>> writes;
    for (unsigned i = 0; i < 20; ++i) writes.push_back(engine->submit(request(Kind::kWrite, file.fd(), 0, source), false));
    std::thread canceller([&] {
      for (unsigned i = 1; i < 20; i += 2)
        if (engine->cancel(writes[i])) EXPECT(writes[i]->error() == ECANCELED && writes[i]->done_bytes() == 0);
    });
    std::thread closer([&] { engine->close(); });
    canceller.join();
    closer.join();
    engine.reset();
    for (const auto& write : writes) {
      EXPECT(write->is_done());
      EXPECT((write->error() == 0) == (write->done_bytes() == source.size()));
      EXPECT(write->error() == 0 || write->error() == ECANCELED);
    }
  }
}

void test_close_releases_hangs() {
  File file(1 << 20);
  const auto engine = make_engine(1);
  auto source = noise(3 * kChunk, 3);
  engine->faults().inject({.kind = Kind::kWrite, .count = 0, .is_hang = true});
  auto write = engine->submit(request(Kind::kWrite, file.fd(), 0, source), false);
  EXPECT(engine->faults().wait_hanging(1, 60.0));
  EXPECT(!write->wait(1'000'000));
  engine->close();
  EXPECT(write->is_done() && write->error() == ECANCELED && write->done_bytes() == kChunk);
}

// Short calls and interrupted ones among many: each transfer is whole all the same.
void test_short_calls_under_load() {
  constexpr std::size_t kRange = 8 * kChunk;
  File file(4 * kRange);
  const auto engine = make_engine(4);
  for (const Kind kind : {Kind::kWrite, Kind::kRead}) {
    engine->faults().inject({.kind = kind, .after = 3, .count = 9, .short_bytes = 5000});
    engine->faults().inject({.kind = kind, .after = 20, .count = 5, .error = EINTR});
  }
  std::vector<std::vector<std::byte>> sources;
  std::vector<std::vector<std::byte>> targets;
  std::vector<std::shared_ptr<tieroff::Transfer>> transfers;
  for (unsigned index = 0; index < 4; ++index) {
    sources.push_back(noise(kRange - 5 * index, index));
    targets.emplace_back(sources.back().size());
    transfers.push_back(engine->submit(request(Kind::kWrite, file.fd(), index * kRange, sources.back()), false));
  }
  for (const auto& write : transfers) EXPECT(write->wait(kWaitNs) && write->error() == 0);
  transfers.clear();
  for (unsigned index = 0; index < 4; ++index)
    transfers.push_back(engine->submit(request(Kind::kRead, file.fd(), index * kRange, targets[index]), true));
  for (const auto& read : transfers) EXPECT(read->wait(kWaitNs) && read->error() == 0);
  EXPECT(sources == targets);
}

// The thread that submits is gone before its transfers have run.
void test_submitting_thread_exits() {
  File file(1 << 20);
  const auto engine = make_engine(2);
  auto source = noise(1 << 20, 5);
  std::vector<std::shared_ptr<tieroff::Transfer>> writes;
  engine->faults().inject({.kind = Kind::kWrite, .is_hang = true});
  std::thread([&] {
    for (unsigned i = 0; i < 8; ++i) writes.push_back(engine->submit(request(Kind::kWrite, file.fd(), 0, source, 4096), false));
  }).join();
  EXPECT(engine->faults().wait_hanging(1, 60.0));
  engine->faults().release();
  for (const auto& write : writes) EXPECT(write->wait(kWaitNs) && write->error() == 0);
}

void test_calls_are_bounded() {
  File file(1 << 20);
  const auto engine = make_engine(3);
  auto source = noise(1 << 20, 6);
  std::vector<std::shared_ptr<tieroff::Transfer>> writes;
  // The first is held until all are there: a thread that submits slowly would never have three to be served at once.
  engine->faults().inject({.kind = Kind::kWrite, .is_hang = true});
  for (unsigned i = 0; i < 8; ++i) writes.push_back(engine->submit(request(Kind::kWrite, file.fd(), 0, source), false));
  EXPECT(engine->faults().wait_hanging(1, 60.0));
  engine->faults().release();
  for (const auto& write : writes) EXPECT(write->wait(kWaitNs) && write->error() == 0);
  EXPECT(engine->peak_call_count() == 3 || (!is_ring && engine->peak_call_count() < 3));
}

// The child destroys what it inherited, while the parent's threads work and one waits.
void test_fork() {
  File file(1 << 20);
  auto engine = make_engine(1);
  auto source = noise(8 * kChunk, 4);
  engine->faults().inject({.kind = Kind::kWrite, .is_hang = true});
  auto write = engine->submit(request(Kind::kWrite, file.fd(), 0, source), false);
  EXPECT(engine->faults().wait_hanging(1, 60.0));
  std::thread waiter([&] { EXPECT(write->wait(kWaitNs)); });
  const pid_t child = fork();
  if (child == 0) {
    bool is_refused = false;
    try {
      engine->cancel(write);
    } catch (const tieroff::StateError&) {
      is_refused = true;
    }
    engine->close();
    write.reset();
    engine.reset();
    _exit(is_refused ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT(status == 0);
  engine->faults().release();
  waiter.join();
  EXPECT(write->error() == 0);
}

void test_page_returner() {
  constexpr std::size_t kSize = 1 << 20;
  File file(kSize);
  void* memory = mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd(), 0);
  {
    tieroff::PageReturner returner(reinterpret_cast<std::uintptr_t>(memory), kSize, 100'000);
    for (int value = 1; value < 50; ++value) {
      std::memset(memory, value, kSize);
      EXPECT(returner.wait_rounds(returner.round_count() + 1, 60.0));
      EXPECT(static_cast<unsigned char*>(memory)[kSize - 1] == value);
      returner.set_interval(100'000 + value);
    }
    EXPECT(returner.error() == 0);
  }
  munmap(memory, kSize);
}

}  // namespace

int main(int argument_count, char** arguments) {
  is_ring = argument_count > 1 && std::string_view(arguments[1]) == "uring";
  test_many_threads();
  test_copies();
  test_errors_under_load();
  test_short_calls_under_load();
  test_submitting_thread_exits();
  test_calls_are_bounded();
  test_cancel_and_close();
  test_close_releases_hangs();
  if (argument_count < 3) test_fork();  // left out where the thread sanitizer's own threads do not fork
  test_page_returner();
  return failures.load() == 0 ? 0 : 1;
}
