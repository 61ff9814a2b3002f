// Windows as the dispatcher plays them: runs, transfers, their order, and whether the lower tiers have room.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "tieroff/search/improve.hpp"

namespace tieroff {

// A copy below and the gaps that it serves.
struct Run {
  std::size_t first;  // into run_gaps_
  std::size_t count;
  std::size_t tier;
  std::int64_t stop;        // of its stay below
  std::ptrdiff_t out = -1;  // its copy's job
};

// Windows as the dispatcher plays them.
struct Play {
  std::vector<Run> runs;
  std::vector<std::size_t> run_gaps;
  std::vector<std::int64_t> link, from, by, size_bytes;  // per job
  std::vector<std::size_t> run_of, gap_of;
  std::array<std::vector<std::size_t>, kLinkCount> order;
  std::vector<std::int64_t> issue;
  std::vector<std::size_t> place;
  Dispatched result{};
};

struct Score {
  double step_ns;
  std::int64_t written_bytes;  // to the drive, per step
  [[nodiscard]] bool beats(const Score& other) const {
    return step_ns != other.step_ns ? step_ns < other.step_ns : written_bytes < other.written_bytes;
  }
};

class Player {
 public:
  Player(const SearchGround& ground, const SearchGaps& gaps)
      : ground_(ground), gaps_(gaps), n_(static_cast<std::int64_t>(ground.duration_ns.size())) {}

  // Plays the windows as they are now; nothing when a lower tier has no room, and then `short_tier` and `short_op` say
  // where.
  std::optional<Score> play(Play& play);

  [[nodiscard]] std::size_t short_tier() const { return short_tier_; }
  [[nodiscard]] std::int64_t short_op() const { return short_op_; }

 private:
  void make_runs(Play& play);
  void make_runs_of_piece(Play& play, bool is_persistent);
  void add_run(Play& play, std::size_t first, std::size_t end, std::size_t leading, bool is_copied);
  void make_jobs(Play& play) const;
  void order_jobs(Play& play) const;
  bool has_room_below(const Play& play);
  [[nodiscard]] bool is_away(std::size_t gap) const { return gaps_.away_start[gap] < gaps_.away_stop[gap]; }
  [[nodiscard]] std::size_t op_at(std::int64_t position) const { return static_cast<std::size_t>(((position % n_) + n_) % n_); }

  SearchGround ground_;
  SearchGaps gaps_;
  std::int64_t n_;
  std::vector<std::size_t> away_;  // gaps of one piece
  std::array<std::vector<std::int64_t>, 2> room_;
  std::size_t short_tier_ = 0;
  std::int64_t short_op_ = 0;
};

}  // namespace tieroff
