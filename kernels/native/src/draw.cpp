// Picking of tokens, a row at a time, by the rule of kernels/reference/sampling.py.
//
// The cuts of top-k and top-p are found without ranking the vocabulary. A peak is the maximum of
// some tokens. At least k tokens reach the k-th highest peak, so only tokens that reach it are
// ranked for top-k. For top-p, tokens are weighed in narrow buckets by their distance from the best
// token, and only the bucket with the cut is searched. Weights and sums are float64.
#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstring>
#include <functional>

#include "api.h"
#include "columns.h"
#include "division.h"
#include "elementwise.h"
#include "guard.h"
#include "mask.h"
#include "pick.h"
#include "team.h"
#include "vec.h"

#define PARAMS(EACH)        \
  EACH(double, temperature) \
  EACH(double, top_p)       \
  EACH(double, min_p)       \
  EACH(int32_t, top_k)

namespace rootlace {
namespace {

typedef double Wide __attribute__((vector_size(64)));
typedef int64_t Longs __attribute__((vector_size(64)));
typedef float HalfVec __attribute__((vector_size(32)));

constexpr int WIDE_LANES = 8;
constexpr int BLOCK = 1024;    // tokens whose weights are summed together
constexpr int BUCKETS = 1024;
constexpr int FEW = 64;  // most tokens that are sorted
constexpr double REACHES[] = {8, 40, 800};  // distances that buckets span; e^-800 is 0

// e^x of x <= 0 to about one unit in the last place; 0 below -708. NaN stays NaN.
inline Wide exp(Wide x) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52: a sum's low bits are the integer part
  Wide clamped = x < -708.0 ? Wide{} - 708.0 : x;
  Wide shifted = clamped * 1.4426950408889634 + magic;
  Wide n = shifted - magic;
  // ln 2 in two parts so that the rest is exact; |r| <= ln 2 / 2.
  Wide r = clamped - n * 6.93147180369123816490e-01;
  r = r - n * 1.90821492927058770002e-10;
  Wide p = Wide{} + 1.6059043836821613e-10;  // 1 / 13!
  const double factorials[] = {2.08767569878681e-09,  2.505210838544172e-08, 2.755731922398589e-07,
                               2.7557319223985893e-06, 2.48015873015873e-05, 1.984126984126984e-04,
                               1.3888888888888889e-03, 8.333333333333333e-03, 4.1666666666666664e-02,
                               1.6666666666666666e-01, 0.5,                   1.0,
                               1.0};
  for (double factorial : factorials) p = p * r + factorial;
  Longs bits = (reinterpret_cast<Longs>(shifted) + 1023) << 52;
  Wide y = p * reinterpret_cast<Wide>(bits);
  return x < -708.0 ? Wide{} : y;
}

uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

// Returns the random number in [0, 1) of kernels/reference/sampling.py.
double uniform(int64_t seed, int64_t position) {
  const uint64_t gamma = 0x9e3779b97f4a7c15;
  uint64_t stream = mix(static_cast<uint64_t>(seed) + gamma);
  uint64_t bits = mix(stream + (static_cast<uint64_t>(position) + 1) * gamma);
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

inline double sum(Wide v) {
  double total = 0;
  for (int i = 0; i < WIDE_LANES; i++) total += v[i];
  return total;
}

struct Params {
  PARAMS(RL_FIELD)
};

// Sampling parameters of a row.
struct Draw : Params {
  int64_t seed, position;
  int64_t mask;  // address, 0: none
};

Draw draw_of(const RlPicks& picks, int row, int vocab) {
  int64_t mask = 0;
  if (picks.mask_row.first) {
    int64_t at = number<int32_t>(picks.mask_row, row), words = ceil_div(vocab, MASK_WORD);
    if (at >= 0) mask = reinterpret_cast<intptr_t>(picks.mask_table + at * words);
  }
  const RlColumn* columns = picks.params;
  Draw draw{{PARAMS(RL_NUMBER)}, number<int64_t>(picks.seed, row),
            number<int64_t>(picks.position, row), mask};
  draw.top_k = std::max(draw.top_k, 1);
  return draw;
}

struct Token {
  float logit;
  int id;
};

bool better(const Token& a, const Token& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// Last kept token, in order of probability, of equals by id.
struct Cut {
  float logit = -INFINITY;
  int id = INT_MAX;
};

struct Space {
  Vec* peaks;      // per block: maxima of every sixteenth token
  double* masses;  // [BUCKETS]
  double* sums;    // per block
  Token* tokens;   // [vocab]
  float* ordered;  // peaks, to be sorted

  static size_t bytes(int vocab) {
    size_t blocks = ceil_div(vocab, BLOCK);
    return BUCKETS * sizeof(double) + blocks * (sizeof(double) + 2 * sizeof(Vec)) +
           static_cast<size_t>(vocab) * sizeof(Token);
  }
  Space(void* memory, int vocab) {
    size_t blocks = ceil_div(vocab, BLOCK);
    peaks = static_cast<Vec*>(memory);
    ordered = reinterpret_cast<float*>(peaks + blocks);
    masses = reinterpret_cast<double*>(ordered + blocks * LANES);
    sums = masses + BUCKETS;
    tokens = reinterpret_cast<Token*>(sums + blocks);
  }
};

class Row {
 public:
  Row(const float* x, int size, const Draw& draw, Space space)
      : x_(x), size_(size), draw_(draw), space_(space) {
    mask_ = mask_at(draw.mask);
    inverse_ = std::min(1.0 / draw.temperature, DBL_MAX);
  }

  int32_t pick() {
    if (!find_most()) return -1;
    Cut cut = find_cut();
    double total = weigh(cut);
    if (!(total > 0)) return -1;
    double u = uniform(draw_.seed, draw_.position);
    double target = std::min(u * total, std::nextafter(total, 0.0));
    double below = 0;
    int last = -1, blocks = ceil_div(size_, BLOCK);
    for (int block = 0; block < blocks; below += space_.sums[block++]) {
      // A block's sum and that of its tokens one by one may differ in the last bits.
      if (below + space_.sums[block] <= target && block + 1 < blocks) continue;
      double upto = below;
      for (int i = block * BLOCK; i < std::min(size_, (block + 1) * BLOCK); i += LANES) {
        double weights[LANES];
        weights_at(i, cut, weights);
        for (int j = 0; j < LANES; j++) {
          if (weights[j] <= 0) continue;
          last = i + j;
          upto += weights[j];
          if (upto > target) return last;
        }
      }
    }
    return last >= 0 ? last : last_kept(cut);
  }

 private:
  // Returns logits i to i + 15; minus infinity outside the vocabulary and for forbidden tokens.
  Vec at(int i) const {
    Vec v = load_part(x_, i, size_);
    if (!mask_) return v;
    return Isa::only(v, bits_from(mask_, i));
  }

  bool find_most() {
    Vec best = splat(-INFINITY);
    Ints unordered = {};
    for (int begin = 0, block = 0; begin < size_; begin += BLOCK, block++) {
      Vec peak = splat(-INFINITY);
      for (int i = begin; i < std::min(size_, begin + BLOCK); i += LANES) {
        Vec v = at(i);
        peak = max_of(peak, v);
        unordered |= v != v;
      }
      space_.peaks[block] = peak;
      best = max_of(best, peak);
    }
    most_ = max_of(best);
    return !bits_of(unordered) && std::isfinite(most_);
  }

  // Returns the distance below the best logit, in units of the temperature: monotonic in the logit.
  Wide distance(HalfVec v) const {
    return (static_cast<double>(most_) - __builtin_convertvector(v, Wide)) * inverse_;
  }

  static HalfVec half(Vec v, int part) {
    HalfVec h;
    std::memcpy(&h, reinterpret_cast<const char*>(&v) + part * sizeof h, sizeof h);
    return h;
  }

  void weights_at(int i, const Cut& cut, double* weights) const {
    Vec v = kept_at(i, cut);
    for (int part = 0; part < 2; part++) {
      Wide w = exp(-distance(half(v, part)));
      w = w >= draw_.min_p ? w : Wide{};
      std::memcpy(weights + part * WIDE_LANES, &w, sizeof w);
    }
  }

  static bool cuts(const Cut& cut) { return cut.id != INT_MAX || cut.logit != -INFINITY; }

  static Ints kept(Vec v, int i, const Cut& cut) {
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (v > cut.logit) | ((v == cut.logit) & (lane + i <= cut.id));
  }

  Vec kept_at(int i, const Cut& cut) const {
    const Vec v = at(i);
    if (!cuts(cut)) return v;
    return kept(v, i, cut) ? v : splat(-INFINITY);
  }

  // Sums the kept weights by blocks; returns their total.
  double weigh(const Cut& cut) {
    const float least = draw_.min_p > 0 ? within(-std::log(draw_.min_p)) : -INFINITY;
    return cuts(cut) || draw_.min_p > 0 ? weigh_kept<true>(cut, std::max(least, cut.logit))
                                        : weigh_kept<false>(cut, least);
  }

  template <bool CUT>
  double weigh_kept(const Cut& cut, float least) {
    double total = 0;
    for (int begin = 0, block = 0; begin < size_; begin += BLOCK, block++) {
      space_.sums[block] = 0;
      if (CUT && !bits_of(space_.peaks[block] >= least)) continue;
      Wide low = {}, high = {};
      for (int i = begin; i < std::min(size_, begin + BLOCK); i += LANES) {
        Vec v = at(i);
        if (CUT) {
          const Ints some = kept(v, i, cut) & (v >= least);
          if (!bits_of(some)) continue;  // with a narrow cut most vectors are zero
          v = some ? v : splat(-INFINITY);
        }
        Wide first = exp(-distance(half(v, 0))), second = exp(-distance(half(v, 1)));
        low += first >= draw_.min_p ? first : Wide{};
        high += second >= draw_.min_p ? second : Wide{};
      }
      total += space_.sums[block] = sum(low + high);
    }
    return total;
  }

  int last_kept(const Cut& cut) const {
    double weights[LANES];
    for (int i = (size_ - 1) / LANES * LANES; i >= 0; i -= LANES) {
      weights_at(i, cut, weights);
      for (int j = LANES - 1; j >= 0; j--)
        if (weights[j] > 0) return i + j;
    }
    return -1;
  }

  Cut find_cut() {
    if (draw_.top_k < size_) {
      const int count = rank();
      if (!count) return {};
      const Token last = space_.tokens[count - 1];
      if (draw_.top_p >= 1) return {last.logit, last.id};
      return cut_behind(count, draw_.top_p * mass_of(space_.tokens, space_.tokens + count));
    }
    if (draw_.top_p >= 1) return {};
    Draw plain = draw_;  // top-p refers to all tokens, including those that min-p removes
    plain.min_p = 0;
    const double limit = draw_.top_p * Row(*this, plain).weigh({});
    for (double reach : REACHES) {
      const bool all = fill(reach);
      double before = 0;
      int bucket = 0;
      while (bucket < BUCKETS && before + space_.masses[bucket] < limit)
        before += space_.masses[bucket++];
      if (bucket < BUCKETS) return cut_behind(gather(bucket, reach), limit - before);
      if (all) break;  // sums are rounded below the limit
    }
    return {};
  }

  // Finds the cut among the first `count` of `tokens`, in any order: where their mass, best first,
  // reaches `limit`.
  Cut cut_behind(int count, double limit) {
    Token *first = space_.tokens, *end = first + count;
    double before = 0;
    while (end - first > FEW) {
      Token* middle = first + (end - first) / 2;
      std::nth_element(first, middle, end, better);
      const double upto = before + mass_of(first, middle);
      if (upto < limit) {
        first = middle;
        before = upto;
      } else {
        end = middle;
      }
    }
    std::sort(first, end, better);
    while (first + 1 < end && (before += weight(first->logit)) < limit) first++;
    return {first->logit, first->id};
  }

  double mass_of(const Token* first, const Token* end) const {
    double mass = 0;
    for (; first < end; first++) mass += weight(first->logit);
    return mass;
  }

  // Collects the `top_k` best tokens, the last one at the end; returns their number.
  int rank() {
    const int peaks = ceil_div(size_, BLOCK) * LANES, top = draw_.top_k;
    float least = within(REACHES[0]);
    if (top <= peaks) {
      std::memcpy(space_.ordered, space_.peaks, peaks * sizeof(float));
      std::nth_element(space_.ordered, space_.ordered + top - 1, space_.ordered + peaks,
                       std::greater<float>());
      least = std::max(-FLT_MAX, space_.ordered[top - 1]);
    }
    int count = from(least);
    if (count < top && least > -FLT_MAX) count = from(-FLT_MAX);
    const int found = std::min(count, top);
    if (found)
      std::nth_element(space_.tokens, space_.tokens + found - 1, space_.tokens + count, better);
    return found;
  }

  // Collects the tokens that are no worse than `least`; returns their number.
  int from(float least) {
    int count = 0;
    for (int i = 0; i < size_; i += LANES) {
      if (i % BLOCK == 0 && !bits_of(space_.peaks[i / BLOCK] >= least)) {
        i += BLOCK - LANES;
        continue;
      }
      const Vec v = at(i);
      for (uint32_t bits = bits_of(v >= least); bits; bits &= bits - 1) {
        const int lane = __builtin_ctz(bits);
        space_.tokens[count++] = {v[lane], i + lane};
      }
    }
    return count;
  }

  Row(const Row& other, const Draw& draw) : Row(other.x_, other.size_, draw, other.space_) {
    most_ = other.most_;
  }

  double weight(float logit) const {
    HalfVec all = HalfVec{} + logit;
    return exp(-distance(all))[0];
  }

  // Weighs the tokens within `reach` by buckets; returns whether these are all tokens.
  bool fill(double reach) {
    std::fill(space_.masses, space_.masses + BUCKETS, 0.0);
    int count = 0;
    each_within(reach, [&](int, float logit, int bucket) {
      count++;
      space_.masses[bucket] += weight(logit);
    });
    return count == size_;
  }

  // Returns a lower bound of the logits within `reach` of the best one.
  float within(double reach) const {
    const double least = most_ - 1.001 * reach / inverse_ - 1e-6 * std::fabs(most_);
    return static_cast<float>(std::max(least, -static_cast<double>(FLT_MAX)));
  }

  // Calls visit(id, logit, bucket) for the tokens within `reach`.
  template <class Visit>
  void each_within(double reach, Visit&& visit) const {
    const float low = within(reach);
    for (int i = 0; i < size_; i += LANES) {
      Vec v = at(i);
      for (uint32_t bits = bits_of(v >= low); bits; bits &= bits - 1) {
        int lane = __builtin_ctz(bits);
        double distance = (static_cast<double>(most_) - v[lane]) * inverse_;
        if (distance < reach)
          visit(i + lane, v[lane], static_cast<int>(distance * (BUCKETS / reach)));
      }
    }
  }

  // Collects the tokens of a bucket; returns their number.
  int gather(int bucket, double reach) {
    int count = 0;
    each_within(reach, [&](int id, float logit, int its) {
      if (its == bucket) space_.tokens[count++] = {logit, id};
    });
    return count;
  }

  const float* x_;
  int size_;
  const Draw& draw_;
  Space space_;
  const int32_t* mask_;
  double inverse_;
  float most_ = 0;
};

}  // namespace
}  // namespace rootlace

extern "C" const char* rl_pick_params() { return PARAMS(RL_NAME); }

extern "C" int32_t rl_pick(void* team, const float* logits, int32_t rows, int32_t vocab,
                           const RlPicks* picks, int32_t* tokens) {
  using namespace rootlace;
  auto region = [&](Crew& crew) {
    crew.each(rows, [&](int row) {
      const float* x = logits + static_cast<int64_t>(row) * vocab;
      Draw draw = draw_of(*picks, row, vocab);
      if (draw.temperature <= 0) {
        tokens[row] = best(x, vocab, draw.mask);
        return;
      }
      Space space(crew.scratch(Space::bytes(vocab)), vocab);
      tokens[row] = Row(x, vocab, draw, space).pick();
    });
  };
  return guarded([&] { static_cast<Team*>(team)->run(region); });
}
