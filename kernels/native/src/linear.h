// Product y = x W^T + bias for any number of rows, fused with the layer's next operation.
//
// Weights are packed once (`rl_pack`) into panels of PANEL columns. Each panel is contiguous in
// memory, so a product reads its weights as one stream. Every sum runs over the inputs in order. So
// a row's bits depend neither on other rows, nor on the tasks, nor on the number of threads.
#pragma once

#include <cstddef>

#include "api.h"
#include "team.h"
#include "vec.h"

namespace rootlace {

enum class Epilogue : int32_t {
  STORE = 0,     // T* out[rows, outputs]
  FLOAT32 = 1,   // float* out[rows, outputs] = factor * y: logits, or input of a norm
  ADD = 2,       // float* out[rows, outputs] += factor * y: the residual stream
  // T* out[rows, outputs / 2] = activation(gate) * up; weights packed as gated
  SILU_MUL = 3,
  GELU_MUL = 4,  // by tanh
  // T* out[rows, outputs] = activation(y)
  RELU = 5,
  GELU = 6,
  GELU_TANH = 7,
  // T* out[rows, outputs / 2] = g sigmoid(alpha g) (u + 1), with g the gate, at most `limit`, and u
  // within -limit : limit; weights packed as gated
  CLAMPED_MUL = 8,
};

inline bool is_gated(Epilogue epilogue) {
  return epilogue == Epilogue::SILU_MUL || epilogue == Epilogue::GELU_MUL ||
         epilogue == Epilogue::CLAMPED_MUL;
}

// Adapters' additions to y, before the epilogue. Row i with an adapter that changes this product
// gets row places[i] of `inner` times the adapter's b. `inner` null: no additions.
template <class T>
struct Added {
  const T* inner = nullptr;  // rows `stride` elements apart
  size_t stride = 0;
  const int32_t *places = nullptr, *adapters = nullptr;  // [rows]; negative: no adapter
  const RlLowRank* adapter = nullptr;  // that of adapter a is at adapter[a * apart]
  size_t apart = 0;
  int part = 0;  // part of the weights

  // Returns the b of a row's adapter, or null.
  const RlLinear* of(int row) const {
    if (adapters[row] < 0) return nullptr;
    const RlLinear& b = adapter[adapters[row] * apart].b[part];
    return b.packed ? &b : nullptr;
  }
  // Returns the additions for another part of the weights.
  Added to(int other) const {
    Added found = *this;
    found.part = other;
    return found;
  }
};

// Returns the bytes that a region's threads must share (`Crew::shared`) for products of x[rows,
// inputs].
template <class T>
size_t shared_bytes(size_t rows, int inputs);

// Computes a product. All threads of a region call this with the same arguments; on return every
// thread sees all of `out`. Rows of x[rows, inputs] and out are `ldx` and `ldo` elements apart,
// aligned for T (or `out`'s type), without overlap. `rows` may be 0. Uses the crew's scratch and
// shared memory.
template <class T>
void linear(Crew& crew, const T* x, size_t ldx, int rows, const RlLinear& weights,
            Epilogue epilogue, void* out, size_t ldo, const Added<T>& added = {});

// Rows first : first + rows of x and out, and the expert whose weights multiply these rows.
struct RowGroup {
  const RlExpert* expert;
  int first, rows;
};

// Computes `linear` for groups of rows, each with its expert's `weights`, all of one shape. The
// last group has no expert.
template <class T>
void linear_grouped(Crew& crew, const T* x, size_t ldx, const RowGroup* groups,
                    RlLinear RlExpert::*weights, Epilogue epilogue, T* out, size_t ldo);

// Computes `linear` for each head of x with its weights[head], into the heads of out. Heads of x
// are `apart` elements apart, heads of out `out_apart`. The weights are dense and of one shape.
template <class T>
void linear_by_head(Crew& crew, const T* x, size_t ldx, size_t apart, int rows,
                    const RlLinear* weights, int heads, T* out, size_t ldo, size_t out_apart);

// Computes `linear` into float32 for the columns that masks[row] allows (an address of packed bits;
// 0: all). Excluded columns far from all allowed ones are not computed, and stay unwritten in
// `out`. Computed columns have the bits of `linear`. Uses the crew's scratch.
template <class T>
void linear_among(Crew& crew, const T* x, size_t ldx, int rows, const RlLinear& weights,
                  const int64_t* masks, float* out, size_t ldo);

// Permutes the columns of x[rows, inputs] by `weights.order` (not null) into to[rows, inputs].
// Called as `linear` is.
template <class T>
void put_in_order(Crew& crew, const T* x, size_t ldx, int rows, const RlLinear& weights, T* to,
                  size_t ldto);

}  // namespace rootlace

extern "C" {

// Returns the bytes that `rl_pack` writes; `gated`: the weights are gate and up of `outputs / 2`
// rows each.
RL_API int64_t rl_packed_bytes(int32_t dtype, int32_t outputs, int32_t inputs, int32_t gated);

// Packs weights[outputs, inputs], row-major, into `packed` (64-byte aligned), by all threads of
// `team`. Padding is zero.
RL_API int32_t rl_pack(rootlace::Team* team, int32_t dtype, const void* weights, int32_t outputs,
                       int32_t inputs, int32_t gated, void* packed);

// The same for codes. Gate and up (`parts` 2) take a call each, with the `schemes` of both and the
// `outputs` of one.
RL_API int64_t rl_codes_bytes(int32_t dtype, int32_t outputs, int32_t inputs, int32_t parts,
                              const RlScheme* schemes);

RL_API int32_t rl_pack_codes(rootlace::Team* team, int32_t dtype, int32_t outputs, int32_t inputs,
                             int32_t parts, const RlScheme* schemes, int32_t part,
                             const RlSource* source, void* packed);

// Unpacks the codes of the outputs `rows` into to[count, inputs], without a bias: code times scale,
// rounded, plus offset. For codes other than E4M3, not gated.
RL_API int32_t rl_rows(int32_t dtype, const RlLinear* weights, const int32_t* rows, int32_t count,
                       float* to);

// Computes `count` products of one shape, one after another in one region. Each multiplies x[rows,
// inputs] (rows `ldx` elements apart) by its own weights, into the same contiguous `out`. For tests
// and measurements. `epilogue` is a rootlace::Epilogue.
RL_API int32_t rl_linear(rootlace::Team* team, int32_t dtype, int32_t epilogue, const void* x,
                         int64_t ldx, int32_t rows, const RlLinear* weights, int32_t count,
                         void* out);
}
