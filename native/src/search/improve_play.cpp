#include "tieroff/search/improve_play.hpp"

#include <algorithm>

namespace tieroff {

void Player::make_runs(Play& play) {
  play.runs.clear();
  play.run_gaps.clear();
  std::size_t gap = 0;
  while (gap < gaps_.piece.size()) {
    std::size_t end = gap;
    away_.clear();
    for (; end < gaps_.piece.size() && gaps_.piece[end] == gaps_.piece[gap]; ++end) {
      if (is_away(end)) away_.push_back(end);
    }
    if (!away_.empty()) make_runs_of_piece(play, gaps_.is_persistent[gap] != 0);
    gap = end;
  }
}

void Player::make_runs_of_piece(Play& play, bool is_persistent) {
  const auto needs_copy = [&](std::size_t i) {
    const std::int64_t before = i > 0 ? gaps_.stop[away_[i - 1]] : is_persistent ? gaps_.stop[away_.back()] - n_ : 0;
    return gaps_.copy_from[away_[i]] > before;
  };
  std::size_t leading = 0;
  while (leading < away_.size() && !needs_copy(leading)) ++leading;
  if (leading == away_.size()) {
    add_run(play, 0, leading, 0, false);
    return;
  }
  for (std::size_t i = leading; i < away_.size();) {
    std::size_t end = i + 1;
    while (end < away_.size() && !needs_copy(end)) ++end;
    add_run(play, i, end, end == away_.size() ? leading : 0, true);
    i = end;
  }
}

// The gaps [first, end) of the piece, and `leading` of the next step.
void Player::add_run(Play& play, std::size_t first, std::size_t end, std::size_t leading, bool is_copied) {
  Run run{play.run_gaps.size(), end - first + leading, 0, n_, is_copied ? 0 : -1};
  std::array<std::int64_t, 2> time{};
  for (std::size_t i = 0; i < run.count; ++i) {
    const bool is_late = first + i >= end;
    const std::size_t gap = away_[is_late ? first + i - end : first + i];
    play.run_gaps.push_back(gap);
    time[static_cast<std::size_t>(gaps_.tier[gap])] += gaps_.away_stop[gap] - gaps_.away_start[gap];
    if (is_copied) run.stop = gaps_.stop[gap] + (gaps_.is_last[gap] ? 0 : 1) + (is_late ? n_ : 0);
  }
  run.tier = time[1] > time[0] ? 1 : 0;
  play.runs.push_back(run);
}

void Player::make_jobs(Play& play) const {
  for (auto* column : {&play.link, &play.from, &play.by, &play.size_bytes}) column->clear();
  play.run_of.clear();
  play.gap_of.clear();
  const auto add_job = [&](std::size_t link, std::int64_t from, std::int64_t by, std::size_t run, std::size_t gap) {
    play.link.push_back(static_cast<std::int64_t>(link));
    play.from.push_back(from);
    play.by.push_back(by);
    play.size_bytes.push_back(gaps_.size_bytes[gap]);
    play.run_of.push_back(run);
    play.gap_of.push_back(gap);
  };
  for (std::size_t number = 0; number < play.runs.size(); ++number) {
    Run& run = play.runs[number];
    const std::size_t head = play.run_gaps[run.first];
    if (run.out < 0) continue;
    run.out = static_cast<std::ptrdiff_t>(play.link.size());
    const std::int64_t release = gaps_.away_start[head];
    const std::int64_t from = std::max(gaps_.copy_from[head], gaps_.start[head] - n_);
    add_job(run.tier, std::max(std::min(from, release), release - n_), release, number, head);
  }
  for (std::size_t number = 0; number < play.runs.size(); ++number) {
    const Run& run = play.runs[number];
    for (std::size_t i = run.first; i < run.first + run.count; ++i) {
      const std::size_t gap = play.run_gaps[i];
      if (!gaps_.is_last[gap]) add_job(2 + run.tier, gaps_.away_stop[gap], gaps_.stop[gap], number, gap);
    }
  }
}

std::optional<Score> Player::play(Play& play) {
  make_runs(play);
  make_jobs(play);
  play.result = dispatch(ground_.duration_ns, {play.link, play.from, play.by, play.size_bytes}, ground_.links, 3);
  order_jobs(play);
  if (!has_room_below(play)) return std::nullopt;
  Score score{play.result.step_ns, 0};
  for (std::size_t job = 0; job < play.link.size(); ++job) {
    if (play.link[job] == static_cast<std::int64_t>(kNvmeWrite)) score.written_bytes += play.size_bytes[job];
  }
  return score;
}

// The place of each job on its link, and the tick at which it is issued to keep that order.
void Player::order_jobs(Play& play) const {
  for (auto& list : play.order) list.clear();
  for (std::size_t job = 0; job < play.link.size(); ++job) play.order[static_cast<std::size_t>(play.link[job])].push_back(job);
  play.issue.assign(play.link.size(), 0);
  play.place.assign(play.link.size(), 0);
  for (auto& list : play.order) {
    std::sort(list.begin(), list.end(), [&](std::size_t a, std::size_t b) {
      const std::size_t pa = op_at(play.result.start_tick[a]);
      const std::size_t pb = op_at(play.result.start_tick[b]);
      return pa != pb ? pa < pb : play.result.served[a] < play.result.served[b];
    });
    std::int64_t latest = -2 * n_;
    for (int round = 0; round < 2; ++round) {
      for (std::size_t i = 0; i < list.size(); ++i) {
        const std::size_t job = list[i];
        const std::int64_t available =
            static_cast<std::int64_t>(op_at(play.result.start_tick[job])) - (play.result.start_tick[job] - play.from[job]);
        latest = std::max(latest, round == 0 ? available - n_ : available);
        play.issue[job] = latest - available + play.from[job];
        play.place[job] = i;
      }
    }
  }
}

bool Player::has_room_below(const Play& play) {
  for (auto& line : room_) line.assign(static_cast<std::size_t>(2 * n_ + 1), 0);
  for (const Run& run : play.runs) {
    const std::int64_t size = gaps_.size_bytes[play.run_gaps[run.first]];
    const std::int64_t room = (size + ground_.granule_bytes - 1) / ground_.granule_bytes * ground_.granule_bytes;
    const std::int64_t start = run.out < 0 ? 0 : play.issue[static_cast<std::size_t>(run.out)];
    const std::int64_t stop = run.out < 0 ? n_ : std::min(run.stop, start + n_);
    const std::size_t first = op_at(start);
    room_[run.tier][first] += room;
    room_[run.tier][first + static_cast<std::size_t>(stop - start)] -= room;
  }
  for (std::size_t tier = 0; tier < 2; ++tier) {
    auto& line = room_[tier];
    for (std::size_t i = 1; i < line.size(); ++i) line[i] += line[i - 1];
    for (std::size_t op = 0; op < static_cast<std::size_t>(n_); ++op) {
      if (line[op] + line[op + static_cast<std::size_t>(n_)] > ground_.lower_bytes[tier]) {
        short_tier_ = tier;
        short_op_ = static_cast<std::int64_t>(op);
        return false;
      }
    }
  }
  return true;
}

}  // namespace tieroff
