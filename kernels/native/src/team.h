// Team of Rootlace's own threads, without OpenMP, which would be a second pool beside torch's.
//
// Code runs in *regions*: every thread of the team executes the same function, and shares work by
// `each`. Threads take tasks from a counter, without fixed shares. So a thread that loses its core
// to another program delays the rest by one task, not by its whole share. A late thread, even after
// all tasks of several `each`, walks through the function and finds the tasks done. So code outside
// of tasks may only compute values of its own thread: it may run before, after or at the same time
// as the tasks around it.
//
// If a task throws, no thread continues behind its `each`: all leave the region, `run` throws the
// exception, and the team stays usable. If threads keep waiting for a thread without a core,
// regions have fewer threads for a while (headcount.h); `size` does not change.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace rootlace {

class Team;

// View of a region by one thread.
class Crew {
 public:
  Crew(Team& team, int rank) : team_(team), rank_(rank) {}

  int rank() const { return rank_; }
  int size() const;

  // Runs task(0) .. task(tasks - 1), each once on some thread. All threads of the region call this
  // with the same count. Returns when all tasks are done and every thread sees their writes. Leaves
  // the region by an exception if a task threw.
  template <class Task>
  void each(int tasks, Task&& task) {
    int64_t first = begin(tasks);
    for (int i; (i = take(first, tasks)) < tasks;) task(i);
    end();
  }

  // Returns at least `bytes` of this thread's own memory, 64-byte aligned, kept from region to
  // region. The next call may move the memory. Contents are undefined. Throws std::bad_alloc.
  void* scratch(size_t bytes);

  // Returns the memory that all threads of the region share, with the size given to `Team::run`,
  // 64-byte aligned. Tasks of later `each` see a task's writes there.
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

// `threads` includes the calling thread. One region runs at a time: callers take turns. Regions do
// not nest. In a forked child the team gets new threads.
class Team {
 public:
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const;
  // Rethrows the first exception of a task. `shared`: bytes that the region's threads share, kept
  // from region to region; contents are undefined.
  void run(const std::function<void(Crew&)>& region) { run(0, region); }
  void run(size_t shared, const std::function<void(Crew&)>& region);

 private:
  friend class Crew;
  struct State;
  State* state_;
};

}  // namespace rootlace
