// How many threads a team's regions have: all, or fewer while other programs have the cores.
//
// Threads wait for one that has lost its core, or for a task that is longer than the others. Only the
// first is a reason for fewer threads. What tells them apart is time in which a thread wanted to
// compute and had no core: the longer task is computed all the while.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>

namespace rootlace {

class Headcount {
 public:
  using Duration = std::chrono::nanoseconds;

  // Threads lose time by waiting and by having no core. Where that is as much, for as long as `WINDOW`,
  // as one thread computes in it, one thread less would do as well (short waits are not counted, so
  // the bound is a little lower). If lost cores explain half of the waiting, regions have one thread
  // less for a while, a longer one each time that turns out to be still so. A single region tells
  // nothing: whoever is sent a step's tokens takes a core, too, for a moment that may be half of a
  // step.
  static constexpr Duration WINDOW = std::chrono::milliseconds(200);
  static constexpr double LOST = 0.98;
  static constexpr Duration SHORT_BREAK = std::chrono::milliseconds(50);
  static constexpr Duration LONG_BREAK = std::chrono::milliseconds(1600);

  explicit Headcount(int threads) : all_(threads), now_(threads) {}

  // There are fewer threads than was thought. Called before the first region.
  void have_at_most(int threads) { now_ = all_ = threads; }

  // Threads of the next region. Any thread may ask.
  int now() const { return now_.load(); }

  // After a region that lasted so long, at a time of any clock: for how long its threads waited for
  // each other, and for how long they were without a core; each sum is of all threads.
  void after(Duration region, Duration waited, Duration robbed, Duration time) {
    if (all_ == 1) return;
    int others = now_ - 1;
    if (others) {
      lasted_ += region;
      waited_ += waited;
      robbed_ += robbed;
      if (lasted_ >= WINDOW) {
        // All but one may wait for that one.
        bool crowded = (waited_ + robbed_).count() > LOST * lasted_.count() &&
                       2 * others * robbed_ > waited_;
        forget();
        if (crowded) {
          now_--;
          try_more_ = time + rest_;
          rest_ = std::min(2 * rest_, LONG_BREAK);
          return;
        }
      }
    }
    if (time < try_more_) return;
    if (now_ < all_) {
      now_++;
      forget();
      try_more_ = time + rest_ + WINDOW;
    } else {
      rest_ = SHORT_BREAK;
    }
  }

 private:
  void forget() { lasted_ = waited_ = robbed_ = {}; }

  int all_;
  std::atomic<int> now_;
  // Since this was last decided.
  Duration lasted_{}, waited_{}, robbed_{};
  Duration try_more_ = Duration::min(), rest_ = SHORT_BREAK;
};

}  // namespace rootlace
