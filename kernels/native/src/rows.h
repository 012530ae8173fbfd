// Rows of activations: their distance in memory, and tasks over rows.
#pragma once

#include <algorithm>
#include <cstddef>

#include "division.h"
#include "team.h"

namespace rootlace {

// Returns the distance of rows with this number of elements: an odd number of cache lines. Rows a
// power of two apart would share few sets of a cache, and products read many rows at a time.
template <class T>
size_t spread(int elements) {
  constexpr size_t LINE = 64 / sizeof(T);
  return ((elements + LINE - 1) / LINE | 1) * LINE;
}

// Calls task(row) for rows 0 .. rows - 1, a few rows to a task.
template <class Task>
void each_row(Crew& crew, int rows, Task&& task) {
  int size = std::max(1, std::min(rows / (4 * crew.size()), 32));
  crew.each(ceil_div(rows, size), [&](int part) {
    for (int row = part * size; row < std::min(rows, (part + 1) * size); row++) task(row);
  });
}

}  // namespace rootlace
