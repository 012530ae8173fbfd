// What LoRA adapters add to the products of some rows: (x a^T) b^T, adapter by adapter.
#pragma once

#include <cstdint>
#include <vector>

#include "api.h"
#include "linear.h"
#include "team.h"

namespace rootlace {

// The products of a layer that an adapter may change, in the order of `RlModel.adapters`.
enum class AdaptedPart : int32_t { QKV = 0, OUTPUT, GATE_UP, DOWN, Q_UP, COUNT };

// Which rows of an x go through which adapter. Kept from step to step for its memory.
class AdapterGroups {
 public:
  // of_tokens[token]: -1 for none; null: no token has one. Row i is token `tokens[i]`, or i where
  // `tokens` is null.
  void find(const int32_t* of_tokens, const int32_t* tokens, int rows);

  struct Group {
    int adapter, begin, end;  // of `rows`
  };
  std::vector<Group> groups;
  std::vector<int32_t> rows;      // those that have an adapter, by adapter
  std::vector<int32_t> places;    // [rows of x]: where each stands in `rows`; -1: nowhere
  std::vector<int32_t> adapters;  // [rows of x]: each one's; -1: none
};

// Memory for what `adapt` computes, of as many rows as have an adapter.
template <class T>
struct AdapterMemory {
  size_t rows = 0, gathered_stride = 0, inner_stride = 0;
  T* gathered = nullptr;
  T* inner = nullptr;  // x a^T

  size_t bytes() const { return rows * (gathered_stride + inner_stride) * sizeof(T); }
  void put(char* memory) {
    gathered = reinterpret_cast<T*>(memory);
    inner = gathered + rows * gathered_stride;
  }
};

// What the adapters add to a product of x[.., inputs], rows `ldx` elements apart, where `parts` has
// what each does to the product: number a's at parts[a * apart]. Called by all threads of a region
// with the same arguments. Nothing (`inner` null) where no group's adapter changes the product.
//
// A row's bits depend on the row and its adapter alone.
template <class T>
Added<T> adapt(Crew& crew, const T* x, size_t ldx, const AdapterGroups& found, const RlLowRank* parts,
            size_t apart, const AdapterMemory<T>& memory);

}  // namespace rootlace
