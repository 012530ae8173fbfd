// Number of threads of a team's regions: all, or fewer while other programs use the cores.
//
// Threads wait for a thread that has lost its core, or for a task that is longer than the others.
// Only a lost core is a reason for fewer threads. The difference is the time in which a thread
// wanted to compute and had no core: a longer task computes all the time.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>

namespace rootlace {

class Headcount {
 public:
  using Duration = std::chrono::nanoseconds;

  // Threads lose time by waiting and by having no core. If the loss within `WINDOW` is as much as
  // one thread computes, one thread less would do as well (the bound is a little lower, as short
  // waits are not counted). If lost cores explain half of the waiting, regions have one thread less
  // for a while; the while gets longer each time this is confirmed. A single region says nothing:
  // the receiver of a step's tokens also takes a core, for a moment of perhaps half a step.
  static constexpr Duration WINDOW = std::chrono::milliseconds(200);
  static constexpr double LOST = 0.98;
  static constexpr Duration SHORT_BREAK = std::chrono::milliseconds(50);
  static constexpr Duration LONG_BREAK = std::chrono::milliseconds(1600);

  explicit Headcount(int threads) : all_(threads), now_(threads) {}

  // Corrects the number of threads downwards. Called before the first region.
  void have_at_most(int threads) { now_ = all_ = threads; }

  // Returns the number of threads of the next region. Any thread may call this.
  int now() const { return now_.load(); }

  // Records a region: its duration and end (of any clock), and the sums over all threads of the
  // time waiting for each other and of the time without a core.
  void after(Duration region, Duration waited, Duration robbed, Duration time) {
    if (all_ == 1) return;
    int others = now_ - 1;
    if (others) {
      lasted_ += region;
      waited_ += waited;
      robbed_ += robbed;
      if (lasted_ >= WINDOW) {
        // All threads but one may wait for that one.
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
  // Sums since the last decision.
  Duration lasted_{}, waited_{}, robbed_{};
  Duration try_more_ = Duration::min(), rest_ = SHORT_BREAK;
};

}  // namespace rootlace
