// A mixture of experts: each token goes through the MLPs that its router chooses.
//
// Tokens of one expert are gathered and multiplied together, and all experts of a step are one
// grouped product. A token's outputs are added up in the order in which its experts were chosen, so
// that its bits do not depend on the other tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "api.h"
#include "elementwise.h"
#include "linear.h"
#include "rows.h"
#include "team.h"

namespace rootlace {

template <class T>
class Mixture {
 public:
  // For steps of so many tokens.
  Mixture(const RlModel& model, int tokens)
      : shape_(model.mixture), hidden_(model.hidden), slices_(ceil_div(tokens, MOST_ROWS)) {
    rows_ = shape_.count ? std::min(tokens, MOST_ROWS) : 0;
    layers_ = shape_.count ? model.num_layers : 0;
    gathered_stride_ = spread<T>(hidden_);
    inner_stride_ = spread<T>(shape_.inner);
  }

  // Memory that this needs, and where it is; 64-byte aligned.
  size_t bytes() const {
    Mixture copy(*this);
    return copy.lay(nullptr);
  }
  void put(char* memory) { lay(memory); }

  // Rows and inputs of its largest products.
  size_t most_rows() const { return static_cast<size_t>(rows_) * std::max(shape_.chosen, 1); }
  int most_inputs() const { return std::max(hidden_, shape_.inner); }

  // out[tokens, hidden] += what the experts of layer `index` make of x[tokens, hidden], or `=` unless
  // `add`. Called by all threads of a region with the same arguments.
  void run(Crew& crew, const RlLayer& layer, int index, const T* x, size_t stride, int tokens,
           float* out, bool add) const {
    for (int slice = 0, row = 0; row < tokens; slice++, row += MOST_ROWS)
      some(crew, layer, groups_ + static_cast<size_t>(index * slices_ + slice) * (shape_.count + 1),
           x + row * stride, stride, std::min(tokens - row, MOST_ROWS),
           out + static_cast<size_t>(row) * hidden_, add);
  }

  // inner[tokens, shared] times the sigmoid of a token's product with the gate of the MLP that all
  // tokens have.
  void weigh(Crew& crew, const RlLayer& layer, const T* x, size_t stride, int tokens, T* inner,
             size_t inner_stride) const {
    for (int row = 0; row < tokens; row += MOST_ROWS) {
      const int count = std::min(tokens - row, MOST_ROWS);
      linear(crew, x + row * stride, stride, count, layer.shared_gate, Epilogue::FLOAT32, scores_, 1);
      each_row(crew, count, [&](int t) {
        const float gate = 1.0f / (1.0f + std::exp(-scores_[t]));
        T* to = inner + (row + t) * inner_stride;
        for (int i = 0; i < layer.down.inputs; i++) store(to + i, to_float(to[i]) * gate);
      });
    }
  }

 private:
  static constexpr int MOST_ROWS = 1024;  // at a time, which bounds the memory

  size_t lay(char* memory) {
    const size_t rows = rows_, pairs = rows * shape_.chosen;
    size_t taken = 0;
    auto take = [&](auto*& to, size_t count) {
      to = reinterpret_cast<std::decay_t<decltype(to)>>(memory + taken);
      taken += (count * sizeof *to + 63) / 64 * 64;
    };
    take(scores_, rows * shape_.count);
    take(shares_, pairs);
    take(chosen_, pairs);
    take(places_, pairs);
    take(tokens_, pairs);
    take(firsts_, shape_.count + 1);
    take(gathered_, pairs * gathered_stride_);
    take(inner_, pairs * inner_stride_);
    take(groups_, static_cast<size_t>(layers_) * slices_ * (shape_.count + 1));
    return taken;
  }

  // `run` of at most MOST_ROWS tokens. `groups` [count + 1] belong to this layer and these rows alone:
  // threads go through the products of a region at their own pace, and one that comes late still
  // reads the groups of a product that the others have finished.
  void some(Crew& crew, const RlLayer& layer, RowGroup* groups, const T* x, size_t stride, int rows,
            float* out, bool add) const {
    linear(crew, x, stride, rows, layer.router, Epilogue::FLOAT32, scores_, shape_.count);
    each_row(crew, rows, [&](int t) { choose(t); });
    crew.each(1, [&](int) { group(layer, rows, groups); });
    each_row(crew, rows * shape_.chosen, [&](int at) {
      std::memcpy(static_cast<void*>(gathered_ + at * gathered_stride_), x + tokens_[at] * stride,
                  hidden_ * sizeof(T));
    });
    linear_grouped(crew, gathered_, gathered_stride_, groups, &RlExpert::gate_up,
                   static_cast<Epilogue>(shape_.activation), inner_, inner_stride_);
    linear_grouped(crew, inner_, inner_stride_, groups, &RlExpert::down, Epilogue::STORE, gathered_,
                   gathered_stride_);
    each_row(crew, rows, [&](int t) {
      float* to = out + static_cast<size_t>(t) * hidden_;
      if (!add) std::fill_n(to, hidden_, 0.0f);
      for (int at = t * shape_.chosen; at < (t + 1) * shape_.chosen; at++)
        rootlace::add(gathered_ + places_[at] * gathered_stride_, shares_[at] * shape_.factor,
                      hidden_, to);
    });
  }

  // The experts of a token, best first, the first of equals before the others, and their shares.
  void choose(int t) const {
    float* scores = scores_ + static_cast<size_t>(t) * shape_.count;
    const float most = *std::max_element(scores, scores + shape_.count);
    float all = 0, of_chosen = 0;
    for (int i = 0; i < shape_.count; i++) all += scores[i] = std::exp(scores[i] - most);
    int32_t* chosen = chosen_ + t * shape_.chosen;
    float* shares = shares_ + t * shape_.chosen;
    for (int rank = 0; rank < shape_.chosen; rank++) {
      int best = -1;
      for (int i = 0; i < shape_.count; i++)
        if (scores[i] > (best < 0 ? TAKEN : scores[best])) best = i;
      // Of scores that are no numbers any will do.
      for (int i = 0; best < 0; i++)
        if (scores[i] != TAKEN) best = i;
      chosen[rank] = best;
      of_chosen += shares[rank] = scores[best];
      scores[best] = TAKEN;
    }
    for (int rank = 0; rank < shape_.chosen; rank++)
      shares[rank] /= shape_.normalised ? of_chosen : all;
  }

  // Pairs of a token and an expert, sorted by expert, then by token.
  void group(const RlLayer& layer, int rows, RowGroup* groups) const {
    const int pairs = rows * shape_.chosen;
    std::fill_n(firsts_, shape_.count + 1, 0);
    for (int at = 0; at < pairs; at++) firsts_[chosen_[at] + 1]++;
    for (int i = 0; i < shape_.count; i++) {
      if (firsts_[i + 1]) *groups++ = {layer.experts + i, firsts_[i], firsts_[i + 1]};
      firsts_[i + 1] += firsts_[i];
    }
    *groups = {};
    for (int at = 0; at < pairs; at++) {
      places_[at] = firsts_[chosen_[at]]++;
      tokens_[places_[at]] = at / shape_.chosen;
    }
  }

  static constexpr float TAKEN = -1;  // where a share, which is not negative, was

  RlMixture shape_;
  int hidden_, slices_, rows_, layers_;
  size_t gathered_stride_, inner_stride_;
  float* scores_;      // [rows, count]
  float* shares_;      // [rows, chosen], as these:
  int32_t* chosen_;    // experts
  int32_t* places_;    // among the gathered rows
  int32_t* tokens_;    // [rows x chosen], whose the gathered rows are
  int32_t* firsts_;    // [count + 1]
  T* gathered_;        // [rows x chosen, hidden]: what experts read, then what they make of it
  T* inner_;           // [rows x chosen, inner]
  RowGroup* groups_;   // [layers, slices, count + 1]
};

}  // namespace rootlace
