#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>

#include "tieroff/sharding/groups.hpp"

namespace tieroff::sharding {

namespace {

// Of all times, those at which something begins and the next event is an end: what is held at any other time is held at
// one of them too.
std::vector<std::int64_t> binding_times(const Problem& problem) {
  std::map<std::int64_t, int> events;  // 1 something begins, 2 something ends
  for (std::size_t n = 0; n < problem.start.size(); ++n) {
    if (problem.start[n] >= problem.stop[n]) continue;
    events[problem.start[n]] |= 1;
    events[problem.stop[n]] |= 2;
  }
  std::vector<std::int64_t> times;
  for (auto event = events.begin(); event != events.end(); ++event) {
    if (!(event->second & 1)) continue;
    const auto next = std::next(event);
    if (next == events.end() || (next->second & 2)) times.push_back(event->first);
  }
  return times;
}

void hold_group(const Problem& problem, const std::vector<std::int64_t>& times, Group& group) {
  struct Event {
    int time;
    const GroupMember* member;
    double sign;
  };
  const auto place = [&](std::int64_t time) {
    return static_cast<int>(std::lower_bound(times.begin(), times.end(), time) - times.begin());
  };
  std::vector<Event> events;
  for (const GroupMember& member : group.members) {
    const std::int64_t start = problem.start[member.original], stop = problem.stop[member.original];
    if (start >= stop) continue;
    events.push_back({place(start), &member, 1});
    events.push_back({place(stop), &member, -1});
  }
  std::stable_sort(events.begin(), events.end(), [](const Event& a, const Event& b) { return a.time < b.time; });
  std::vector<double> bytes(group.cost.size(), 0.0);
  for (std::size_t i = 0; i < events.size(); ++i) {
    const std::int64_t* usage = &problem.usage[problem.first_strategy[events[i].member->original]];
    for (std::size_t k = 0; k < bytes.size(); ++k)
      bytes[k] += events[i].sign * static_cast<double>(usage[events[i].member->choice[k]]);
    if (i + 1 == events.size() || events[i + 1].time == events[i].time) continue;
    if (!group.held.empty() && group.held.back().stop == events[i].time && group.held.back().bytes == bytes)
      group.held.back().stop = events[i + 1].time;
    else
      group.held.push_back({events[i].time, events[i + 1].time, bytes});
  }
}

bool holds_no_more(const Group& group, int k, int than) {
  return std::all_of(group.held.begin(), group.held.end(),
                     [&](const GroupHeld& piece) { return piece.bytes[k] <= piece.bytes[than]; });
}

}  // namespace

void hold(const Problem& problem, std::vector<Group>& groups) {
  const std::vector<std::int64_t> times = binding_times(problem);
  for (Group& group : groups) hold_group(problem, times, group);
}

bool drop_dominated(const std::vector<Group>& groups, const std::vector<Link>& links, std::vector<std::vector<int>>& kept) {
  std::vector<std::vector<const Link*>> touching(groups.size());
  for (const Link& link : links) {
    touching[link.a].push_back(&link);
    touching[link.b].push_back(&link);
  }
  bool is_any = false;
  kept.assign(groups.size(), {});
  // The most that k costs beyond `than`, whatever the neighbours are.
  const auto excess = [&](int g, int k, int than) {
    double sum = groups[g].cost[k] - groups[g].cost[than];
    for (const Link* link : touching[g]) {
      const bool is_row = link->a == g;
      const int others = groups[is_row ? link->b : link->a].size(), width = groups[link->b].size();
      double most = -std::numeric_limits<double>::infinity();
      for (int j = 0; j < others; ++j) {
        const double of_k = link->cost[is_row ? std::size_t(k) * width + j : std::size_t(j) * width + k];
        const double of_than = link->cost[is_row ? std::size_t(than) * width + j : std::size_t(j) * width + than];
        if (of_than < kForbidden) most = std::max(most, of_k - of_than);
      }
      sum += most;
    }
    return sum;
  };
  for (int g = 0; g < static_cast<int>(groups.size()); ++g) {
    std::vector<char> is_dropped(groups[g].cost.size(), 0);
    for (int than = 0; than < groups[g].size(); ++than)
      for (int k = 0; k < groups[g].size() && !is_dropped[than]; ++k)
        if (k != than && !is_dropped[k] && holds_no_more(groups[g], k, than) && excess(g, k, than) <= 0) is_dropped[than] = 1;
    for (int k = 0; k < groups[g].size(); ++k)
      if (!is_dropped[k]) kept[g].push_back(k);
    is_any = is_any || kept[g].size() < groups[g].cost.size();
  }
  return is_any;
}

void place_in_time(std::int64_t limit, std::vector<Group>& groups, Reduced& reduced) {
  int count = 0;
  for (const Group& group : groups)
    for (const GroupHeld& piece : group.held) count = std::max(count, piece.stop);
  std::vector<double> least(count + 1, 0.0), most(count + 1, 0.0);
  for (Group& group : groups) {
    for (GroupHeld& piece : group.held) {
      const auto [low, high] = std::minmax_element(piece.bytes.begin(), piece.bytes.end());
      const double base = *low, top = *high;
      least[piece.start] += base, least[piece.stop] -= base;
      most[piece.start] += top, most[piece.stop] -= top;
      for (double& bytes : piece.bytes) bytes -= base;
    }
    std::erase_if(group.held, [](const GroupHeld& piece) {
      return std::all_of(piece.bytes.begin(), piece.bytes.end(), [](double bytes) { return bytes == 0; });
    });
  }
  std::vector<int> place(count + 1);
  double low = 0, high = 0;
  for (int t = 0; t < count; ++t) {
    low += least[t], high += most[t];
    place[t] = static_cast<int>(reduced.room.size());
    if (high > static_cast<double>(limit)) reduced.room.push_back(static_cast<double>(limit) - low);
  }
  place[count] = static_cast<int>(reduced.room.size());
  for (Group& group : groups) {
    for (GroupHeld& piece : group.held) piece.start = place[piece.start], piece.stop = place[piece.stop];
    std::erase_if(group.held, [](const GroupHeld& piece) { return piece.start >= piece.stop; });
  }
  reduced.is_feasible = std::all_of(reduced.room.begin(), reduced.room.end(), [](double room) { return room >= 0; });
}

}  // namespace tieroff::sharding
