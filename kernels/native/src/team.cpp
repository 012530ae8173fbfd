#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "api.h"
#include "buffer.h"
#include "guard.h"
#include "headcount.h"
#include "isa/pause.h"

namespace rootlace {
namespace {

// Time that a waiting thread spins before it sleeps. Sleeping and waking take about as long. A
// thread that spins much longer takes its core from the thread it waits for, or from other
// programs.
constexpr int PAUSES = 256;
constexpr std::chrono::microseconds LOOK{50};

// Least wait for a thread that has lost its core, or for a task longer than the others.
constexpr std::chrono::microseconds STALL{300};

using Clock = std::chrono::steady_clock;
using Duration = Headcount::Duration;

// Returns the time that this thread has computed.
inline Duration computed() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

// Place where threads wait for a condition on atomics that other threads change.
class Place {
 public:
  // Returns the time that the thread slept.
  template <class Ready>
  Duration wait(Ready ready) {
    if (look(ready)) return {};
    auto began = Clock::now();
    sleepers_.fetch_add(1);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, ready);
    }
    sleepers_.fetch_sub(1);
    return Clock::now() - began;
  }

  // Call this after the change. Either this call sees the sleeper, or the sleeper sees the change.
  void wake() {
    if (sleepers_.load() == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }
    changed_.notify_all();
  }

 private:
  template <class Ready>
  static bool look(Ready& ready) {
    for (int i = 0; i < PAUSES; i++) {
      if (ready()) return true;
      pause();
    }
    auto until = Clock::now() + LOOK;
    do {
      sched_yield();  // threads with work go first
      if (ready()) return true;
    } while (Clock::now() < until);
    return false;
  }

  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

// Thrown to leave a region in which another thread's task threw.
struct Abandoned {};

constexpr uint64_t OPEN = uint64_t{1} << 31;
constexpr uint64_t INSIDE = OPEN - 1;

}  // namespace

struct Team::State {
  // Number of the region << 32, whether workers may still enter, how many are inside.
  alignas(64) std::atomic<uint64_t> entry{0};
  // Tasks taken and done in this region, over all its `each`.
  alignas(64) std::atomic<int64_t> taken{0};
  alignas(64) std::atomic<int64_t> done{0};
  alignas(64) Place outside;  // workers between regions
  Place inside;               // threads that wait for tasks or for workers to leave
  const std::function<void(Crew&)>* region = nullptr;
  std::atomic<bool> stop{false};
  // Whether a thread of this region threw, and the first exception.
  std::atomic<bool> failed{false};
  std::mutex failing;
  std::exception_ptr error;
  // Nanoseconds of this region, over all threads: of stalls, and without a core.
  std::atomic<int64_t> stalled{0}, robbed{0};
  Headcount headcount;

  std::mutex turn;  // of the callers of `run`
  std::vector<std::thread> workers;
  std::vector<Buffer> scratch;  // per thread
  Buffer buffer;
  void* shared = nullptr;  // memory shared by the threads of this region
  pid_t owner = getpid();

  State(Team& team, int threads) : headcount(threads), scratch(threads) {
    // The program's own threads handle signals.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (int rank = 1; rank < threads; rank++)
        workers.emplace_back([this, &team, rank] { work(team, rank); });
    } catch (...) {  // the system gives no more threads: use the existing ones
      scratch.resize(workers.size() + 1);
      headcount.have_at_most(static_cast<int>(scratch.size()));
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  ~State() {
    stop.store(true);
    outside.wake();
    for (auto& worker : workers) worker.join();
  }

  void compute(Crew& crew) noexcept {
    try {
      (*region)(crew);
    } catch (const Abandoned&) {
    } catch (...) {
      {
        std::lock_guard<std::mutex> lock(failing);
        if (!error) error = std::current_exception();
      }
      failed.store(true);
      inside.wake();
    }
  }

  bool may_enter(uint64_t now) const {
    return (now & OPEN) && static_cast<int>(now & INSIDE) < headcount.now() - 1;
  }

  // The region's function on this thread.
  void attend(Crew& crew) {
    auto began = Clock::now();
    auto before = computed();
    compute(crew);
    Duration without = Clock::now() - began - crew.slept_ - (computed() - before);
    if (without > Duration::zero()) robbed.fetch_add(without.count());
  }

  void work(Team& team, int rank) {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "rootlace");
#endif
    uint64_t last = 0;
    for (;;) {
      outside.wait([&] {
        uint64_t now = entry.load();
        return stop.load() || ((now & OPEN) && (now >> 32) != last);
      });
      if (stop.load()) return;
      uint64_t now = entry.load();
      last = now >> 32;
      while (may_enter(now) && !entry.compare_exchange_weak(now, now + 1)) {
      }
      if (!may_enter(now)) continue;
      last = now >> 32;
      Crew crew(team, rank);
      attend(crew);
      entry.fetch_sub(1);
      inside.wake();
    }
  }
};

Team::Team(int threads) : state_(new State(*this, threads < 1 ? 1 : threads)) {}

Team::~Team() {
  // A forked child has no threads to join; their memory is lost until the child ends.
  if (state_->owner == getpid()) delete state_;
}

int Team::size() const { return static_cast<int>(state_->scratch.size()); }

void Team::run(size_t shared, const std::function<void(Crew&)>& region) {
  if (state_->owner != getpid()) state_ = new State(*this, size());
  State& state = *state_;
  std::lock_guard<std::mutex> lock(state.turn);
  state.shared = state.buffer.take(shared);
  state.region = &region;
  state.taken.store(0);
  state.done.store(0);
  state.stalled.store(0);
  state.failed.store(false);
  state.robbed.store(0);
  auto began = Clock::now();
  if (state.headcount.now() > 1) {
    state.entry.store((((state.entry.load() >> 32) + 1) << 32) | OPEN);
    state.outside.wake();
  }
  Crew crew(*this, 0);
  state.attend(crew);
  state.entry.fetch_and(~OPEN);
  state.inside.wait([&] { return (state.entry.load() & INSIDE) == 0; });
  auto ended = Clock::now();
  state.headcount.after(ended - began, Duration(state.stalled.load()),
                        Duration(state.robbed.load()), ended.time_since_epoch());
  if (state.failed.load()) std::rethrow_exception(std::exchange(state.error, nullptr));
}

int Crew::size() const { return team_.size(); }

int64_t Crew::begin(int tasks) {
  int64_t first = begun_;
  begun_ += tasks;
  finished_ = 0;
  return first;
}

// All tasks of earlier `each` are done when a thread is here, so the counter is at `first` or
// beyond; beyond the last task it counts those of a later `each`.
int Crew::take(int64_t first, int tasks) {
  auto& taken = team_.state_->taken;
  int64_t next = taken.load(std::memory_order_relaxed);
  do {
    if (next >= first + tasks) return tasks;
  } while (!taken.compare_exchange_weak(next, next + 1, std::memory_order_relaxed));
  finished_++;
  return static_cast<int>(next - first);
}

void Crew::end() {
  auto& state = *team_.state_;
  if (finished_ && state.done.fetch_add(finished_) + finished_ == begun_) state.inside.wake();
  if (state.done.load() >= begun_) return;
  auto began = Clock::now();
  slept_ += state.inside.wait([&] { return state.done.load() >= begun_ || state.failed.load(); });
  if (state.done.load() < begun_) throw Abandoned{};
  Duration waited = Clock::now() - began;
  if (waited > STALL) state.stalled.fetch_add(waited.count());
}

void* Crew::shared() const { return team_.state_->shared; }

void* Crew::scratch(size_t bytes) { return team_.state_->scratch[rank_].take(bytes); }

}  // namespace rootlace

extern "C" {

void* rl_team_new(int32_t threads) {
  rootlace::Team* made = nullptr;
  rootlace::guarded([&] { made = new rootlace::Team(threads); });
  return made;
}

void rl_team_free(void* team) { delete static_cast<rootlace::Team*>(team); }

int32_t rl_team_size(void* team) { return static_cast<rootlace::Team*>(team)->size(); }

int64_t rl_team_try(void* team, int32_t rounds, int32_t tasks, int64_t work, int32_t* counts) {
  std::atomic<int64_t> early{0};
  auto region = [&](rootlace::Crew& crew) {
    for (int64_t round = 0; round < rounds; round++)
      crew.each(tasks, [&](int task) {
        for (int32_t i = 0; round && i < tasks; i++)
          if (counts[(round - 1) * tasks + i] < 1) early++;
        volatile int64_t sum = 0;
        for (int64_t i = 0; i < work; i++) sum = sum + i;
        auto* mine = static_cast<int32_t*>(crew.scratch(4096));
        *mine = 1;
        counts[round * tasks + task] += *mine;
      });
  };
  bool threw = rootlace::guarded([&] { static_cast<rootlace::Team*>(team)->run(region); });
  return threw ? -1 : early.load();
}

int32_t rl_team_fail(void* team, int32_t tasks, int32_t at, int64_t bytes) {
  auto region = [&](rootlace::Crew& crew) {
    for (int round = 0; round < 3; round++)
      crew.each(tasks, [&](int task) {
        if (round != 1 || task != at) return;
        if (bytes < 0) throw std::runtime_error("thrown for a test");
        crew.scratch(static_cast<size_t>(bytes));
      });
  };
  return rootlace::guarded([&] { static_cast<rootlace::Team*>(team)->run(region); });
}
}
