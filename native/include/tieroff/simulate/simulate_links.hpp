// The links of a simulation at work.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tieroff/simulate/simulate_program.hpp"

namespace tieroff::simulation {

// Jobs that are served one at a time in order of issue, each in a time of its own, so that its end is known at once.
class Lane {
 public:
  void issue(std::uint32_t slot, Job& job, std::int64_t duration_ns, std::int64_t now_ns) {
    job.start_ns = std::max(now_ns, free_ns_);
    job.stop_ns = free_ns_ = job.start_ns + duration_ns;
    queue_.push_back(slot);
  }

  // Appends what is under way.
  void describe(std::int64_t now_ns, const std::vector<Job>& jobs, std::vector<std::uint64_t>& state) {
    std::erase_if(queue_, [&](std::uint32_t slot) { return jobs[slot].stop_ns <= now_ns; });
    state.push_back(queue_.size());
    for (const std::uint32_t slot : queue_) {
      state.push_back(item_of(slot));
      state.push_back(static_cast<std::uint64_t>(jobs[slot].stop_ns - now_ns));
    }
  }

 private:
  std::int64_t free_ns_ = 0;
  std::vector<std::uint32_t> queue_;
};

// Links of which none slows another.
class SeparateLinks {
 public:
  SeparateLinks(const Program& program, const Rates&, std::vector<Job>& jobs) : items_(program.items), jobs_(jobs) {}

  void issue(std::uint32_t slot, std::int64_t now_ns) {
    const Item& item = items_[item_of(slot)];
    lanes_[item.lane].issue(slot, jobs_[slot], item.alone_ns, now_ns);
  }

  void finish(std::uint32_t) {}
  void advance(std::int64_t) {}

  void describe(std::int64_t now_ns, std::vector<std::uint64_t>& state) {
    for (Lane& lane : lanes_) lane.describe(now_ns, jobs_, state);
  }

 private:
  const std::vector<Item>& items_;
  std::vector<Job>& jobs_;
  std::array<Lane, kLaneCount> lanes_;
};

// Links and a CPU that share the host link or the host's memory: advanced together from event to event, each with what is
// left and its rate since.
class SharedLinks {
 public:
  SharedLinks(const Program& program, const Rates& rates, std::vector<Job>& jobs)
      : items_(program.items), rates_(rates), jobs_(jobs) {}

  void issue(std::uint32_t slot, std::int64_t now_ns) {
    advance(now_ns);
    jobs_[slot].stop_ns = kNever;
    Channel& channel = channels_[items_[item_of(slot)].lane];
    channel.queue.push_back(slot);
    if (!channel.is_busy) {
      serve(channel);
      settle();
    }
  }

  void finish(std::uint32_t slot) {
    while (jobs_[slot].stop_ns == kNever) step();
  }

  // Every event up to then has happened.
  void advance(std::int64_t until_ns) {
    while (next_ns_ <= until_ns) step();
    now_ns_ = std::max(now_ns_, until_ns);
  }

  void describe(std::int64_t now_ns, std::vector<std::uint64_t>& state) {
    for (Channel& channel : channels_) {
      state.push_back(channel.is_busy ? channel.queue.size() - channel.served + 1 : 0);
      if (!channel.is_busy) continue;
      const Wide left = channel.is_moving ? channel.work - moved(channel, now_ns) : channel.work;
      state.push_back(item_of(channel.slot));
      state.push_back(channel.is_moving ? 0 : static_cast<std::uint64_t>(channel.event_ns - now_ns));
      state.push_back(static_cast<std::uint64_t>(left >> 64U));
      state.push_back(static_cast<std::uint64_t>(left));
      channel.queue.erase(channel.queue.begin(), channel.queue.begin() + static_cast<std::ptrdiff_t>(channel.served));
      channel.served = 0;
      for (const std::uint32_t slot : channel.queue) state.push_back(item_of(slot));
    }
  }

 private:
  struct Channel {
    std::vector<std::uint32_t> queue;
    std::size_t served = 0;  // how many of the queue have left it
    bool is_busy = false;
    bool is_moving = false;          // past its latency
    std::uint32_t slot = 0;          // in service
    std::int64_t event_ns = kNever;  // when its latency or the job ends, if no rate changes before
    std::int64_t since_ns = 0;       // when `work` was left
    std::int64_t rate = 0;           // 0: not known yet
    Wide work = 0;                   // bytes times ns per second
  };

  static Wide moved(const Channel& channel, std::int64_t now_ns) {
    const Wide done = static_cast<Wide>(channel.rate) * static_cast<Wide>(now_ns - channel.since_ns);
    return std::min(done, channel.work);
  }

  void serve(Channel& channel) {
    if (channel.served == channel.queue.size()) {
      channel.queue.clear();
      channel.served = 0;
      channel.is_busy = channel.is_moving = false;
      channel.event_ns = kNever;
      return;
    }
    channel.slot = channel.queue[channel.served++];
    const Item& item = items_[item_of(channel.slot)];
    jobs_[channel.slot].start_ns = now_ns_;
    if (item.work == 0) {  // an update of no time: nothing ever happens to it
      jobs_[channel.slot].stop_ns = now_ns_;
      return serve(channel);
    }
    channel.is_busy = true;
    channel.is_moving = item.latency_ns == 0;
    channel.work = item.work;
    channel.rate = 0;
    channel.since_ns = now_ns_;
    channel.event_ns = now_ns_ + item.latency_ns;  // without a latency, settle() sets it
  }

  // Gives each channel the rate that it has now.
  void settle() {
    unsigned moving = 0;
    for (const Channel& channel : channels_) {
      if (!channel.is_moving) continue;
      const Item& item = items_[item_of(channel.slot)];
      if (item.touches_device) moving |= 1U << item.link;
    }
    Wide wanted = 0;  // of the host's memory, per second
    for (const Channel& channel : channels_) {
      if (channel.is_moving) wanted += static_cast<Wide>(wanted_rate(channel, moving)) * static_cast<Wide>(passes(channel));
    }
    next_ns_ = kNever;
    for (Channel& channel : channels_) {
      if (channel.is_moving) {
        std::int64_t rate = wanted_rate(channel, moving);
        if (passes(channel) > 0) rate = rates_.within_memory(rate, wanted);
        if (rate != channel.rate) {
          channel.work -= moved(channel, now_ns_);
          channel.since_ns = now_ns_;
          channel.rate = rate;
          channel.event_ns = now_ns_ + ceil_div(channel.work, rate);
        }
      }
      next_ns_ = std::min(next_ns_, channel.event_ns);
    }
  }

  // The rate of what a channel moves, if the host's memory has room for it.
  [[nodiscard]] std::int64_t wanted_rate(const Channel& channel, unsigned moving) const {
    const Item& item = items_[item_of(channel.slot)];
    return item.lane == kCpu ? rates_.of_update() : rates_.of(item.link, item.touches_device, moving);
  }

  [[nodiscard]] std::int64_t passes(const Channel& channel) const {
    const Item& item = items_[item_of(channel.slot)];
    return item.lane == kCpu ? rates_.passes_of_update() : rates_.passes(item.link, item.touches_device);
  }

  // One event: the end of a latency or of a job.
  void step() {
    now_ns_ = next_ns_;
    for (Channel& channel : channels_) {
      if (channel.event_ns != now_ns_) continue;
      if (!channel.is_moving) {
        channel.is_moving = true;
        channel.since_ns = now_ns_;
      } else {
        jobs_[channel.slot].stop_ns = now_ns_;
        serve(channel);
      }
    }
    settle();
  }

  const std::vector<Item>& items_;
  const Rates& rates_;
  std::vector<Job>& jobs_;
  std::array<Channel, kLaneCount> channels_;
  std::int64_t now_ns_ = 0;
  std::int64_t next_ns_ = kNever;
};

}  // namespace tieroff::simulation
