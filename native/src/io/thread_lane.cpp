#include "tieroff/io/thread_lane.hpp"

#include <optional>

#include "tieroff/io/service_thread.hpp"

namespace tieroff {
namespace {

ssize_t call_through(FaultTable& faults, Call call) {
  const std::optional<Fault> fault = faults.next(call.kind);
  if (!fault) return make_call(call);
  const std::optional<ssize_t> answered = answer(*fault, call);
  return answered ? *answered : distort(*fault, call, make_call(call));
}

}  // namespace

ThreadLane::ThreadLane(const std::string& name, std::size_t thread_count, std::size_t chunk_bytes, FaultTable& faults)
    : Lane(faults) {
  for (std::size_t i = 0; i < thread_count; ++i) bounce_buffers_.emplace_back(bounce_bytes(chunk_bytes));
  try {
    for (const BounceBuffer& bounce : bounce_buffers_)
      threads_.push_back(start_service_thread(name + std::to_string(threads_.size()), [this, &bounce] { work(bounce); }));
  } catch (...) {
    close();  // a thread that could not be started: join those that were
    join();
    throw;
  }
}

ThreadLane::~ThreadLane() {
  close();
  join();
}

void ThreadLane::join() {
  for (std::thread& thread : threads_)
    if (thread.joinable()) thread.join();
}

void ThreadLane::work(const BounceBuffer& bounce) {
  for (Claim claim = queue_.take(); claim.transfer; claim = queue_.take()) {
    if (claim.transfer->request().kind == Kind::kCopy) {
      run_copy(claim, faults_);
      continue;
    }
    count_calls(call_count_.fetch_add(1) + 1);
    count_bounced(ChunkRun::bounced_bytes(claim));
    ChunkRun run(std::move(claim), bounce.data());
    while (run.has_call()) run.take(call_through(faults_, run.call()));
    run.finish();
    call_count_.fetch_sub(1);
  }
}

}  // namespace tieroff
