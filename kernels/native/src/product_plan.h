// Division of a product's work among threads.
#pragma once

#include <algorithm>

#include "division.h"
#include "vec.h"

namespace rootlace {

// Rows of x are multiplied in groups that stay in the second level of cache. Weights larger than this would be read
// from memory for each group, so their groups are larger and stay in the third level.
constexpr int64_t LARGE_WEIGHTS = 16 << 20;

// Work of one `linear`: units of some rows x some columns, numbered so that units with common weights or rows are
// near. Tasks are runs of units.
template <class Packing>
struct Plan {
  Packing packing;
  int rows, threads;
  int unit_vecs;   // vectors of columns of a unit: a panel's, or one if panels are few
  int unit_rows;   // rows of a unit
  int group_rows;  // rows of a group, whose units come before the next group's
  int column_units, units;

  // `rows` rows of factors, of `input_bytes` per input.
  Plan(const Packing& packing, int rows, int threads, size_t input_bytes)
      : packing(packing), rows(rows), threads(threads) {
    int vecs = ceil_div(packing.columns, LANES);
    // Cut panels if there are few, and whole panels would make the largest share larger by more than a tenth.
    int whole = ceil_div(packing.panels, threads) * Packing::VECS;
    bool uneven = 10 * whole > 11 * ceil_div(vecs, threads);
    bool scarce = packing.panels < 6 * threads && rows <= 2 * Packing::ROWS && uneven;
    unit_vecs = scarce ? 1 : Packing::VECS;
    column_units = unit_vecs == 1 ? vecs : packing.panels;
    // Row groups, of about the same size each.
    bool large = packing.bytes() > LARGE_WEIGHTS;
    int64_t bytes = large ? Packing::LARGE_GROUP_BYTES : Packing::GROUP_BYTES;
    int most_rows = std::max<int64_t>(Packing::MOST_ROWS, bytes / (packing.inputs * input_bytes));
    int groups = ceil_div(rows, most_rows);
    group_rows = round_rows(ceil_div(rows, groups));
    int blocks = ceil_div(group_rows, Packing::MOST_ROWS);
    int most = ceil_div(group_rows, 2 * Packing::ROWS);
    int wanted = ceil_div(16 * threads, static_cast<int64_t>(column_units) * groups);
    unit_rows = round_rows(ceil_div(group_rows, std::max(blocks, std::min(most, wanted))));
    units = column_units * (rows / group_rows * ceil_div(group_rows, unit_rows) +
                            ceil_div(rows % group_rows, unit_rows));
  }

  static int round_rows(int rows) { return ceil_div(rows, Packing::ROWS) * Packing::ROWS; }

  // Tasks are large at first and small at the end: few tasks, and all threads end together. A round has a task for
  // each thread, and takes a half or a quarter of the units left.
  int share(int left) const {
    return std::max(1, left / (threads * (units >= 64 * threads ? 4 : 2)));
  }
  int tasks() const {
    if (threads == 1) return std::min(units, 1);
    int count = 0;
    for (int left = units; left > 0;) {
      int size = share(left);
      int round = std::min(threads, ceil_div(left, size));
      count += round;
      left -= round * size;
    }
    return count;
  }
  void task(int index, int& begin, int& end) const {
    begin = 0, end = units;
    if (threads == 1) return;
    for (int left = units;;) {
      int size = share(left);
      int round = std::min(threads, ceil_div(left, size));
      if (index < round) {
        begin += index * size;
        end = std::min(begin + size, units);
        return;
      }
      index -= round, begin += round * size, left -= round * size;
    }
  }

  struct Unit {
    int row, rows, panel, vec, vecs;  // `vec`: first vector, within the panel
    int count;                        // units taken together
  };
  // Returns unit `index`, joined with those behind it, below `end`, of the same panel.
  Unit unit(int index, int end) const {
    int full = column_units * ceil_div(group_rows, unit_rows);
    int group = index / full;
    int row = group * group_rows;
    int in_group = std::min(group_rows, rows - row);
    int blocks = ceil_div(in_group, unit_rows);
    Unit unit;
    bool alone = unit_vecs == Packing::VECS || units > column_units;
    unit.count = alone ? 1 : std::min(end - index, Packing::VECS - index % Packing::VECS);
    index -= group * full;
    unit.row = row + index % blocks * unit_rows;
    unit.rows = std::min(unit_rows, row + in_group - unit.row);
    int first = index / blocks * unit_vecs;
    unit.panel = first / Packing::VECS;
    unit.vec = first % Packing::VECS;
    unit.vecs = std::min(unit_vecs * unit.count, ceil_div(packing.columns, LANES) - first);
    return unit;
  }
};

}  // namespace rootlace
