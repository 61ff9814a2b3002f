#include "tieroff/search/dispatch.hpp"

#include <algorithm>
#include <limits>
#include <queue>
#include <stdexcept>

namespace tieroff {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kDoneBytes = 0.5;  // less than a byte is left: rounding

struct Instance {
  std::int64_t deadline;  // tick, counted from the first step
  std::int64_t job;
  std::int64_t first_tick;  // of its step: what its ticks are counted from
};

struct IsLater {
  bool operator()(const Instance& a, const Instance& b) const {
    return a.deadline != b.deadline ? a.deadline > b.deadline : a.job > b.job;
  }
};

struct Server {
  std::priority_queue<Instance, std::vector<Instance>, IsLater> queue;
  bool is_busy = false;
  Instance current{};
  double latency_left = 0.0;
  double bytes_left = 0.0;
};

class Dispatcher {
 public:
  Dispatcher(std::span<const std::int64_t> duration_ns, const DispatchJobs& jobs, const DispatchLinks& links)
      : durations_(duration_ns),
        jobs_(jobs),
        links_(links),
        n_(static_cast<std::int64_t>(duration_ns.size())),
        done_(jobs.link.size(), 0) {
    check();
    result_.waits_ns.assign(duration_ns.size(), 0.0);
    result_.served.assign(jobs.link.size(), 0);
    result_.start_tick.assign(jobs.link.size(), 0);
    issued_at_.resize(duration_ns.size());
    due_at_[0].resize(duration_ns.size());
    due_at_[1].resize(duration_ns.size());
    for (std::size_t job = 0; job < jobs.link.size(); ++job) {
      issued_at_[fold(jobs.issue_from[job])].push_back(job);
      due_at_[is_out(job) ? 0 : 1][fold(jobs.ready_by[job])].push_back(job);
    }
  }

  Dispatched run(std::size_t step_count) {
    for (std::size_t step = 0; step < step_count; ++step) {
      const double begin_ns = now_;
      for (std::int64_t op = 0; op < n_; ++op) {
        tick_ = static_cast<std::int64_t>(step) * n_ + op;
        const double before_ns = now_;
        issue(op, true);
        await(op, 0);
        issue(op, false);
        await(op, 1);
        result_.waits_ns[static_cast<std::size_t>(op)] = now_ - before_ns;
        const double until = now_ + static_cast<double>(durations_[static_cast<std::size_t>(op)]);
        while (now_ < until) advance(until);
      }
      result_.step_ns = now_ - begin_ns;
    }
    return std::move(result_);
  }

 private:
  void check() const {
    const std::size_t count = jobs_.link.size();
    if (jobs_.issue_from.size() != count || jobs_.ready_by.size() != count || jobs_.size_bytes.size() != count) {
      throw std::invalid_argument("expected arrays of one length for the transfers");
    }
    for (std::size_t job = 0; job < count; ++job) {
      const std::int64_t from = jobs_.issue_from[job];
      const std::int64_t by = jobs_.ready_by[job];
      if (n_ == 0 || from < -n_ || from > 2 * n_ || by < from || by > from + n_ || jobs_.link[job] < 0 ||
          jobs_.link[job] >= static_cast<std::int64_t>(kLinkCount) || jobs_.size_bytes[job] <= 0 ||
          links_.bytes_per_ns[static_cast<std::size_t>(jobs_.link[job])] <= 0.0) {
        throw std::invalid_argument("expected transfers of some bytes on links with a bandwidth, within a step of their issue");
      }
    }
  }

  [[nodiscard]] bool is_out(std::size_t job) const { return jobs_.link[job] <= static_cast<std::int64_t>(kNvmeWrite); }

  [[nodiscard]] std::size_t fold(std::int64_t tick) const { return static_cast<std::size_t>(((tick % n_) + n_) % n_); }

  [[nodiscard]] std::int64_t step_of(std::int64_t tick) const { return (tick - static_cast<std::int64_t>(fold(tick))) / n_; }

  // Copies out first: one that is due at its own tick must be in service before it is awaited.
  void issue(std::int64_t op, bool outs) {
    for (const std::size_t job : issued_at_[static_cast<std::size_t>(op)]) {
      if (is_out(job) != outs) continue;
      const std::int64_t first_tick = tick_ - jobs_.issue_from[job];
      servers_[static_cast<std::size_t>(jobs_.link[job])].queue.push(
          {first_tick + jobs_.ready_by[job], static_cast<std::int64_t>(job), first_tick});
    }
    for (std::size_t link = 0; link < kLinkCount; ++link) serve(link);
  }

  void await(std::int64_t op, std::size_t group) {
    for (const std::size_t job : due_at_[group][static_cast<std::size_t>(op)]) {
      const std::int64_t issue_step = step_of(tick_ - (jobs_.ready_by[job] - jobs_.issue_from[job]));
      // What would have been issued before the first step is not waited for.
      while (done_[job] < issue_step + 1) advance(kNever);
    }
  }

  void serve(std::size_t link) {
    Server& server = servers_[link];
    if (server.is_busy || server.queue.empty()) return;
    server.current = server.queue.top();
    server.queue.pop();
    server.is_busy = true;
    const auto job = static_cast<std::size_t>(server.current.job);
    server.latency_left = links_.latency_ns[link];
    server.bytes_left = static_cast<double>(jobs_.size_bytes[job]);
    result_.served[job] = count_++;
    result_.start_tick[job] = tick_ - server.current.first_tick;
  }

  [[nodiscard]] double rate(std::size_t link) const {
    double rate = links_.bytes_per_ns[link];
    const std::size_t beside = link ^ 1U;  // the link to the other tier in the same direction
    if (links_.nvme_shares_host_link) {
      const bool is_host = link == kD2h || link == kH2d;
      const double other = links_.bytes_per_ns[beside];
      if (is_host) {
        if (servers_[beside].is_busy) rate -= std::min(other, rate / 2.0);
      } else if (other > 0.0) {
        rate = std::min(rate, servers_[beside].is_busy ? other / 2.0 : other);
      }
    }
    if ((link == kD2h && servers_[kH2d].is_busy) || (link == kH2d && servers_[kD2h].is_busy)) rate *= links_.duplex_share;
    return rate;
  }

  // To the next event, at most to `until`.
  void advance(double until) {
    double span = until - now_;
    std::array<double, kLinkCount> rates{};
    for (std::size_t link = 0; link < kLinkCount; ++link) {
      const Server& server = servers_[link];
      if (!server.is_busy) continue;
      rates[link] = rate(link);
      span = std::min(span, server.latency_left > 0.0 ? server.latency_left : server.bytes_left / rates[link]);
    }
    if (span == kNever) throw std::invalid_argument("a transfer is awaited that is never issued");
    now_ = span == until - now_ ? until : now_ + span;
    for (std::size_t link = 0; link < kLinkCount; ++link) {
      Server& server = servers_[link];
      if (!server.is_busy) continue;
      if (server.latency_left > 0.0) {
        server.latency_left = std::max(0.0, server.latency_left - span);
        if (server.latency_left < 1e-6) server.latency_left = 0.0;
        continue;
      }
      server.bytes_left -= rates[link] * span;
      if (server.bytes_left < kDoneBytes) {
        server.is_busy = false;
        ++done_[static_cast<std::size_t>(server.current.job)];
      }
    }
    for (std::size_t link = 0; link < kLinkCount; ++link) serve(link);
  }

  std::span<const std::int64_t> durations_;
  DispatchJobs jobs_;
  DispatchLinks links_;
  std::int64_t n_;
  std::vector<std::int64_t> done_;  // per transfer: how many times
  std::vector<std::vector<std::size_t>> issued_at_;
  std::array<std::vector<std::vector<std::size_t>>, 2> due_at_;  // copies out, loads
  std::array<Server, kLinkCount> servers_;
  double now_ = 0.0;
  std::int64_t tick_ = 0;
  std::int64_t count_ = 0;
  Dispatched result_{};
};

}  // namespace

Dispatched dispatch(std::span<const std::int64_t> duration_ns, const DispatchJobs& jobs, const DispatchLinks& links,
                    std::size_t step_count) {
  return Dispatcher(duration_ns, jobs, links).run(step_count);
}

}  // namespace tieroff
