// Latent attention (DeepSeek-V2, arXiv:2405.04434): the operations before and after attention over
// cached latents, as in runtime/model/decoder/torch_decoder.py.
//
// Queries become queries of latents in steps of one token and of many. So a token's bits do not
// depend on the cuts of its text into steps.
#pragma once

#include <algorithm>
#include <cstring>

#include "api.h"
#include "elementwise.h"
#include "linear.h"
#include "rows.h"
#include "team.h"

namespace rootlace {

constexpr int MAX_CACHED = 1024;  // most cached numbers of a token

template <class T>
class Latent {
 public:
  // For steps of so many tokens.
  Latent(const RlModel& model, int tokens)
      : shape_(model.latent),
        heads_(model.heads),
        cached_(model.head_dim),
        rotated_(model.head_dim - model.latent.rank),
        tokens_(model.latent.rank ? tokens : 0),
        made_stride_(shape_.query_rank ? spread<T>(heads_ * (shape_.plain + rotated_)) : 0),
        query_stride_(spread<T>(heads_ * cached_)) {}

  // Returns whether the model has latent attention.
  explicit operator bool() const { return shape_.rank; }

  // Memory that this needs, and where it is; 64-byte aligned.
  size_t bytes() const { return tokens_ * (made_stride_ + query_stride_) * sizeof(T); }
  void put(char* memory) {
    made_ = reinterpret_cast<T*>(memory);
    queries_ = made_ + tokens_ * made_stride_;
  }

  // Returns the number of outputs of a layer's qkv.
  int width() const { return first() + cached_; }
  // Returns the most inputs of a product here, or of a product of its results.
  int most_inputs() const {
    return std::max({shape_.query_rank, shape_.plain, shape_.rank, heads_ * shape_.values});
  }

  // Queries of latents, [tokens, heads, rank + rotated].
  const T* queries() const { return queries_; }
  size_t query_stride() const { return query_stride_; }

  // Writes the cached vector of a token with qkv `row` to key[rank + rotated].
  void make_key(const RlLayer& layer, const T* row, const float* cos, const float* sin, T* key) const {
    row += first();
    rms_norm(row, layer.k_norm, shape_.rank, shape_.eps, key);
    norm_and_rotate(row + shape_.rank, nullptr, 1, cos, sin, rotated_, key + shape_.rank);
  }

  // Norms the input of the queries, in place.
  void norm(const RlLayer& layer, T* row) const {
    if (shape_.query_rank) rms_norm(row, layer.q_norm, shape_.query_rank, shape_.eps, row);
  }

  // Makes the queries of `tokens` tokens from their normed qkv. `multiply(from, stride, weights,
  // to, stride)` computes a product; `rotation(token, cos, sin)` finds a token's cosines and sines.
  // All threads of a region call this with the same arguments.
  template <class Multiply, class Rotation>
  void make_queries(Crew& crew, const RlLayer& layer, const T* qkv, size_t stride, int tokens,
                    Multiply&& multiply, Rotation&& rotation) const {
    if (shape_.query_rank) {
      multiply(qkv, stride, layer.q_up, made_, made_stride_);
      qkv = made_, stride = made_stride_;
    }
    const int size = shape_.plain + rotated_;
    linear_by_head(crew, qkv, stride, size, tokens, layer.k_up, heads_, queries_, query_stride_,
                   cached_);
    each_row(crew, tokens, [&](int token) {
      const float *cos = nullptr, *sin = nullptr;
      rotation(token, cos, sin);
      const T* from = qkv + token * stride + shape_.plain;
      T* to = queries_ + token * query_stride_ + shape_.rank;
      for (int head = 0; head < heads_; head++, from += size, to += cached_)
        norm_and_rotate(from, nullptr, 1, cos, sin, rotated_, to);
    });
  }

  // Computes attended[tokens, heads, rank] -> to[tokens, heads, values]. Called as `make_queries`
  // is.
  void outputs(Crew& crew, const RlLayer& layer, const T* attended, size_t stride, int tokens, T* to,
               size_t to_stride) const {
    linear_by_head(crew, attended, stride, shape_.rank, tokens, layer.v_up, heads_, to, to_stride,
                   shape_.values);
  }

 private:
  // Returns the number of qkv's outputs before the cached vector.
  int first() const {
    return shape_.query_rank ? shape_.query_rank : heads_ * (shape_.plain + rotated_);
  }

  RlLatent shape_;
  int heads_, cached_, rotated_;
  size_t tokens_, made_stride_, query_stride_;
  T* made_;     // [tokens, heads, plain + rotated], where there is a query_rank
  T* queries_;  // [tokens, heads, rank + rotated]
};

}  // namespace rootlace
