// What a problem is while it is reduced: groups of nodes that are chosen for together, and links between them.
#pragma once

#include <cstdint>
#include <vector>

#include "tieroff/sharding/solve.hpp"

namespace tieroff::sharding {

struct GroupMember {
  int original;
  std::vector<int> choice;  // of the original node's strategies, by the group's
};

struct GroupHeld {
  int start, stop;
  std::vector<double> bytes;  // by strategy
};

struct Group {
  std::vector<double> cost;
  std::vector<GroupMember> members;
  std::vector<GroupHeld> held;

  int size() const { return static_cast<int>(cost.size()); }
  void keep(const std::vector<int>& kept);
};

struct Link {
  int a, b;
  std::vector<double> cost;  // rows are a's strategies
};

// Finds the times that can bind, and what each group holds over them.
void hold(const Problem& problem, std::vector<Group>& groups);

// Finds strategies for which another costs no more, whatever the neighbours do, and holds no more at any time.
bool drop_dominated(const std::vector<Group>& groups, const std::vector<Link>& links, std::vector<std::vector<int>>& kept);

// Takes from the limit what is held anyway, and drops times that cannot reach it.
void place_in_time(std::int64_t limit, std::vector<Group>& groups, Reduced& reduced);

}  // namespace tieroff::sharding
