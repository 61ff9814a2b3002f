// The choice of one strategy per node of a graph: least cost of nodes and edges under a limit of bytes at every time.
//
// A problem is reduced first. Strategies that no finite cost allows are dropped. Two nodes whose edge leaves each
// strategy of one a single partner become one, so that what is left has finite costs nearly everywhere and far fewer
// nodes. Times are reduced to those at which something has just begun and the next event is an end.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tieroff::sharding {

constexpr double kForbidden = 1e17;  // a cost from here on is no choice

// As it was given: strategies of node `n` are `first_strategy[n]` up to `first_strategy[n + 1]`, the cost matrix of
// edge `e` lies from `first_entry[e]` on, row by row of its source. A node holds `usage` over times [start, stop).
struct Problem {
  std::span<const std::int64_t> first_strategy, cost, usage, start, stop, source, target, first_entry, entry;
  std::int64_t limit;
};

// What a node holds over reduced times [start, stop), beyond its least there: one value per strategy, from `value` on.
struct Held {
  int start, stop;
  std::int64_t value;
};

struct Edge {
  int source, target;
  std::int64_t entry;  // rows are the source's strategies
};

struct Neighbour {
  int node, edge;
  bool is_source;  // of the other node's edge: whether the neighbour is its source
};

// One original node's choice, given its node's: `choice` is where the list of its strategies begins.
struct Member {
  int original;
  std::int64_t choice;
};

struct Reduced {
  bool is_feasible = true;  // false: no assignment has a finite cost
  std::vector<std::int64_t> first_strategy;
  std::vector<double> cost;
  std::vector<Edge> edges;
  std::vector<double> entry;
  std::vector<std::int64_t> first_neighbour;
  std::vector<Neighbour> neighbours;
  std::vector<std::int64_t> first_held;
  std::vector<Held> held;
  std::vector<double> held_bytes;
  std::vector<std::int64_t> first_member;
  std::vector<Member> members;
  std::vector<int> choices;
  std::vector<double> room;  // by reduced time: the limit less what is held whatever is chosen

  int node_count() const { return static_cast<int>(first_strategy.size()) - 1; }
  int strategies_of(int node) const { return static_cast<int>(first_strategy[node + 1] - first_strategy[node]); }
};

Reduced reduce(const Problem& problem);

// The original nodes' strategies of an assignment of the reduced problem.
std::vector<std::int64_t> expand(const Reduced& reduced, std::span<const int> assignment, std::size_t original_count);

struct Options {
  double time_limit_s = 10;
  std::uint64_t seed = 1;
};

struct Result {
  bool is_feasible = false;
  double cost = 0;   // where it is feasible; exact below 2^53
  double bound = 0;  // no assignment within the limit costs less
  std::vector<std::int64_t> strategies;
  std::int64_t start_count = 0;
};

// Searches until the time is over or the bound is met. Takes two threads.
Result solve(const Problem& problem, const Options& options);

}  // namespace tieroff::sharding
