// A lane of threads that each make one call at a time.
#pragma once

#include <string>
#include <thread>
#include <vector>

#include "tieroff/io/lane.hpp"

namespace tieroff {

// Several threads work on the chunks of one transfer. Each has a bounce buffer.
class ThreadLane final : public Lane {
 public:
  ThreadLane(const std::string& name, std::size_t thread_count, std::size_t chunk_bytes, FaultTable& faults);
  ~ThreadLane() override;

  void join() override;

 private:
  void work(const BounceBuffer& bounce);

  std::atomic<std::size_t> call_count_{0};
  std::vector<BounceBuffer> bounce_buffers_;
  std::vector<std::thread> threads_;
};

}  // namespace tieroff
