// Tokens picked, a row at a time: the rule is that of kernels/reference/sampling.py.
//
// Where top-k and top-p cut is found without ranking the vocabulary: tokens are counted and weighed
// in narrow buckets by their distance from the best one, and only the bucket that a cut falls into
// is sorted. Weights and sums are float64.
#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstring>

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

// In [0, 1), as kernels/reference/sampling.py says.
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

// How a row is sampled.
struct Draw : Params {
  int64_t seed, position;
  int64_t mask;  // where it lies, 0: none
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

// The last token that is kept, the most probable first, the smallest id first among equals.
struct Cut {
  float logit = -INFINITY;
  int id = INT_MAX;
};

struct Space {
  int32_t* counts;  // [BUCKETS]
  double* masses;   // [BUCKETS]
  double* sums;     // a block each
  Token* tokens;    // [vocab]

  static size_t bytes(int vocab) {
    size_t blocks = ceil_div(vocab, BLOCK);
    return BUCKETS * (sizeof(int32_t) + sizeof(double)) + blocks * sizeof(double) +
           static_cast<size_t>(vocab) * sizeof(Token);
  }
  Space(void* memory, int vocab) {
    masses = static_cast<double*>(memory);
    sums = masses + BUCKETS;
    counts = reinterpret_cast<int32_t*>(sums + ceil_div(vocab, BLOCK));
    tokens = reinterpret_cast<Token*>(counts + BUCKETS);
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
  // Logits i to i + 15, minus infinity where there is none or it is not allowed.
  Vec at(int i) const {
    Vec v = load_part(x_, i, size_);
    if (!mask_) return v;
    return Isa::only(v, bits_from(mask_, i));
  }

  bool find_most() {
    Vec best = splat(-INFINITY);
    Ints unordered = {};
    for (int i = 0; i < size_; i += LANES) {
      Vec v = at(i);
      best = max_of(best, v);
      unordered |= v != v;
    }
    most_ = max_of(best);
    return !bits_of(unordered) && std::isfinite(most_);
  }

  // How far below the best one, in units of the temperature: monotonous in the logit.
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

  // Sums of the kept weights by blocks; returns their total.
  double weigh(const Cut& cut) { return cuts(cut) ? weigh_kept<true>(cut) : weigh_kept<false>(cut); }

  template <bool CUT>
  double weigh_kept(const Cut& cut) {
    double total = 0;
    for (int begin = 0, block = 0; begin < size_; begin += BLOCK, block++) {
      Wide low = {}, high = {};
      for (int i = begin; i < std::min(size_, begin + BLOCK); i += LANES) {
        Vec v = at(i);
        if (CUT) {
          const Ints some = kept(v, i, cut);
          if (!bits_of(some)) continue;  // most, behind a narrow cut: they would add zeros
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
    bool by_rank = draw_.top_k < size_, by_mass = draw_.top_p < 1;
    if (!by_rank && !by_mass) return {};
    double mass = 0;
    if (!by_rank) {  // top-p refers to all tokens, also those that min-p takes away
      Draw plain = draw_;
      plain.min_p = 0;
      mass = Row(*this, plain).weigh({});
    }
    for (double reach : REACHES) {
      int64_t missing = fill(reach);
      Cut cut;
      int end = BUCKETS;  // the first bucket beyond the cut by rank
      if (by_rank) {
        int64_t rank = 0;
        int bucket = 0;
        while (bucket < BUCKETS && rank + space_.counts[bucket] < draw_.top_k)
          rank += space_.counts[bucket++];
        if (bucket == BUCKETS) {
          if (missing && reach != REACHES[2]) continue;
          mass = mass_before(BUCKETS);
        } else {
          int count = sort(bucket, reach), kept = static_cast<int>(draw_.top_k - rank);
          cut = {space_.tokens[kept - 1].logit, space_.tokens[kept - 1].id};
          if (!by_mass) return cut;
          mass = mass_before(bucket);
          for (int i = 0; i < std::min(kept, count); i++) mass += weight(space_.tokens[i].logit);
          end = bucket + 1;
        }
      }
      if (!by_mass) return cut;
      double limit = draw_.top_p * mass, before = 0;
      int bucket = 0;
      while (bucket < end && before + space_.masses[bucket] < limit)
        before += space_.masses[bucket++];
      if (bucket == end) {  // sums are rounded below the limit, or `reach` is too short
        if (end == BUCKETS && missing && reach != REACHES[2]) continue;
        return cut;
      }
      int count = sort(bucket, reach);
      for (int i = 0; i < count && before < limit; i++) {
        Token token = space_.tokens[i];
        bool beyond = token.logit < cut.logit || (token.logit == cut.logit && token.id > cut.id);
        if (beyond) return cut;
        before += weight(token.logit);
        if (before >= limit || i + 1 == count) return {token.logit, token.id};
      }
      return cut;
    }
    return {};
  }

  Row(const Row& other, const Draw& draw) : Row(other.x_, other.size_, draw, other.space_) {
    most_ = other.most_;
  }

  double mass_before(int bucket) const {
    double mass = 0;
    for (int i = 0; i < bucket; i++) mass += space_.masses[i];
    return mass;
  }

  double weight(float logit) const {
    HalfVec all = HalfVec{} + logit;
    return exp(-distance(all))[0];
  }

  // Counts and weighs the tokens within `reach`; returns how many there are beyond.
  int64_t fill(double reach) {
    std::fill(space_.counts, space_.counts + BUCKETS, 0);
    std::fill(space_.masses, space_.masses + BUCKETS, 0.0);
    int64_t within = 0;
    each_within(reach, [&](int, float logit, int bucket) {
      within++;
      space_.counts[bucket]++;
      if (draw_.top_p < 1) space_.masses[bucket] += weight(logit);
    });
    return size_ - within;
  }

  // visit(id, logit, bucket) for the tokens within `reach`.
  template <class Visit>
  void each_within(double reach, Visit&& visit) const {
    // What is surely too far is not looked at one by one.
    double least = most_ - 1.001 * reach / inverse_ - 1e-6 * std::fabs(most_);
    float low = static_cast<float>(std::max(least, -static_cast<double>(FLT_MAX)));
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

  // The tokens of a bucket, best first; returns how many.
  int sort(int bucket, double reach) {
    int count = 0;
    each_within(reach, [&](int id, float logit, int its) {
      if (its == bucket) space_.tokens[count++] = {logit, id};
    });
    std::sort(space_.tokens, space_.tokens + count, [](const Token& a, const Token& b) {
      return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
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
