// y = x W^T + bias for any number of rows, with what follows it in a layer folded in.
//
// Weights are packed once (`rl_pack`) into panels of PANEL columns, each contiguous in memory, so
// that a product reads them as one stream. A row's bits do not depend on the other rows, on how
// work is cut into tasks nor on the number of threads: every sum runs over the inputs in order.
#pragma once

#include <cstddef>

#include "api.h"
#include "team.h"
#include "vec.h"

namespace rootlace {

enum class Epilogue : int32_t {
  STORE = 0,     // T* out[rows, outputs]
  FLOAT32 = 1,   // float* out[rows, outputs] = factor * y: logits, or what is normed next
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

// What adapters add to y before anything follows it: to row i, where it has one and that changes this
// product, row places[i] of `inner` times the adapter's b. `inner` null: nothing to any row.
template <class T>
struct Added {
  const T* inner = nullptr;  // rows `stride` elements apart
  size_t stride = 0;
  const int32_t *places = nullptr, *adapters = nullptr;  // [rows]; of rows without one negative
  const RlLowRank* adapter = nullptr;  // number a's is at adapter[a * apart]
  size_t apart = 0;
  int part = 0;  // of the weights

  // The b of a row's adapter, or null.
  const RlLinear* of(int row) const {
    if (adapters[row] < 0) return nullptr;
    const RlLinear& b = adapter[adapters[row] * apart].b[part];
    return b.packed ? &b : nullptr;
  }
  // That of another part of the weights.
  Added to(int other) const {
    Added found = *this;
    found.part = other;
    return found;
  }
};

// How much memory a region's threads must share (`Crew::shared`) for products of x[rows, inputs].
template <class T>
size_t shared_bytes(size_t rows, int inputs);

// Called by all threads of a region with the same arguments; on return all of `out` is written and
// seen by all. x[rows, inputs] and out have rows `ldx` and `ldo` elements apart, T (or `out`'s
// type) aligned, and do not overlap. `rows` may be 0. Uses scratch of the crew and what it shares.
template <class T>
void linear(Crew& crew, const T* x, size_t ldx, int rows, const RlLinear& weights,
            Epilogue epilogue, void* out, size_t ldo, const Added<T>& added = {});

// Rows first : first + rows of x and out, and the expert whose weights they are multiplied by.
struct RowGroup {
  const RlExpert* expert;
  int first, rows;
};

// `linear` of groups, the last of which has no expert, with one of each expert's weights; all have
// the same shape.
template <class T>
void linear_grouped(Crew& crew, const T* x, size_t ldx, const RowGroup* groups,
                    RlLinear RlExpert::*weights, Epilogue epilogue, T* out, size_t ldo);

// `linear` of each head of x, `apart` elements from one to the next, with its own one of weights[heads],
// which are no codes and of one shape, into the heads of out, `out_apart` elements apart.
template <class T>
void linear_by_head(Crew& crew, const T* x, size_t ldx, size_t apart, int rows,
                    const RlLinear* weights, int heads, T* out, size_t ldo, size_t out_apart);

// `linear` into float32, as far as somebody has a use for it: of the columns that masks[row] (an
// address of packed bits; 0: all) excludes, those far from all others are not computed, and their
// place in `out` is left as it is. What is computed has the bits that `linear` gives it. Uses
// scratch of the crew.
template <class T>
void linear_among(Crew& crew, const T* x, size_t ldx, int rows, const RlLinear& weights,
                  const int64_t* masks, float* out, size_t ldo);

// x[rows, inputs] with its columns as `weights.order` has them (there is one): to[rows, inputs]. Called
// as `linear` is.
template <class T>
void put_in_order(Crew& crew, const T* x, size_t ldx, int rows, const RlLinear& weights, T* to,
                  size_t ldto);

}  // namespace rootlace

extern "C" {

// Size of what `rl_pack` writes; `gated`: the weights are gate and up of `outputs / 2` rows each.
RL_API int64_t rl_packed_bytes(int32_t dtype, int32_t outputs, int32_t inputs, int32_t gated);

// weights[outputs, inputs], row-major, into `packed` (64-byte aligned), by all threads of `team`.
// Padding is zero.
RL_API int32_t rl_pack(rootlace::Team* team, int32_t dtype, const void* weights, int32_t outputs,
                       int32_t inputs, int32_t gated, void* packed);

// The same of weights that are codes. Gate and up (`parts` 2) are packed by a call each, in which
// `schemes` are those of both, and `outputs` those of one.
RL_API int64_t rl_codes_bytes(int32_t dtype, int32_t outputs, int32_t inputs, int32_t parts,
                              const RlScheme* schemes);

RL_API int32_t rl_pack_codes(rootlace::Team* team, int32_t dtype, int32_t outputs, int32_t inputs,
                             int32_t parts, const RlScheme* schemes, int32_t part,
                             const RlSource* source, void* packed);

// to[count, inputs] = the numbers that the codes of these outputs stand for, without a bias: code times
// scale, rounded, plus offset. For weights that are codes other than E4M3, and not gated.
RL_API int32_t rl_rows(int32_t dtype, const RlLinear* weights, const int32_t* rows, int32_t count,
                       float* to);

// `count` products of the same shape, one behind the other in one region, each of x[rows, inputs],
// rows `ldx` elements apart, with its own weights into the same `out`, contiguous; for tests and
// measurements. `epilogue` is a rootlace::Epilogue.
RL_API int32_t rl_linear(rootlace::Team* team, int32_t dtype, int32_t epilogue, const void* x,
                         int64_t ldx, int32_t rows, const RlLinear* weights, int32_t count,
                         void* out);
}
