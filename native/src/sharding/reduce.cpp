#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "tieroff/sharding/groups.hpp"

namespace tieroff::sharding {

namespace {

constexpr int kDominanceRounds = 8;  // each looks at all; the first ones find nearly all there is

using Map = std::vector<int>;  // new strategy -> old strategy

std::vector<Group> groups_of(const Problem& problem) {
  const std::size_t count = problem.start.size();
  std::vector<Group> groups(count);
  for (std::size_t node = 0; node < count; ++node) {
    const std::int64_t begin = problem.first_strategy[node], end = problem.first_strategy[node + 1];
    groups[node].cost.assign(problem.cost.begin() + begin, problem.cost.begin() + end);
    Map choice(groups[node].cost.size());
    std::iota(choice.begin(), choice.end(), 0);
    groups[node].members.push_back({static_cast<int>(node), std::move(choice)});
  }
  return groups;
}

// Links between the same two groups are one, the sum.
class LinkSet {
 public:
  void add(int a, int b, std::vector<double> matrix, int rows, int columns) {
    if (a > b) {
      std::vector<double> turned(matrix.size());
      for (int i = 0; i < rows; ++i)
        for (int j = 0; j < columns; ++j) turned[std::size_t(j) * rows + i] = matrix[std::size_t(i) * columns + j];
      std::swap(a, b);
      std::swap(rows, columns);
      matrix.swap(turned);
    }
    const auto [place, is_new] = index_.try_emplace((std::uint64_t(a) << 32) | std::uint32_t(b), links_.size());
    if (is_new) {
      links_.push_back({a, b, std::move(matrix)});
      return;
    }
    std::vector<double>& sum = links_[place->second].cost;
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += matrix[i];
  }

  std::vector<Link> take() { return std::move(links_); }

 private:
  std::unordered_map<std::uint64_t, std::size_t> index_;
  std::vector<Link> links_;
};

std::vector<Link> links_of(const Problem& problem, std::vector<Group>& groups) {
  LinkSet links;
  for (std::size_t e = 0; e < problem.source.size(); ++e) {
    const int a = static_cast<int>(problem.source[e]), b = static_cast<int>(problem.target[e]);
    const std::int64_t begin = problem.first_entry[e];
    const int rows = groups[a].size(), columns = groups[b].size();
    if (a == b) {  // only the diagonal can be chosen
      for (int i = 0; i < rows; ++i) groups[a].cost[i] += static_cast<double>(problem.entry[begin + i * (rows + 1)]);
      continue;
    }
    links.add(a, b, {problem.entry.begin() + begin, problem.entry.begin() + begin + std::int64_t(rows) * columns}, rows,
              columns);
  }
  return links.take();
}

// Drops strategies; an empty list of kept ones means that there is no solution.
bool keep_only(std::vector<Group>& groups, std::vector<Link>& links, const std::vector<Map>& kept) {
  for (Link& link : links) {
    const Map &rows = kept[link.a], &columns = kept[link.b];
    const std::size_t width = groups[link.b].cost.size();
    if (rows.size() == groups[link.a].cost.size() && columns.size() == width) continue;
    std::size_t to = 0;
    for (const int i : rows)
      for (const int j : columns) link.cost[to++] = link.cost[i * width + j];
    link.cost.resize(to);
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (kept[g].empty()) return false;
    groups[g].keep(kept[g]);
  }
  return true;
}

// Arc consistency: a strategy stays while each neighbour has a partner for it.
bool make_consistent(std::vector<Group>& groups, std::vector<Link>& links) {
  std::vector<std::vector<int>> touching(groups.size());
  for (std::size_t e = 0; e < links.size(); ++e) {
    touching[links[e].a].push_back(static_cast<int>(e));
    touching[links[e].b].push_back(static_cast<int>(e));
  }
  std::vector<std::vector<char>> alive(groups.size());
  std::vector<int> queue(groups.size());
  std::vector<char> is_queued(groups.size(), 1);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (const double cost : groups[g].cost) alive[g].push_back(cost < kForbidden);
    queue[g] = static_cast<int>(g);
  }
  std::vector<char> has_partner;
  while (!queue.empty()) {
    const int g = queue.back();
    queue.pop_back();
    is_queued[g] = 0;
    for (const int e : touching[g]) {
      const Link& link = links[e];
      const bool is_row = link.a == g;
      const int other = is_row ? link.b : link.a;
      const std::size_t rows = alive[link.a].size(), columns = alive[link.b].size();
      has_partner.assign(alive[other].size(), 0);
      for (std::size_t i = 0; i < rows; ++i) {
        if (is_row && !alive[g][i]) continue;
        for (std::size_t j = 0; j < columns; ++j)
          if ((is_row || alive[g][j]) && link.cost[i * columns + j] < kForbidden) has_partner[is_row ? j : i] = 1;
      }
      bool is_changed = false;
      for (std::size_t k = 0; k < has_partner.size(); ++k)
        if (alive[other][k] && !has_partner[k]) alive[other][k] = 0, is_changed = true;
      if (is_changed && !is_queued[other]) queue.push_back(other), is_queued[other] = 1;
    }
  }
  std::vector<Map> kept(groups.size());
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (std::size_t k = 0; k < alive[g].size(); ++k)
      if (alive[g][k]) kept[g].push_back(static_cast<int>(k));
  return keep_only(groups, links, kept);
}

// Takes what a link says about one of its ends alone into that end's costs; drops the link when nothing is left.
void fold_links(std::vector<Group>& groups, std::vector<Link>& links) {
  std::erase_if(links, [&](Link& link) {
    Group &a = groups[link.a], &b = groups[link.b];
    const std::size_t rows = a.cost.size(), columns = b.cost.size();
    for (const double cost : link.cost)
      if (cost >= kForbidden) return false;
    for (std::size_t i = 1; i < rows; ++i)
      for (std::size_t j = 1; j < columns; ++j)
        if (link.cost[i * columns + j] - link.cost[i * columns] != link.cost[j] - link.cost[0]) return false;
    for (std::size_t i = 0; i < rows; ++i) a.cost[i] += link.cost[i * columns];
    for (std::size_t j = 0; j < columns; ++j) b.cost[j] += link.cost[j] - link.cost[0];
    return true;
  });
}

// For each row the only column that is allowed, or an empty list where one has several.
Map only_partner(const Link& link, std::size_t rows, std::size_t columns, bool of_rows) {
  Map partner(of_rows ? rows : columns, -1);
  for (std::size_t i = 0; i < rows; ++i)
    for (std::size_t j = 0; j < columns; ++j) {
      if (link.cost[i * columns + j] >= kForbidden) continue;
      int& found = partner[of_rows ? i : j];
      if (found >= 0) return {};
      found = static_cast<int>(of_rows ? j : i);
    }
  return partner;
}

// Where each group goes: its root, and its strategy for each of the root's.
struct Roots {
  std::vector<int> root;
  std::vector<Map> strategy;
};

Map composed(const Map& outer, const Map& inner) {
  Map result;
  for (const int k : inner) result.push_back(outer[k]);
  return result;
}

// Groups whose strategy follows from another's join it. Walks from each root along links that determine the far end;
// returns false when there is none.
bool find_roots(const std::vector<Group>& groups, const std::vector<Link>& links, Roots& roots) {
  struct Step {
    int to;
    Map partner;
  };
  std::vector<std::vector<Step>> steps(groups.size());
  for (const Link& link : links) {
    const std::size_t rows = groups[link.a].cost.size(), columns = groups[link.b].cost.size();
    if (rows >= columns)
      if (Map partner = only_partner(link, rows, columns, true); !partner.empty())
        steps[link.a].push_back({link.b, std::move(partner)});
    if (columns >= rows)
      if (Map partner = only_partner(link, rows, columns, false); !partner.empty())
        steps[link.b].push_back({link.a, std::move(partner)});
  }
  roots.root.assign(groups.size(), -1);
  roots.strategy.assign(groups.size(), {});
  std::vector<int> order(groups.size());
  std::iota(order.begin(), order.end(), 0);
  // The one with most strategies first: who has more determines who has fewer.
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return groups[a].cost.size() > groups[b].cost.size(); });
  bool is_any = false;
  for (const int start : order) {
    if (roots.root[start] >= 0) continue;
    roots.root[start] = start;
    roots.strategy[start].resize(groups[start].cost.size());
    std::iota(roots.strategy[start].begin(), roots.strategy[start].end(), 0);
    std::vector<int> stack{start};
    while (!stack.empty()) {
      const int at = stack.back();
      stack.pop_back();
      for (const Step& step : steps[at]) {
        if (roots.root[step.to] >= 0) continue;
        roots.root[step.to] = start;
        roots.strategy[step.to] = composed(step.partner, roots.strategy[at]);
        stack.push_back(step.to);
        is_any = true;
      }
    }
  }
  return is_any;
}

void join(std::vector<Group>& groups, std::vector<Link>& links, const Roots& roots) {
  std::vector<int> place(groups.size(), -1);
  std::vector<Group> joined;
  for (std::size_t g = 0; g < groups.size(); ++g)
    if (roots.root[g] == static_cast<int>(g)) {
      place[g] = static_cast<int>(joined.size());
      joined.push_back({std::vector<double>(groups[g].cost.size(), 0.0), {}, {}});
    }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    Group& root = joined[place[roots.root[g]]];
    const Map& strategy = roots.strategy[g];
    for (std::size_t k = 0; k < strategy.size(); ++k) root.cost[k] += groups[g].cost[strategy[k]];
    for (GroupMember& member : groups[g].members) root.members.push_back({member.original, composed(member.choice, strategy)});
  }
  LinkSet set;
  for (const Link& link : links) {
    const int a = place[roots.root[link.a]], b = place[roots.root[link.b]];
    const Map &of_a = roots.strategy[link.a], &of_b = roots.strategy[link.b];
    const std::size_t columns = groups[link.b].cost.size();
    if (a == b) {
      for (std::size_t k = 0; k < of_a.size(); ++k) joined[a].cost[k] += link.cost[of_a[k] * columns + of_b[k]];
      continue;
    }
    std::vector<double> cost;
    cost.reserve(of_a.size() * of_b.size());
    for (const int i : of_a)
      for (const int j : of_b) cost.push_back(link.cost[i * columns + j]);
    set.add(a, b, std::move(cost), static_cast<int>(of_a.size()), static_cast<int>(of_b.size()));
  }
  groups = std::move(joined);
  links = set.take();
}

bool contract(std::vector<Group>& groups, std::vector<Link>& links) {
  while (true) {
    if (!make_consistent(groups, links)) return false;
    fold_links(groups, links);
    Roots roots;
    if (!find_roots(groups, links, roots)) return true;
    join(groups, links, roots);
  }
}

void connect(Reduced& reduced) {
  std::vector<std::vector<Neighbour>> neighbours(reduced.node_count());
  for (std::size_t e = 0; e < reduced.edges.size(); ++e) {
    const Edge& edge = reduced.edges[e];
    neighbours[edge.source].push_back({edge.target, static_cast<int>(e), false});
    neighbours[edge.target].push_back({edge.source, static_cast<int>(e), true});
  }
  reduced.first_neighbour = {0};
  for (const auto& list : neighbours) {
    reduced.neighbours.insert(reduced.neighbours.end(), list.begin(), list.end());
    reduced.first_neighbour.push_back(static_cast<std::int64_t>(reduced.neighbours.size()));
  }
}

}  // namespace

void Group::keep(const std::vector<int>& kept) {
  if (kept.size() == cost.size()) return;
  for (std::size_t k = 0; k < kept.size(); ++k) cost[k] = cost[kept[k]];
  for (GroupMember& member : members) member.choice = composed(member.choice, kept);
  for (GroupHeld& piece : held) {
    for (std::size_t k = 0; k < kept.size(); ++k) piece.bytes[k] = piece.bytes[kept[k]];
    piece.bytes.resize(kept.size());
  }
  cost.resize(kept.size());
}

Reduced reduce(const Problem& problem) {
  Reduced reduced;
  std::vector<Group> groups = groups_of(problem);
  std::vector<Link> links = links_of(problem, groups);
  if (!contract(groups, links)) {
    reduced.is_feasible = false;
    return reduced;
  }
  hold(problem, groups);
  std::vector<Map> kept;
  for (int round = 0; round < kDominanceRounds && drop_dominated(groups, links, kept); ++round) {
    keep_only(groups, links, kept);
    fold_links(groups, links);
  }
  place_in_time(problem.limit, groups, reduced);
  reduced.first_strategy = reduced.first_member = reduced.first_held = {0};
  for (Group& group : groups) {
    reduced.cost.insert(reduced.cost.end(), group.cost.begin(), group.cost.end());
    reduced.first_strategy.push_back(static_cast<std::int64_t>(reduced.cost.size()));
    for (const GroupMember& member : group.members) {
      reduced.members.push_back({member.original, static_cast<std::int64_t>(reduced.choices.size())});
      reduced.choices.insert(reduced.choices.end(), member.choice.begin(), member.choice.end());
    }
    reduced.first_member.push_back(static_cast<std::int64_t>(reduced.members.size()));
    for (const GroupHeld& piece : group.held) {
      reduced.held.push_back({piece.start, piece.stop, static_cast<std::int64_t>(reduced.held_bytes.size())});
      reduced.held_bytes.insert(reduced.held_bytes.end(), piece.bytes.begin(), piece.bytes.end());
    }
    reduced.first_held.push_back(static_cast<std::int64_t>(reduced.held.size()));
  }
  for (const Link& link : links) {
    reduced.edges.push_back({link.a, link.b, static_cast<std::int64_t>(reduced.entry.size())});
    reduced.entry.insert(reduced.entry.end(), link.cost.begin(), link.cost.end());
  }
  connect(reduced);
  return reduced;
}

std::vector<std::int64_t> expand(const Reduced& reduced, std::span<const int> assignment, std::size_t original_count) {
  std::vector<std::int64_t> strategies(original_count, 0);
  for (int node = 0; node < reduced.node_count(); ++node)
    for (std::int64_t m = reduced.first_member[node]; m < reduced.first_member[node + 1]; ++m)
      strategies[reduced.members[m].original] = reduced.choices[reduced.members[m].choice + assignment[node]];
  return strategies;
}

}  // namespace tieroff::sharding
