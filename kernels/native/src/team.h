// A team of threads of our own: no OpenMP, which would be a second pool beside torch's.
//
// Code runs in *regions*: every thread of the team executes the same function, and shares work by
// `each`. Tasks are taken from a counter, not dealt out: a thread that loses its core to another
// program delays the rest by one task, not by its whole share. A thread that comes late, even after
// all tasks of several `each`, walks through the function and finds them done. So outside of tasks
// a region's function may only compute values of its own: it may run before, after or at the same
// time as the tasks around it. Where a task throws, no thread goes on behind its `each`: all leave
// the region, `run` throws that exception, and the team is as good as before. Where threads keep
// waiting for one that has no core, regions have fewer threads for a while (headcount.h); `size` stays
// what it is.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace rootlace {

class Team;

// One thread's view of a region.
class Crew {
 public:
  Crew(Team& team, int rank) : team_(team), rank_(rank) {}

  int rank() const { return rank_; }
  int size() const;

  // Run task(0) .. task(tasks - 1), each once on some thread. All threads of the region call it
  // with the same count; returns when all tasks are done and their writes are seen by all. Leaves
  // the region by an exception if one of them threw.
  template <class Task>
  void each(int tasks, Task&& task) {
    int64_t first = begin(tasks);
    for (int i; (i = take(first, tasks)) < tasks;) task(i);
    end();
  }

  // At least `bytes` of this thread's own memory, 64-byte aligned, kept from region to region; the
  // next call may move it. Contents are undefined. Throws std::bad_alloc.
  void* scratch(size_t bytes);

  // The memory that all threads of the region share: as much as `Team::run` was told, 64-byte aligned.
  // What one task writes there is seen by those of later `each`.
  void* shared() const;

 private:
  friend class Team;
  int64_t begin(int tasks);
  int take(int64_t first, int tasks);
  void end();

  Team& team_;
  int rank_;
  int64_t begun_ = 0;     // tasks of all `each` so far
  int64_t finished_ = 0;  // tasks of this `each` that this thread ran
  std::chrono::nanoseconds slept_{};
};

// `threads` includes the calling one. One region at a time: callers take turns. Regions do not
// nest. In a child made by fork the team gets new threads.
class Team {
 public:
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const;
  // Throws what a task threw first. `shared`: bytes that the region's threads share, which are kept
  // from region to region; contents are undefined.
  void run(const std::function<void(Crew&)>& region) { run(0, region); }
  void run(size_t shared, const std::function<void(Crew&)>& region);

 private:
  friend class Crew;
  struct State;
  State* state_;
};

}  // namespace rootlace
